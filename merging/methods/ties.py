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
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from merging.methods.contract import Method, Parameters, Read

Scope = Literal["tensor", "model"]
Elect = Literal["weighted", "unweighted"]
Divisor = Literal["weights", "count", "none"]


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
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    params: TiesParameters,
    survey: Sequence[float] | None = None,
) -> Tensor:
    """base + lambda * the elected mean of trimmed task vectors, in their shape.

    Args:
        survey: with scope `model`, each expert's threshold over the whole model; without it the
            one tensor is taken for the model.
    """
    if params.density == 0 or params.lambda_ == 0:
        return base.clone()
    choice = params.choice
    deltas = [expert - base for expert in experts]
    if choice.scope == "model":
        thresholds = survey or _thresholds(lambda: [(base, list(experts))], params)
        trimmed = [_above(tau, limit) for tau, limit in zip(deltas, thresholds, strict=True)]
    else:
        trimmed = [_largest(delta, params.density) for delta in deltas]
    return base + params.lambda_ * _merge_agreeing(trimmed, weights, choice)


def _merge_agreeing(trimmed: Sequence[Tensor], weights: Sequence[float], choice: Preset) -> Tensor:
    total, mass = torch.zeros_like(trimmed[0]), torch.zeros_like(trimmed[0])
    voting = weights if choice.elect == "weighted" else [1.0] * len(weights)
    for tau, vote in zip(trimmed, voting, strict=True):
        mass += vote * tau
    positive = mass >= 0
    divisor = torch.zeros_like(total)
    for tau, weight, vote in zip(trimmed, weights, voting, strict=True):
        signed = vote * tau
        agrees = torch.where(positive, signed > 0, signed < 0)
        total += torch.where(agrees, weight * tau, 0.0)
        divisor += agrees.to(tau.dtype) * (weight if choice.divisor == "weights" else 1.0)
    if choice.divisor == "none":
        return total
    return torch.where(divisor == 0, total, total / torch.where(divisor == 0, 1.0, divisor))


def _largest(delta: Tensor, density: float) -> Tensor:
    """Exactly max(1, int(density * n)) entries of largest magnitude; equals by lowest index."""
    count = max(1, int(density * delta.numel()))
    if count >= delta.numel():
        return delta
    magnitudes = delta.abs().flatten()
    threshold = magnitudes.kthvalue(delta.numel() - count + 1).values
    keep = magnitudes > threshold
    equal = magnitudes == threshold
    keep |= equal & (equal.cumsum(0) <= count - keep.sum())
    return torch.where(keep.view_as(delta), delta, 0.0)


def _above(delta: Tensor, threshold: float) -> Tensor:
    # In float32, as the threshold was found; `float` of a float32 threshold is exact.
    return torch.where(delta.abs().float() >= threshold, delta, 0.0)


HALF = 16  # bits: a float32 magnitude is found by its upper half, then by its lower half


def _thresholds(read: Read, params: TiesParameters) -> list[float]:
    """Each expert's magnitude of rank int(density * n) over the whole model, exact in float32.

    A non-negative float32 orders as its bit pattern does: two passes over the model count the
    upper and then, within the bin that holds the rank, the lower 16 bits. No sort, no copy.
    """
    counts: list[Tensor] = []
    for base, experts in read():
        counts = counts or [torch.zeros(1 << HALF, dtype=torch.long) for _ in experts]
        for index, expert in enumerate(experts):
            counts[index] += _histogram(_bits(expert - base) >> HALF)
    ranks = [max(1, int(params.density * int(count.sum()))) for count in counts]
    upper = [_rank_bin(count, rank) for count, rank in zip(counts, ranks, strict=True)]
    counts = [torch.zeros(1 << HALF, dtype=torch.long) for _ in counts]
    for base, experts in read():
        for index, expert in enumerate(experts):
            bits = _bits(expert - base)
            inside = bits[bits >> HALF == upper[index][0]]
            counts[index] += _histogram(inside & ((1 << HALF) - 1))
    found = []
    for (high, left), count in zip(upper, counts, strict=True):
        pattern = (high << HALF) + _rank_bin(count, left)[0]
        found.append(float(torch.tensor(pattern, dtype=torch.int32).view(torch.float32)))
    return found


def _bits(delta: Tensor) -> Tensor:
    return delta.abs().float().flatten().view(torch.int32)


def _histogram(values: Tensor) -> Tensor:
    return torch.bincount(values, minlength=1 << HALF).cpu()


def _rank_bin(counts: Tensor, rank: int) -> tuple[int, int]:
    """The bin that holds the rank-th largest value, and its rank within the bin (from 1)."""
    above = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(above, torch.tensor(rank)))
    before = int(above[place - 1]) if place else 0
    return len(counts) - 1 - place, rank - before


def survey(read: Read, params: Any) -> list[float] | None:
    """The thresholds over the whole model, where the scope asks for them."""
    if params.choice.scope == "tensor" or params.density == 0:
        return None
    return _thresholds(read, params)


TIES = Method("trim, elect sign, merge what agrees", TiesParameters, ties, survey)
