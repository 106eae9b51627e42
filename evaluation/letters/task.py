"""The letters task: strings over ten letters, skills that replace one letter by another.

The base copies its input, the expert of the skill `A->B` writes B for every A and copies the rest.
A model that has two skills does both. Texts of the autoregressive form read `ABCA>BBCB` and end
with EOS; the position-aligned form has no separator: the tag at each position is its output letter.

Source: "Compositional Generalization in Autoregressive Models via Logit Composition"
(arXiv:2605.28304) has the aligned form, with independently trained models. The autoregressive form,
whose experts are fine-tuned from the base, is ours: only there do task vectors exist.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from evaluation.errors import InputError

ALPHABET = "ABCDEFGHIJ"
SEPARATOR = ">"
COPY = "copy"
TRAINED_LENGTHS = range(2, 13)
"""Lengths seen in training; `letters` stays within, `letters_long` goes beyond."""


class Skill(NamedTuple):
    """Write `new` wherever the input has `old`."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.old}->{self.new}"


def parse_skill(text: str) -> Skill | None:
    """A skill from `A->B`; None for `copy`, the base.

    Raises:
        InputError: it is neither.
    """
    if text == COPY:
        return None
    match = re.fullmatch(rf"([{ALPHABET}])->([{ALPHABET}])", text)
    if match is None or match[1] == match[2]:
        raise InputError(
            f"letters: found {text!r}; expected {COPY!r} or a skill such as 'A->B' with two "
            f"different letters of {ALPHABET}"
        )
    return Skill(match[1], match[2])


def apply(skills: Sequence[Skill], text: str) -> str:
    """The output for an input: every skill acts on the input's letters, none on another's output.

    Where two skills claim one letter, the first one has it.
    """
    table = {skill.old: skill.new for skill in reversed(skills)}
    return "".join(table.get(letter, letter) for letter in text)


def sample(generator: random.Random, length: int, wanted: Sequence[str] = ()) -> str:
    """A random string; each letter of `wanted` stands in it at least once."""
    letters = generator.choices(ALPHABET, k=length)
    places = generator.sample(range(length), k=len(wanted))
    for place, letter in zip(places, wanted, strict=True):
        letters[place] = letter
    return "".join(letters)
