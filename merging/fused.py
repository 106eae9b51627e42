"""The fused loops of kernels.c, where they were built: same numbers as the methods, without torch.

They take bfloat16, float16 and float32 on the CPU, and up to 32 experts; everything else, and all
methods without a loop, goes through torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from merging.raw import Raw, itemsize
from merging.report import Moments

if TYPE_CHECKING:
    from merging.methods.contract import Fused, RawInputs

try:
    from merging import kernels
except ImportError:  # no compiler where it was installed
    kernels = None  # type: ignore[assignment]

TYPES = {"BF16": 0, "F16": 1, "F32": 2}
CODES_OF = {number: code for code, number in TYPES.items()}
EXPERTS = 32  # at most


def types_of(codes: Sequence[str]) -> bytes | None:
    """The types of base and experts as the loops number them; None where they do not take them."""
    if kernels is None or len(codes) > EXPERTS + 1 or not all(code in TYPES for code in codes):
        return None
    return bytes(TYPES[code] for code in codes)


def merge(
    fused: Fused, inputs: RawInputs, out_code: str, arguments: tuple[Any, ...]
) -> tuple[Raw, Moments]:
    """One stretch merged and rounded to `out_code`, and the moments of its task vectors."""
    out = numpy.empty(inputs.entries * itemsize(out_code), dtype=numpy.uint8)
    kernel = getattr(kernels, fused.kernel)
    found = kernel(inputs.raw, inputs.types, inputs.entries, out, TYPES[out_code], *arguments)
    return out, Moments(*found)


__all__ = ["CODES_OF", "TYPES", "kernels", "merge", "types_of"]
