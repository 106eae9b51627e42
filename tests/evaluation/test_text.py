"""Tokenisation: BOS once, completions decoded in place, pairs split as lm-eval splits them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chat_tokenizers import CHATML, GEMMA, LLAMA, chat_tokenizer, ids

from evaluation.benchmarks.contract import Score
from evaluation.errors import InputError
from evaluation.text import (
    Chat,
    chat_digest,
    cut_at_stops,
    decode_completion,
    encode,
    encode_pair,
)


class Words:
    """A tokenizer over words that can add BOS and EOS as different families do."""

    bos_token_id, eos_token_id, eos_token = 1, 2, "</s>"

    def __init__(self, add_bos: bool = False, add_eos: bool = False) -> None:
        self.add_bos, self.add_eos = add_bos, add_eos

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        words = text.replace("<s>", " <s> ").split()
        ids = [1 if word == "<s>" else 10 + len(word) for word in words]
        if add_special_tokens and self.add_bos:
            ids = [1, *ids]
        if add_special_tokens and self.add_eos:
            ids = [*ids, 2]
        return {"input_ids": ids}


@pytest.mark.parametrize(
    ("tokenizer", "model_type", "text", "expected"),
    [
        (Words(), "llama", "a bb", [11, 12]),  # no BOS where the tokenizer adds none
        (Words(add_bos=True), "llama", "a bb", [1, 11, 12]),
        (Words(add_bos=True), "llama", "<s>a bb", [1, 11, 12]),  # never twice
        (Words(), "gemma2", "a bb", [1, 11, 12]),  # the family needs it
        (Words(add_bos=True), "gemma2", "a bb", [1, 11, 12]),
        (Words(), "gemma2", "<s>a", [1, 11]),
        (Words(add_bos=True, add_eos=True), "llama", "a bb", [1, 11, 12]),  # no EOS behind a prompt
    ],
)
def test_a_prompt_has_bos_once_where_its_family_uses_it(
    tokenizer: Words, model_type: str, text: str, expected: list[int]
) -> None:
    assert encode(tokenizer, text, model_type) == expected


def test_a_space_behind_the_context_moves_to_the_continuation(tokenizer: Any) -> None:
    context, rest = encode_pair(tokenizer, Score("ab ", "cd"))
    assert (tokenizer.decode(context), tokenizer.decode(rest)) == ("ab", " cd")


def test_a_separate_pair_keeps_its_boundary_and_is_cut_to_max_tokens(tokenizer: Any) -> None:
    context, rest = encode_pair(tokenizer, Score("ab ", "cdef", separate=True, max_tokens=3))
    assert (tokenizer.decode(context), tokenizer.decode(rest)) == ("ab ", "cde")


def test_an_empty_context_becomes_the_token_that_begins_a_document(tokenizer: Any) -> None:
    context, rest = encode_pair(tokenizer, Score("", "cd"))
    assert context == [tokenizer.bos_token_id]
    assert tokenizer.decode(rest) == "cd"


def test_a_completion_keeps_the_space_that_sentencepiece_would_drop() -> None:
    pieces = {5: "▁def", 6: "▁f", 7: "▁x"}

    def decode(ids: list[int], **_: Any) -> str:  # as SentencePiece: the first space is dropped
        return "".join(pieces[token] for token in ids).replace("▁", " ").removeprefix(" ")

    tokenizer = SimpleNamespace(decode=decode)
    assert decode([7]) == "x"
    assert decode_completion(tokenizer, [5, 6], [7]) == " x"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("a\n\nQ: b", ("Q:", "\n\n"), ("a", True)),  # the earliest one, whatever their order
        ("abc", ("d",), ("abc", False)),
        ("abc", (), ("abc", False)),
        ("stop", ("stop",), ("", True)),
    ],
)
def test_text_is_cut_at_its_earliest_stop(
    text: str, stops: tuple[str, ...], expected: tuple[str, bool]
) -> None:
    assert cut_at_stops(text, stops) == expected


WITHOUT_BOS = LLAMA.removeprefix("{{ bos_token }}")


@pytest.mark.parametrize(
    ("tokenizer", "model_type", "chat", "expected"),
    [
        (
            chat_tokenizer(LLAMA, add_bos=True),
            "llama",
            Chat(),
            "<s><|start|>user<|end|>\n\n1 + 1?<|eot|><|start|>assistant<|end|>\n\n",
        ),
        (
            chat_tokenizer(LLAMA, add_bos=True),
            "llama",
            Chat("Be brief."),
            "<s><|start|>system<|end|>\n\nBe brief.<|eot|><|start|>user<|end|>\n\n1 + 1?<|eot|>"
            "<|start|>assistant<|end|>\n\n",
        ),
        (  # a tokenizer that adds BOS adds it to a template that has none
            chat_tokenizer(WITHOUT_BOS, add_bos=True),
            "llama",
            Chat(),
            "<s><|start|>user<|end|>\n\n1 + 1?<|eot|><|start|>assistant<|end|>\n\n",
        ),
        (  # and one that adds none does not
            chat_tokenizer(WITHOUT_BOS),
            "llama",
            Chat(),
            "<|start|>user<|end|>\n\n1 + 1?<|eot|><|start|>assistant<|end|>\n\n",
        ),
        (
            chat_tokenizer(GEMMA),
            "gemma2",
            Chat(),
            "<s><|start|>user\n1 + 1?<|eot|>\n<|start|>model\n",
        ),
        (  # the family needs BOS whatever the template says
            chat_tokenizer(GEMMA.removeprefix("{{ bos_token }}")),
            "gemma2",
            Chat(),
            "<s><|start|>user\n1 + 1?<|eot|>\n<|start|>model\n",
        ),
        (  # the first turn's mark is BOS; the template's own system prompt stays
            chat_tokenizer(CHATML, bos="<|start|>"),
            "llama",
            Chat(),
            "<|start|>system\nHelp<|eot|>\n<|start|>user\n1 + 1?<|eot|>\n<|start|>assistant\n",
        ),
        (
            chat_tokenizer(CHATML, bos="<|start|>"),
            "llama",
            Chat("Be brief."),
            "<|start|>system\nBe brief.<|eot|>\n<|start|>user\n1 + 1?<|eot|>\n<|start|>assistant\n",
        ),
    ],
)
def test_a_prompt_becomes_a_user_message_with_bos_once(
    tokenizer: Any, model_type: str, chat: Chat, expected: str
) -> None:
    assert encode(tokenizer, "1 + 1?", model_type, chat) == ids(expected)


def test_a_template_leaves_plain_prompts_alone() -> None:
    assert encode(chat_tokenizer(LLAMA, add_bos=True), "1 + 1?", "llama") == ids("<s>1 + 1?")


def test_a_context_becomes_a_user_message_and_its_continuation_the_answer() -> None:
    """The white space that ends the template goes with the answer, as in lm-eval; a pair that is
    tokenised apart keeps it in the context."""
    tokenizer, chat = chat_tokenizer(LLAMA, add_bos=True), Chat()
    asked = "<s><|start|>user<|end|>\n\nQ<|eot|><|start|>assistant<|end|>"
    pair = encode_pair(tokenizer, Score("Q", " yes"), "llama", chat)
    assert pair == (ids(asked), ids("\n\n yes"))
    pair = encode_pair(tokenizer, Score("Q", " yes", separate=True, max_tokens=3), "llama", chat)
    assert pair == (ids(asked + "\n\n"), ids(" ye"))


def test_no_context_is_no_message() -> None:
    """The probability of an answer as such, which some metrics compare with."""
    pair = encode_pair(chat_tokenizer(CHATML), Score("", "yes"), "llama", Chat())
    assert pair == (ids("<s>"), ids("yes"))


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize(
    "made",
    [
        chat_tokenizer(LLAMA, add_bos=True),
        chat_tokenizer(CHATML, bos="<|start|>"),
        chat_tokenizer(GEMMA),
        chat_tokenizer(WITHOUT_BOS, add_bos=True),
    ],
)
def test_ids_are_those_of_lm_eval(made: Any, system: str | None, llama: Any) -> None:
    """lm-eval 0.4.13 with `apply_chat_template`, one turn: prompts and pairs to score."""
    from lm_eval.models.huggingface import HFLM

    if system is not None and made.chat_template == GEMMA:
        pytest.skip("lm-eval drops a system prompt that a template refuses; here it is an error")
    theirs = HFLM(pretrained=llama(seed=0, vocab_size=102), tokenizer=made, device="cpu")
    messages = [{"role": "user", "content": "Q: a b\nA: "}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    written = theirs.apply_chat_template(messages)
    chat = Chat(system)
    assert encode(made, "Q: a b\nA: ", "llama", chat) == theirs.tok_encode(written)
    expected = theirs._encode_pair(written, "so it is")
    assert encode_pair(made, Score("Q: a b\nA: ", "so it is"), "llama", chat) == expected


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        (None, Chat(), "the base's tokenizer has no chat template"),
        (GEMMA, Chat("Be brief."), r"refuses a system prompt \(System role not supported\)"),
        (GEMMA.replace("== 'system'", "== 'user'"), Chat(), "refuses a user message"),
        (LLAMA.replace("in messages", "in messages[-1:]"), Chat("Be brief."), "drops system"),
    ],
)
def test_what_a_template_cannot_do_is_told(template: str | None, chat: Chat, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        chat_digest(chat_tokenizer(template), chat)


def test_another_template_or_system_prompt_is_another_chat() -> None:
    made = [
        chat_digest(chat_tokenizer(template), chat)
        for template in (LLAMA, CHATML)
        for chat in (Chat(), Chat("Be brief."))
    ]
    assert len(set(made)) == 4


def test_a_date_in_a_template_is_the_same_every_day() -> None:
    dated = "{{ date_string or strftime_now('%d %b %Y') }}" + LLAMA
    assert encode(chat_tokenizer(dated), "Q", "llama", Chat())[:11] == ids("26 Jul 2024")
