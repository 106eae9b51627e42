"""Entries of tensors as bytes, with the type codes of safetensors: what is read and written.

Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from merging.errors import MergeError
from merging.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Raw = NDArray[numpy.uint8]

CODES = {  # code -> torch's name of the type, bytes an entry
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
FLOATING = ("F64", "F32", "F16", "BF16")


def code_of(name: str) -> str:
    """The code of a type by torch's name of it, such as `bfloat16`.

    Raises:
        MergeError: no such type can be stored.
    """
    for code, (known, _) in CODES.items():
        if known == name:
            return code
    names = ", ".join(known for known, _ in CODES.values())
    raise MergeError(f"numbers of type {name} cannot be stored; expected one of {names}")


def itemsize(code: str) -> int:
    """Bytes an entry."""
    return CODES[code][1]


def torch_dtype(code: str) -> torch.dtype:
    """torch's type for a code."""
    found: torch.dtype = getattr(torch, CODES[code][0])
    return found


def dtype_code(dtype: torch.dtype) -> str:
    """The code for torch's type."""
    return code_of(str(dtype).removeprefix("torch."))


def to_tensor(raw: Raw, code: str) -> Tensor:
    """The entries as a flat tensor, without a copy."""
    if raw.size == 0:  # which torch cannot view as another type
        return torch.empty(0, dtype=torch_dtype(code))
    return torch.from_numpy(raw).view(torch_dtype(code))


def to_raw(entries: Tensor) -> Raw:
    """A tensor's entries in a row, without a copy where they are in a row on the CPU."""
    flat = entries.detach().cpu().contiguous().flatten()
    if flat.numel() == 0:
        return numpy.empty(0, dtype=numpy.uint8)
    found: Raw = flat.view(torch.uint8).numpy()
    return found


def to_floats(raw: Raw, code: str) -> NDArray[Any]:
    """Floating entries as numbers NumPy knows: float64 as they are, all others as float32."""
    if code == "BF16":
        return (raw.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
    if code == "F16":
        return raw.view(numpy.float16).astype(numpy.float32)
    return raw.view(numpy.float64 if code == "F64" else numpy.float32)
