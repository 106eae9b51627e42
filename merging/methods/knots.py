"""KnOTS: align the task vectors by one singular value decomposition, merge them there by TIES.

    [tau_1 ... tau_k] = U S [V_1 ... V_k],   theta = theta_b + lambda U ties(S V_1, ..., S V_k)

LoRA experts move a matrix within few directions, each in its own; in the common directions U their
entries can be compared, trimmed and their signs elected, as TIES does over one tensor. Tensors that
are no matrices are merged by TIES itself.

Source: "Model merging with SVD to tie the Knots" (Stoica et al. 2024, arXiv:2410.19735).
U and S come from the eigenvectors of the smaller of the two Gram matrices, in float64. Directions
in which the task vectors are not larger than the rounding of the weights take no part: of LoRA
experts they would be most of all entries, and trimming would keep everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.lazy import torch
from merging.methods.contract import Inputs, Method, Parameters
from merging.methods.election import Divisor, Elect
from merging.methods.selection import select
from merging.methods.ties import TiesParameters, ties

if TYPE_CHECKING:
    from torch import Tensor


MARGIN = 16  # eigenvalues of 0 come out as a few units of rounding


class KnotsParameters(Parameters):
    """`density`, `lambda`, `elect`, `divisor`: those of TIES, in the common directions."""

    density: float = Field(default=0.2, ge=0, le=1)
    lambda_: float = Field(default=1.0, alias="lambda", allow_inf_nan=False)
    elect: Elect = "weighted"
    divisor: Divisor = "weights"


def knots(inputs: Inputs, weights: Sequence[float], params: KnotsParameters, known: None) -> Tensor:
    """base + lambda * U times the elected mean of the trimmed S V_i."""
    if params.lambda_ == 0 or params.density == 0:
        return inputs.base.clone()
    if inputs.base.dim() != 2:
        return inputs.base.add(_elected(inputs.deltas, weights, params), alpha=params.lambda_)
    common, parts = _aligned([delta.double() for delta in inputs.deltas], _noise(inputs))
    if common.shape[1] == 0:  # nobody moves
        return inputs.base.clone()
    merged = common @ _elected(parts, weights, params)
    return inputs.base.add(merged.to(inputs.base.dtype), alpha=params.lambda_)


def _elected(parts: Sequence[Tensor], weights: Sequence[float], params: KnotsParameters) -> Tensor:
    """TIES around 0."""
    zero = torch.zeros_like(parts[0])
    inside = TiesParameters(density=params.density, elect=params.elect, divisor=params.divisor)
    kept = [select(parts, max(1, int(params.density * zero.numel())))]
    return ties(Inputs(zero, parts), weights, inside, kept)


def _noise(inputs: Inputs) -> float:
    """About the largest singular value of the rounding errors in all task vectors together."""
    rows, columns = inputs.base.shape
    size = max(float(expert.square().mean().sqrt()) for expert in inputs.experts)
    spread = math.sqrt(rows) + math.sqrt(columns * len(inputs.experts))
    return torch.finfo(inputs.base.dtype).eps * size * spread


def _aligned(deltas: Sequence[Tensor], noise: float) -> tuple[Tensor, list[Tensor]]:
    """U (rows, r) and each S V_i (r, columns), without the directions that nobody moves in."""
    rows, columns = deltas[0].shape
    if rows <= columns * len(deltas):
        gram = torch.zeros(rows, rows, dtype=deltas[0].dtype, device=deltas[0].device)
        for delta in deltas:
            gram.addmm_(delta, delta.T)
        _, common = _directions(gram, noise)
        return common, [common.T @ delta for delta in deltas]
    together = torch.cat(list(deltas), dim=1)
    values, right = _directions(together.T @ together, noise)
    scaled = right.T * values.sqrt().unsqueeze(1)
    return together @ (right / values.sqrt()), list(torch.split(scaled, columns, dim=1))


def _directions(gram: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors, but those that are 0 within rounding: of the Gram matrix itself, or
    of the task vectors in it."""
    values, vectors = torch.linalg.eigh(gram)
    rounding = float(values[-1]) * len(gram) * torch.finfo(gram.dtype).eps
    moved = values > max(MARGIN * rounding, noise**2)
    return values[moved], vectors[:, moved]


KNOTS = Method(
    "TIES in the common singular directions of all task matrices",
    KnotsParameters,
    knots,
    whole=True,
)
