"""What a run leaves behind: its plan, one answer an item and model, one divergence a prompt.

The plan says which answers make up the table; an answer is known only by its key, a digest of
everything that determines it (weights, recipe, prompt, settings). So two models with identical
weights share their answers, and an answer survives every change of plan that does not touch it.

Nothing here is coerced: the `*_faults` functions say in words what a record lacks, and
`results.store` refuses the record.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["base", "expert", "merge", "composition"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer to one item of a benchmark, scored."""

    key: str  # hex digest of everything that determines this answer
    benchmark: str
    item: str
    prompt_digest: str
    completion: str  # any text, lone surrogates and NUL included; kept exactly
    score: float  # the primary metric; finite
    metrics: Mapping[str, float]  # all metrics of the benchmark, finite
    truncated: bool  # the token limit came before a stop
    prompt_tokens: int
    completion_tokens: int
    seconds: float  # its share of the batch's wall time
    dtype: str
    batch_size: int


class PlannedItem(NamedTuple):
    """One item of a cell, and the key of the answer that fills it."""

    item: str
    key: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A model on a benchmark: one cell of the leaderboard, with its items in order."""

    model: str
    kind: Kind
    method: str
    benchmark: str
    metric: str  # name of the primary metric
    binary: bool  # scores are 0 or 1: an accuracy
    higher_is_better: bool
    protocol: str  # digest of dtype, limits, benchmark version: equal for every model of a table
    items: tuple[tuple[str, str], ...]  # (item, key) in order, such as PlannedItem


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a merge is from its composition on one prompt: sums over the prompt's tokens.

    `alpha` scales the task vectors; the means a token follow by division through `tokens`.
    `gap_squared` is the squared distance of the logits, `kl` and `js` are in nats.
    """

    key: str
    model: str
    reference: str
    prompts: str  # name of the set of prompts
    alpha: float
    prompt: str  # the prompt's id within the set
    tokens: int
    gap_squared: float
    kl: float
    js: float
    tv: float
    top1_agreement: float


TYPES: dict[str, type] = {"str": str, "float": float, "int": int, "bool": bool}


def answer_faults(answer: Answer) -> list[str]:
    """One sentence for everything that is wrong with an answer; none for a sound one."""
    faults = _type_faults(answer)
    if faults:
        return faults
    faults += _key_faults(answer.key)
    numbers = {"score": answer.score, "seconds": answer.seconds}
    numbers |= {f"metrics[{name!r}]": value for name, value in answer.metrics.items()}
    faults += _finite_faults(numbers)
    counts = ("prompt_tokens", "completion_tokens", "seconds")
    faults += _at_least(answer, dict.fromkeys(counts, 0) | {"batch_size": 1})
    names = {"benchmark": answer.benchmark, "item": answer.item}
    names |= {f"metric {name!r}": name for name in answer.metrics}
    return faults + name_faults(names)


def divergence_faults(row: Divergence) -> list[str]:
    """One sentence for everything that is wrong with a divergence; none for a sound one."""
    faults = _type_faults(row)
    if faults:
        return faults
    measures = ("alpha", "gap_squared", "kl", "js", "tv", "top1_agreement")
    faults += _key_faults(row.key)
    faults += _finite_faults({name: getattr(row, name) for name in measures})
    faults += _at_least(row, {"tokens": 1, "gap_squared": 0, "tv": 0, "top1_agreement": 0})
    if row.alpha <= 0:
        faults.append(f"alpha is {row.alpha}; expected a positive scale")
    names = ("model", "reference", "prompts", "prompt")
    return faults + name_faults({name: getattr(row, name) for name in names})


def cell_faults(cell: Cell) -> list[str]:
    """One sentence for everything that is wrong with a planned cell; none for a sound one."""
    faults = _type_faults(cell)
    if faults:
        return faults
    if cell.kind not in KINDS:
        faults.append(f"kind is {cell.kind!r}; expected one of {', '.join(KINDS)}")
    if not cell.items:
        faults.append("it has no items; a cell needs at least one")
    items, keys = [item for item, _ in cell.items], [key for _, key in cell.items]
    for part, values in (("item", items), ("key", keys)):
        value, count = Counter(values).most_common(1)[0] if values else ("", 0)
        faults += [f"{count} of its items have the {part} {value!r}"] if count > 1 else []
    names = {name: getattr(cell, name) for name in ("model", "method", "benchmark", "metric")}
    for item, key in cell.items:
        faults += _key_faults(key) + name_faults({"item": item})
    return faults + name_faults(names)


def name_faults(names: Mapping[str, str]) -> list[str]:
    """Names go into tables, pages and file formats: one line of printable text each."""
    return [
        f"{what} is {name!r}; expected one line of printable text"
        for what, name in names.items()
        if not name.strip() or not name.isprintable()
    ]


def _key_faults(key: str) -> list[str]:
    if key and set(key) <= set(string.hexdigits):
        return []
    return [f"key is {key!r}; expected a hexadecimal digest"]


def _type_faults(record: Any) -> list[str]:
    """Strict types: a NumPy integer would be stored as bytes, a bool as a number."""
    faults = []
    for field in fields(record):
        value, expected = getattr(record, field.name), TYPES.get(str(field.type))
        if expected is None:
            continue
        fits = isinstance(value, expected) or (expected is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and expected is not bool):
            faults.append(f"{field.name} is a {type(value).__name__}; expected {field.type}")
    return faults


def _finite_faults(numbers: Mapping[str, float]) -> list[str]:
    return [
        f"{name} is {number!r}; expected a finite number"
        for name, number in numbers.items()
        if isinstance(number, bool)
        or not isinstance(number, int | float)
        or not math.isfinite(number)
    ]


def _at_least(record: Any, least: Mapping[str, int]) -> list[str]:
    return [
        f"{name} is {getattr(record, name)}; expected at least {low}"
        for name, low in least.items()
        if getattr(record, name) < low
    ]
