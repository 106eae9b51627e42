"""What a run will do and how long it may take, told before it is begun.

The base answers a few items of each benchmark, once with a single token and once with sixteen
more; an item of another model costs as many times that as the model has components. A completion
may end early, so the sum is what the run takes at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from evaluation.benchmarks.contract import Generate, Item, Request
from evaluation.engine import answer
from evaluation.errors import InputError
from evaluation.progress import duration
from evaluation.served import Ready

PROBED = 8
"""Items of a benchmark that are answered to measure it."""
TOKENS = 16


WORTH_A_PROBE = 256
"""Items left from which on a run begins with a probe: a few seconds, where hours are at stake."""


class CellForecast(NamedTuple):
    """One model on one benchmark."""

    model: str
    benchmark: str
    items: int
    done: int
    seconds: float | None  # for what is left, at most; None where nothing was measured


def summary(cells: Sequence[CellForecast]) -> str:
    """A plan in one sentence."""
    items, done = sum(cell.items for cell in cells), sum(cell.done for cell in cells)
    text = f"{len(cells)} cells, {items} items, {done} of them done"
    known = [cell.seconds for cell in cells if cell.seconds is not None]
    if not known:
        return text
    return (
        f"{text}; {duration(sum(known))} left at most: every completion at its limit of tokens, by "
        "a probe of the base"
    )


def is_wanted(model: str, benchmark: str, only: Sequence[str]) -> bool:
    """Does one of the patterns `MODEL/BENCHMARK` name the cell? Without any, all are meant.

    A pattern may hold `*` and `?`; one without a slash names a model on all benchmarks.
    """
    for pattern in only:
        of_model, _, of_benchmark = pattern.rpartition("/") if "/" in pattern else (pattern, "", "")
        if fnmatchcase(model, of_model) and fnmatchcase(benchmark, of_benchmark or "*"):
            return True
    return not only


def check_only(cells: Sequence[tuple[str, str]], only: Sequence[str]) -> None:
    """Every pattern names something.

    Raises:
        InputError: patterns that name no cell.
    """
    faults = [
        f"--only {pattern}: no such cell; there are the models "
        f"{', '.join(dict.fromkeys(model for model, _ in cells))} and the benchmarks "
        f"{', '.join(dict.fromkeys(benchmark for _, benchmark in cells))}"
        for pattern in only
        if not any(is_wanted(model, benchmark, [pattern]) for model, benchmark in cells)
    ]
    if faults:
        raise InputError(faults)


def seconds_an_item(
    runtime: Ready,
    items: Sequence[Item],
    batch_size: int | None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """How long an item takes at most, measured on the first few."""
    requests = [request for item in items[:PROBED] for request in item.requests]
    short = _timed(runtime, [_limited(request, 1) for request in requests], batch_size, clock)
    completions = [request for request in requests if isinstance(request, Generate)]
    if not completions:
        return short / min(len(items), PROBED)
    longer = [_limited(request, 1 + TOKENS) for request in requests]
    step = (_timed(runtime, longer, batch_size, clock) - short) / TOKENS
    most = max(request.max_new_tokens for request in completions)
    return (short + max(step, 0.0) * (most - 1)) / min(len(items), PROBED)


def _limited(request: Request, tokens: int) -> Request:
    if not isinstance(request, Generate):
        return request
    return replace(request, max_new_tokens=min(tokens, request.max_new_tokens), stops=())


def _timed(
    runtime: Ready,
    requests: Sequence[Request],
    batch_size: int | None,
    clock: Callable[[], float],
) -> float:
    started = clock()
    for _ in answer(runtime, requests, batch_size):
        pass
    return clock() - started
