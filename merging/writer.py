"""Writes safetensors files tensor by tensor, in bounded memory and with the same bytes each time.

A file is an 8-byte length, a JSON header with every tensor's type, shape and offsets, and the
data. All of the header is known before the first tensor is computed, so tensors stream through.
Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from merging.checkpoint import DTYPES
from merging.errors import MergeError

CODES = {dtype: code for code, dtype in DTYPES.items()}


class Planned(NamedTuple):
    """A tensor before it is computed."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path, planned: Sequence[Planned], tensors: Iterable[tuple[str, Tensor]], limit: int
) -> None:
    """Writes tensors in the planned order as `model.safetensors`, or as shards with an index.

    Args:
        limit: bytes a shard; a larger single tensor gets a shard of its own.
    """
    shards = _split(planned, limit)
    stream = iter(tensors)
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / file, shard, stream)
        names |= {tensor.name: file for tensor in shard}
    if len(shards) > 1:
        total = sum(tensor.bytes for tensor in planned)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


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


def _write_file(
    path: Path, planned: Sequence[Planned], stream: Iterator[tuple[str, Tensor]]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in planned:
        header[tensor.name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in planned:
            name, value = next(stream)
            found = (name, tuple(value.shape), value.dtype)
            if found != tuple(tensor):
                raise MergeError(f"computed {found} where {tuple(tensor)} was planned")
            file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
