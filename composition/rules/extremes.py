"""Union and intersection: the largest, or the smallest, of the experts' probabilities.

    max   p(y) ∝ max_i w_i p_i(y)      what at least one expert finds likely
    min   p(y) ∝ min_i w_i p_i(y)      what every expert finds likely

With equal weights these are the union and the intersection of "Controlled Text Generation via
Language Model Arithmetic" (Dekoninck et al. 2024, arXiv:2311.14479). An expert with weight 0 takes
no part; the base does not either, unless there is no expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from composition.errors import CompositionError
from composition.rules.contract import Compose, Rule


def _extreme(name: str, choose: Callable[[Tensor], Tensor]) -> Compose:
    def compose(base: Tensor, experts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Unnormalised log-probabilities (..., V).

        Raises:
            CompositionError: a negative weight, or none above zero.
        """
        if not experts:
            return base.clone()
        if min(weights) < 0 or max(weights) <= 0:
            raise CompositionError(
                f"{name}: the weights are {list(weights)}; expected none below 0 and one above"
            )
        parts = [
            expert.log_softmax(-1) + math.log(weight)
            for expert, weight in zip(experts, weights, strict=True)
            if weight > 0
        ]
        return choose(torch.stack(parts))

    return compose


def _one(experts: int) -> float:
    return 1.0


MAX = Rule(
    "union: the largest of the experts' probabilities", _extreme("max", lambda p: p.amax(0)), _one
)
MIN = Rule(
    "intersection: the smallest of the experts' probabilities",
    _extreme("min", lambda p: p.amin(0)),
    _one,
)
