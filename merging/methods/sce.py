"""SCE: select, calculate, erase.

    select      the entries whose task vectors differ most between experts (variance, a fraction
                `select_topk` of those that differ at all)
    calculate   a weight for each expert: its share of the summed squares of what is selected
    erase       entries against the sign of the sum

    theta = theta_b + (Σ c_i tau_i over agreeing entries) / (Σ c_i over agreeing entries)

Source: "FuseChat" (Wan et al. 2024, arXiv:2408.07990). Reference: mergekit's `sce`; of equal
variances those with the lowest index are selected, where it leaves the choice to its sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.lazy import torch
from merging.methods.contract import Inputs, Method, Parameters
from merging.methods.election import weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


class SceParameters(Parameters):
    """`select_topk`: the selected fraction."""

    select_topk: float = Field(default=1.0, ge=0, le=1)


def sce(inputs: Inputs, weights: Sequence[float], params: SceParameters, known: None) -> Tensor:
    """The base plus the weighted mean of selected, agreeing entries."""
    deltas = inputs.deltas
    if params.select_topk < 1:
        mask = _selected(torch.stack(deltas), params.select_topk)
        deltas = [delta * mask for delta in deltas]
    squares = [float(delta.double().square().mean()) for delta in deltas]
    total = sum(squares)
    shares = [s / total for s in squares] if total >= 1e-6 else [1 / len(deltas)] * len(deltas)
    majority = torch.where(weighted_sum(deltas, [1.0] * len(deltas)) >= 0, 1.0, -1.0)
    above, below = torch.zeros_like(inputs.base), torch.zeros_like(inputs.base)
    for delta, share in zip(deltas, shares, strict=True):
        agrees = (delta.sign() == majority).to(delta.dtype)
        above.add_(delta * agrees, alpha=share)
        below.add_(agrees, alpha=share)
    return inputs.base + above / below.clamp(min=1e-6)


def _selected(deltas: Tensor, fraction: float) -> Tensor:
    """1 where the variance over experts is among the largest; of (k, ...) the shape (...)."""
    variance = deltas.var(dim=0, unbiased=False)
    count = int(int((variance != 0).sum()) * fraction)
    mask = torch.zeros_like(variance).flatten()
    mask[variance.flatten().neg().argsort(stable=True)[:count]] = 1
    return mask.view_as(variance)


SCE = Method(
    "entries of large variance, weighted by their squares",
    SceParameters,
    sce,
    whole=True,
    weighted=False,
)
