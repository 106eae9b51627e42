"""`ComposedForCausalLM` against a plain loop that recomputes everything at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCABULARY, cohere, gemma2, gpt2, granite, llama, qwen2
from torch import Tensor

from composition import (
    ComposedForCausalLM,
    CompositionError,
    check_vocabularies,
    compose_logits,
    score_continuations,
)


def next_logits(models: list[Any], ids: list[int]) -> Tensor:
    """Composed next-token logits of one prefix, without any cache or padding."""
    with torch.no_grad():
        base, *experts = (model(input_ids=torch.tensor([ids])).logits[0, -1] for model in models)
    return compose_logits(base, experts)


def plain_greedy(models: list[Any], prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(next_logits(models, ids).argmax()))
    return ids[len(prompt) :]


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


PROMPTS = [[5, 9, 13], [7, 3, 30, 31, 32, 8, 22], list(range(10, 25))]


@pytest.mark.parametrize("build", [llama, gemma2, qwen2, gpt2])
@pytest.mark.parametrize("experts", [0, 1, 2])
def test_greedy_equals_a_plain_loop_in_left_padded_batches(
    build: Callable[[int], Any], experts: int
) -> None:
    models = [build(seed) for seed in range(1 + experts)]
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    ids, mask = left_padded(PROMPTS)
    found = composed.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
    expected = [plain_greedy(models, prompt, 14) for prompt in PROMPTS]
    assert found[:, ids.shape[1] :].tolist() == expected


def test_sampling_draws_from_the_composed_distribution() -> None:
    """20,000 first tokens against the exact probabilities, by chi-square at a fixed seed."""
    from scipy.stats import chisquare

    models = [llama(seed) for seed in range(3)]
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    exact = next_logits(models, PROMPTS[0]).double().softmax(-1)
    torch.manual_seed(0)
    draws = 20_000
    ids = torch.tensor([PROMPTS[0]])
    tokens = composed.generate(
        ids, do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=draws
    )[:, -1]
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    common = exact * draws >= 5  # the rest is pooled, as the test asks for
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([exact[common], exact[~common].sum()[None]]) * draws
    wanted *= observed.sum() / wanted.sum()
    assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 0.01


def test_beam_search_finds_what_exhaustive_search_finds() -> None:
    """With as many beams as tokens, two steps of beam search are exhaustive."""
    models = [llama(seed) for seed in range(3)]
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    first = next_logits(models, PROMPTS[0]).log_softmax(-1)
    scores = {}
    for token in range(VOCABULARY):
        second = next_logits(models, [*PROMPTS[0], token]).log_softmax(-1)
        scores[token, int(second.argmax())] = float(first[token] + second.max())
    best = max(scores, key=scores.__getitem__)
    found = composed.generate(
        torch.tensor([PROMPTS[0]]), num_beams=VOCABULARY, max_new_tokens=2, do_sample=False
    )
    assert tuple(found[0, -2:].tolist()) == best


@pytest.mark.parametrize("build", [llama, gemma2])
def test_rows_can_be_selected_and_repeated_in_the_flat_cache(build: Callable[[int], Any]) -> None:
    models = [build(seed) for seed in range(3)]
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    prompts = [list(range(10, 22)), list(range(30, 42)), list(range(5, 17))]
    cache = composed.new_cache()
    with torch.no_grad():
        composed(input_ids=torch.tensor(prompts), cache=cache, use_cache=True, logits_to_keep=1)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        kept = [prompts[2], prompts[2], prompts[0], prompts[0]]
        following = [40, 41, 42, 43]
        found = composed(
            input_ids=torch.tensor(following)[:, None],
            position_ids=torch.full((4, 1), 12),
            cache=cache,
            use_cache=True,
        ).logits[:, -1]
    for row, (prompt, token) in enumerate(zip(kept, following, strict=True)):
        assert torch.allclose(found[row], next_logits(models, [*prompt, token]), atol=2e-4)


@pytest.mark.parametrize("build", [llama, gemma2, qwen2, gpt2, cohere, granite])
@pytest.mark.parametrize("side", ["left", "right"])
def test_lean_scores_equal_the_full_forward(build: Callable[[int], Any], side: str) -> None:
    models = [build(seed) for seed in range(3)]
    composed = ComposedForCausalLM.from_models(models[0], models[1:])
    ids, mask = left_padded(PROMPTS)
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    wanted = mask.clone()
    for row in range(len(PROMPTS)):  # all but the first two real tokens of a row
        wanted[row, mask[row].nonzero()[:2, 0]] = 0
    logprobs, greedy = score_continuations(composed, ids, mask, wanted, chunk=4)
    for row in range(len(PROMPTS)):
        real = ids[row][mask[row].bool()].tolist()
        places = wanted[row].nonzero()[:, 0].tolist()
        for place, index in zip(places, range(2, len(real)), strict=True):
            exact = next_logits(models, real[:index]).log_softmax(-1)
            assert float(logprobs[row, place]) == pytest.approx(float(exact[real[index]]), abs=2e-4)
            assert bool(greedy[row, place]) == (int(exact.argmax()) == real[index])
    assert float(logprobs[wanted == 0].abs().max()) == 0


def test_logits_that_are_more_than_a_projection_are_not_scored_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama(0)
    plain_forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = plain_forward(*args, **kwargs)
        output.logits = 3 * output.logits
        return output

    monkeypatch.setattr(model, "forward", scaled)
    ids = torch.tensor([[3, 4, 5]])
    wanted = torch.tensor([[0, 0, 1]])
    with pytest.raises(CompositionError, match="llama model are more than a projection"):
        score_continuations(model, ids, torch.ones_like(ids), wanted)


def test_a_first_token_cannot_be_scored() -> None:
    ids = torch.tensor([[3, 4]])
    with pytest.raises(CompositionError, match="first token"):
        score_continuations(llama(0), ids, torch.ones_like(ids), torch.ones_like(ids))


def test_padded_vocabulary_rows_are_ruled_out_after_composing() -> None:
    models = [llama(seed) for seed in range(2)]
    composed = ComposedForCausalLM.from_models(models[0], models[1:], vocab_size=50)
    with torch.no_grad():
        logits = composed(input_ids=torch.tensor([[5, 6]])).logits
    assert bool((logits[..., 50:] == -torch.inf).all())
    assert bool(logits[..., :50].isfinite().all())


def test_the_config_says_what_is_composed() -> None:
    composed = ComposedForCausalLM.from_models(llama(0), [llama(1)], gate=0.05, names=["math"])
    assert composed.config.composition == {
        "rule": "product",
        "weights": [1.0],
        "gate": 0.05,
        "gating": "hard",
        "eos": "sum",
        "plausible": None,
        "temperatures": None,
        "experts": ["math"],
    }


def test_another_architecture_is_refused_with_both_sides() -> None:
    with pytest.raises(CompositionError, match="math: model_type is 'qwen2' where the base has 'l"):
        ComposedForCausalLM.from_models(llama(0), [qwen2(0)], names=["math"])


def test_vocabularies_that_differ_are_refused_with_examples() -> None:
    first = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    second = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 2, "c": 1})
    check_vocabularies([first, first])
    with pytest.raises(CompositionError, match=r"\(3 tokens\).*\(2 tokens\) in 2 tokens: 'b' is 1"):
        check_vocabularies([first, second])


@pytest.mark.parametrize("stacked", [False, True])
@torch.inference_mode()
def test_bfloat16_logits_are_not_rounded(stacked: bool, tmp_path: Path) -> None:
    """The hidden states in bfloat16, the projection exact: what float64 makes of the same states.

    Rounded logits are off by 2^-9 of their size and more, 0.01 here.
    """
    base = llama(0).bfloat16()
    head = base.lm_head
    if stacked:
        wrapped = get_peft_model(llama(1), LoraConfig(r=2, target_modules=["q_proj"]))
        wrapped.save_pretrained(tmp_path)
        composed = ComposedForCausalLM.from_adapters(base, {"one": tmp_path})
    else:
        composed = ComposedForCausalLM.from_models(base, [llama(1).bfloat16()])
        assert base.lm_head is head  # what was passed is left alone
    ids = torch.tensor([PROMPTS[2]])
    output = composed(input_ids=ids, output_components=True)
    assert output.components is not None
    for index, found in enumerate(output.components):
        assert found.dtype == torch.float32
        hidden = composed.parts.hidden(index, input_ids=ids)
        assert hidden.dtype == torch.bfloat16
        weight = (head if index == 0 or stacked else llama(1).bfloat16().lm_head).weight
        exact = hidden.double() @ weight.double().T
        assert torch.allclose(found.double(), exact, atol=1e-4)
        assert not torch.allclose(exact.bfloat16().double(), exact, atol=1e-3)
