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
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from merging.lazy import torch
from merging.methods.contract import Inputs, Method, Parameters
from merging.methods.dare import drawn
from merging.methods.election import add_elected, add_summed

if TYPE_CHECKING:
    from torch import Tensor


ENTRIES = 1 << 20  # ranked at a time


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
        if (
            self.density < 1
            and not 0 < self.density - self.epsilon <= self.density + self.epsilon < 1
        ):
            raise ValueError("density - epsilon and density + epsilon must lie between 0 and 1")
        return self


def della(inputs: Inputs, weights: Sequence[float], params: DellaParameters, known: None) -> Tensor:
    """The elected mean (`normalize: false`: sum) of thinned task vectors on the base."""
    divisor: Literal["weights", "none"] = "none" if params.normalize is False else "weights"
    thinned = _thinned(inputs, params)
    return add_elected(inputs.base, thinned, weights, params.lambda_, "weighted", divisor)


def della_linear(
    inputs: Inputs, weights: Sequence[float], params: DellaParameters, known: None
) -> Tensor:
    """The weighted sum (`normalize: true`: mean) of thinned task vectors on the base."""
    thinned = _thinned(inputs, params)
    return add_summed(inputs.base, thinned, weights, params.lambda_, bool(params.normalize))


def _thinned(inputs: Inputs, params: DellaParameters) -> list[Tensor]:
    if params.density == 1:
        return inputs.deltas
    return [_thin(inputs, number, params) for number in range(len(inputs.deltas))]


def _thin(inputs: Inputs, expert: int, params: DellaParameters) -> Tensor:
    delta = inputs.deltas[expert]
    rows = delta.reshape(1, -1) if delta.dim() < 2 else delta.reshape(len(delta), -1)
    columns = rows.shape[1]
    at_once = max(ENTRIES // max(columns, 1), 1)
    thinned = torch.cat(
        [
            _thin_rows(rows[first : first + at_once], inputs, first * columns, expert, params)
            for first in range(0, len(rows), at_once)
        ]
    ).view_as(delta)
    if params.rescale == "l1":
        before, after = (float(one.abs().sum(dtype=torch.float64)) for one in (delta, thinned))
        return thinned.mul_(before / after) if min(before, after) >= 1e-7 else thinned
    return thinned


def _thin_rows(
    rows: Tensor, inputs: Inputs, start: int, expert: int, params: DellaParameters
) -> Tensor:
    """Some rows, of which the first begins at entry `start` of the tensor."""
    order = rows.abs().argsort(dim=1, stable=True)
    steps = torch.linspace(-1, 1, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if rows.shape[1] == 1:
        steps = torch.zeros_like(steps)
    chances = torch.empty_like(rows).scatter_(1, order, steps.expand_as(rows).contiguous())
    chances = params.density + params.epsilon * chances
    stretch = Inputs(rows, [rows] * len(inputs.experts), inputs.name, inputs.start + start)
    thinned = torch.where(drawn(stretch, expert, params.seed) < chances, rows, 0.0)
    return thinned / chances if params.rescale == "inverse" else thinned


DELLA = Method("small entries dropped likelier, signs elected", DellaParameters, della, whole=True)
DELLA_LINEAR = Method(
    "small entries dropped likelier, the rest summed", DellaParameters, della_linear, whole=True
)
