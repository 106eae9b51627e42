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

The exact threshold takes one look at the data and no sort: a sample brackets it, the look counts
what lies above and collects what lies within, a hundredth or two of all entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
from numpy.typing import NDArray
from pydantic import Field

from merging.fused import kernels
from merging.lazy import torch
from merging.methods.contract import Again, Fused, Inputs, Method, Parameters, RawInputs, Survey
from merging.methods.election import Divisor, Elect, add_elected, votes_and_shares

if TYPE_CHECKING:
    from torch import Tensor

Scope = Literal["tensor", "model"]


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
    inputs: Inputs, weights: Sequence[float], params: TiesParameters, kept: Sequence[Kept] | None
) -> Tensor:
    """base + lambda * the elected mean of trimmed task vectors.

    Args:
        kept: what stays of each expert's task vector; None for all of it.
    """
    if params.density == 0 or params.lambda_ == 0:
        return inputs.base.clone()
    trimmed = inputs.deltas
    if kept is not None:
        trimmed = [_trim(tau, keep) for tau, keep in zip(trimmed, kept, strict=True)]
    choice = params.choice
    return add_elected(inputs.base, trimmed, weights, params.lambda_, choice.elect, choice.divisor)


def _arguments(
    weights: Sequence[float], params: TiesParameters, kept: Sequence[Kept] | None
) -> tuple[Any, ...]:
    votes, shares = votes_and_shares(weights, params.choice.elect, params.choice.divisor)
    limits, scale = kept, params.lambda_
    if params.density == 0:
        scale = 0.0
    if limits is None:
        limits = [Kept(-1.0, None)] * len(weights)
    return (
        scale,
        int(params.choice.divisor != "none"),
        weights,
        votes,
        shares,
        [keep.threshold for keep in limits],
        [-1 if keep.equals is None else keep.equals for keep in limits],
    )


class Bracket(NamedTuple):
    """Magnitudes between which an expert's threshold is looked for."""

    low: float
    high: float


class Seen(NamedTuple):
    """One expert's magnitudes in one stretch, seen through a bracket."""

    entries: int
    above: int  # the bracket's high end
    at_high: int
    at_low: int  # 0 where both ends are the same
    inside: NDArray[Any]  # the magnitudes strictly between


class Kept(NamedTuple):
    """What trimming keeps of a stretch: all above the threshold, and of those equal to it the
    first so many (None: all)."""

    threshold: float
    equals: int | None


def _scope(params: TiesParameters) -> Scope | None:
    return None if params.density in (0, 1) else params.choice.scope


def _begin(sample: Sequence[NDArray[Any]], params: TiesParameters) -> list[Bracket]:
    """Brackets from a sample, wide enough that the exact threshold hardly ever lies outside."""
    return [_bracket(numpy.abs(delta), params.density) for delta in sample]


def _bracket(sample: NDArray[Any], density: float) -> Bracket:
    size = len(sample)
    margin = (
        6 * math.sqrt(density * (1 - density) * size) + 2
    )  # six standard deviations of the rank
    low, high = int(size * (1 - density) - margin), int(size * (1 - density) + margin)
    places = sorted({max(low, 0), min(high, size - 1)})
    found = numpy.partition(sample, places)
    return Bracket(
        float(found[places[0]]) if low >= 0 else 0.0,
        float(found[places[-1]]) if high < size else math.inf,
    )


def _observe(inputs: Inputs, params: TiesParameters, brackets: Sequence[Bracket]) -> list[Seen]:
    return [
        _look(_magnitudes(delta), bracket)
        for delta, bracket in zip(inputs.deltas, brackets, strict=True)
    ]


