"""A gate: an expert takes part only where it has something to say.

    expert i counts at a prefix  iff  KL(p_i ‖ p_b) > epsilon nats

Elsewhere its logits are replaced by the base's, which takes it out of the product rule. Off its
skill an expert differs from the base by noise only, and that noise adds up with their number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kl_to_base(base: Tensor, expert: Tensor) -> Tensor:
    """KL(p_expert ‖ p_base) in nats at every prefix: (..., V) each -> (...)."""
    logp, logq = expert.log_softmax(-1), base.log_softmax(-1)
    terms = torch.where(logp == -torch.inf, 0.0, logp.exp() * (logp - logq))
    return terms.sum(-1)


def gate(base: Tensor, experts: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    """The experts' logits, with the base's in their place where KL(p_i ‖ p_b) <= epsilon."""
    return [
        torch.where((kl_to_base(base, expert) > epsilon)[..., None], expert, base)
        for expert in experts
    ]
