"""The largest entries of each task vector, exactly so many, from one look and without a sort.

A sample brackets the magnitude at which a selection ends, one look at the data counts what lies
above the bracket and collects what lies within, a hundredth or two of all entries, and the exact
threshold is picked among those. Where the sample was wrong the look is repeated with a bracket that
cannot be; the result never depends on the sample.

Equal magnitudes at the threshold: with scope `tensor` exactly so many entries are selected, those
with the lowest index first; with scope `model` all of them are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
from numpy.typing import NDArray

from merging.fused import kernels
from merging.lazy import torch
from merging.methods.contract import Again, Inputs, RawInputs, Survey

if TYPE_CHECKING:
    from torch import Tensor

Scope = Literal["tensor", "model"]
Counts = Callable[[int, Any], Sequence[int]]
"""(entries, params) -> how many of the largest entries each selection holds, from 0 to entries"""

CLUSTER = 4096  # entries of a sample that may be alike because they stand together
DEVIATIONS = 5  # of a rank in the sample, to both sides


class Kept(NamedTuple):
    """What a selection holds of a stretch: all magnitudes above the threshold, and of those equal
    to it the first so many (None: all)."""

    threshold: float
    equals: int | None


class Bracket(NamedTuple):
    """Magnitudes between which a threshold is looked for."""

    low: float
    high: float


class Seen(NamedTuple):
    """One expert's magnitudes in one stretch, seen through a bracket."""

    entries: int
    above: int  # the bracket's high end
    at_high: int
    at_low: int  # 0 where both ends are the same
    inside: NDArray[Any]  # the magnitudes strictly between


ALL, NOTHING = Kept(-1.0, None), Kept(math.inf, 0)
Brackets = Sequence[Sequence[Bracket]]  # of each selection, of each expert
Looks = Sequence[Sequence[Seen]]  # of one stretch: of each selection, of each expert


def survey(scope: Callable[[Any], Scope | None], counts: Counts) -> Survey:
    """Selects from every expert's task vector; a merge gets for each selection a `Kept` an expert.

    Args:
        scope: over what the entries are ranked; None where the parameters need no selection.
    """

    def begin(sample: Sequence[NDArray[Any]], params: Any) -> Brackets:
        magnitudes = [numpy.abs(delta) for delta in sample]
        return [
            [_bracket(expert, count) for expert in magnitudes]
            for count in counts(len(magnitudes[0]), params)
        ]

    def decide(seen: Sequence[Looks], params: Any, brackets: Brackets) -> Any:
        entries = sum(stretch[0][0].entries for stretch in seen)
        found: list[list[list[Kept]]] = []  # selection, expert, stretch
        again: list[list[Bracket]] = []
        for place, count in enumerate(counts(entries, params)):
            experts = zip(*(stretch[place] for stretch in seen), strict=True)
            kept, wider = [], []
            for bracket, stretches in zip(brackets[place], experts, strict=True):
                one = _kept(stretches, count, bracket, scope(params) == "model")
                wider.append(one if isinstance(one, Bracket) else bracket)
                kept.append([] if isinstance(one, Bracket) else one)
            found.append(kept)
            again.append(wider)
        if again != [list(one) for one in brackets]:
            return Again(again)
        return [
            [[expert[stretch] for expert in selection] for selection in found]
            for stretch in range(len(seen))
        ]

    return Survey(scope, begin, _observe, decide, _observe_fused)


def select(deltas: Sequence[Tensor], count: int) -> list[Kept]:
    """What the selection of the `count` largest entries holds of each of some whole tensors."""
    everything = Bracket(0.0, math.inf)
    found = []
    for delta in deltas:
        kept = _kept([_look(_magnitudes(delta), everything)], count, everything, False)
        assert not isinstance(kept, Bracket)  # nothing lies outside of everything
        found += kept
    return found


def trim(delta: Tensor, kept: Kept) -> Tensor:
    """The task vector where the selection holds it, and 0 elsewhere."""
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


def _bracket(sample: NDArray[Any], count: int) -> Bracket:
    """Around the magnitude below the `count` largest of a sample, as wide as clusters differ."""
    size = len(sample)
    place = size - count  # in rising order: how many are not selected
    if place in (0, size):
        middle = float(sample.min() if place == 0 else sample.max())
        shares = numpy.array([0.0])
    else:
        middle = float(numpy.partition(sample, place)[place])
        clusters = sample[: size // CLUSTER * CLUSTER].reshape(-1, min(CLUSTER, max(size, 1)))
        shares = (clusters >= middle).mean(axis=1) if len(clusters) else numpy.array([0.0])
    variance = float(shares.var()) / len(shares)
    least = count / size * (1 - count / size) / size  # of entries that are alike nowhere
    margin = int(DEVIATIONS * math.sqrt(max(variance, least)) * size) + 2
    low, high = place - margin, place + margin
    places = sorted({max(low, 0), min(high, size - 1)})
    found = numpy.partition(sample, places)
    return Bracket(
        min(float(found[places[0]]), middle) if low >= 0 else 0.0,
        max(float(found[places[-1]]), middle) if high < size else math.inf,
    )


def _observe(inputs: Inputs, params: Any, brackets: Brackets) -> Looks:
    magnitudes = [_magnitudes(delta) for delta in inputs.deltas]
    return [
        [_look(one, bracket) for one, bracket in zip(magnitudes, selection, strict=True)]
        for selection in brackets
    ]


def _magnitudes(delta: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = delta.abs().flatten().cpu().numpy()
    return found


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


def _observe_fused(inputs: RawInputs, params: Any, brackets: Brackets) -> Looks:
    assert kernels is not None
    looks = []
    for selection in brackets:
        # One place more than entries: the loop writes a candidate before it judges it.
        inside = tuple(numpy.empty(inputs.entries + 1, dtype=numpy.float32) for _ in selection)
        lows, highs = zip(*selection, strict=True)
        found = kernels.look(inputs.raw, inputs.types, inputs.entries, lows, highs, inside)
        looks.append(
            [
                Seen(
                    inputs.entries, above, high, low if one.low < one.high else 0, m[:count].copy()
                )
                for one, (above, high, low, count), m in zip(selection, found, inside, strict=True)
            ]
        )
    return looks


def _kept(
    stretches: Sequence[Seen], count: int, bracket: Bracket, all_equals: bool
) -> list[Kept] | Bracket:
    """What a selection of `count` entries of one expert holds of each stretch; a wider bracket
    where its threshold lies outside of this one."""
    entries = sum(seen.entries for seen in stretches)
    if count in (0, entries):
        return [NOTHING if count == 0 else ALL] * len(stretches)
    left = count - sum(seen.above for seen in stretches)  # of those not above the bracket
    if left <= 0:
        return Bracket(bracket.high, math.inf)
    at_high = sum(seen.at_high for seen in stretches)
    at_low = sum(seen.at_low for seen in stretches)
    inside = numpy.concatenate([seen.inside for seen in stretches])
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
        return Bracket(0.0, bracket.low)
    if all_equals:
        return [Kept(threshold, None)] * len(stretches)
    kept = []
    for equal in equals:
        kept.append(Kept(threshold, None if equal <= left else left))
        left -= min(equal, left)
    return kept
