"""Model stock: from the base towards the mean of the experts, as far as their angles justify.

    theta = t mean(theta_i) + (1 - t) theta_b,   t = k c / (1 + (k - 1) c)

c is the mean cosine between task vectors over the tensor: experts that agree are trusted, experts
at right angles are noise around the base.

Source: "Model Stock" (Jang et al. 2024, arXiv:2403.19522). Reference: mergekit's `model_stock`
without `filter_wise`; where 1 + (k - 1) c is 0 the base is kept, as there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from merging.methods.contract import Method, Parameters
from merging.methods.span import Gram, fused_by, merge_by, survey_of_deltas

SINGULAR = 1e-6


class ModelStockParameters(Parameters):
    """None: the angles decide."""


def model_stock(gram: Gram, weights: Sequence[float], params: ModelStockParameters) -> list[float]:
    """The coefficients of the base and of each expert; they sum to 1."""
    count = len(gram)
    cosines = [
        gram[i, j] / max(math.sqrt(gram[i, i] * gram[j, j]), SINGULAR)
        for i in range(count)
        for j in range(i)
    ]
    cosine = sum(max(-1.0, min(1.0, c)) for c in cosines) / len(cosines)
    below = 1 + (count - 1) * cosine
    t = count * cosine / below if abs(below) >= SINGULAR else 0.0
    return [1 - t, *[t / count] * count]


MODEL_STOCK = Method(
    "between the base and the experts' mean, by their angles",
    ModelStockParameters,
    merge_by(model_stock),
    survey_of_deltas(),
    fused=fused_by(model_stock),
    least=2,
    weighted=False,
)
"""Takes at least two experts."""
