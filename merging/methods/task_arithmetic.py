"""Task arithmetic: add the experts' task vectors to the base.

    theta = theta_b + lambda Σ w_i tau_i

Source: "Editing models with task arithmetic" (Ilharco et al. 2023, arXiv:2212.04089). Reference:
mergekit's `task_arithmetic`. Its counterpart in probability space is the product rule with
w_i = lambda w_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.methods.contract import Fused, Inputs, Method, Parameters

if TYPE_CHECKING:
    from torch import Tensor


class TaskArithmeticParameters(Parameters):
    """`lambda`: the scale of the sum of task vectors."""

    lambda_: float = Field(default=1.0, alias="lambda", allow_inf_nan=False)


def task_arithmetic(
    inputs: Inputs, weights: Sequence[float], params: TaskArithmeticParameters, known: None
) -> Tensor:
    """base + lambda * sum of weighted task vectors."""
    merged = inputs.base.clone()
    for delta, weight in zip(inputs.deltas, weights, strict=True):
        if params.lambda_ * weight != 0:  # adding 0 would turn -0.0 into 0.0
            merged.add_(delta, alpha=params.lambda_ * weight)
    return merged


def _arguments(
    weights: Sequence[float], params: TaskArithmeticParameters, known: None
) -> tuple[int, float, list[float]]:
    """Around input 0, the base."""
    return 0, 1.0, [params.lambda_ * weight for weight in weights]


TASK_ARITHMETIC = Method(
    "base plus lambda times the sum of task vectors",
    TaskArithmeticParameters,
    task_arithmetic,
    fused=Fused("combine", _arguments),
)
