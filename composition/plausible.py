"""A mask: only what at least one component finds plausible may come next.

    token y stays  iff  p_i(y) >= plausible * max_v p_i(v)  for the base or an expert i

The union of the components' plausible sets: their intersection would veto one token in five at four
experts. The threshold is that of "Contrastive Decoding" (Li et al. 2022, arXiv:2210.15097).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def implausible(components: Sequence[Tensor], threshold: float) -> Tensor:
    """Where no component finds a token plausible: (..., V) logits each -> (..., V) bool."""
    margin = math.log(threshold)
    plausible = [z >= z.amax(-1, keepdim=True) + margin for z in components]
    return ~torch.stack(plausible).any(0)
