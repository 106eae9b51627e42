"""Checkpoints as lazy sources of named tensors.

A folder holds `model.safetensors`, or shards with `model.safetensors.index.json`, or the same as
`pytorch_model.bin` (read without running pickled code). Nothing is read before it is asked for,
but the headers; quantised weights are refused, since a task vector of packed numbers is noise.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy
from safetensors import SafetensorError, safe_open

from merging.digests import file_digest
from merging.errors import MergeError
from merging.lazy import torch
from merging.raw import CODES, Raw, dtype_code, itemsize, to_raw, to_tensor

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
SPAN = 1 << 22  # entries compared at a time


class TensorSource(Protocol):
    """Named tensors, read one at a time or in pieces."""

    folder: Path

    def names(self) -> list[str]:
        """The tensors' names, in the order of the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def code(self, name: str) -> str:
        """The type of the entries, as in `merging.raw.CODES`."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU."""
        ...

    def read_raw(self, name: str, start: int, stop: int) -> Raw:
        """The bytes of entries [start, stop) of the flattened tensor; called from threads."""
        ...

    def digest(self) -> str:
        """SHA-256 of everything that determines the tensors."""
        ...

    def unchanged(self) -> bool:
        """Are the files still those that `digest` was taken of?"""
        ...


class Part(Protocol):
    """One file of a checkpoint."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def code(self, name: str) -> str: ...

    def read_raw(self, name: str, start: int, stop: int) -> Raw: ...


class Entry(NamedTuple):
    """A tensor in a safetensors file."""

    code: str
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file


class SafetensorsFile:
    """A safetensors file; its header is checked, its data are read at their places."""

    def __init__(self, path: Path) -> None:
        try:
            # The library checks what the header promises; its order is by type and name.
            with safe_open(path, framework="numpy") as opened:
                self._names = list(opened.keys())
            self._stream = path.open("rb", buffering=0)
            size = int.from_bytes(self._stream.read(8), "little")
            header = json.loads(self._stream.read(size))
        except (SafetensorError, OSError, ValueError) as error:
            raise MergeError(f"{path} is no sound safetensors file: {error}") from None
        self._path = path
        self._entries = {
            name: Entry(entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def code(self, name: str) -> str:
        found = self._entries[name].code
        if found not in CODES:
            raise MergeError(
                f"{self._path}: {name} has type {found}; expected one of {', '.join(CODES)}"
            )
        return found

    def read_raw(self, name: str, start: int, stop: int) -> Raw:
        entry = self._entries[name]
        size = itemsize(self.code(name))
        found = numpy.empty((stop - start) * size, dtype=numpy.uint8)
        view, place = found.data, entry.offset + start * size
        while view:
            count = _read_at(self._stream.fileno(), view, place)
            if count == 0:
                raise MergeError(
                    f"{self._path}: {name} cannot be read; the file has become shorter"
                )
            view, place = view[count:], place + count
        return found


def _read_at(descriptor: int, view: memoryview, place: int) -> int:
    """Fills the view from a place in a file, as far as it goes at once."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], place)
    found = os.pread(descriptor, len(view), place)  # systems without preadv
    view[: len(found)] = found
    return len(found)


