"""Contrast: experts in pairs, each an expert and the anti-expert it is compared with.

    p(y) ∝ p_b(y) Π_pairs (p_+(y) / p_-(y))^w      z_b + Σ w (z_+ - z_-)

The experts alternate: the first of a pair pushes towards its distribution, the second away from
its own. With the base as the large model this is proxy-tuning (the tuned small model, then the
untuned one); with one weight for both it is DExperts. Each expert has a weight of its own, so the
rule is the product with every second weight negative, and a single expert is the product's.

Sources: "DExperts" (Liu et al. 2021, arXiv:2105.03023); "Tuning Language Models by Proxy"
(Liu et al. 2024, arXiv:2401.08565).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from composition.rules.contract import Rule
from composition.rules.product import product


def contrast(base: Tensor, experts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Composed logits (..., V). Zero experts give the base."""
    signed = [-weight if place % 2 else weight for place, weight in enumerate(weights)]
    return product(base, experts, signed)


CONTRAST = Rule("base times experts over their anti-experts, in turn", contrast, lambda k: 1.0)
