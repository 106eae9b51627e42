"""Writes safetensors files in pieces, in bounded memory and with the same bytes each time.

A file is an 8-byte length, a JSON header with every tensor's type, shape and offsets, and the
data. All of the header is known before the first tensor is computed, so that every entry has its
place in a file, and pieces may come in any order and from several threads.
Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from merging.errors import MergeError
from merging.raw import Raw, itemsize


class Planned(NamedTuple):
    """A tensor before it is computed."""

    name: str
    shape: tuple[int, ...]
    code: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * itemsize(self.code)


class Shards:
    """The files of a checkpoint while they are written: `model.safetensors`, or shards with an
    index."""

    def __init__(self, folder: Path, planned: Sequence[Planned], limit: int) -> None:
        """Begins the files.

        Args:
            limit: bytes a shard; a larger single tensor gets a shard of its own.
        """
        self._planned = {tensor.name: tensor for tensor in planned}
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._files: list[BinaryIO] = []
        shards = _split(planned, limit)
        names: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._begin(folder / file, shard)
            names |= {tensor.name: file for tensor in shard}
        if len(shards) > 1:
            total = sum(tensor.bytes for tensor in planned)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            text = json.dumps(index, indent=2) + "\n"
            (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def write(self, name: str, start: int, entries: Raw) -> None:
        """Puts entries of a flattened tensor in their place; safe from several threads."""
        planned = self._planned[name]
        begin = start * itemsize(planned.code)
        if begin + entries.nbytes > planned.bytes:
            raise MergeError(
                f"{name}: computed {entries.nbytes} bytes from {begin} on where {planned.bytes} "
                "were planned"
            )
        file, place = self._places[name]
        place += begin
        view = entries.data
        while view:
            count = os.pwrite(file.fileno(), view, place)
            view, place = view[count:], place + count

    def close(self) -> None:
        """Ends the files."""
        for file in self._files:
            file.close()

    def _begin(self, path: Path, planned: Sequence[Planned]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in planned:
            header[tensor.name] = {
                "dtype": tensor.code,
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.bytes],
            }
            offset += tensor.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
        file = path.open("wb", buffering=0)
        self._files.append(file)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
        place = 8 + len(text)
        for tensor in planned:
            self._places[tensor.name] = (file, place)
            place += tensor.bytes


def _split(planned: Sequence[Planned], limit: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return shards
