"""Divergences against their definitions and SciPy, and at differences where those give up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from composition import divergences


def pair(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p = 2 * torch.randn(5, 40, generator=generator, dtype=torch.float64)
    return p, p + scale * torch.randn(5, 40, generator=generator, dtype=torch.float64)


def test_measures_equal_scipy_and_their_definitions() -> None:
    a, b = pair(1.0)
    found = divergences(a, b)
    p, q = a.softmax(-1).numpy(), b.softmax(-1).numpy()
    assert np.allclose(found.kl, entropy(p, q, axis=-1))
    assert np.allclose(found.js, jensenshannon(p, q, axis=-1) ** 2)
    assert np.allclose(found.tv, 0.5 * np.abs(p - q).sum(-1))
    gap = (a - b).numpy()
    assert np.allclose(found.gap_squared, gap.var(-1))  # centred: the variance over the vocabulary
    assert found.top1_agreement.tolist() == (p.argmax(-1) == q.argmax(-1)).astype(float).tolist()


def test_a_constant_shift_is_no_difference() -> None:
    a, _ = pair(0.0)
    found = divergences(a, a + 7.0)
    assert float(found.kl.abs().max()) < 1e-28
    assert float(found.gap_squared.max()) < 1e-28
    assert float(found.tv.max()) < 1e-14


@pytest.mark.parametrize("scale", [1e-3, 1e-5, 1e-7])
def test_tiny_divergences_keep_their_scale(scale: float) -> None:
    """To leading order KL = Var_p(d)/2, JS = Var_p(d)/8 and TV = E_p|d - E d|/2, d the gap."""
    a, b = pair(1.0)
    gap = b - a
    found = divergences(a, a + scale * gap)
    p = a.softmax(-1)
    centred = gap - (p * gap).sum(-1, keepdim=True)
    variance = (p * centred.square()).sum(-1)
    assert torch.allclose(found.kl / scale**2, variance / 2, rtol=20 * scale + 1e-6)
    assert torch.allclose(found.js / scale**2, variance / 8, rtol=20 * scale + 1e-6)
    mean = (p * centred.abs()).sum(-1) / 2
    assert torch.allclose(found.tv / scale, mean, rtol=20 * scale + 1e-6)


def test_disjoint_distributions_reach_the_bounds() -> None:
    a = torch.tensor([60.0, 0.0, 0.0], dtype=torch.float64)
    b = torch.tensor([0.0, 60.0, 0.0], dtype=torch.float64)
    found = divergences(a, b)
    assert float(found.tv) == pytest.approx(1.0)
    assert float(found.js) == pytest.approx(math.log(2))
    assert float(found.kl) == pytest.approx(60.0)
