"""Every method keeps the identities of its kind; TIES equals a slow, obvious reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from merging import (
    METHODS,
    MergeError,
    merge_tensors,
    merged_tensors,
    open_checkpoint,
    parse_parameters,
)

DENSE: dict[str, dict[str, Any]] = {name: {} for name in METHODS} | {
    "ties": {"density": 1.0},
    "dare_linear": {"density": 1.0},
    "dare_ties": {"density": 1.0},
    "della": {"density": 1.0},
    "della_linear": {"density": 1.0},
    "breadcrumbs": {"density": 1.0},
    "breadcrumbs_ties": {"density": 1.0},
    "slerp": {"t": 1.0},
    "knots": {"density": 1.0},
    "consensus": {"agree": 1},
}
"""Parameters under which a method merges whole task vectors."""
EVEN = ("iso_c",)  # changes the task vector of a single expert: that is its point
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")  # the draw is an expert's, by place


def fitting(method: str, experts: list[Tensor]) -> list[Tensor]:
    """As many of the experts as the method takes."""
    return experts[: METHODS[method].most]


def tensors(seed: int, count: int, shape: tuple[int, ...] = (6, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def merge(
    method: str,
    base: Tensor,
    experts: list[Tensor],
    weights: list[float] | None = None,
    **given: Any,
) -> Tensor:
    """`merge_tensors`, with statistics where the method weighs by them."""
    if METHODS[method].statistics is not None:
        given["statistics"] = [statistic(method, expert) for expert in experts]
    return merge_tensors(method, base, experts, weights, **given)


def statistic(method: str, expert: Tensor) -> Tensor | None:
    """Something of the right kind that depends on the expert alone."""
    if METHODS[method].statistics == "entries":
        return expert.float().abs()
    return expert.float().T @ expert.float() if expert.dim() == 2 else None


@pytest.mark.parametrize("method", list(METHODS))
class TestEveryMethod:
    """The contract of a method."""

    def test_shape_precision_and_inputs_stay(self, method: str) -> None:
        base, *experts = tensors(0, 3)
        experts = fitting(method, experts)
        before = [tensor.clone() for tensor in (base, *experts)]
        found = merge(method, base.bfloat16(), [e.bfloat16() for e in experts])
        assert (found.shape, found.dtype) == (base.shape, torch.float32)
        assert merge(method, base.double(), experts).dtype == torch.float64
        first = merge(method, base, experts)
        assert torch.equal(first, merge(method, base, experts))
        assert all(map(torch.equal, before, (base, *experts)))

    def test_one_expert_gives_that_expert(self, method: str) -> None:
        if METHODS[method].least > 1:
            with pytest.raises(MergeError, match="experts beside the base; found 1"):
                merge(method, *_pair())
            return
        base, expert = tensors(1, 2)
        if method in EVEN:
            assert not torch.allclose(merge(method, base, [expert]), expert)
            return
        found = merge(method, base, [expert], **DENSE[method])
        assert torch.allclose(found, expert, atol=1e-6)

    def test_experts_equal_to_the_base_give_the_base(self, method: str) -> None:
        (base,) = tensors(2, 1)
        experts = fitting(method, [base, base, base])
        assert torch.equal(merge(method, base, experts), base)

    def test_the_order_of_experts_does_not_matter(self, method: str) -> None:
        base, *experts = tensors(3, 4)
        experts = fitting(method, experts)
        weights = [0.2, 0.5, 1.0][: len(experts)] if METHODS[method].weighted else None
        turned_weights = None if weights is None else weights[::-1]
        given = DENSE[method] if method in RANDOM else {}
        found = merge(method, base, experts, weights, **given)
        turned = merge(method, base, experts[::-1], turned_weights, **given)
        assert torch.allclose(found, turned, atol=2e-6)

    def test_a_tensor_of_one_number_is_merged(self, method: str) -> None:
        base, *experts = tensors(4, 3, shape=())
        experts = fitting(method, experts)
        assert merge(method, base, experts).shape == ()

    def test_unknown_parameters_name_the_nearest(self, method: str) -> None:
        with pytest.raises(MergeError, match="unknown key"):
            merge(method, *_pair(), lamda=1.0)

    def test_shapes_weights_and_nan_are_told(self, method: str) -> None:
        base, experts = _pair()
        least = METHODS[method].least
        with pytest.raises(MergeError, match=r"shape \(5,\) where the base has \(4,\)"):
            merge(method, base, [torch.zeros(5)] * least)
        with pytest.raises(MergeError, match="2 weights for 1 experts"):
            merge(method, base, experts, weights=[1, 1])
        with pytest.raises(MergeError, match="finite"):
            merge(method, base, experts, weights=[math.inf])
        with pytest.raises(MergeError, match="no experts"):
            merge(method, base, [])
        with pytest.raises(MergeError, match="expert 0 holds NaN"):
            merge(method, base, [torch.full((4,), math.nan)] * least)


def _pair() -> tuple[Tensor, list[Tensor]]:
    return torch.zeros(4), [torch.ones(4)]


def test_an_unknown_method_names_the_nearest() -> None:
    with pytest.raises(MergeError, match="did you mean 'ties'"):
        parse_parameters("tie", {})


def test_linear_is_the_weighted_mean() -> None:
    base, first, second = torch.zeros(2), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    found = merge_tensors("linear", base, [first, second], weights=[1, 3])
    assert found.tolist() == [2.5, 5.0]  # (1 + 9) / 4, (2 + 18) / 4
    plain = merge_tensors("linear", base, [first, second], weights=[1, 3], normalize=False)
    assert plain.tolist() == [10.0, 20.0]
    with pytest.raises(MergeError, match="sum to 0"):
        merge_tensors("linear", base, [first, second], weights=[1, -1])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(-3, 3))
def test_task_arithmetic_is_linear_in_lambda(seed: int, scale: float) -> None:
    base, *experts = (tensor.double() for tensor in tensors(seed, 3))
    whole = merge_tensors("task_arithmetic", base, experts, lambda_=1.0) - base
    found = merge_tensors("task_arithmetic", base, experts, lambda_=scale) - base
    assert torch.allclose(found, scale * whole, atol=1e-12)


SCALED = [name for name, method in METHODS.items() if "lambda" in method.params.spelled()]


@pytest.mark.parametrize("method", SCALED)
def test_lambda_zero_gives_the_base_bit_for_bit(method: str, tmp_path: Path) -> None:
    """Through the engine, which also keeps the sign of a base's -0."""
    base, *experts = tensors(5, 3)
    base[0] = -0.0
    sources = []
    for number, tensor in enumerate((base, *experts)):
        save_file({"w": tensor}, tmp_path / f"{number}.safetensors")
        sources.append(open_checkpoint(tmp_path / f"{number}.safetensors"))
    params = parse_parameters(method, {"lambda": 0.0})
    (found,) = dict(merged_tensors(sources[0], sources[1:], method, parameters=params)).values()
    assert torch.equal(found.view(torch.int32), base.view(torch.int32))


