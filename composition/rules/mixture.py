"""Mixture of the experts' probabilities, an ensemble.

    p(y) = Σ_i w_i p_i(y)

Weights must sum to something positive and none may be negative; they are divided by their sum.
Zero experts give the base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from composition.errors import CompositionError
from composition.rules.contract import Rule


def mixture(base: Tensor, experts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Log-probabilities (..., V) of the mixture.

    Raises:
        CompositionError: a negative weight, or none above zero.
    """
    if not experts:
        return base.clone()
    total = sum(weights)
    if min(weights) < 0 or total <= 0:
        raise CompositionError(
            f"mixture: the weights are {list(weights)}; expected none below 0 and one above"
        )
    parts = [
        expert.log_softmax(-1) + math.log(weight / total)
        for expert, weight in zip(experts, weights, strict=True)
        if weight > 0
    ]
    return torch.stack(parts).logsumexp(0)


MIXTURE = Rule("mixture of the experts' probabilities", mixture, lambda k: 1.0 / k)
