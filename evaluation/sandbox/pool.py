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
from typing import Self, TypeVar

from evaluation.sandbox.process import Sandbox

Work = TypeVar("Work")
Result = TypeVar("Result")


class Sandboxes:
    """Threads with a warm sandbox each, until it is closed; use it as a context manager."""

    def __init__(self, workers: int, unsafe: bool = False) -> None:
        self._workers, self._unsafe = max(1, workers), unsafe
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="sandbox")
        self._mine = threading.local()
        self._all: list[Sandbox] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads and their sandboxes."""
        self._threads.shutdown()
        for sandbox in self._all:
            sandbox.close()
        self._all.clear()

    def map(
        self,
        function: Callable[[Work, Sandbox], Result],
        work: Sequence[Work],
        step: Callable[[], None],
        seconds: Callable[[Work], float] = lambda _: 0.0,
    ) -> list[Result]:
        """`function` of every piece of work, in order.

        Args:
            step: called after each.
            seconds: how long a piece may take; the longest are begun first, so that none is left
                alone at the end.
        """
        results: dict[int, Result] = {}
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in sorted(range(len(work)), key=lambda place: -seconds(work[place])):
            waiting.put(place)

        def take() -> None:
            with suppress(queue.Empty):
                while True:
                    place = waiting.get_nowait()
                    results[place] = function(work[place], self._sandbox())
                    step()

        running = [self._threads.submit(take) for _ in range(min(self._workers, len(work)))]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:  # an interrupt too: end what runs, begin nothing new
            with suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            for sandbox in list(self._all):
                sandbox.kill()
            raise
        return [results[place] for place in range(len(work))]

    def _sandbox(self) -> Sandbox:
        """This thread's own, since bubblewrap ends with the thread that started it."""
        if not hasattr(self._mine, "sandbox"):
            self._mine.sandbox = Sandbox(self._unsafe)
            self._all.append(self._mine.sandbox)
        own: Sandbox = self._mine.sandbox
        return own


def counter(total: int, progress: Callable[[int, int], None] | None) -> Callable[[], None]:
    """A step that threads may take: it tells `progress` (done, total)."""
    lock, done = threading.Lock(), itertools.count(1)

    def step() -> None:
        with lock:
            if progress is not None:
                progress(next(done), total)

    return step
