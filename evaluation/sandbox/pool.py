"""Work shared among threads that have a sandbox each.

Threads, since they wait: the work is done in the sandboxes' processes.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import TypeVar

from evaluation.sandbox.process import Sandbox

Work = TypeVar("Work")
Result = TypeVar("Result")


def in_sandboxes(
    function: Callable[[Work, Sandbox], Result],
    work: Sequence[Work],
    workers: int,
    unsafe: bool,
    step: Callable[[], None],
    seconds: Callable[[Work], float] = lambda _: 0.0,
) -> list[Result]:
    """`function` of every piece of work, in order, by threads with a sandbox each.

    Args:
        seconds: how long a piece may take; the longest are begun first, so that none is left
            alone at the end.
    """
    results: dict[int, Result] = {}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in sorted(range(len(work)), key=lambda place: -seconds(work[place])):
        waiting.put(place)
    sandboxes = [Sandbox(unsafe) for _ in range(max(1, min(workers, len(work))))]

    def take(sandbox: Sandbox) -> None:
        with sandbox, suppress(queue.Empty):
            while True:
                place = waiting.get_nowait()
                results[place] = function(work[place], sandbox)
                step()

    with ThreadPoolExecutor(len(sandboxes)) as pool:
        try:
            for future in as_completed([pool.submit(take, sandbox) for sandbox in sandboxes]):
                future.result()
        except BaseException:  # an interrupt too: end what runs, begin nothing new
            with suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            for sandbox in sandboxes:
                sandbox.kill()
            raise
    return [results[place] for place in range(len(work))]


def counter(total: int, progress: Callable[[int, int], None] | None) -> Callable[[], None]:
    """A step that threads may take: it tells `progress` (done, total)."""
    lock, done = threading.Lock(), itertools.count(1)

    def step() -> None:
        with lock:
            if progress is not None:
                progress(next(done), total)

    return step
