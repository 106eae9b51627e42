"""Merging in the singular vectors of the task matrices: TSV-M and isotropic merging (Iso-C).

    TSV-M   of each of k task matrices keep the first rank/k singular triples; put the left vectors
            side by side and likewise the right ones, replace both by the nearest orthogonal
            matrices, and multiply out with the singular values: tasks no longer interfere
    Iso-C   sum the task matrices and give all singular values of the sum their mean: no direction
            dominates

A task matrix of lower rank (every LoRA expert's) has singular vectors without weight, which are
arbitrary; they take no part, where the authors' code lets them disturb the others. Tensors that are
no matrices get the mean of the task vectors (TSV-M) or the same (Iso-C), as the
authors do.

Sources: "Task Singular Vectors" (Gargiulo et al. 2024, arXiv:2412.00081); "No Task Left Behind"
(Marczak et al. 2025, arXiv:2502.04959). Embeddings and heads are matrices to this module; exclude
them where they should not be.
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


class SpectralParameters(Parameters):
    """`lambda`: the scale of the merged task matrix."""

    lambda_: float = Field(default=1.0, alias="lambda", allow_inf_nan=False)


def tsv_m(
    inputs: Inputs, weights: Sequence[float], params: SpectralParameters, known: None
) -> Tensor:
    """The base plus the decorrelated task matrices."""
    scaled = [delta * weight for delta, weight in zip(inputs.deltas, weights, strict=True)]
    if inputs.base.dim() != 2:
        merged = weighted_sum(scaled, [1 / len(scaled)] * len(scaled))
        return inputs.base.add(merged, alpha=params.lambda_)
    rank = max(min(inputs.base.shape) // len(scaled), 1)
    triples = [_triples(delta, rank) for delta in scaled]
    left = torch.cat([u for u, _, _ in triples], dim=1)
    values = torch.cat([s for _, s, _ in triples])
    right = torch.cat([v for _, _, v in triples])
    if len(values) == 0:
        return inputs.base.clone()
    merged = (_orthogonal(left) * values) @ _orthogonal(right)
    return inputs.base.add(merged, alpha=params.lambda_)


def _triples(delta: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first singular triples, but those that are 0 within rounding."""
    u, s, v = torch.linalg.svd(delta, full_matrices=False)
    floor = s[0] * max(delta.shape) * torch.finfo(delta.dtype).eps
    count = min(rank, int((s > floor).sum()))
    return u[:, :count], s[:count], v[:count]


def iso_c(
    inputs: Inputs, weights: Sequence[float], params: SpectralParameters, known: None
) -> Tensor:
    """The base plus the summed task matrix with an even spectrum."""
    summed = weighted_sum(inputs.deltas, weights)
    if inputs.base.dim() != 2:
        return inputs.base.add(summed, alpha=params.lambda_ / len(inputs.deltas))
    u, s, v = torch.linalg.svd(summed, full_matrices=False)
    return inputs.base.add((u @ v) * s.mean(), alpha=params.lambda_)


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns."""
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found: Tensor = u @ v
    return found


TSV_M = Method(
    "task matrices with their singular vectors decorrelated", SpectralParameters, tsv_m, whole=True
)
ISO_C = Method(
    "the summed task matrix with an even spectrum", SpectralParameters, iso_c, whole=True
)
