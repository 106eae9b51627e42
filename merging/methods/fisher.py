"""Fisher-weighted averaging: each parameter is the mean of the experts', each weighed by how much
its predictions depend on it.

    theta = Σ w_i F_i theta_i / Σ w_i F_i,   F_i the diagonal of expert i's Fisher information

Source: "Merging Models with Fisher-Weighted Averaging" (Matena & Raffel 2021, arXiv:2111.09832),
with their floor under F. As there, each model's F can be brought to one length first, so that an
expert with large gradients everywhere does not outvote the others; by default it is. The base takes
no part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.errors import MergeError
from merging.lazy import torch
from merging.methods.contract import Inputs, Method, Parameters, Survey, no_hint

if TYPE_CHECKING:
    from torch import Tensor


class FisherParameters(Parameters):
    """`floor`: the least F, after scaling. `normalize`: F of each model is brought to length 1."""

    floor: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    normalize: bool = True


def fisher(
    inputs: Inputs, weights: Sequence[float], params: FisherParameters, scales: list[float] | None
) -> Tensor:
    """The mean of the experts with weights w_i F_i.

    Args:
        scales: what each expert's F is multiplied by; None for 1.

    Raises:
        MergeError: a negative weight, or all of them 0.
    """
    if min(weights) < 0 or max(weights) == 0:
        raise MergeError(
            f"fisher: the weights are {list(weights)}; expected numbers from 0, not all of them 0"
        )
    total, merged = torch.zeros_like(inputs.base), torch.zeros_like(inputs.base)
    first = inputs.experts[0]
    for number, (expert, weight) in enumerate(zip(inputs.experts, weights, strict=True)):
        shares = _information(inputs, number)
        shares = shares.mul(1.0 if scales is None else scales[number]).clamp_(min=params.floor)
        shares.mul_(weight)
        total += shares
        # Around the first expert, so that equal experts give themselves bit for bit.
        merged.addcmul_(expert - first, shares)
    return first + merged / total


def _information(inputs: Inputs, expert: int) -> Tensor:
    found = inputs.statistics[expert]
    if found is None or bool((found < 0).any()):
        raise MergeError(
            f"fisher: the statistics of expert {expert} for {inputs.name or 'the tensor'} are "
            "missing or negative; gather them with `mergescope statistics --kind fisher`"
        )
    return found.to(inputs.base.dtype).view_as(inputs.base)


def _scope(params: FisherParameters) -> Literal["model"] | None:
    return "model" if params.normalize else None


def _observe(inputs: Inputs, params: FisherParameters, hint: None) -> list[float]:
    """The sum of squares of each expert's F."""
    return [
        float(_information(inputs, number).double().square().sum())
        for number in range(len(inputs.experts))
    ]


def _decide(seen: Sequence[list[float]], params: FisherParameters, hint: None) -> list[list[float]]:
    lengths = [math.sqrt(math.fsum(one)) for one in zip(*seen, strict=True)]
    return [[1 / length if length else 1.0 for length in lengths]] * len(seen)


FISHER = Method(
    "mean of the experts, each parameter weighed by its Fisher information",
    FisherParameters,
    fisher,
    Survey(_scope, no_hint, _observe, _decide),
    statistics="entries",
)
