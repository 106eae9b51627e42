"""What each of the further methods is for, by hand or by a slow, obvious reference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from merging import engine, merge_tensors, merged_tensors, open_checkpoint, parse_parameters
from merging.methods.contract import Inputs
from merging.methods.dare import drawn, kept


def tensors(seed: int, count: int, shape: tuple[int, ...] = (12, 10)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def test_slerp_keeps_the_length_between_unit_vectors() -> None:
    """Between two unit vectors at a right angle, a third of the way is 30 degrees."""
    base, expert = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    found = merge_tensors("slerp", base, [expert], t=1 / 3)
    assert found.tolist() == pytest.approx([math.cos(math.pi / 6), math.sin(math.pi / 6)])


def test_nuslerp_halfway_between_task_vectors_at_a_right_angle() -> None:
    base = torch.tensor([5.0, 5.0])
    first, second = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])
    found = merge_tensors("nuslerp", base, [base + first, base + second])
    assert found.tolist() == pytest.approx([5 + math.sqrt(2), 5 + math.sqrt(2)])


@pytest.mark.parametrize(
    ("cosine", "t"),
    [(1.0, 1.0), (0.5, 2 / 3), (0.0, 0.0)],  # t = 2c / (1 + c): equation 5 of the paper, k = 2
)
def test_model_stock_trusts_what_agrees(cosine: float, t: float) -> None:
    base = torch.tensor([1.0, 1.0])
    first = torch.tensor([1.0, 0.0])
    second = torch.tensor([cosine, math.sqrt(1 - cosine**2)])
    found = merge_tensors("model_stock", base, [base + first, base + second])
    assert torch.allclose(found, base + t * (first + second) / 2, atol=1e-6)


def test_karcher_of_two_unit_vectors_is_their_middle() -> None:
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    found = merge_tensors("karcher", torch.zeros(2), [first, second])
    assert found.tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(0.5)])


def test_karcher_makes_the_mean_tangent_vanish() -> None:
    """The defining property, on vectors of their full size: Σ w_i log_m(x_i) = 0."""
    base, *experts = (tensor.double() for tensor in tensors(0, 4))
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    found = merge_tensors("karcher", base, experts, weights.tolist(), max_iter=100, tol=1e-12)
    mean = found.flatten() / found.norm()
    tangent = torch.zeros_like(mean)
    for weight, expert in zip(weights, experts, strict=True):
        unit = expert.flatten() / expert.norm()
        theta = torch.arccos(mean @ unit)
        tangent += weight * theta / torch.sin(theta) * (unit - (mean @ unit) * mean)
    assert float(tangent.norm()) < 1e-9
    lengths = torch.stack([expert.norm() for expert in experts])
    assert float(found.norm()) == pytest.approx(float(weights @ lengths))


def test_dare_keeps_the_expectation() -> None:
    """100,000 entries of a task vector of ones: the mean stays 1, within four deviations."""
    base, expert = torch.zeros(100_000), torch.ones(100_000)
    found = merge_tensors("dare_linear", base, [expert], density=0.25)
    assert set(found.unique().tolist()) == {0.0, 4.0}
    assert float(found.mean()) == pytest.approx(1.0, abs=4 * math.sqrt(3 / 100_000))


def test_dare_restores_the_l1_norm_where_asked() -> None:
    base, expert = tensors(1, 2, (300, 70))
    found = merge_tensors("dare_linear", base, [expert], density=0.3, rescale="l1")
    before, after = (expert - base).abs().sum(), (found - base).abs().sum()
    assert float(after) == pytest.approx(float(before), rel=1e-4)


def test_draws_differ_between_experts_tensors_and_seeds_and_nothing_else() -> None:
    base = torch.zeros(50_000)
    inputs = Inputs(base, [base, base], "layer.weight")
    same = kept(inputs, 0, 0.5, seed=1)
    assert torch.equal(same, kept(inputs, 0, 0.5, seed=1))
    # A stretch draws what the whole tensor draws at its place.
    stretch = Inputs(base[:1000], [base[:1000]] * 2, "layer.weight", 30_000)
    assert torch.equal(kept(stretch, 0, 0.5, seed=1), same[30_000:31_000])
    for other in (
        kept(inputs, 1, 0.5, seed=1),
        kept(inputs, 0, 0.5, seed=2),
        kept(Inputs(base, [base] * 2, "other.weight"), 0, 0.5, seed=1),
        torch.cat([same[1:], same[:1]]),
    ):
        agreement = float((same == other).float().mean())  # of independent coins: a half
        assert agreement == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(50_000))


def test_the_drawn_numbers_are_uniform() -> None:
    base = torch.zeros(100_000, dtype=torch.float64)
    numbers = drawn(Inputs(base, [base], "w"), 0, 0)
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    chi = float(((counts - 5000) ** 2 / 5000).sum())
    assert chi < 43.8  # the 99.9th percentile of chi-square with 19 degrees of freedom


def test_della_keeps_large_entries_more_often() -> None:
    """A row of 1..10000: the smallest half stays with p = 0.425 on average, the largest 0.575."""
    base, expert = torch.zeros(4, 10_000), torch.arange(1.0, 10_001).repeat(4, 1)
    found = merge_tensors("della_linear", base, [expert], density=0.5, rescale="none") != 0
    for half, expected in ((found[:, :5000], 0.425), (found[:, 5000:], 0.575)):
        assert float(half.float().mean()) == pytest.approx(
            expected, abs=4 * 0.5 / math.sqrt(20_000)
        )


def test_della_with_the_papers_rescaling_keeps_the_expectation() -> None:
    base, expert = torch.zeros(1, 100_000), torch.ones(1, 100_000)
    found = merge_tensors("della_linear", base, [expert], density=0.5, rescale="inverse")
    assert float(found.mean()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("method", ["della", "della_linear", "breadcrumbs", "breadcrumbs_ties"])
def test_ranking_is_the_same_in_stretches_of_any_size(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = [(50, 30), (70,), (6, 5, 4)]
    inputs = {f"{i}": tensors(i, 3, shape) for i, shape in enumerate(shapes)}
    sources = []
    for model in range(3):
        file = tmp_path / f"{model}.safetensors"
        save_file({name: found[model] for name, found in inputs.items()}, file)
        sources.append(open_checkpoint(file))
    whole = dict(merged_tensors(sources[0], sources[1:], method))
    monkeypatch.setattr("merging.engine.STRETCH", 100)
    pieces = dict(merged_tensors(sources[0], sources[1:], method))
    for name, expected in whole.items():
        assert expected.shape == inputs[name][0].shape
        assert torch.allclose(pieces[name], expected, rtol=1e-6, atol=0)


def test_breadcrumbs_drops_both_ends() -> None:
    """Of ten entries the largest (gamma 0.1) and all but six of the rest go."""
    expert = torch.tensor([1.0, -2, 3, -4, 5, -6, 7, -8, 9, -10])
    found = merge_tensors("breadcrumbs", torch.zeros(10), [expert], density=0.6, gamma=0.1)
    assert found.tolist() == [0, 0, 0, -4, 5, -6, 7, -8, 9, 0]


def test_consensus_by_hand() -> None:
    """Entry by entry: both care (kept), one cares (dropped), signs fight (|tau_i| >= 0.4 |tau_j|:
    both still care, so the sum stays), nobody moves (the base)."""
    base = torch.zeros(4)
    one, two = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 0.1, -1.0, 0.0])
    assert merge_tensors("consensus", base, [one, two]).tolist() == [2.0, 0.0, 0.0, 0.0]
    either = merge_tensors("consensus", base, [one, two], agree=1)
    assert either.tolist() == pytest.approx([2.0, 1.1, 0.0, 0.0])


def test_tsv_m_adds_tasks_that_do_not_interfere() -> None:
    """Two task matrices of low rank with orthogonal singular vectors merge to their sum: their
    directions without weight do not disturb."""
    u, _, v = torch.linalg.svd(tensors(2, 1, (20, 12))[0].double(), full_matrices=False)
    first = 3.0 * torch.outer(u[:, 0], v[0]) + 2.0 * torch.outer(u[:, 1], v[1])
    second = 1.5 * torch.outer(u[:, 2], v[2])
    base = torch.zeros(20, 12, dtype=torch.float64)
    found = merge_tensors("tsv_m", base, [first, second])
    assert torch.allclose(found, first + second, atol=1e-6)


def test_iso_c_evens_the_spectrum() -> None:
    base, *experts = (tensor.double() for tensor in tensors(3, 3))
    found = merge_tensors("iso_c", base, experts) - base
    summed = experts[0] + experts[1] - 2 * base
    values = torch.linalg.svdvals(found)
    assert torch.allclose(values, torch.linalg.svdvals(summed).mean().expand_as(values))


@pytest.mark.parametrize(
    "method",
    ["dare_linear", "dare_ties", "slerp", "nuslerp", "model_stock", "karcher", "consensus"],
)
def test_stretches_make_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A tensor merged in stretches equals the tensor merged at once."""
    monkeypatch.setattr(engine, "STRETCH", 1000)
    count = {"slerp": 2}.get(method, 3)
    sources = []
    for seed in range(count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (state,) = tensors(seed, 1, (70, 90))
        save_file({"w": state}, folder / "model.safetensors")
        sources.append(open_checkpoint(folder))
    given = {"rescale": "l1"} if method.startswith("dare") else {}
    params = parse_parameters(method, given)
    (found,) = dict(merged_tensors(sources[0], sources[1:], method, parameters=params)).values()
    monkeypatch.setattr(engine, "STRETCH", 1 << 20)
    (whole,) = dict(merged_tensors(sources[0], sources[1:], method, parameters=params)).values()
    assert torch.allclose(found, whole, atol=1e-6)
    if not method.startswith("dare"):  # whose draw knows the tensor's name
        base, *experts = (source.read("w") for source in sources)
        alone = merge_tensors(method, base, experts)
        assert torch.allclose(found, alone, atol=1e-6)
