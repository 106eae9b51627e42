"""Karcher mean: the point on the sphere with the least squared angles to the experts.

The experts, brought to length 1, have a mean direction on the sphere that is found by walking along
the mean tangent until it vanishes; its length is the mean of their lengths. The base takes no part.

Source: Karcher 1977, "Riemannian center of mass"; as a merge mergekit's `karcher` (which weighs the
experts alike; so do weights of 1). The walk stays in the span of the experts, so that it is done on
their inner products alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray
from pydantic import Field

from merging.errors import MergeError
from merging.methods.contract import Method, Parameters
from merging.methods.span import Gram, fused_by, merge_by, survey_of_inputs


class KarcherParameters(Parameters):
    """`max_iter`: steps of the walk at most. `tol`: the angle at which it ends."""

    max_iter: int = Field(default=10, ge=1)
    tol: float = Field(default=1e-5, gt=0)


def karcher(gram: Gram, weights: Sequence[float], params: KarcherParameters) -> list[float]:
    """The coefficients of base (0) and experts.

    Raises:
        MergeError: a weight is negative, or all are 0.
    """
    shares = numpy.array(weights, dtype=numpy.float64)
    if shares.min() < 0 or shares.sum() == 0:
        raise MergeError(
            f"karcher: the weights are {list(weights)}; expected none below 0 and one above"
        )
    shares = shares / shares.sum()
    lengths = numpy.sqrt(numpy.diag(gram)[1:])
    real = lengths > params.tol
    if not real.any():
        return [0.0] * len(gram)
    units = numpy.where(real, 1 / numpy.where(real, lengths, 1.0), 0.0)
    angles = gram[1:, 1:] * numpy.outer(units, units)  # inner products of the unit vectors
    pulls = numpy.where(real, shares, 0.0)
    pulls = pulls / pulls.sum()
    mean = _walk(angles, pulls, real, params)
    return [0.0, *(mean * units * float(shares @ lengths))]


def _walk(angles: Gram, pulls: Gram, real: NDArray[numpy.bool], params: KarcherParameters) -> Gram:
    """Coefficients of the mean direction over the unit vectors."""
    mean = pulls.copy()
    size = math.sqrt(max(float(mean @ angles @ mean), 0.0))
    if size < params.tol:  # they cancel: begin at the first
        mean = numpy.zeros_like(pulls)
        mean[int(numpy.argmax(real))] = size = 1.0
    mean = mean / size
    for _ in range(params.max_iter):
        cosines = numpy.clip(angles @ mean, -1, 1)
        thetas = numpy.arccos(cosines)
        away = real & (thetas >= params.tol)
        steps = numpy.where(away, pulls * thetas / numpy.sin(numpy.where(away, thetas, 1.0)), 0.0)
        tangent = steps - (steps @ cosines) * mean
        size = math.sqrt(max(float(tangent @ angles @ tangent), 0.0))
        if size < params.tol:
            break
        mean = math.cos(size) * mean + math.sin(size) * tangent / size
        mean = mean / math.sqrt(float(mean @ angles @ mean))
    return mean


KARCHER = Method(
    "mean direction of the experts on the sphere",
    KarcherParameters,
    merge_by(karcher),
    survey_of_inputs(),
    fused=fused_by(karcher),
)
