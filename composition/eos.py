"""How the composition decides to stop.

With h the probability of any EOS id and d_i = logit h_i - logit h_b, the product of two or more
experts has

    logit h = logit h_b + Σ w_i d_i - log Z_c,   Z_c the partition of the other tokens

Experts that share a format stop too late (Z_c grows with the square of their number), experts that
disagree too early. Rules other than `sum` leave what is composed of the other tokens as it is and
set the odds of stopping:

    sum         as any other token (no change)
    canonical   all EOS ids of a component count as one token, then as `sum`
    hazard      logit h_b + Σ w_i d_i: the evidence without the partition
    mean        logit h_b + (1/k) Σ d_i
    max         the largest of the experts' odds: stop when one wants to
    base        the base's odds: experts have no say
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

EosRule = Literal["sum", "canonical", "hazard", "mean", "max", "base"]

Odds = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(base's log-odds (...), experts' (k, ...), weights (k,)) -> the composition's"""
ODDS: dict[EosRule, Odds] = {
    "hazard": lambda base, experts, weights: (
        base + torch.einsum("k...,k->...", experts - base, weights)
    ),
    "mean": lambda base, experts, weights: experts.mean(0),
    "max": lambda base, experts, weights: experts.amax(0),
    "base": lambda base, experts, weights: base,
}


def with_odds(
    rule: EosRule,
    composed: Tensor,
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    eos_ids: Sequence[int],
) -> Tensor:
    """The composed logits (..., V) with the odds of stopping that a rule of `ODDS` sets."""
    if not experts:
        return composed
    ids = torch.tensor(sorted(eos_ids), device=composed.device)
    wanted = ODDS[rule](
        _log_odds(base, ids),
        torch.stack([_log_odds(expert, ids) for expert in experts]),
        torch.tensor(list(weights), dtype=composed.dtype, device=composed.device),
    )
    # Adding c to every EOS logit adds exactly c to the log-odds of stopping.
    result = composed.clone()
    result[..., ids] += (wanted - _log_odds(composed, ids))[..., None]
    return result


def canonical(logits: Tensor, eos_ids: Sequence[int], excluded: float) -> Tensor:
    """One component's logits (..., V) with the mass of all EOS ids on the first of them."""
    first, *others = sorted(eos_ids)
    result = logits.clone()
    result[..., first] = logits[..., sorted(eos_ids)].logsumexp(-1)
    result[..., others] = excluded
    return result


def _log_odds(logits: Tensor, ids: Tensor) -> Tensor:
    rest = logits.clone()
    rest[..., ids] = -torch.inf
    return logits[..., ids].logsumexp(-1) - rest.logsumexp(-1)
