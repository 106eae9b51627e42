"""Consensus: keep the entries that enough experts care about.

    TALL mask of expert i   |tau_i| >= tall |tau - tau_i|,   tau = Σ w_i tau_i
    theta = theta_b + lambda tau where at least `agree` masks are set, else theta_b

`agree: 2` drops what no expert needs and what only one does ("catastrophic" and "selfish" weights).

Source: "Localizing Task Information for Improved Model Merging and Compression" (Wang et al. 2024,
arXiv:2405.07813), whose defaults are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.lazy import torch
from merging.methods.contract import Inputs, Method, Parameters
from merging.methods.election import weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


class ConsensusParameters(Parameters):
    """`tall`: how much of an entry an expert must hold. `agree`: masks that must be set."""

    tall: float = Field(default=0.4, ge=0, allow_inf_nan=False)
    agree: int = Field(default=2, ge=0)
    lambda_: float = Field(default=1.0, alias="lambda", allow_inf_nan=False)


def consensus(
    inputs: Inputs, weights: Sequence[float], params: ConsensusParameters, known: None
) -> Tensor:
    """base + lambda * the entries of the sum of task vectors that enough masks hold."""
    together = weighted_sum(inputs.deltas, weights)
    held = torch.zeros_like(inputs.base)
    for delta in inputs.deltas:
        held += delta.abs() >= params.tall * (together - delta).abs()
    together.mul_(held >= params.agree)
    return inputs.base.add(together, alpha=params.lambda_)


CONSENSUS = Method("entries that enough experts care about", ConsensusParameters, consensus)
