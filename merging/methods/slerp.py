"""SLERP: along the great circle from the base to one expert.

    theta = (sin((1 - t) a) theta_b + sin(t a) theta_1) / sin(a),  a the angle between the two

Source: Shoemake 1985, "Animating rotation with quaternion curves"; in weight space a custom of
practitioners. Reference: mergekit's `slerp`, whose threshold below which the two count as parallel
(cosine above 0.9995: plain interpolation) is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from merging.methods.contract import Method, Parameters
from merging.methods.span import Gram, cosine, fused_by, merge_by, on_arc, survey_of_inputs

PARALLEL = 0.9995


class SlerpParameters(Parameters):
    """`t`: 0 is the base, 1 the expert."""

    t: float = Field(default=0.5, ge=0, le=1)


def slerp(gram: Gram, weights: Sequence[float], params: SlerpParameters) -> tuple[float, float]:
    """The coefficients of base and expert."""
    between = cosine(gram)
    if abs(between) > PARALLEL:
        return 1 - params.t, params.t
    return on_arc(between, params.t)


SLERP = Method(
    "along the great circle from the base to one expert",
    SlerpParameters,
    merge_by(slerp),
    survey_of_inputs(),
    fused=fused_by(slerp),
    most=1,
    weighted=False,
)
"""Takes one expert."""
