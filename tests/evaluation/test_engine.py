"""The engine against plain `generate` and plain forward passes, one row at a time, in float32."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from chat_tokenizers import CHATML, chat_tokenizer
from tiny_models import gemma2

from composition import ComposedForCausalLM, new_cache, task_arithmetic_drafter
from evaluation import decoding, engine
from evaluation.benchmarks.contract import Generate, Output, Score, Tag
from evaluation.engine import answer
from evaluation.errors import InputError
from evaluation.runtime import Runtime, fitting_batch
from evaluation.text import Chat

PROMPTS = ["a", "hello world", "def f(x):\n    return", "Q: 1+1?\nA:", "zz top", "-", "long " * 9]


def runtime(model: Any, tokenizer: Any, eos: frozenset[int] = frozenset({2})) -> Runtime:
    composed = isinstance(model, ComposedForCausalLM)

    def empty() -> Any:
        return model.new_cache() if composed else new_cache(model.config)

    return Runtime(model, tokenizer, eos, empty, "llama", 256)


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


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("guess", ["near", "far"])
@pytest.mark.parametrize("shared", ["", "Q: what is 2+2? A: four, of course it is. "])
def test_a_drafter_changes_no_completion(
    llama: Any, tokenizer: Any, batch_size: int, guess: str, shared: str
) -> None:
    """The task-arithmetic merge, which is right now and then, and a model that never is."""
    base, *experts = llama(seed=1), llama(seed=1), llama(seed=1)
    torch.manual_seed(3)
    with torch.no_grad():
        for expert in experts:
            for parameter in expert.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    model = ComposedForCausalLM.from_models(base, experts)
    drafter = task_arithmetic_drafter(model) if guess == "near" else llama(seed=9)
    eos, stops = frozenset({2, 40}), ("e", "ZQ")
    requests = [
        Generate(shared + prompt, stops if place % 2 else (), 9 + place)
        for place, prompt in enumerate(PROMPTS)
    ]
    ready = runtime(model, tokenizer, eos)._replace(drafter=drafter, components=3)
    calls = []
    drafter.register_forward_hook(lambda *_: calls.append(1))
    found = answers(ready, list(requests), batch_size)
    expected = [plain(model, tokenizer, request, eos) for request in requests]
    assert [output.text for output in found] == expected
    assert calls
    without = answers(ready._replace(drafter=None), list(requests), batch_size)
    assert [o._replace(seconds=0.0) for o in found] == [o._replace(seconds=0.0) for o in without]


def test_a_drafter_saves_forwards_of_the_composition(llama: Any, tokenizer: Any) -> None:
    model = ComposedForCausalLM.from_models(llama(seed=1), [llama(seed=1)])  # all the same
    ready = runtime(model, tokenizer, frozenset())._replace(components=2)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    answers(ready, [Generate("ab", (), 40)], 1)
    plainly, calls[:] = len(calls), []
    answers(ready._replace(drafter=task_arithmetic_drafter(model)), [Generate("ab", (), 40)], 1)
    assert plainly == 40
    assert len(calls) < 14


def test_a_drafter_is_left_out_where_a_layer_forgets(tokenizer: Any) -> None:
    """Gemma 2: keys that left the window cannot come back when a guess was wrong."""
    models = [gemma2(seed=seed, vocab_size=99) for seed in (1, 2)]
    model = ComposedForCausalLM.from_models(models[0], models[1:])
    drafter = task_arithmetic_drafter(model)
    ready = runtime(model, tokenizer, frozenset())._replace(components=2)
    requests = [Generate(prompt, (), 20) for prompt in PROMPTS[:3]]
    drafter.register_forward_hook(lambda *_: pytest.fail("it was asked"))
    found = answers(ready._replace(drafter=drafter), list(requests), 2)
    assert [output.text for output in found] == [
        plain(model, tokenizer, request, frozenset()) for request in requests
    ]


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


def test_a_chat_is_answered_as_its_written_prompt_is(llama: Any) -> None:
    """The template written out by hand and tokenised as plain text gives the same answers."""
    plain = runtime(llama(seed=1, vocab_size=102), chat_tokenizer(CHATML))
    chat = plain._replace(chat=Chat("Be brief."))

    def by_hand(prompt: str) -> str:
        system = "<|start|>system\nBe brief.<|eot|>\n"
        return f"{system}<|start|>user\n{prompt}<|eot|>\n<|start|>assistant\n"

    asked: list[Any] = [Generate(prompt, ("e",), 6) for prompt in PROMPTS]
    asked += [Score(prompt, "cd", separate=True) for prompt in PROMPTS]
    written: list[Any] = [Generate(by_hand(prompt), ("e",), 6) for prompt in PROMPTS]
    written += [Score(by_hand(prompt), "cd", separate=True) for prompt in PROMPTS]
    for one, other in zip(answers(chat, asked, 3), answers(plain, written, 3), strict=True):
        assert one.text == other.text
        assert one.prompt_tokens == other.prompt_tokens
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_chat_that_does_not_fit_counts_the_template(llama: Any) -> None:
    """200 characters and 19 + 6 + 2 + 11 tokens of the template, with 20 new ones to come."""
    ready = runtime(llama(seed=1, vocab_size=102), chat_tokenizer(CHATML))
    ready = ready._replace(chat=Chat("Be brief."))
    with pytest.raises(InputError, match=r"longest has 238 tokens and 20 more may follow, 258 in"):
        answers(ready, [Generate("a" * 200, (), 20)], 1)


def shot(place: int) -> str:
    """Prompts of different lengths behind 60 common characters."""
    return "Question: what is to be done?\nAnswer: nothing but counting.\n\n" + "ab" * place + "?"


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_rows_behind_a_common_beginning_that_join_as_others_leave(
    llama: Any, tokenizer: Any, batch_size: int, composed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two beginnings in one call, more rows than fit, each with its own limit and ends."""
    model = llama(seed=1)
    if composed:
        model = ComposedForCausalLM.from_models(model, [llama(seed=2), llama(seed=3)])
    filled = watched(monkeypatch)
    eos, stops = frozenset({2, 40}), ("e", "ZQ")
    prompts = [shot(place) for place in range(9)] + [shot(place)[::-1] for place in range(3)]
    requests = [
        Generate(prompt, stops, 4 + 3 * (place % 5)) for place, prompt in enumerate(prompts)
    ]
    found = answers(runtime(model, tokenizer, eos), list(requests), batch_size)
    assert [output.text for output in found] == [
        plain(model, tokenizer, request, eos) for request in requests
    ]
    assert filled == [61]  # the reversed ones begin with their own questions
    assert all(output.batch_size == batch_size for output in found)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the beginnings that are filled from now on."""
    filled: list[int] = []
    real = decoding.fill_prefix

    def fill(model: Any, ids: list[int], *rest: Any) -> Any:
        filled.append(len(ids))
        return real(model, ids, *rest)

    monkeypatch.setattr(decoding, "fill_prefix", fill)
    monkeypatch.setattr(engine, "fill_prefix", fill)
    return filled


def test_rows_join_a_batch_of_a_model_with_sliding_windows(tokenizer: Any) -> None:
    """Gemma 2 with a window of 8: no beginning is shared, rows still come and go."""
    model = gemma2(0, vocab_size=99)
    requests = [Generate(prompt, ("e",), 5 + place) for place, prompt in enumerate(PROMPTS)]
    ready = Runtime(model, tokenizer, frozenset(), lambda: new_cache(model.config), "", 256)
    found = answers(ready, list(requests), 3)
    expected = [plain(model, tokenizer, request, frozenset()) for request in requests]
    assert [output.text for output in found] == expected


def test_scores_behind_a_common_beginning(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = runtime(llama(seed=4), tokenizer)
    filled = watched(monkeypatch)
    requests: list[Any] = [Score(shot(place), f" {place}x") for place in range(5)]
    together = answers(ready, requests, None)
    assert filled == [61]
    alone = [answers(ready, [request], 1)[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert (one.tokens, one.prompt_tokens) == (other.tokens, other.prompt_tokens)


@pytest.mark.parametrize("kind", [Generate, Score])
def test_out_of_memory_halves_the_batch_and_loses_nothing(
    llama: Any, tokenizer: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot take more than three rows, as an allocator would tell it."""
    model = llama(seed=1)
    requests = [
        Generate(prompt, (), 6) if kind is Generate else Score(prompt, "rest") for prompt in PROMPTS
    ]
    expected = answers(runtime(model, tokenizer), list(requests), 1)
    real = type(model.model).forward

    def small(self: Any, input_ids: Any = None, **rest: Any) -> Any:
        if len(input_ids) > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return real(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(type(model.model), "forward", small)
    found = answers(runtime(model, tokenizer), list(requests), 7)
    assert [(one.text, one.tokens) for one in found] == [(one.text, one.tokens) for one in expected]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected])


