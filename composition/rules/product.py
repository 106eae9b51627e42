"""Product of the experts' ratios to the base: the paper's logit composition.

    p(y) ∝ p_b(y) Π_i (p_i(y) / p_b(y))^{w_i}   =   softmax( z_b + Σ_i w_i (z_i - z_b) )

Raw logits suffice: each model's normaliser is constant over the vocabulary and drops out.

Source: "Compositional Generalization in Autoregressive Models via Logit Composition"
(arXiv:2605.28304), where all weights are 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from composition.rules.contract import Rule


def product(base: Tensor, experts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Composed logits (..., V). Zero experts give the base."""
    composed = base.clone()
    for expert, weight in zip(experts, weights, strict=True):
        composed += weight * (expert - base)  # one buffer: nothing is normalised on the way
    return composed


PRODUCT = Rule("base times the experts' ratios to it (the paper's)", product, lambda k: 1.0)
