"""The fused loops of kernels.c."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

Products = tuple[list[list[float]], int, int, int]
"""(products of the task vectors, sign conflicts, entries, non-finite entries)"""

def combine(
    inputs: tuple[NDArray[Any], ...],
    types: bytes,
    entries: int,
    out: NDArray[Any],
    out_type: int,
    around: int,
    scale: float,
    coefficients: Sequence[float],
    /,
) -> Products: ...
def ties(
    inputs: tuple[NDArray[Any], ...],
    types: bytes,
    entries: int,
    out: NDArray[Any],
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
    inputs: tuple[NDArray[Any], ...],
    types: bytes,
    entries: int,
    lows: Sequence[float],
    highs: Sequence[float],
    insides: tuple[NDArray[Any], ...],
    /,
) -> list[tuple[int, int, int, int]]: ...
