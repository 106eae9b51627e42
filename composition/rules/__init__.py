"""The registry of composition rules."""

from __future__ import annotations

from composition.rules.contract import Rule
from composition.rules.contrast import CONTRAST
from composition.rules.extremes import MAX, MIN
from composition.rules.geometric_mean import GEOMETRIC_MEAN
from composition.rules.mixture import MIXTURE
from composition.rules.product import PRODUCT

RULES: dict[str, Rule] = {
    "product": PRODUCT,
    "geometric_mean": GEOMETRIC_MEAN,
    "mixture": MIXTURE,
    "contrast": CONTRAST,
    "max": MAX,
    "min": MIN,
}

__all__ = ["RULES", "Rule"]
