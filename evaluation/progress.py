"""A progress bar with an ETA, and one below for its present part; where there is no terminal,
plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import TimeElapsedColumn as Elapsed

SECONDS_BETWEEN_LINES = 10.0

Step = Callable[[int, int], None]
"""A callback (done, total) such as training and merging call."""


class Bar(Protocol):
    """One bar: `total` units of work, told as they are done."""

    def advance(self, units: float = 1) -> None: ...

    def describe(self, text: str, part: float | None = None) -> None:
        """What is being done; with `part`, the units it has, it gets a bar of its own."""
        ...


class _TerminalBar:
    def __init__(self, progress: Progress, text: str, total: float) -> None:
        self._progress, self._text = progress, text
        self._tasks = [progress.add_task(text, total=total)]  # the whole, and its present part

    def advance(self, units: float = 1) -> None:
        for task in self._tasks:
            self._progress.advance(task, units)

    def describe(self, text: str, part: float | None = None) -> None:
        for task in self._tasks[1:]:
            self._progress.remove_task(task)
        del self._tasks[1:]
        self._progress.update(self._tasks[0], description=text if part is None else self._text)
        if part is not None:
            self._tasks.append(self._progress.add_task(text, total=part))


class _LineBar:
    """For logs and pipes: a line where the work changes, and one with the ETA every ten seconds."""

    def __init__(self, text: str, total: float) -> None:
        self._text, self._total, self._done = text, total, 0.0
        self._part, self._begun = 0.0, 0.0  # units of what is being done, and those before it
        self._start = self._last = time.monotonic()
        self._print(text)

    def advance(self, units: float = 1) -> None:
        self._done += units
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_LINES or self._done <= 0:
            return
        self._last = now
        left = (now - self._start) * (self._total - self._done) / self._done
        part = f" ({(self._done - self._begun) / self._part:.0%})" if self._part else ""
        self._print(f"{self._text}{part}, {_clock(left)} left")

    def describe(self, text: str, part: float | None = None) -> None:
        self._part, self._begun = part or 0.0, self._done
        if text != self._text:
            self._text = text
            self._print(text)

    def _print(self, text: str) -> None:
        print(f"{self._done / self._total:4.0%} {text}", file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def bar(text: str, total: float, in_bytes: bool = False) -> Iterator[Bar]:
    """Shows progress on standard error until the block ends; bytes with their speed."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LineBar(text, max(total, 1))
        return
    counted: list[ProgressColumn] = [MofNCompleteColumn()]
    if in_bytes:
        counted = [DownloadColumn(), TransferSpeedColumn()]
    columns = [TextColumn("{task.description}"), BarColumn(), *counted, Elapsed()]
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        yield _TerminalBar(progress, text, total)


@contextmanager
def steps(text: str, in_bytes: bool = False) -> Iterator[Step]:
    """A bar for work that reports (done, total) itself, such as training or merging."""
    with ExitStack() as stack:
        shown: Bar | None = None  # begun when the total is known
        before = 0

        def step(done: int, total: int) -> None:
            nonlocal shown, before
            if shown is None:
                shown = stack.enter_context(bar(text, total, in_bytes))
            shown.advance(done - before)
            before = done

        yield step
