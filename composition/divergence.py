"""How far two next-token distributions are apart, accurate down to tiny differences.

With P = softmax(a), Q = softmax(b) and the centred log-ratio d = (a - b) - E_P[a - b],

    KL(P‖Q) = log E_P[exp(-d)]

E_P[d] is 0, so KL = log(1 + E_P[exp(-d) - 1 + d]): every term is non-negative, and nothing of
order d cancels. The plain sum of P log(P/Q) loses everything below about 1e-16 * max|log P|;
here a gap of 1e-7 still gives its KL of 1e-15 to several digits in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composition.gate import kl_to_base


class Divergences(NamedTuple):
    """One number a token, (...) each, in nats where a unit applies."""

    gap_squared: Tensor  # mean over the vocabulary of the squared difference of centred logits
    kl: Tensor  # KL(p ‖ q)
    js: Tensor  # Jensen-Shannon divergence, at most log 2
    tv: Tensor  # total variation distance, in [0, 1]
    top1_agreement: Tensor  # 1 where both have the same most probable token


class Explanation(NamedTuple):
    """What each component has said of a token, in nats."""

    logprobs: Tensor  # (k + 1, ...) of the chosen token, the base's first
    kl_to_base: Tensor  # (k, ...) KL(p_i ‖ p_b)
    log_partition: Tensor  # (...) log Z_t of the product rule


def explain(components: Sequence[Tensor], tokens: Tensor, weights: Sequence[float]) -> Explanation:
    """The components' part in chosen tokens.

    Args:
        components: logits (..., V), the base's first: what `output_components` gives.
        tokens: (...) the ids that were chosen.
        weights: one an expert.
    """
    base, *experts = (logits.float() for logits in components)
    logprobs = [
        logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for logits in (base, *experts)
    ]
    shifts = [kl_to_base(base, expert) for expert in experts]
    return Explanation(
        torch.stack(logprobs),
        torch.stack(shifts) if shifts else base.new_zeros(0, *tokens.shape),
        log_partition(base, experts, weights),
    )


def divergences(p_logits: Tensor, q_logits: Tensor) -> Divergences:
    """Compares distributions given by logits (..., V), float32 or float64, finite.

    `gap_squared` centres each token's logits over the vocabulary: a constant shift is no gap.
    """
    difference = p_logits - q_logits
    gap = difference - difference.mean(-1, keepdim=True)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    # q / p - 1, from the logits' difference alone: log(q/p) = -difference - log E_p[e^-difference]
    kl = _kl(p, difference)
    log_ratio = -difference + (p * difference).sum(-1, keepdim=True) - kl[..., None]
    tv = 0.5 * (p * torch.expm1(log_ratio)).abs().sum(-1)
    return Divergences(
        gap_squared=gap.square().mean(-1),
        kl=kl,
        js=_js(p, q, log_ratio),
        tv=tv,
        top1_agreement=(p_logits.argmax(-1) == q_logits.argmax(-1)).to(p_logits.dtype),
    )


def log_partition(
    base_logits: Tensor, expert_logits: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """log Z_t = log E_b[Π (p_i/p_b)^{w_i}], (...): 0 where the conditionals factorise."""
    base = base_logits.log_softmax(-1)
    total = base
    for expert, weight in zip(expert_logits, weights, strict=True):
        total = total + weight * (expert.log_softmax(-1) - base)
    return total.logsumexp(-1)


def _kl(p: Tensor, difference: Tensor) -> Tensor:
    centred = difference - (p * difference).sum(-1, keepdim=True)
    return torch.log1p((p * _exp_rest(-centred)).sum(-1))


def _exp_rest(x: Tensor) -> Tensor:
    """exp(x) - 1 - x, by its series where subtraction would cancel."""
    series = x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720))))
    return torch.where(x.abs() < 0.02, series, torch.expm1(x) - x)


def _js(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """Half KL(P‖M) + half KL(Q‖M) with M = (P + Q) / 2 and log_ratio = log(Q/P)."""
    # log(M/P) = log((1 + Q/P) / 2) and log(M/Q) = log((1 + P/Q) / 2)
    to_p = torch.log1p(torch.expm1(log_ratio) / 2)
    to_q = torch.log1p(torch.expm1(-log_ratio) / 2)
    return 0.5 * (_kl(p, -to_p) + _kl(q, -to_q))
