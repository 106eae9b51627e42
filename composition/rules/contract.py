"""What a rule is: logits of a base and of its experts in, logits of the composition out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

Compose = Callable[[Tensor, Sequence[Tensor], Sequence[float]], Tensor]
"""(base (..., V), experts (..., V) each, a weight an expert) -> unnormalised logits (..., V)"""


class Rule(NamedTuple):
    """A row of the registry."""

    summary: str
    compose: Compose
    default_weight: Callable[[int], float]  # of k experts, the weight of each
