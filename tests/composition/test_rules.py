"""Rules and options on logits: identities that must hold, and hand-made examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composition import RULES, CompositionError, compose_logits, log_partition, parse_combination


def random_logits(seed: int, count: int, vocabulary: int = 11, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(rows, vocabulary, generator=generator) for _ in range(count)]


def definition(base: Tensor, experts: list[Tensor], weights: list[float]) -> Tensor:
    """log of p_b * prod (p_i / p_b)^w_i, normalised, from the definition in float64."""
    log_base = base.double().log_softmax(-1)
    total = log_base.clone()
    for expert, weight in zip(experts, weights, strict=True):
        total += weight * (expert.double().log_softmax(-1) - log_base)
    return total - total.logsumexp(-1, keepdim=True)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    weights=st.lists(st.floats(-2, 2, allow_nan=False), min_size=0, max_size=4),
)
def test_product_equals_its_definition(seed: int, weights: list[float]) -> None:
    base, *experts = random_logits(seed, 1 + len(weights))
    found = compose_logits(base, experts, weights=weights).log_softmax(-1)
    assert torch.allclose(found.double(), definition(base, experts, weights), atol=2e-5)


def test_geometric_mean_is_the_mean_of_logprobs() -> None:
    base, first, second = random_logits(0, 3)
    found = compose_logits(base, [first, second], rule="geometric_mean").log_softmax(-1)
    mean = (first.log_softmax(-1) + second.log_softmax(-1)) / 2
    assert torch.allclose(found, mean.log_softmax(-1), atol=1e-5)


def test_mixture_averages_probabilities() -> None:
    base, first, second = random_logits(0, 3)
    found = compose_logits(base, [first, second], weights=[3, 1], rule="mixture").softmax(-1)
    assert torch.allclose(found, 0.75 * first.softmax(-1) + 0.25 * second.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("rule", list(RULES))
class TestEveryRule:
    """The contract of a rule."""

    def test_shape_dtype_and_inputs_stay(self, rule: str) -> None:
        base, *experts = random_logits(1, 3)
        before = [tensor.clone() for tensor in (base, *experts)]
        found = compose_logits(base.bfloat16(), [e.bfloat16() for e in experts], rule=rule)
        assert (found.shape, found.dtype) == (base.shape, torch.float32)
        assert compose_logits(base.double(), experts, rule=rule).dtype == torch.float64
        compose_logits(base, experts, rule=rule)
        assert all(map(torch.equal, before, (base, *experts)))

    def test_zero_experts_give_the_base(self, rule: str) -> None:
        (base,) = random_logits(2, 1)
        assert torch.allclose(compose_logits(base, [], rule=rule).softmax(-1), base.softmax(-1))

    def test_one_expert_gives_that_expert(self, rule: str) -> None:
        base, expert = random_logits(3, 2)
        found = compose_logits(base, [expert], rule=rule).softmax(-1)
        assert torch.allclose(found, expert.softmax(-1), atol=1e-5)

    def test_the_base_as_its_own_expert_gives_the_base(self, rule: str) -> None:
        (base,) = random_logits(4, 1)
        found = compose_logits(base, [base, base], rule=rule).softmax(-1)
        assert torch.allclose(found, base.softmax(-1), atol=1e-5)

    def test_an_expert_with_weight_zero_is_absent(self, rule: str) -> None:
        base, first, second = random_logits(5, 3)
        found = compose_logits(base, [first, second], weights=[1, 0], rule=rule).softmax(-1)
        alone = compose_logits(base, [first], weights=[1], rule=rule).softmax(-1)
        assert torch.allclose(found, alone, atol=1e-6)

    def test_the_order_of_experts_does_not_matter(self, rule: str) -> None:
        base, *experts = random_logits(6, 4)
        if rule == "contrast":  # experts and anti-experts alternate: only the pairs have no order
            experts = [*experts[:2], experts[2], base]
            weights = [0.2, 0.5, 1.0, 0.3]
            found = compose_logits(base, experts, weights=weights, rule=rule)
            swapped = [experts[place] for place in (2, 3, 0, 1)]
            turned = compose_logits(base, swapped, weights=[1.0, 0.3, 0.2, 0.5], rule=rule)
            assert torch.allclose(found.softmax(-1), turned.softmax(-1), atol=1e-5)
            return
        found = compose_logits(base, experts, weights=[0.2, 0.5, 1.0], rule=rule)
        turned = compose_logits(base, experts[::-1], weights=[1.0, 0.5, 0.2], rule=rule)
        assert torch.allclose(found.softmax(-1), turned.softmax(-1), atol=1e-5)

    def test_an_excluded_token_stays_excluded_without_nan(self, rule: str) -> None:
        base, first, second = random_logits(7, 3)
        for logits in (base, first, second):
            logits[:, 4] = -torch.inf
        found = compose_logits(base, [first, second], rule=rule, gate=0.01)
        assert not bool(found.isnan().any())
        assert bool((found.softmax(-1)[:, 4] == 0).all())


def test_contrast_is_proxy_tuning_and_dexperts() -> None:
    """Proxy-tuning adds the difference of the small models' logits to the large one's; DExperts is
    softmax(z + alpha (z_+ - z_-))."""
    large, tuned, untuned = random_logits(20, 3)
    found = compose_logits(large, [tuned, untuned], rule="contrast").softmax(-1)
    assert torch.allclose(found, (large + (tuned - untuned)).softmax(-1), atol=1e-6)
    found = compose_logits(large, [tuned, untuned], [0.6, 0.6], rule="contrast").softmax(-1)
    assert torch.allclose(found, (large + 0.6 * (tuned - untuned)).softmax(-1), atol=1e-6)


def test_max_and_min_are_union_and_intersection() -> None:
    """language-model-arithmetic's union and intersection: softmax of the larger (smaller) of the
    two log-probabilities."""
    base, first, second = random_logits(21, 3)
    p, q = first.softmax(-1), second.softmax(-1)
    for rule, extreme in (("max", torch.maximum(p, q)), ("min", torch.minimum(p, q))):
        found = compose_logits(base, [first, second], rule=rule).softmax(-1)
        assert torch.allclose(found, extreme / extreme.sum(-1, keepdim=True), atol=1e-6)
    weighted = torch.maximum(0.2 * p, q)
    found = compose_logits(base, [first, second], [0.2, 1.0], rule="max").softmax(-1)
    assert torch.allclose(found, weighted / weighted.sum(-1, keepdim=True), atol=1e-6)


def test_temperatures_divide_each_components_logits() -> None:
    base, first, second = random_logits(22, 3)
    found = compose_logits(base, [first, second], temperatures=[2.0, 0.5, 1.5])
    expected = compose_logits(base / 2, [first / 0.5, second / 1.5])
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_soft_gate_is_between_none_and_hard() -> None:
    base, expert = random_logits(23, 2)
    divergence = (expert.softmax(-1) * (expert.log_softmax(-1) - base.log_softmax(-1))).sum(-1)
    found = compose_logits(base, [expert], gate=0.5, gating="soft")
    share = (divergence / (divergence + 0.5))[:, None]
    assert torch.allclose(found, base + share * (expert - base), atol=1e-5)
    assert torch.equal(compose_logits(base, [base], gate=0.0, gating="soft"), base)


def test_only_what_a_component_finds_plausible_may_come() -> None:
    """Token 2 is plausible to the second expert alone (0.5), token 3 to nobody (0.01 of 0.7)."""
    base = torch.tensor([0.70, 0.20, 0.09, 0.01]).log()
    first = torch.tensor([0.60, 0.30, 0.09, 0.01]).log()
    second = torch.tensor([0.40, 0.08, 0.50, 0.02]).log()
    found = compose_logits(base, [first, second], plausible=0.2)
    assert torch.isinf(found).tolist() == [False, False, False, True]
    plain = compose_logits(base, [first, second])
    assert torch.allclose(found[:3], plain[:3])


def odds(logits: Tensor, ids: list[int]) -> Tensor:
    p = logits.double().softmax(-1)[..., ids].sum(-1)
    return torch.log(p / (1 - p))


EOS = [4, 9]


@pytest.mark.parametrize("rule", ["product", "mixture"])
class TestStopping:
    """The odds of stopping, at logits of no special form; the rest stays as it is composed."""

    def composed(self, rule: str, eos: str) -> tuple[Tensor, Tensor, list[Tensor]]:
        base, *experts = random_logits(24, 3)
        found = compose_logits(base, experts, [0.7, 0.4], rule=rule, eos=eos, eos_ids=EOS)
        return found, base, experts

    def test_hazard_adds_the_evidence(self, rule: str) -> None:
        found, base, (first, second) = self.composed(rule, "hazard")
        b = odds(base, EOS)
        expected = b + 0.7 * (odds(first, EOS) - b) + 0.4 * (odds(second, EOS) - b)
        assert torch.allclose(odds(found, EOS), expected, atol=1e-4)

    def test_max_and_base(self, rule: str) -> None:
        found, _, (first, second) = self.composed(rule, "max")
        expected = torch.maximum(odds(first, EOS), odds(second, EOS))
        assert torch.allclose(odds(found, EOS), expected, atol=1e-4)
        found, base, _ = self.composed(rule, "base")
        assert torch.allclose(odds(found, EOS), odds(base, EOS), atol=1e-4)

    @pytest.mark.parametrize("eos", ["hazard", "mean", "max", "base"])
    def test_other_tokens_keep_their_proportions(self, rule: str, eos: str) -> None:
        found, _, _ = self.composed(rule, eos)
        plain, _, _ = self.composed(rule, "sum")
        others = [place for place in range(11) if place not in EOS]
        found, plain = (z[:, others].log_softmax(-1) for z in (found, plain))
        assert torch.allclose(found, plain, atol=1e-5)

    def test_canonical_composes_the_mass_of_all_ids(self, rule: str) -> None:
        """As if every component had one EOS token, of the probability of both."""
        found, base, experts = self.composed(rule, "canonical")
        others = [place for place in range(11) if place not in EOS]

        def joined(z: Tensor) -> Tensor:
            return torch.cat([z[:, others], z[:, EOS].logsumexp(-1, keepdim=True)], dim=-1)

        expected = compose_logits(
            joined(base), [joined(e) for e in experts], [0.7, 0.4], rule=rule
        ).softmax(-1)
        assert torch.allclose(found.softmax(-1)[:, others], expected[:, :-1], atol=1e-6)
        assert torch.allclose(found.softmax(-1)[:, EOS[0]], expected[:, -1], atol=1e-6)
        assert bool((found.softmax(-1)[:, EOS[1]] == 0).all())


def test_two_experts_partition_is_one_plus_the_covariance_of_their_ratios() -> None:
    """Z = E_b[r1 r2] = 1 + Cov_b(r1, r2), since E_b[r_i] = 1."""
    base, first, second = (logits.double() for logits in random_logits(8, 3))
    p = base.softmax(-1)
    r1, r2 = first.softmax(-1) / p, second.softmax(-1) / p
    covariance = (p * (r1 - 1) * (r2 - 1)).sum(-1)
    assert torch.allclose(log_partition(base, [first, second], [1, 1]).exp(), 1 + covariance)


def test_the_gate_leaves_out_an_expert_near_the_base_at_single_prefixes() -> None:
    base, expert = random_logits(9, 2)
    near = base.clone()
    near[0] = expert[0]  # differs at the first prefix only
    found = compose_logits(base, [near], gate=0.05)
    assert torch.allclose(found[0], expert[0], atol=1e-5)
    assert torch.equal(found[1:], base[1:])
    slightly = base.clone()
    slightly[:, 0] += 0.01  # KL about p(1-p)/2 * 1e-4: below any sensible gate
    assert torch.equal(compose_logits(base, [slightly], gate=0.05), base)


def test_mean_eos_moves_the_log_odds_of_stopping_by_the_mean_shift() -> None:
    """Base log-odds -2, experts 1 and 3: the mean shift is +4, so +2; the sum would give +6."""

    def with_odds(odds: float) -> Tensor:
        # Ten equal other tokens: the log-odds of token 0 are z_0 - log 10.
        return torch.tensor([odds + math.log(10)] + [0.0] * 10)

    base, experts = with_odds(-2.0), [with_odds(1.0), with_odds(3.0)]
    found = compose_logits(base, experts, eos="mean", eos_ids=[0]).double().softmax(-1)
    assert float(torch.log(found[0] / (1 - found[0]))) == pytest.approx(2.0, abs=1e-5)
    plain = compose_logits(base, experts).double().softmax(-1)
    assert float(torch.log(plain[0] / (1 - plain[0]))) == pytest.approx(6.0, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weights": [1.0]}, "1 weights for 2 experts"),
        ({"weights": [1.0, math.nan]}, "finite"),
        ({"rule": "produkt"}, "did you mean 'product'"),
        ({"rule": "mixture", "weights": [1.0, -1.0]}, "none below 0"),
        ({"eos": "mean"}, "needs the ids"),
        ({"eos": "canonical"}, "needs the ids"),
        ({"rule": "max", "weights": [0.0, 0.0]}, "none below 0"),
        ({"gating": "soft"}, "there is no gate"),
        ({"temperatures": [1.0, 0.0, 1.0]}, "expected 3 numbers above 0"),
        ({"temperatures": [1.0, 1.0]}, "expected 3 numbers above 0"),
        ({"plausible": 0.0}, "plausible: found 0.0"),
    ],
)
def test_bad_options_are_told(changes: dict[str, Any], expected: str) -> None:
    base, *experts = random_logits(10, 3)
    with pytest.raises(CompositionError, match=expected):
        compose_logits(base, experts, **changes)


def test_nan_and_shapes_are_told_with_the_component() -> None:
    base, first, second = random_logits(11, 3)
    second[0, 0] = math.nan
    with pytest.raises(CompositionError, match="the logits of code hold NaN"):
        compose_logits(base, [first, second], names=["math", "code"])
    with pytest.raises(CompositionError, match=r"expert 0 have shape \(3, 10\)"):
        compose_logits(base, [first[:, :10]])


def test_several_faults_of_a_combination_are_told_together() -> None:
    with pytest.raises(CompositionError) as raised:
        parse_combination({"rule": "product", "gates": 0.1, "gate": -1}, 2)
    assert "gates: unknown key; did you mean 'gate'?" in str(raised.value)
    assert "gate: found -1" in str(raised.value)
