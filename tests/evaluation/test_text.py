"""Tokenisation: BOS once, completions decoded in place, pairs split as lm-eval splits them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evaluation.benchmarks.contract import Score
from evaluation.text import cut_at_stops, decode_completion, encode, encode_pair


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
