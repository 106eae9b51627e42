"""The letters task: strings, skills, tokenizer, batches and scores."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.benchmarks.contract import Generate, Output, Settings, Tag
from evaluation.benchmarks.letters import LETTERS, LETTERS_ALIGNED, LETTERS_LONG
from evaluation.errors import InputError
from evaluation.letters.models import _batches, build_tokenizer
from evaluation.letters.task import ALPHABET, Skill, apply, parse_skill, sample
from evaluation.training import IGNORED

TWO = Settings(options={"skills": ["A->B", "C->D"]})


def test_skills_act_on_the_input_and_not_on_each_other() -> None:
    assert apply([Skill("A", "B"), Skill("B", "C")], "ABAD") == "BCBD"
    assert apply([Skill("A", "B"), Skill("A", "C")], "A") == "B"  # the first one has the letter
    assert apply([], "ABC") == "ABC"


@pytest.mark.parametrize("text", ["A->A", "a->b", "A>B", "A->Z", "AB->C", ""])
def test_what_is_no_skill_is_told(text: str) -> None:
    with pytest.raises(InputError, match="expected 'copy' or a skill"):
        parse_skill(text)


@given(st.integers(2, 16), st.integers(0, 1000))
def test_samples_have_their_length_and_the_wanted_letters(length: int, seed: int) -> None:
    text = sample(random.Random(seed), length, "AC")
    assert len(text) == length
    assert {"A", "C"} <= set(text) <= set(ALPHABET)


def test_the_tokenizer_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("ABJ>")["input_ids"]
    assert len(ids) == 4  # nothing is added
    assert tokenizer.decode(ids) == "ABJ>"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "ABJ>"


def test_batches_teach_the_output_and_eos() -> None:
    tokenizer = build_tokenizer()
    (batch,) = next(_batches(Skill("A", "B"), "causal", 0, tokenizer))
    for row in range(8):
        text = tokenizer.decode(batch.ids[row][batch.mask[row] == 1].tolist())
        source = text.split(">")[0]
        taught = tokenizer.decode(batch.labels[row][batch.labels[row] != IGNORED].tolist())
        assert taught == apply([Skill("A", "B")], source) + "</s>"
        assert len(text.removesuffix("</s>")) == 2 * len(source) + 1


def test_aligned_batches_teach_the_letter_of_the_same_place() -> None:
    tokenizer = build_tokenizer()
    (batch,) = next(_batches(Skill("A", "B"), "aligned", 0, tokenizer))
    real = batch.mask[0] == 1
    source = tokenizer.decode(batch.ids[0][real].tolist())
    assert tokenizer.decode(batch.labels[0][real].tolist()) == apply([Skill("A", "B")], source)


def test_items_ask_for_both_skills_and_stay_the_same() -> None:
    items = LETTERS.open(TWO).items(None)
    assert len(items) == 400
    for item in items:
        request = item.requests[0]
        assert isinstance(request, Generate)
        text = request.prompt.removesuffix(">")
        assert "A" in text
        assert "C" in text
        assert item.doc == apply([Skill("A", "B"), Skill("C", "D")], text)
    assert LETTERS.open(TWO).items(3) == items[:3]
    long = LETTERS_LONG.open(TWO).items(None)
    assert min(len(item.doc) for item in long) > 12  # longer than anything in training
    assert isinstance(LETTERS_ALIGNED.open(TWO).items(1)[0].requests[0], Tag)


def test_scores_tell_a_wrong_stop_from_a_wrong_letter() -> None:
    benchmark = LETTERS.open(TWO)
    item = benchmark.items(1)[0]
    answer = item.doc
    wrong = ("J" if answer[0] != "J" else "I") + answer[1:]
    outputs = [[Output(text=text)] for text in (answer, wrong, answer[:-1], answer + "A")]
    found = benchmark.score([item] * 4, outputs)
    assert [m["exact_match"] for m in found] == [1, 0, 0, 0]
    assert [m["too_short"] for m in found] == [0, 0, 1, 0]
    assert [m["too_long"] for m in found] == [0, 0, 0, 1]
    assert found[1]["letters_right"] == 1 - 1 / len(answer)


def test_without_letters_models_there_is_a_fault() -> None:
    assert "base: {letters: copy}" in LETTERS.faults(Settings())[0]
    assert LETTERS.faults(TWO) == []
