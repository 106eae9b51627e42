"""RegMean: of all matrices the one whose outputs are nearest to those of the experts on their data.

    W = (Σ w_i W_i G_i) (Σ w_i G_i)^-1,   G_i = X_i^T X_i of the inputs x that W_i (out, in) meets
    off the diagonal G_i is multiplied by `reduce` first, which is a prior for the plain mean

Where no expert has an input (the sum is singular) the weighted mean of the experts stays. Tensors
without statistics (norms, embeddings) are that mean, as in the paper. Solved in float64.

Source: "Dataless Knowledge Fusion by Merging Weights of Language Models" (Jin et al. 2022,
arXiv:2212.09849), with its 0.9. The base takes no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.errors import MergeError
from merging.lazy import torch
from merging.methods.contract import Inputs, Method, Parameters

if TYPE_CHECKING:
    from torch import Tensor


class RegMeanParameters(Parameters):
    """`reduce`: the share of the inputs' correlations that is believed, from 0 to 1."""

    reduce: float = Field(default=0.9, ge=0, le=1)


def regmean(
    inputs: Inputs, weights: Sequence[float], params: RegMeanParameters, known: None
) -> Tensor:
    """The solution of the least squares problem of all experts.

    Raises:
        MergeError: a negative weight, or all of them 0.
    """
    if min(weights) < 0 or max(weights) == 0:
        raise MergeError(
            f"regmean: the weights are {list(weights)}; expected numbers from 0, not all of them 0"
        )
    shares = [weight / sum(weights) for weight in weights]
    first = inputs.experts[0]
    mean = first.double()
    for expert, share in zip(inputs.experts[1:], shares[1:], strict=True):
        # Around the first expert, so that equal experts give themselves bit for bit.
        mean = mean.add(expert.double() - first.double(), alpha=share)
    grams = [gram for gram in inputs.statistics if gram is not None]
    if len(grams) < len(inputs.experts) or inputs.base.dim() != 2:
        return mean.to(first.dtype)
    total, missed = torch.zeros_like(grams[0], dtype=torch.float64), torch.zeros_like(mean)
    for expert, gram, share in zip(inputs.experts, grams, shares, strict=True):
        reduced = gram.double() * params.reduce
        reduced.diagonal().copy_(gram.diagonal())
        total.add_(reduced, alpha=share)
        missed.addmm_(expert.double() - mean, reduced, alpha=share)
    return (mean + _divided(missed, total)).to(first.dtype)


def _divided(left: Tensor, gram: Tensor) -> Tensor:
    """`left` @ gram^-1; directions in which the matrix is 0 give 0."""
    factor, failed = torch.linalg.cholesky_ex(gram)
    if not bool(failed):
        return torch.cholesky_solve(left.T, factor).T
    found: Tensor = left @ torch.linalg.pinv(gram, hermitian=True)
    return found


REGMEAN = Method(
    "matrices nearest to the experts' outputs on their own data",
    RegMeanParameters,
    regmean,
    whole=True,
    statistics="matrix",
)
