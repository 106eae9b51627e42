"""How the composition decides to stop.

With h the probability of EOS, experts that agree on a format shift the log-odds of stopping each
by about the same; summed over k experts the shift is k times too large, and the composition stops
too early (or, where they lengthen, never). `mean` composes EOS by the mean shift instead:

    logit h  =  logit h_b + (1/k) Σ_i (logit h_i - logit h_b)

and leaves what is composed of the other tokens as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

EosRule = Literal["sum", "mean"]


def mean_eos(
    composed: Tensor, base: Tensor, experts: Sequence[Tensor], eos_ids: Sequence[int]
) -> Tensor:
    """The composed logits (..., V) with the probability of the EOS ids set by the mean shift."""
    if not experts:
        return composed
    ids = torch.tensor(sorted(eos_ids), device=composed.device)
    odds = _log_odds(base, ids)
    shift = torch.stack([_log_odds(expert, ids) - odds for expert in experts]).mean(0)
    # Adding c to every EOS logit adds exactly c to the log-odds of stopping.
    change = odds + shift - _log_odds(composed, ids)
    result = composed.clone()
    result[..., ids] += change[..., None]
    return result


def _log_odds(logits: Tensor, ids: Tensor) -> Tensor:
    rest = logits.clone()
    rest[..., ids] = -torch.inf
    return logits[..., ids].logsumexp(-1) - rest.logsumexp(-1)
