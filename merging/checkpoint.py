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
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from merging.errors import MergeError

log = logging.getLogger(__name__)

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
BLOCK = 1 << 24  # bytes hashed at a time


class TensorSource(Protocol):
    """Named tensors, read one at a time."""

    folder: Path

    def names(self) -> list[str]:
        """The tensors' names, in the order of the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU."""
        ...

    def read_span(self, name: str, start: int, stop: int) -> Tensor:
        """Entries [start, stop) of the flattened tensor, 1-D, on the CPU; called from threads."""
        ...

    def digest(self) -> str:
        """SHA-256 of everything that determines the tensors."""
        ...


class Place(NamedTuple):
    """Where the entries of a tensor begin in a file."""

    stream: IO[bytes]
    offset: int
    dtype: torch.dtype


class Checkpoint:
    """A checkpoint folder or a single .safetensors file; see `open_checkpoint`."""

    def __init__(self, folder: Path, files: Mapping[str, Path], tied: bool) -> None:
        self.folder = folder
        self._files = dict(files)  # tensor -> file
        self._opened: dict[Path, Any] = {}
        self._places: dict[str, Place | Tensor] = {}
        self._lock = threading.Lock()
        if tied and HEAD in self._files and EMBEDDINGS in self._files:
            self._forget_tied_head()

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._part(name)
        return tuple(part.shape if isinstance(part, Tensor) else part.get_shape())

    def dtype(self, name: str) -> torch.dtype:
        part = self._part(name)
        if isinstance(part, Tensor):
            return part.dtype
        found = DTYPES.get(part.get_dtype())
        if found is None:
            raise MergeError(
                f"{self._files[name]}: {name} has type {part.get_dtype()}; expected one of "
                f"{', '.join(DTYPES)}"
            )
        return found

    def read(self, name: str) -> Tensor:
        part = self._part(name)
        try:
            return part if isinstance(part, Tensor) else self._open(name).get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise MergeError(
                f"{self._files[name]}: {name} cannot be read ({error}); the file is damaged"
            ) from None

    def read_span(self, name: str, start: int, stop: int) -> Tensor:
        place = self._places.get(name) or self._locate(name)
        if isinstance(place, Tensor):
            return place[start:stop]
        found = torch.empty(stop - start, dtype=place.dtype)
        view = found.view(torch.uint8).numpy().data
        offset = place.offset + start * place.dtype.itemsize
        while view:
            count = os.preadv(place.stream.fileno(), [view], offset)
            if count == 0:
                raise MergeError(
                    f"{self._files[name]}: {name} cannot be read (the file has become shorter)"
                )
            view, offset = view[count:], offset + count
        return found

    def _locate(self, name: str) -> Place | Tensor:
        """Finds the places of all tensors of the file that holds this one."""
        file = self._files[name]
        with self._lock:
            if name in self._places:
                return self._places[name]
            opened = self._opened_file(file)  # its header is sound: the library has checked it
            if isinstance(opened, dict):
                self._places |= {key: tensor.reshape(-1) for key, tensor in opened.items()}
                return self._places[name]
            stream = file.open("rb", buffering=0)
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
            for key, entry in header.items():
                if key != "__metadata__" and entry["dtype"] in DTYPES:
                    offset = 8 + size + entry["data_offsets"][0]
                    self._places[key] = Place(stream, offset, DTYPES[entry["dtype"]])
            return self._places[name]

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        total = hashlib.sha256()
        for file in sorted({*self._files.values()}):
            total.update(file.name.encode() + file_digest(file).encode())
        return total.hexdigest()

    def _open(self, name: str) -> Any:
        with self._lock:
            return self._opened_file(self._files[name])

    def _opened_file(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = _open_file(file)
        return self._opened[file]

    def _part(self, name: str) -> Any:
        opened = self._open(name)
        try:
            return opened[name] if isinstance(opened, dict) else opened.get_slice(name)
        except (KeyError, SafetensorError):
            raise MergeError(
                f"{self._files[name]} holds no tensor {name}, which the index promises; the "
                "checkpoint is incomplete"
            ) from None

    def _forget_tied_head(self) -> None:
        if not torch.equal(self.read(HEAD), self.read(EMBEDDINGS)):
            raise MergeError(
                f"{self.folder}: config.json ties the head to the embeddings, but {HEAD} and "
                f"{EMBEDDINGS} differ; set tie_word_embeddings to what the weights are"
            )
        del self._files[HEAD]  # one tensor under two names is merged once


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


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
    return dict.fromkeys(_open_file(file).keys(), file)


def _open_file(file: Path) -> Any:
    """A safetensors file's handle, or the tensors of a .bin file by name."""
    if file.suffix == ".bin":
        log.info("%s is a pickle; reading its tensors without running its code", file)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds; all mean the file cannot be used
            raise MergeError(
                f"{file} cannot be read as plain tensors: {str(error).splitlines()[0]}"
            ) from None
        if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
            raise MergeError(f"{file} holds something else than named tensors")
        return state
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise MergeError(f"{file} is no sound safetensors file: {error}") from None
