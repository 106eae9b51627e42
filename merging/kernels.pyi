"""The fused loops of kernels.c."""

from collections.abc import Sequence

from numpy.typing import NDArray
from typing_extensions import Any, Buffer

Products = tuple[list[list[float]], int, int, int]
"""(products of the task vectors, sign conflicts, entries, non-finite entries)"""

def combine(
    inputs: tuple[Buffer, ...],
    types: bytes,
    entries: int,
    out: Buffer,
    out_type: int,
    around: int,
    scale: float,
    coefficients: Sequence[float],
    /,
) -> Products: ...
def ties(
    inputs: tuple[Buffer, ...],
    types: bytes,
    entries: int,
    out: Buffer,
    out_type: int,
    lambda_: float,
    divide: int,
    weights: Sequence[float],
    votes: Sequence[float],
    shares: Sequence[float],
    thresholds: Sequence[float],
    equals: Sequence[int],
    /,
) -> Products: ...
def look(
    inputs: tuple[Buffer, ...],
    types: bytes,
    entries: int,
    lows: Sequence[float],
    highs: Sequence[float],
    insides: tuple[NDArray[Any], ...],
    /,
) -> list[tuple[int, int]]: ...
