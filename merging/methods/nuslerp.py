"""NuSLERP: two task vectors, spherically interpolated, added to the base.

    tau = (sin((1 - t) a) tau_1 + sin(t a) tau_2) / sin(a),  t = w_2 / (w_1 + w_2)

a is the angle between the task vectors over the tensor. Reference: mergekit's `nuslerp` with a base
and `nuslerp_flatten: true`, its defaults here; the row-wise form is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from merging.methods.contract import Method, Parameters
from merging.methods.span import Gram, fused_by, merge_by, survey_of_deltas

PARALLEL = 1e-8  # sine of the angle below which the two count as parallel


class NuSlerpParameters(Parameters):
    """None; the weights say where between the two."""


def nuslerp(
    gram: Gram, weights: Sequence[float], params: NuSlerpParameters
) -> tuple[float, float, float]:
    """The coefficients of the base and the two experts; they sum to 1."""
    total = sum(weights)
    t = weights[1] / total if abs(total) > 1e-6 else 0.5
    lengths = math.sqrt(gram[0, 0] * gram[1, 1])
    cosine = max(-1.0, min(1.0, gram[0, 1] / lengths)) if lengths else 0.0
    first, second = 1 - t, t
    if 1 - cosine * cosine > PARALLEL**2:
        angle = math.acos(cosine)
        first = math.sin((1 - t) * angle) / math.sin(angle)
        second = math.sin(t * angle) / math.sin(angle)
    return 1 - first - second, first, second


NUSLERP = Method(
    "two task vectors, spherically interpolated",
    NuSlerpParameters,
    merge_by(nuslerp),
    survey_of_deltas(),
    fused=fused_by(nuslerp),
    least=2,
    most=2,
)
