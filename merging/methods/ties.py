"""TIES: trim the task vectors, elect a sign an entry, merge the entries that agree.

    trim    keep the largest |tau_i|, a fraction `density` of them, in one tensor or in the model
    elect   the sign of the sum of the kept entries (an exact 0 counts as +)
    merge   theta = theta_b + lambda * (Σ w_i tau_i over agreeing entries) / divisor

Source: "TIES-Merging" (Yadav et al. 2023, arXiv:2306.01708). "TIES" names three functions; which
one a table shows must be said, so scope, election and divisor are parameters with named presets:

    preset     scope    elect        divisor
    mergekit   tensor   weighted     weights      mergekit 0.1.5
    peft       tensor   unweighted   count        PEFT's `ties`
    paper      model    unweighted   count        the authors' code

Equal magnitudes at the threshold: with scope `tensor` exactly max(1, int(density * n)) entries are
kept, those with the lowest index first (the references leave it to an unstable sort); with scope
`model` all of them are kept, as in the authors' code. Density 0 keeps nothing: the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from merging.methods.contract import Fused, Inputs, Method, Parameters
from merging.methods.election import Divisor, Elect, add_elected, votes_and_shares
from merging.methods.selection import ALL, Kept, Scope, survey, trim

if TYPE_CHECKING:
    from torch import Tensor


class Preset(NamedTuple):
    """One of the functions that are called TIES."""

    scope: Scope
    elect: Elect
    divisor: Divisor


PRESETS = {
    "mergekit": Preset("tensor", "weighted", "weights"),
    "peft": Preset("tensor", "unweighted", "count"),
    "paper": Preset("model", "unweighted", "count"),
}


class TiesParameters(Parameters):
    """`density`: kept fraction in [0, 1]. `scope`, `elect`, `divisor`: the preset's if left out."""

    density: float = Field(default=0.2, ge=0, le=1)
    lambda_: float = Field(default=1.0, alias="lambda", allow_inf_nan=False)
    preset: Literal["mergekit", "peft", "paper"] = "mergekit"
    scope: Scope | None = None
    elect: Elect | None = None
    divisor: Divisor | None = None

    @property
    def choice(self) -> Preset:
        """Scope, election and divisor after the preset."""
        preset = PRESETS[self.preset]
        return Preset(
            self.scope or preset.scope,
            self.elect or preset.elect,
            self.divisor or preset.divisor,
        )


def ties(
    inputs: Inputs,
    weights: Sequence[float],
    params: TiesParameters,
    kept: Sequence[Sequence[Kept]] | None,
) -> Tensor:
    """base + lambda * the elected mean of trimmed task vectors.

    Args:
        kept: what stays of each expert's task vector, the only selection; None for all of it.
    """
    if params.density == 0 or params.lambda_ == 0:
        return inputs.base.clone()
    trimmed = inputs.deltas
    if kept is not None:
        trimmed = [trim(tau, keep) for tau, keep in zip(trimmed, kept[0], strict=True)]
    choice = params.choice
    return add_elected(inputs.base, trimmed, weights, params.lambda_, choice.elect, choice.divisor)


def _arguments(
    weights: Sequence[float], params: TiesParameters, kept: Sequence[Sequence[Kept]] | None
) -> tuple[Any, ...]:
    votes, shares = votes_and_shares(weights, params.choice.elect, params.choice.divisor)
    scale = 0.0 if params.density == 0 else params.lambda_
    limits = [ALL] * len(weights) if kept is None else kept[0]
    return (
        scale,
        int(params.choice.divisor != "none"),
        weights,
        votes,
        shares,
        [keep.threshold for keep in limits],
        [-1 if keep.equals is None else keep.equals for keep in limits],
    )


def _scope(params: TiesParameters) -> Scope | None:
    return None if params.density in (0, 1) else params.choice.scope


def _counts(entries: int, params: TiesParameters) -> list[int]:
    return [max(1, int(params.density * entries))]


TIES = Method(
    "trim, elect sign, merge what agrees",
    TiesParameters,
    ties,
    survey(_scope, _counts),
    fused=Fused("ties", _arguments),
)
