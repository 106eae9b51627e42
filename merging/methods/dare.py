"""DARE: drop entries of the task vectors at random, rescale the rest, then sum or elect a sign.

    tau_i' = m_i tau_i * r,  m_i = 1 with probability `density`
    rescale: inverse   r = 1 / density, as in the paper: the expectation stays
             l1        r restores the L1 norm of tau_i over the tensor, as in mergekit 0.1.5
             none      r = 1
    dare_linear: theta_b + lambda Σ w_i tau_i';  dare_ties: the elected sum (divisor none)

Source: "Language Models are Super Mario" (Yu et al. 2023, arXiv:2311.03099). Reference: mergekit's
`dare_linear` and `dare_ties`. Which entries stay depends on seed, tensor, expert and place alone:
the same on any machine and device, and other than mergekit's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy
from pydantic import Field

from merging.lazy import torch
from merging.methods.contract import Inputs, Method, Parameters, Survey, no_hint
from merging.methods.election import add_elected, add_summed

if TYPE_CHECKING:
    from torch import Tensor


class DareParameters(Parameters):
    """`density`: the probability that an entry stays. `seed`: of the draw."""

    density: float = Field(default=0.5, gt=0, le=1)
    lambda_: float = Field(default=1.0, alias="lambda", allow_inf_nan=False)
    rescale: Literal["inverse", "l1", "none"] = "inverse"
    normalize: bool = False
    seed: int = Field(default=0, ge=0)


def dare_linear(
    inputs: Inputs, weights: Sequence[float], params: DareParameters, scales: list[float] | None
) -> Tensor:
    """The weighted sum of thinned task vectors on the base."""
    thinned = _thinned(inputs, params, scales)
    return add_summed(inputs.base, thinned, weights, params.lambda_, params.normalize)


def dare_ties(
    inputs: Inputs, weights: Sequence[float], params: DareParameters, scales: list[float] | None
) -> Tensor:
    """The elected sum (with `normalize` the mean) of thinned task vectors on the base."""
    return add_elected(
        inputs.base,
        _thinned(inputs, params, scales),
        weights,
        params.lambda_,
        "weighted",
        "weights" if params.normalize else "none",
    )


def _thinned(inputs: Inputs, params: DareParameters, scales: list[float] | None) -> list[Tensor]:
    if params.density == 1:
        return inputs.deltas
    if scales is None:
        scale = 1 / params.density if params.rescale == "inverse" else 1.0
        scales = [scale] * len(inputs.deltas)
    return [
        delta * kept(inputs, number, params.density, params.seed).mul_(scale)
        for number, (delta, scale) in enumerate(zip(inputs.deltas, scales, strict=True))
    ]


def kept(inputs: Inputs, expert: int, density: float, seed: int) -> Tensor:
    """1 where an entry stays and 0 elsewhere, in the shape and precision of the inputs."""
    stays = _bits(inputs, expert, seed) < numpy.uint32(min(int(density * 2**32), 2**32 - 1))
    found: Tensor = torch.from_numpy(stays).to(inputs.base.device, inputs.base.dtype)
    return found.view_as(inputs.base)


def drawn(inputs: Inputs, expert: int, seed: int) -> Tensor:
    """A number in [0, 1) for each entry, in the shape of the inputs."""
    numbers = (_bits(inputs, expert, seed) >> numpy.uint32(8)).astype(numpy.float32) / 2**24
    found: Tensor = torch.from_numpy(numbers).to(inputs.base.device, inputs.base.dtype)
    return found.view_as(inputs.base)


def _bits(inputs: Inputs, expert: int, seed: int) -> Any:
    """32 random bits for each entry: a hash of seed, tensor, expert and place."""
    place = numpy.arange(inputs.start, inputs.start + inputs.base.numel(), dtype=numpy.uint64)
    name = hashlib.sha256(f"{seed} {expert} {inputs.name}".encode()).digest()
    first, second = (int.from_bytes(name[i : i + 4], "little") for i in (0, 4))
    bits = place.astype(numpy.uint32) ^ numpy.uint32(first)
    bits ^= (place >> numpy.uint64(32)).astype(numpy.uint32) * numpy.uint32(0x9E3779B1)
    return _mixed(_mixed(bits) + numpy.uint32(second))


def _mixed(bits: Any) -> Any:
    """A bijection of 32 bits in which every input bit moves every output bit about half the time;
    its constants are those of Wellons's "lowbias32"."""
    bits = (bits ^ (bits >> numpy.uint32(16))) * numpy.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> numpy.uint32(15))) * numpy.uint32(0x846CA68B)
    return bits ^ (bits >> numpy.uint32(16))


def _scope(params: DareParameters) -> Literal["tensor"] | None:
    return "tensor" if params.rescale == "l1" and params.density < 1 else None


def _observe(inputs: Inputs, params: DareParameters, hint: None) -> list[tuple[float, float]]:
    """Each expert's L1 norm before and after."""
    found = []
    for number, delta in enumerate(inputs.deltas):
        magnitudes = delta.abs().double()
        stays = kept(inputs, number, params.density, params.seed)
        found.append((float(magnitudes.sum()), float((magnitudes * stays).sum())))
    return found


def _decide(
    seen: Sequence[list[tuple[float, float]]], params: DareParameters, hint: None
) -> list[list[float]]:
    scales = []
    for stretches in zip(*seen, strict=True):
        before, after = (sum(one) for one in zip(*stretches, strict=True))
        scales.append(before / after if min(before, after) >= 1e-7 else 1.0)
    return [scales] * len(seen)


SURVEY = Survey(_scope, no_hint, _observe, _decide)
DARE_LINEAR = Method(
    "random entries dropped, the rest rescaled and summed", DareParameters, dare_linear, SURVEY
)
DARE_TIES = Method(
    "random entries dropped, the rest rescaled, signs elected", DareParameters, dare_ties, SURVEY
)
