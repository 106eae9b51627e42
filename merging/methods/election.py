"""What trimmed task vectors become together: a sum, or the mean of those that agree in sign.

    sum      theta_b + lambda Σ w_i tau_i
    elect    theta_b + lambda (Σ w_i tau_i over entries of the elected sign) / divisor

The elected sign of an entry is that of Σ v_i tau_i (an exact 0 counts as +), v_i the votes.
Source of the election: "TIES-Merging" (Yadav et al. 2023, arXiv:2306.01708).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from merging.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Elect = Literal["weighted", "unweighted"]
Divisor = Literal["weights", "count", "none"]


def votes_and_shares(
    weights: Sequence[float], elect: Elect, divisor: Divisor
) -> tuple[Sequence[float], Sequence[float]]:
    """Of each expert: what it counts in the election, and in the divisor."""
    ones = [1.0] * len(weights)
    return (
        weights if elect == "weighted" else ones,
        weights if divisor == "weights" else ones,
    )


def add_elected(
    base: Tensor,
    trimmed: Sequence[Tensor],
    weights: Sequence[float],
    scale: float,
    elect: Elect,
    divisor: Divisor,
) -> Tensor:
    """base + scale * the elected mean (or sum: divisor `none`) of trimmed task vectors."""
    if scale == 0:
        return base.clone()
    votes, shares = votes_and_shares(weights, elect, divisor)
    elected = torch.copysign(torch.ones_like(base), weighted_sum(trimmed, votes))
    total, count = torch.zeros_like(base), torch.zeros_like(base)
    for tau, weight, vote, share in zip(trimmed, weights, votes, shares, strict=True):
        side = math.copysign(1.0, vote)  # a negative vote agrees where its entry disagrees
        agreeing = (tau * elected).mul_(side).relu_() if side < 0 else (tau * elected).relu_()
        total.add_(agreeing, alpha=weight * side)
        count.add_(agreeing.sign_(), alpha=share)
    total *= elected
    if divisor == "none":
        return base.add(total, alpha=scale)
    if min(shares) > 0:  # then the count is 0 only where nothing agrees and the total is 0
        count.clamp_(min=min(shares))
    else:
        count = torch.where(count == 0, 1.0, count)
    return torch.addcdiv(base, total, count, value=scale)


def add_summed(
    base: Tensor,
    trimmed: Sequence[Tensor],
    weights: Sequence[float],
    scale: float,
    normalize: bool,
) -> Tensor:
    """base + scale * the weighted sum of trimmed task vectors; over the weights' sum, unless that
    is 0, where they are to be normalised."""
    if scale == 0:
        return base.clone()
    total = sum(weights)
    if normalize and abs(total) > 1e-8:
        scale /= total
    return base.add(weighted_sum(trimmed, weights), alpha=scale)


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_i x_i."""
    first, *rest = tensors
    found = first * weights[0]
    for tensor, weight in zip(rest, weights[1:], strict=True):
        found.add_(tensor, alpha=weight)
    return found