class PickledFile:
    """A .bin file, read as plain tensors: the code in it is not run."""

    def __init__(self, path: Path) -> None:
        log.info("%s is a pickle; reading its tensors without running its code", path)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds; all mean the file cannot be used
            raise MergeError(
                f"{path} cannot be read as plain tensors: {str(error).splitlines()[0]}"
            ) from None
        if not isinstance(state, dict) or not all(
            isinstance(tensor, torch.Tensor) for tensor in state.values()
        ):
            raise MergeError(f"{path} holds something else than named tensors")
        self._state: dict[str, Tensor] = state

    def names(self) -> list[str]:
        return list(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def code(self, name: str) -> str:
        return dtype_code(self._state[name].dtype)

    def read_raw(self, name: str, start: int, stop: int) -> Raw:
        return to_raw(self._state[name].reshape(-1)[start:stop])


class Checkpoint:
    """A checkpoint folder or a single file; see `open_checkpoint`."""

    def __init__(self, folder: Path, files: Mapping[str, Path], tied: bool) -> None:
        self.folder = folder
        self._files = dict(files)  # tensor -> file
        self._parts: dict[Path, Part] = {}
        self._lock = threading.Lock()
        if tied and HEAD in self._files and EMBEDDINGS in self._files:
            self._forget_tied_head()

    def __getstate__(self) -> dict[str, Any]:
        """To another process goes where the files are, and their digest; it opens them itself."""
        kept = {name: value for name, value in vars(self).items() if name != "_lock"}
        files = {name: file.absolute() for name, file in self._files.items()}
        return {**kept, "folder": self.folder.absolute(), "_files": files, "_parts": {}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._part(name).shape(name)

    def code(self, name: str) -> str:
        return self._part(name).code(name)

    def read(self, name: str) -> Tensor:
        shape = self.shape(name)
        return to_tensor(self.read_raw(name, 0, prod(shape)), self.code(name)).view(shape)

    def read_raw(self, name: str, start: int, stop: int) -> Raw:
        return self._part(name).read_raw(name, start, stop)

    def digest(self) -> str:
        return self._digest

    def unchanged(self) -> bool:
        return self._hashed() == self._digest

    @cached_property
    def _digest(self) -> str:
        return self._hashed()

    def _hashed(self) -> str:
        total = hashlib.sha256()
        for file in sorted({*self._files.values()}):
            total.update(file.name.encode() + file_digest(file).encode())
        return total.hexdigest()

    def _part(self, name: str) -> Part:
        file = self._files[name]
        with self._lock:
            if file not in self._parts:
                part = _open_file(file)
                known = set(part.names())
                lost = [n for n, place in self._files.items() if place == file and n not in known]
                if lost:
                    raise MergeError(
                        f"{file} holds no tensor {lost[0]}, which the index promises; the "
                        "checkpoint is incomplete"
                    )
                self._parts[file] = part
            return self._parts[file]

    def _forget_tied_head(self) -> None:
        size = prod(self.shape(HEAD))
        same = self.shape(HEAD) == self.shape(EMBEDDINGS) and self.code(HEAD) == self.code(
            EMBEDDINGS
        )
        for start in range(0, size, SPAN) if same else ():
            stop = min(start + SPAN, size)
            head, embeddings = (self.read_raw(n, start, stop) for n in (HEAD, EMBEDDINGS))
            same = same and numpy.array_equal(head, embeddings)
        if not same:
            raise MergeError(
                f"{self.folder}: config.json ties the head to the embeddings, but {HEAD} and "
                f"{EMBEDDINGS} differ; set tie_word_embeddings to what the weights are"
            )
        del self._files[HEAD]  # one tensor under two names is merged once


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint folder or a single .safetensors or .bin file.

    Raises:
        MergeError: there is none, it is damaged, incomplete or quantised.
    """
    if path.is_file() and path.suffix in (".safetensors", ".bin"):
        return Checkpoint(path.parent, _tensors_of(path), tied=False)
    if not path.is_dir():
        raise MergeError(
            f"there is no checkpoint {path}; expected a folder with config.json and safetensors "
            "files, or one .safetensors file"
        )
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if config.get("quantization_config"):
        kind = config["quantization_config"].get("quant_method", "unknown")
        raise MergeError(
            f"{path} is quantised ({kind}); packed weights cannot be merged. Use the original "
            "checkpoint, or save a dequantised one"
        )
    tied = bool(config.get("tie_word_embeddings", False))
    return Checkpoint(path, _weight_files(path), tied)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        MergeError: it cannot be read or is no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise MergeError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise MergeError(f"{path} holds {type(content).__name__}; expected a JSON object")
    return content


def _weight_files(folder: Path) -> dict[str, Path]:
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            return _indexed(folder, index)
        if (folder / f"{stem}.{suffix}").is_file():
            return _tensors_of(folder / f"{stem}.{suffix}")
    found = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    raise MergeError(
        f"{folder} holds no weights; expected model.safetensors, shards with "
        f"model.safetensors.index.json, or pytorch_model.bin, and found {found}"
    )


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise MergeError(f"{index} has no weight_map; the checkpoint is incomplete")
    escaping = sorted({str(file) for file in named.values() if Path(str(file)).name != file})
    if escaping:
        raise MergeError(f"{index} names {escaping[0]!r}; expected files of the same folder")
    missing = sorted({file for file in named.values() if not (folder / file).is_file()})
    if missing:
        raise MergeError(
            f"{folder} lacks {len(missing)} of its shards ({', '.join(missing[:3])}); the "
            "checkpoint is incomplete"
        )
    return {name: folder / file for name, file in named.items()}


def _tensors_of(file: Path) -> dict[str, Path]:
    return dict.fromkeys(_open_file(file).names(), file)


def _open_file(file: Path) -> Part:
    return PickledFile(file) if file.suffix == ".bin" else SafetensorsFile(file)