def _observe_fused(
    inputs: RawInputs, params: TiesParameters, brackets: Sequence[Bracket]
) -> list[Seen]:
    assert kernels is not None
    # One place more than entries: the loop writes a candidate before it judges it.
    inside = tuple(numpy.empty(inputs.entries + 1, dtype=numpy.float32) for _ in brackets)
    lows, highs = zip(*brackets, strict=True)
    found = kernels.look(inputs.raw, inputs.types, inputs.entries, lows, highs, inside)
    return [
        Seen(inputs.entries, above, high, 0 if one.low == one.high else low, between[:count].copy())
        for one, (above, high, low, count), between in zip(brackets, found, inside, strict=True)
    ]


def _look(magnitudes: NDArray[Any], bracket: Bracket) -> Seen:
    low, high = bracket
    count = numpy.count_nonzero
    return Seen(
        len(magnitudes),
        int(count(magnitudes > high)),
        int(count(magnitudes == high)),
        int(count(magnitudes == low)) if low < high else 0,
        magnitudes[(magnitudes > low) & (magnitudes < high)],
    )


def _magnitudes(delta: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = delta.abs().flatten().cpu().numpy()
    return found


def _decide(
    seen: Sequence[Sequence[Seen]], params: TiesParameters, brackets: Sequence[Bracket]
) -> list[list[Kept]] | Again:
    """Exactly max(1, int(density * n)) entries; of equal magnitudes those with the lowest index,
    or all of them where the scope is the model."""
    found = []
    for bracket, expert in zip(brackets, zip(*seen, strict=True), strict=True):
        kept = _kept(expert, params, bracket)
        if kept is None:
            return Again([Bracket(0.0, math.inf)] * len(brackets))
        found.append(kept)
    return [list(stretch) for stretch in zip(*found, strict=True)]


def _kept(stretches: Sequence[Seen], params: TiesParameters, bracket: Bracket) -> list[Kept] | None:
    """What one expert keeps of each stretch; None where its threshold is outside the bracket."""
    count = max(1, int(params.density * sum(seen.entries for seen in stretches)))
    left = count - sum(seen.above for seen in stretches)  # of those not above the bracket
    if left <= 0:
        return None
    at_high = sum(seen.at_high for seen in stretches)
    inside = numpy.concatenate([seen.inside for seen in stretches])
    at_low = sum(seen.at_low for seen in stretches)
    if left <= at_high:
        threshold, equals = bracket.high, [seen.at_high for seen in stretches]
    elif left <= at_high + len(inside):
        place = len(inside) - (left - at_high)  # in rising order
        limit = numpy.partition(inside, place)[place]
        left -= at_high + int(numpy.count_nonzero(inside > limit))
        threshold = float(limit)
        equals = [int(numpy.count_nonzero(seen.inside == limit)) for seen in stretches]
    elif left <= at_high + len(inside) + at_low or bracket.low == 0:
        left -= at_high + len(inside)
        threshold, equals = bracket.low, [seen.at_low for seen in stretches]
    else:
        return None
    if params.choice.scope == "model":
        return [Kept(threshold, None)] * len(stretches)
    kept = []
    for equal in equals:
        kept.append(Kept(threshold, None if equal <= left else left))
        left -= min(equal, left)
    return kept


def _trim(delta: Tensor, kept: Kept) -> Tensor:
    if kept.equals == 0:
        return torch.hardshrink(delta, kept.threshold)  # 0 where |x| <= threshold
    if kept.equals is None:
        limit = torch.tensor(kept.threshold, dtype=delta.dtype)
        below = float(torch.nextafter(limit, torch.zeros_like(limit)))
        return torch.hardshrink(delta, below) if kept.threshold > 0 else delta
    magnitudes = delta.abs()
    equal = (magnitudes == kept.threshold).flatten()
    first = (equal & (equal.cumsum(0) <= kept.equals)).view_as(delta)
    return torch.where((magnitudes > kept.threshold) | first, delta, 0.0)


TIES = Method(
    "trim, elect sign, merge what agrees",
    TiesParameters,
    ties,
    Survey(_scope, _begin, _observe, _decide, _observe_fused),
    fused=Fused("ties", _arguments),
)
