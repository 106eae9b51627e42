"""Speculation changes no token of greedy decoding and no probability of sampling."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from tiny_models import gemma2, gpt2, llama, qwen2
from torch import Tensor

from composition import (
    ComposedForCausalLM,
    CompositionError,
    Sampling,
    compose_logits,
    speculate,
    task_arithmetic_drafter,
)
from composition.speculation import best_gamma


def near(base: Any, seed: int, size: float = 0.03) -> Any:
    """An expert: the base with a little of everything."""
    expert = deepcopy(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return expert


def family(build: Any, experts: int = 2) -> list[Any]:
    base = build(0)
    return [base, *(near(base, seed) for seed in range(1, experts + 1))]


def next_logits(models: list[Any], ids: list[int]) -> Tensor:
    with torch.no_grad():
        base, *rest = (model(input_ids=torch.tensor([ids])).logits[0, -1] for model in models)
    return compose_logits(base, rest)


def plain(models: list[Any], prompt: list[int], count: int, ends: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    while len(found) < count and not (found and found[-1] in ends):
        found.append(int(next_logits(models, prompt + found).argmax()))
    return found


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    return ids, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])


PROMPTS = [[5, 9, 13], [7, 3, 30, 31, 32, 8, 22], list(range(10, 25)), [44]]


@pytest.mark.parametrize("gamma", [1, 4, None])
@pytest.mark.parametrize("build", [llama, gemma2, qwen2, gpt2])
def test_greedy_gives_the_plain_loops_tokens(build: Any, gamma: int | None) -> None:
    """In a left-padded batch, past the sliding window, with rows that leave at their own ends."""
    models = family(build)
    free = [plain(models, prompt, 24, ()) for prompt in PROMPTS]
    ends = (free[0][5], free[2][9])  # which end some rows early
    composed = ComposedForCausalLM.from_models(models[0], models[1:], eos_ids=ends)
    ids, mask = left_padded(PROMPTS)
    expected = [plain(models, prompt, 24, ends) for prompt in PROMPTS]
    assert len({len(row) for row in expected}) > 1
    for drafter in (task_arithmetic_drafter(composed), models[0]):
        found = speculate(composed, drafter, ids, mask, max_new_tokens=24, gamma=gamma)
        assert found.tokens == expected
        assert 0 < found.accepted <= found.drafted


def test_a_drafter_that_is_always_wrong_changes_nothing() -> None:
    models = family(llama)
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    ids, mask = left_padded(PROMPTS)
    found = speculate(composed, llama(7), ids, mask, max_new_tokens=12, gamma=3)
    assert found.tokens == [plain(models, prompt, 12, ()) for prompt in PROMPTS]


def test_stacked_adapters(tmp_path: Path) -> None:
    base = llama(0)
    folders = {}
    for seed, name in enumerate(("math", "code"), start=1):
        config = LoraConfig(task_type="CAUSAL_LM", r=3 + seed, target_modules="all-linear")
        wrapped = get_peft_model(deepcopy(base), config)
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, parameter in wrapped.named_parameters():
                if "lora_" in key:
                    parameter.copy_(0.08 * torch.randn_like(parameter))
        wrapped.save_pretrained(tmp_path / name)
        folders[name] = tmp_path / name
    composed = ComposedForCausalLM.from_adapters(base, folders, weights=[1.0, 0.5])
    drafter = task_arithmetic_drafter(composed)
    ids, mask = left_padded(PROMPTS)
    expected = composed.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    found = speculate(composed, drafter, ids, mask, max_new_tokens=16)
    assert found.tokens == expected[:, ids.shape[1] :].tolist()
    assert found.accepted > found.drafted / 2


@pytest.mark.parametrize("experts", [1, 2, 3])
@pytest.mark.parametrize("build", ["near", "far"])
def test_sampling_draws_from_the_composed_distribution(experts: int, build: str) -> None:
    """Three tokens after a prompt, over a vocabulary of 4: all 64 texts by chi-square, 20,000 of
    them (60,000 tokens), with two to four components and drafters near to and far from them."""
    base = llama(0, vocab_size=4, bos_token_id=1, pad_token_id=0)
    models = [base, *(near(base, seed, 0.1) for seed in range(1, experts + 1))]
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    drafter = task_arithmetic_drafter(composed)
    if build == "far":
        drafter = llama(9, vocab_size=4, bos_token_id=1, pad_token_id=0)
    generator = torch.Generator().manual_seed(experts)
    ids = torch.tensor([[1, 2, 3]]).repeat(5000, 1)
    counts: dict[tuple[int, ...], int] = dict.fromkeys(product(range(4), repeat=3), 0)
    for gamma in (1, 2, 3, None):
        found = speculate(
            composed,
            drafter,
            ids,
            max_new_tokens=3,
            sampling=Sampling(1.3, generator),
            gamma=gamma,
        )
        for row in found.tokens:
            counts[tuple(row)] += 1
    exact = {}
    for text in counts:
        probability = 1.0
        for place, token in enumerate(text):
            logits = next_logits(models, [1, 2, 3, *text[:place]])
            probability *= float((logits / 1.3).softmax(-1)[token])
        exact[text] = probability
    expected = [20_000 * exact[text] for text in counts]
    large = [place for place, value in enumerate(expected) if value >= 5]
    seen = list(counts.values())
    observed = [seen[place] for place in large]
    wanted = [expected[place] for place in large]
    if len(large) < len(seen):  # rare texts together
        observed.append(20_000 - sum(observed))
        wanted.append(20_000 - sum(wanted))
    chi = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 0)
    assert chi < stats.chi2.ppf(0.9999, len(wanted) - 1)


def test_the_drafter_is_task_arithmetic() -> None:
    models = family(llama)
    composed = ComposedForCausalLM.from_models(models[0], models[1:], weights=[0.5, 2.0])
    states = [model.state_dict() for model in models]
    for name, found in task_arithmetic_drafter(composed).state_dict().items():
        base, first, second = (state[name] for state in states)
        assert torch.allclose(found, base + 0.5 * (first - base) + 2.0 * (second - base), atol=1e-5)


def test_more_is_drafted_where_more_is_accepted() -> None:
    assert best_gamma(0.1, 3) < best_gamma(0.7, 3) < best_gamma(0.98, 3)
    assert best_gamma(0.8, 3) <= best_gamma(0.8, 9)  # a dear judgement wants longer drafts


def test_forwards_are_counted() -> None:
    """One row, the last round no longer than what is left: gamma + 1 of the drafter and one of each
    component a round; the first token comes with the prompt."""
    models = family(llama)
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    ids = torch.tensor([[5, 6, 7]])
    drafter = task_arithmetic_drafter(composed)
    found = speculate(composed, drafter, ids, max_new_tokens=9, gamma=2)
    assert found.forwards == found.drafted + found.rounds * (1 + 3)
    assert found.per_token == pytest.approx(found.forwards / 8)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gamma": 0}, "gamma is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"drafter": True}, "the drafter has 30 tokens where the composition has 60"),
    ],
)
def test_bad_settings_are_told(changes: dict[str, Any], expected: str) -> None:
    models = family(llama, 1)
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    drafter = llama(0, vocab_size=30) if changes.pop("drafter", False) else models[0]
    with pytest.raises(CompositionError, match=expected):
        speculate(composed, drafter, torch.tensor([[5]]), **{"max_new_tokens": 4, **changes})
