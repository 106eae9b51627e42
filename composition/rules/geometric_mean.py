"""Geometric mean of the experts: the product rule at w_i = 1/k, where the base drops out.

    p(y) ∝ Π_i p_i(y)^{1/k}

To first order it is the function that a linear average of the experts' weights computes.
"""

from __future__ import annotations

from composition.rules.contract import Rule
from composition.rules.product import product

GEOMETRIC_MEAN = Rule("geometric mean of the experts", product, lambda k: 1.0 / k)