def test_a_single_row_that_does_not_fit_is_told(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(seed=1)

    def never(self: Any, **rest: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(model.model), "forward", never)
    with pytest.raises(InputError, match="one prompt alone does not fit into memory"):
        answers(runtime(model, tokenizer), [Generate("ab", (), 3)] * 4, 4)


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(seed=1)

    def broken(self: Any, **rest: Any) -> Any:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(type(model.model), "forward", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        answers(runtime(model, tokenizer), [Generate("ab", (), 3)], 4)


def test_the_batch_that_fits_shrinks_with_longer_rows(llama: Any, tokenizer: Any) -> None:
    """Two layers of two heads of 8 numbers, keys and values, 4 bytes: 256 bytes a token."""
    ready = runtime(llama(seed=1), tokenizer)
    assert fitting_batch(ready, 10) == 64
    free = psutil.virtual_memory().available
    assert fitting_batch(ready, free // 256 // 8) in (3, 4, 5)
    assert fitting_batch(ready, free) == 1


@pytest.mark.parametrize("kind", [Generate, Score])
def test_long_prompts_with_nothing_in_common_share_their_batches(
    llama: Any, tokenizer: Any, kind: Any
) -> None:
    """Six programs, say: most of them start like no other."""
    ready = runtime(llama(seed=1), tokenizer, frozenset())
    prompts = [chr(97 + place) * 40 for place in range(6)] + ["a" * 40 + "b", "b" * 40 + "c"]
    requests = [
        Generate(prompt, (), 5) if kind is Generate else Score(prompt, "xyz") for prompt in prompts
    ]
    rows: list[int] = []
    ready.model.model.register_forward_pre_hook(
        lambda _, given, named: rows.append(len(named["input_ids"])), with_kwargs=True
    )
    answers(ready, list(requests), 8)
    # Before it scores, a model is asked with one token how it does that, in two ways.
    assert rows == ([8] * 5 if kind is Generate else [1, 1, 8])


def test_prompts_are_grouped_where_enough_begin_alike() -> None:
    some = [[1] * 40 + [place] for place in range(8)]
    few = [[2] * 40 + [place] for place in range(7)]
    assert decoding.by_beginning([*some, *few, [3]]) == [list(range(8)), list(range(8, 16))]
    assert decoding.by_beginning(few) == [list(range(7))]
    assert decoding.by_beginning([]) == []


def test_common_beginnings_leave_each_prompt_a_token() -> None:
    assert decoding.common_beginning([[1, 2, 3], [1, 2, 3, 4]]) == 2
    assert decoding.common_beginning([[1, 2, 3], [1, 5, 3]]) == 1
    assert decoding.common_beginning([[7], [7, 8]]) == 0
