"""Model breadcrumbs: drop the largest entries of the task vectors as outliers and the smallest as
noise, then sum or elect a sign.

    of n entries in a tensor the largest int(gamma n) and all but int(density n) of the rest go

Source: "Model Breadcrumbs" (Davari & Belilovsky 2023, arXiv:2312.06795). Reference: mergekit's
`breadcrumbs` and `breadcrumbs_ties`. Of equal magnitudes the one with the lower index counts as the
larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.methods.contract import Inputs, Method, Parameters
from merging.methods.election import add_elected, add_summed
from merging.methods.selection import Kept, Scope, survey, trim

if TYPE_CHECKING:
    from torch import Tensor


class BreadcrumbsParameters(Parameters):
    """`density`: the kept fraction. `gamma`: the fraction dropped at the top."""

    density: float = Field(default=0.9, ge=0, le=1)
    gamma: float = Field(default=0.01, ge=0, le=1)
    lambda_: float = Field(default=1.0, alias="lambda", allow_inf_nan=False)
    normalize: bool = False


def breadcrumbs(
    inputs: Inputs,
    weights: Sequence[float],
    params: BreadcrumbsParameters,
    kept: Sequence[Sequence[Kept]] | None,
) -> Tensor:
    """The weighted sum of what is left of the task vectors on the base."""
    left = _left(inputs, kept)
    return add_summed(inputs.base, left, weights, params.lambda_, params.normalize)


def breadcrumbs_ties(
    inputs: Inputs,
    weights: Sequence[float],
    params: BreadcrumbsParameters,
    kept: Sequence[Sequence[Kept]] | None,
) -> Tensor:
    """The elected sum (with `normalize` the mean) of what is left on the base."""
    return add_elected(
        inputs.base,
        _left(inputs, kept),
        weights,
        params.lambda_,
        "weighted",
        "weights" if params.normalize else "none",
    )


def _left(inputs: Inputs, kept: Sequence[Sequence[Kept]] | None) -> list[Tensor]:
    """Each task vector without the outliers, which are the first selection, and without what the
    second leaves out."""
    if kept is None:
        return inputs.deltas
    return [
        trim(delta, most) - trim(delta, outliers)
        for delta, outliers, most in zip(inputs.deltas, *kept, strict=True)
    ]


def _scope(params: BreadcrumbsParameters) -> Scope | None:
    return None if params.density == 1 else "tensor"


def _counts(entries: int, params: BreadcrumbsParameters) -> list[int]:
    target = int(params.density * entries)
    below = max(0, entries - target - int(params.gamma * entries))
    return [entries - below - target, entries - below]


SURVEY = survey(_scope, _counts)
BREADCRUMBS = Method(
    "largest and smallest entries dropped, the rest summed",
    BreadcrumbsParameters,
    breadcrumbs,
    SURVEY,
)
BREADCRUMBS_TIES = Method(
    "largest and smallest entries dropped, signs elected",
    BreadcrumbsParameters,
    breadcrumbs_ties,
    SURVEY,
)