def test_ties_by_hand() -> None:
    """Density 0.5 of 4 keeps 2. Expert 1: [3, -1, 2, 0] -> [3, 0, 2, 0]; expert 2:
    [-4, 2, 1, 0] -> [-4, 2, 0, 0]. Signs of the sums [-1, 2, 2, 0]: -, +, +, +. Means of what
    agrees: -4, 2, 2, nothing. Base 10."""
    base = torch.full((4,), 10.0)
    deltas = [torch.tensor([3.0, -1.0, 2.0, 0.0]), torch.tensor([-4.0, 2.0, 1.0, 0.0])]
    found = merge_tensors("ties", base, [base + delta for delta in deltas], density=0.5)
    assert found.tolist() == [6.0, 12.0, 12.0, 10.0]


def test_ties_keeps_the_lowest_indices_among_equal_magnitudes() -> None:
    base = torch.zeros(6)
    expert = torch.tensor([1.0, -1.0, 1.0, 2.0, -1.0, 1.0])
    found = merge_tensors("ties", base, [expert], density=0.5)  # 3 of 6: the 2, then two ones
    assert found.tolist() == [1.0, -1.0, 0.0, 2.0, 0.0, 0.0]


def test_ties_election_before_or_after_weighting() -> None:
    """Deltas 1 and -2 with weights 3 and 1: weighted 3 - 2 > 0 elects +, unweighted 1 - 2 elects -.
    mergekit: 3*1 / 3 = 1. peft: 1*(-2) / 1 = -2."""
    base, experts = torch.zeros(1), [torch.ones(1), torch.full((1,), -2.0)]
    options: dict[str, Any] = {"weights": [3.0, 1.0], "density": 1.0}
    assert merge_tensors("ties", base, experts, preset="mergekit", **options).item() == 1.0
    assert merge_tensors("ties", base, experts, preset="peft", **options).item() == -2.0


