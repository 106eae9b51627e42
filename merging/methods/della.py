"""DELLA: drop entries of the task vectors at random, the smaller the likelier.

    within a row the entry of rank r (0 the smallest of n) stays with probability
    density - epsilon + 2 epsilon r / (n - 1); rescale and merge as DARE does

Source: "DELLA-Merging" (Deep et al. 2024, arXiv:2406.11617). Reference: mergekit's `della` (signs
elected, normalised by the weights) and `della_linear`; both restore the L1 norm, the default here.
The paper rescales every entry by the inverse of its own probability: `rescale: inverse`. Equal
magnitudes are ranked by their place in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy
from numpy.typing import NDArray
from pydantic import Field, model_validator

from merging.lazy import torch
from merging.methods.contract import Inputs, Method, Parameters, Survey, no_hint
from merging.methods.dare import drawn
from merging.methods.election import add_elected, add_summed

if TYPE_CHECKING:
    from torch import Tensor


class DellaParameters(Parameters):
    """`density`: the mean probability that an entry stays. `epsilon`: how far it goes to both
    sides of it."""

    density: float = Field(default=0.5, gt=0, le=1)
    epsilon: float = Field(default=0.15, ge=0)
    lambda_: float = Field(default=1.0, alias="lambda", allow_inf_nan=False)
    rescale: Literal["l1", "inverse", "none"] = "l1"
    normalize: bool | None = None
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _probabilities(self) -> DellaParameters:
        least, most = self.density - self.epsilon, self.density + self.epsilon
        if self.density < 1 and not 0 < least <= most < 1:
            raise ValueError("density - epsilon and density + epsilon must lie between 0 and 1")
        return self


class Thinned(NamedTuple):
    """What the merge of a stretch must know of one expert."""

    kept: NDArray[numpy.uint8]  # a bit an entry
    scale: float


class Thinning(NamedTuple):
    """One expert's task vector in one stretch, thinned."""

    kept: NDArray[numpy.uint8]
    before: float  # L1 norm
    after: float


def della(
    inputs: Inputs, weights: Sequence[float], params: DellaParameters, known: list[Thinned] | None
) -> Tensor:
    """The elected mean (`normalize: false`: sum) of thinned task vectors on the base."""
    divisor: Literal["weights", "none"] = "none" if params.normalize is False else "weights"
    thinned = _thinned(inputs, params, known)
    return add_elected(inputs.base, thinned, weights, params.lambda_, "weighted", divisor)


def della_linear(
    inputs: Inputs, weights: Sequence[float], params: DellaParameters, known: list[Thinned] | None
) -> Tensor:
    """The weighted sum (`normalize: true`: mean) of thinned task vectors on the base."""
    thinned = _thinned(inputs, params, known)
    return add_summed(inputs.base, thinned, weights, params.lambda_, bool(params.normalize))


def _thinned(inputs: Inputs, params: DellaParameters, known: list[Thinned] | None) -> list[Tensor]:
    if params.density == 1:
        return inputs.deltas
    if known is not None:
        return [
            torch.where(_unpacked(one.kept, delta), delta * one.scale, 0.0)
            for one, delta in zip(known, inputs.deltas, strict=True)
        ]
    thinned = []
    for number, delta in enumerate(inputs.deltas):
        chances = _chances(delta, params)
        stays = drawn(inputs, number, params.seed) < chances
        thinned.append(
            torch.where(stays, delta / chances if params.rescale == "inverse" else delta, 0.0)
        )
    return thinned


def _chances(delta: Tensor, params: DellaParameters) -> Tensor:
    """The probability that each entry stays, by its rank within its row."""
    rows = delta.reshape(1, -1) if delta.dim() < 2 else delta.reshape(len(delta), -1)
    columns = rows.shape[1]
    steps = torch.linspace(-1, 1, columns, dtype=rows.dtype, device=rows.device)
    if columns == 1:
        steps = torch.zeros_like(steps)
    places = torch.empty_like(rows).scatter_(1, _order(rows.abs()), steps.expand_as(rows))
    return (params.density + params.epsilon * places).view_as(delta)


def _order(magnitudes: Tensor) -> Tensor:
    """Each row's places in rising order; of equal magnitudes the first comes first."""
    if magnitudes.dtype != torch.float32 or magnitudes.device.type != "cpu":
        return magnitudes.argsort(dim=1, stable=True)
    # The bits of a positive number rise with it: sorting bits and place as one number is twice as
    # fast as a stable argsort.
    keys = magnitudes.contiguous().numpy().view(numpy.uint32).astype(numpy.uint64)
    keys <<= numpy.uint64(32)
    keys |= numpy.arange(keys.shape[1], dtype=numpy.uint64)
    keys.sort(axis=1)
    keys &= numpy.uint64(0xFFFFFFFF)
    return torch.from_numpy(keys.view(numpy.int64))


def _unpacked(kept: NDArray[numpy.uint8], like: Tensor) -> Tensor:
    stays = numpy.unpackbits(kept, count=like.numel()).view(numpy.bool_)
    return torch.from_numpy(stays).to(like.device).view_as(like)


def _scope(params: DellaParameters) -> Literal["tensor"] | None:
    return "tensor" if params.rescale == "l1" and params.density < 1 else None


def _observe(inputs: Inputs, params: DellaParameters, hint: None) -> list[Thinning]:
    found = []
    for number, delta in enumerate(inputs.deltas):
        stays = drawn(inputs, number, params.seed) < _chances(delta, params)
        magnitudes = delta.abs().double()
        before, after = float(magnitudes.sum()), float((magnitudes * stays).sum())
        found.append(Thinning(numpy.packbits(stays.flatten().cpu().numpy()), before, after))
    return found


def _decide(
    seen: Sequence[list[Thinning]], params: DellaParameters, hint: None
) -> list[list[Thinned]]:
    """The scales that restore each task vector's L1 norm over the tensor."""
    scales = []
    for stretches in zip(*seen, strict=True):
        before, after = (sum(getattr(s, norm) for s in stretches) for norm in ("before", "after"))
        scales.append(before / after if min(before, after) >= 1e-7 else 1.0)
    return [
        [Thinned(one.kept, scale) for one, scale in zip(stretch, scales, strict=True)]
        for stretch in seen
    ]


SURVEY = Survey(_scope, no_hint, _observe, _decide)
DELLA = Method(
    "small entries dropped likelier, signs elected", DellaParameters, della, SURVEY, rows=True
)
DELLA_LINEAR = Method(
    "small entries dropped likelier, the rest summed",
    DellaParameters,
    della_linear,
    SURVEY,
    rows=True,
)
