"""The engine against plain `generate` and plain forward passes, one row at a time, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from composition import ComposedForCausalLM
from evaluation.benchmarks.contract import Generate, Output, Score, Tag
from evaluation.engine import Runtime, answer
from evaluation.errors import InputError

PROMPTS = ["a", "hello world", "def f(x):\n    return", "Q: 1+1?\nA:", "zz top", "-", "long " * 9]


def runtime(model: Any, tokenizer: Any, eos: frozenset[int] = frozenset({2})) -> Runtime:
    composed = isinstance(model, ComposedForCausalLM)

    def new_cache() -> Any:
        return model.new_cache() if composed else DynamicCache(config=model.config)

    return Runtime(model, tokenizer, eos, new_cache, "llama", 256)


def answers(ready: Runtime, requests: list[Any], batch_size: int) -> list[Output]:
    found = {
        index: output for batch in answer(ready, requests, batch_size) for index, output in batch
    }
    return [found[index] for index in range(len(requests))]


def plain(model: Any, tokenizer: Any, request: Generate, eos: frozenset[int]) -> str:
    """The reference: recompute everything at each step, one prompt alone; then cut."""
    ids = tokenizer(request.prompt)["input_ids"]
    made: list[int] = []
    for _ in range(request.max_new_tokens):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids + made])).logits[0, -1].argmax())
        if token in eos:
            break
        made.append(token)
        text = str(tokenizer.decode(made, skip_special_tokens=True))
        hits = [text.find(stop) for stop in request.stops if stop in text]
        if hits:
            return text[: min(hits)]
    return str(tokenizer.decode(made, skip_special_tokens=True))


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("composed", [False, True])
def test_completions_equal_a_plain_loop_at_any_batch_size(
    llama: Any, tokenizer: Any, batch_size: int, composed: bool
) -> None:
    model = llama(seed=1)
    if composed:
        model = ComposedForCausalLM.from_models(model, [llama(seed=2), llama(seed=3)])
    # Ends chosen so that rows leave at different steps: ids 2 and 40, and two stop strings.
    eos, stops = frozenset({2, 40}), ("e", "ZQ")
    requests = [Generate(prompt, stops, 12 + place) for place, prompt in enumerate(PROMPTS)]
    found = answers(runtime(model, tokenizer, eos), list(requests), batch_size)
    expected = [plain(model, tokenizer, request, eos) for request in requests]
    assert [output.text for output in found] == expected
    assert [output.prompt_tokens for output in found] == [len(prompt) for prompt in PROMPTS]


def test_truncated_says_whether_the_limit_ended_the_row(llama: Any, tokenizer: Any) -> None:
    model = llama(seed=1)
    first = answers(runtime(model, tokenizer, frozenset()), [Generate("ab", (), 5)], 1)[0]
    assert (first.tokens, first.truncated) == (5, True)
    stop = first.text[2]
    second = answers(runtime(model, tokenizer, frozenset()), [Generate("ab", (stop,), 5)], 1)[0]
    assert second.text == first.text[: first.text.index(stop)]
    assert not second.truncated


def test_a_stop_at_the_last_token_is_no_truncation(llama: Any, tokenizer: Any) -> None:
    ready = runtime(llama(seed=1), tokenizer, frozenset())
    whole = answers(ready, [Generate("ab", (), 5)], 1)[0].text
    stop = whole[-1]
    limit = whole.index(stop) + 1
    assert not answers(ready, [Generate("ab", (stop,), limit)], 1)[0].truncated


def test_scores_equal_log_softmax_of_a_plain_forward(llama: Any, tokenizer: Any) -> None:
    model = llama(seed=4)
    requests = [Score(prompt, rest) for prompt, rest in zip(PROMPTS, PROMPTS[::-1], strict=True)]
    found = answers(runtime(model, tokenizer), list(requests), 3)
    for request, output in zip(requests, found, strict=True):
        whole = tokenizer(request.context + request.continuation)["input_ids"]
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(-1)
        start = len(whole) - output.tokens
        expected = sum(
            float(logprobs[place - 1, whole[place]]) for place in range(start, len(whole))
        )
        assert output.logprob == pytest.approx(expected, abs=1e-4)


def test_is_greedy_is_true_exactly_for_the_greedy_continuation(llama: Any, tokenizer: Any) -> None:
    ready = runtime(llama(seed=6), tokenizer, frozenset())
    text = answers(ready, [Generate("hello", (), 4)], 1)[0].text
    assert len(text) == 4, "the seed must give four plain characters"
    other = text[:-1] + ("x" if text[-1] != "x" else "y")
    found = answers(ready, [Score("hello", text, True), Score("hello", other, True)], 2)
    assert [output.is_greedy for output in found] == [True, False]


def test_tags_are_the_argmax_at_every_position(llama: Any, tokenizer: Any) -> None:
    model = llama(seed=5)
    found = answers(runtime(model, tokenizer), [Tag(prompt) for prompt in PROMPTS], 4)
    for prompt, output in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            ids = (
                model(input_ids=torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0].argmax(-1)
            )
        assert output.text == tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def test_a_prompt_that_does_not_fit_is_an_error_with_the_numbers(
    llama: Any, tokenizer: Any
) -> None:
    ready = runtime(llama(seed=1), tokenizer)
    with pytest.raises(InputError, match=r"200 tokens and 100 more may follow, 300 in all.*256"):
        answers(ready, [Generate("a" * 200, (), 100), Generate("a", (), 100)], 2)


def test_a_prompt_without_tokens_is_refused(llama: Any, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="no tokens"):
        answers(runtime(llama(seed=1), tokenizer), [Generate("", (), 4)], 1)