def test_ties_of_agreeing_signs_at_density_one_is_the_mean() -> None:
    base, *experts = tensors(6, 4)
    experts = [base + expert.abs() for expert in experts]
    found = merge_tensors("ties", base, experts, density=1.0)
    assert torch.allclose(found, torch.stack(experts).mean(0), atol=1e-6)


def test_ties_with_density_zero_is_the_base() -> None:
    base, *experts = tensors(7, 3)
    assert torch.equal(merge_tensors("ties", base, experts, density=0.0), base)


def slow_ties(
    base: Tensor, experts: list[Tensor], weights: list[float], density: float, preset: str
) -> Tensor:
    """Entry by entry with full sorts, from the definitions; scope `model` over one tensor."""
    count = max(1, int(density * base.numel()))
    kept: list[list[float]] = []
    for expert in experts:
        delta = (expert - base).flatten().tolist()
        order = sorted(range(len(delta)), key=lambda i, d=delta: (-abs(d[i]), i))[:count]
        limit = abs(delta[order[-1]])
        if preset == "paper":
            kept.append([d if abs(d) >= limit else 0.0 for d in delta])
        else:
            kept.append([d if i in set(order) else 0.0 for i, d in enumerate(delta)])
    merged = []
    for entries in zip(*kept, strict=True):
        votes = weights if preset == "mergekit" else [1.0] * len(weights)
        positive = sum(v * e for v, e in zip(votes, entries, strict=True)) >= 0
        total = divisor = 0.0
        for entry, weight, vote in zip(entries, weights, votes, strict=True):
            if entry * vote != 0 and (entry * vote > 0) == positive:
                total += weight * entry
                divisor += weight if preset == "mergekit" else 1.0
        merged.append(total / divisor if divisor else total)
    return base + torch.tensor(merged, dtype=base.dtype).view_as(base)


@pytest.mark.parametrize("preset", ["mergekit", "peft", "paper"])
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    density=st.floats(0.01, 1),
    weights=st.lists(st.floats(0.1, 2), min_size=1, max_size=4),
    coarse=st.booleans(),
)
def test_ties_equals_a_slow_reference(
    preset: str, seed: int, density: float, weights: list[float], coarse: bool
) -> None:
    base, *experts = (t.double() for t in tensors(seed, 1 + len(weights), shape=(7, 5)))
    if coarse:  # many equal magnitudes
        base, experts = base.round(), [expert.round() for expert in experts]
    else:  # magnitudes are compared in float32
        base, experts = torch.zeros_like(base), [e.float().double() for e in experts]
    found = merge_tensors("ties", base, experts, weights=weights, density=density, preset=preset)
    assert torch.allclose(found, slow_ties(base, experts, weights, density, preset), atol=1e-9)
