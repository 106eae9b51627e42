"""NuSLERP: two task vectors, spherically interpolated, added to the base.

    tau = (sin((1 - t) a) tau_1 + sin(t a) tau_2) / sin(a),  t = w_2 / (w_1 + w_2)

a is the angle between the task vectors over the tensor. Reference: mergekit's `nuslerp` with a base
and `nuslerp_flatten: true`, its defaults here; the row-wise form is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from merging.methods.contract import Method, Parameters
from merging.methods.span import Gram, cosine, fused_by, merge_by, on_arc, survey_of_deltas

PARALLEL = 1e-8  # sine of the angle below which the two count as parallel


class NuSlerpParameters(Parameters):
    """None; the weights say where between the two."""


def nuslerp(
    gram: Gram, weights: Sequence[float], params: NuSlerpParameters
) -> tuple[float, float, float]:
    """The coefficients of the base and the two experts; they sum to 1."""
    total = sum(weights)
    t = weights[1] / total if abs(total) > 1e-6 else 0.5
    between = cosine(gram)
    parallel = 1 - between * between <= PARALLEL**2
    first, second = (1 - t, t) if parallel else on_arc(between, t)
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
