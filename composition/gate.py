"""A gate: an expert takes part only where it has something to say.

    hard   expert i counts at a prefix  iff  KL(p_i ‖ p_b) > epsilon nats
    soft   its logits are z_b + g (z_i - z_b),  g = KL / (KL + epsilon)

Elsewhere its logits are the base's, which takes it out of the product rule. Off its skill an
expert differs from the base by noise only, and that noise adds up with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Gating = Literal["hard", "soft"]


def kl_to_base(base: Tensor, expert: Tensor) -> Tensor:
    """KL(p_expert ‖ p_base) in nats at every prefix: (..., V) each -> (...)."""
    logp, logq = expert.log_softmax(-1), base.log_softmax(-1)
    terms = torch.where(logp == -torch.inf, 0.0, logp.exp() * (logp - logq))
    return terms.sum(-1)


def gate(
    base: Tensor, experts: Sequence[Tensor], epsilon: float, gating: Gating = "hard"
) -> list[Tensor]:
    """The experts' logits after the gate."""
    gated = []
    for expert in experts:
        divergence = kl_to_base(base, expert)[..., None].clamp(min=0)
        if gating == "hard":
            gated.append(torch.where(divergence > epsilon, expert, base))
        else:
            share = torch.where(divergence > 0, divergence / (divergence + epsilon), 0.0)
            gated.append(base + share * (expert - base))
    return gated
