"""Merges within the span of the inputs: coefficients from lengths and angles, then a weighted sum.

SLERP, NuSLERP, Karcher mean and model stock differ only in how they choose a coefficient for each
input from the inner products of the inputs (or of the task vectors) over a whole tensor. Those are
summed in float64 in one look at the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from merging.fused import CODES_OF
from merging.methods.contract import Fused, Inputs, RawInputs, Survey, no_hint
from merging.raw import to_floats

if TYPE_CHECKING:
    from torch import Tensor

Gram = NDArray[numpy.float64]
Solve = Callable[[Gram, Sequence[float], Any], Sequence[float]]
"""(inner products, weights, params) -> a coefficient for the base and for each expert"""


def survey_of_inputs() -> Survey:
    """Looks at the inner products of base and experts, (k + 1, k + 1), the base first."""
    return Survey(_tensor, no_hint, _observe_inputs, _decide, _observe_raw_inputs)


def survey_of_deltas() -> Survey:
    """Looks at the inner products of the task vectors, (k, k)."""
    return Survey(_tensor, no_hint, _observe_deltas, _decide, _observe_raw_deltas)


def merge_by(solve: Solve) -> Callable[[Inputs, Sequence[float], Any, Gram], Tensor]:
    """The merge with the coefficients that `solve` finds."""

    def merge(inputs: Inputs, weights: Sequence[float], params: Any, gram: Gram) -> Tensor:
        coefficients = solve(gram, weights, params)
        merged = inputs.base * float(sum(coefficients))
        for delta, coefficient in zip(inputs.deltas, coefficients[1:], strict=True):
            if coefficient != 0:
                merged.add_(delta, alpha=float(coefficient))
        return merged

    return merge


def fused_by(solve: Solve) -> Fused:
    """The same, around the base in the fused loop."""

    def arguments(
        weights: Sequence[float], params: Any, gram: Gram
    ) -> tuple[int, float, list[float]]:
        coefficients = [float(c) for c in solve(gram, weights, params)]
        return 0, sum(coefficients), coefficients[1:]

    return Fused("combine", arguments)


def cosine(gram: Gram) -> float:
    """Of the angle between two vectors; 0 where one of them is 0."""
    lengths = math.sqrt(gram[0, 0] * gram[1, 1])
    return max(-1.0, min(1.0, float(gram[0, 1]) / lengths)) if lengths else 0.0


def on_arc(cosine: float, t: float) -> tuple[float, float]:
    """Coefficients of the point at t between two vectors that are not parallel."""
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def _tensor(params: Any) -> Any:
    return "tensor"


def _observe_inputs(inputs: Inputs, params: Any, hint: None) -> Gram:
    return _products([inputs.base, *inputs.experts])


def _observe_deltas(inputs: Inputs, params: Any, hint: None) -> Gram:
    return _products(inputs.deltas)


def _products(tensors: Sequence[Tensor]) -> Gram:
    return _gram([tensor.double().flatten().cpu().numpy() for tensor in tensors])


def _observe_raw_inputs(inputs: RawInputs, params: Any, hint: None) -> Gram:
    return _gram([vector.astype(numpy.float64) for vector in _floats(inputs)])


def _observe_raw_deltas(inputs: RawInputs, params: Any, hint: None) -> Gram:
    base, *experts = _floats(inputs)
    return _gram([(expert - base).astype(numpy.float64) for expert in experts])


def _floats(inputs: RawInputs) -> list[NDArray[Any]]:
    return [
        to_floats(raw, CODES_OF[kind]) for raw, kind in zip(inputs.raw, inputs.types, strict=True)
    ]


def _gram(vectors: Sequence[NDArray[Any]]) -> Gram:
    return numpy.array([[numpy.dot(a, b) for b in vectors] for a in vectors], dtype=numpy.float64)


def _decide(seen: Sequence[Gram], params: Any, hint: None) -> list[Gram]:
    return [numpy.sum(seen, axis=0)] * len(seen)
