"""The letters task as three benchmarks: within trained lengths, beyond them, position-aligned.

Sample item for the skills A->B and C->D:   prompt `ACFA>`   answer `BDFB`, then EOS

Every model is scored on the joint task of all the experiment's skills, and every input holds at
least one letter of each: a model with one skill, and the base, solve none of the items.

`exact_match` is primary. Beside it `letters_right`, the share of output letters that are right at
their place, and for the generating forms `too_short` and `too_long`, which tell a wrong stop from
a wrong letter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from evaluation.benchmarks.contract import (
    Benchmark,
    BenchmarkEntry,
    Form,
    Generate,
    Item,
    Output,
    Score,
    Settings,
    Tag,
)
from evaluation.errors import InputError
from evaluation.letters.task import SEPARATOR, Skill, apply, parse_skill, sample

ITEMS = 400
WITHIN, BEYOND = range(4, 13), range(13, 17)  # lengths
ROOM = 8  # tokens that a model may write beyond the right answer


class LettersBenchmark:
    """Random strings of some lengths; see `Benchmark`."""

    def __init__(self, skills: Sequence[Skill], lengths: range, form: Form, seed: int) -> None:
        generator = random.Random(f"letters {seed} {lengths}")
        wanted = [skill.old for skill in dict.fromkeys(skills)]
        wanted = list(dict.fromkeys(wanted))
        self._pairs = [
            (text, apply(skills, text))
            for text in (sample(generator, generator.choice(lengths), wanted) for _ in range(ITEMS))
        ]
        self._form = form
        named = ", ".join(map(str, skills))
        self.version = f"letters 1, {named}, lengths {lengths[0]}-{lengths[-1]}, seed {seed}"

    def items(self, limit: int | None) -> Sequence[Item]:
        return [
            Item(str(number), (self._request(text, answer),), answer)
            for number, (text, answer) in enumerate(self._pairs[:limit])
        ]

    def _request(self, text: str, answer: str) -> Generate | Tag:
        if self._form == "aligned":
            return Tag(text)
        return Generate(f"{text}{SEPARATOR}", (), len(answer) + 1 + ROOM)

    def score(
        self, items: Sequence[Item], outputs: Sequence[Sequence[Output]]
    ) -> list[dict[str, float]]:
        return [
            self._score(item.doc, output.text)
            for item, (output,) in zip(items, outputs, strict=True)
        ]

    def _score(self, answer: str, text: str) -> dict[str, float]:
        right = sum(found == letter for found, letter in zip(text, answer, strict=False))
        metrics = {"exact_match": float(text == answer), "letters_right": right / len(answer)}
        if self._form == "causal":
            metrics["too_short"] = float(len(text) < len(answer))
            metrics["too_long"] = float(len(text) > len(answer))
        return metrics


class LettersLogLikelihood:
    """The right answers' log-likelihood, EOS excluded: where merges and compositions part."""

    def __init__(self, generating: LettersBenchmark) -> None:
        self._generating = generating
        self.version = generating.version

    def items(self, limit: int | None) -> Sequence[Item]:
        found = []
        for item in self._generating.items(limit):
            request = item.requests[0]
            if isinstance(request, Generate):
                scored = Score(request.prompt, item.doc, separate=True)
                found.append(Item(item.id, (scored,), item.doc))
        return found

    def score(
        self, items: Sequence[Item], outputs: Sequence[Sequence[Output]]
    ) -> list[dict[str, float]]:
        return [{"nats_per_token": -output.logprob / output.tokens} for (output,) in outputs]


def _skills(settings: Settings) -> list[Skill]:
    parsed = [parse_skill(text) for text in settings.options.get("skills", ())]
    return [skill for skill in parsed if skill is not None]


def _faults(settings: Settings) -> list[str]:
    try:
        skills = _skills(settings)
    except InputError as error:
        return error.faults
    if skills:
        return []
    return [
        "it needs letters models: write `base: {letters: copy}` and experts such as "
        '`a-to-b: {letters: "A->B"}`'
    ]


def _entry(summary: str, lengths: range, form: Form) -> BenchmarkEntry:
    def open_benchmark(settings: Settings) -> Benchmark:
        return LettersBenchmark(_skills(settings), lengths, form, settings.seed)

    return BenchmarkEntry(
        summary=summary,
        metric="exact_match",
        binary=True,
        higher_is_better=True,
        form=form,
        faults=_faults,
        open=open_benchmark,
    )


LETTERS = _entry("letters: all skills at once, lengths seen in training", WITHIN, "causal")
LETTERS_LONG = _entry("letters: strings longer than in training", BEYOND, "causal")
LETTERS_ALIGNED = _entry("letters: position-aligned tagging, the paper's form", WITHIN, "aligned")

LETTERS_LOGLIK = BenchmarkEntry(
    summary="log-likelihood of the right letters, nats a token",
    metric="nats_per_token",
    binary=False,
    higher_is_better=False,
    form="causal",
    faults=_faults,
    open=lambda settings: LettersLogLikelihood(
        LettersBenchmark(_skills(settings), WITHIN, "causal", settings.seed)
    ),
)
