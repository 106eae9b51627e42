"""Linear: the weighted mean of the experts; the base takes no part.

    theta = Σ w_i theta_i / Σ w_i

Source: "Model soups" (Wortsman et al. 2022, arXiv:2203.05482). Reference: mergekit's `linear`,
whose models list is the experts here. With `normalize: false` the plain weighted sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from merging.errors import MergeError
from merging.methods.contract import Fused, Inputs, Method, Parameters

if TYPE_CHECKING:
    from torch import Tensor


class LinearParameters(Parameters):
    """`normalize`: divide by the sum of the weights."""

    normalize: bool = True


def linear(
    inputs: Inputs, weights: Sequence[float], params: LinearParameters, known: None
) -> Tensor:
    """The mean of the experts.

    Raises:
        MergeError: the weights sum to 0 and shall be normalised.
    """
    total = _total(weights, params)
    first, *rest = inputs.experts
    # Around the first expert, so that equal experts give themselves bit for bit.
    merged = first * (sum(weights) / total)
    for expert, weight in zip(rest, weights[1:], strict=True):
        merged.add_(expert - first, alpha=weight / total)
    return merged


def _total(weights: Sequence[float], params: LinearParameters) -> float:
    total = sum(weights) if params.normalize else 1.0
    if total == 0:
        raise MergeError(
            f"linear: the weights {list(weights)} sum to 0, so their mean is undefined; choose "
            "other weights or normalize: false"
        )
    return total


def _arguments(
    weights: Sequence[float], params: LinearParameters, known: None
) -> tuple[int, float, list[float]]:
    """Around input 1, the first expert."""
    total = _total(weights, params)
    return 1, sum(weights) / total, [weight / total for weight in weights]


LINEAR = Method(
    "weighted mean of the experts", LinearParameters, linear, fused=Fused("combine", _arguments)
)
