"""Open items cut into shards, and which worker takes which.

    cell      one model on one benchmark
    shard     items of a cell that one worker answers in one go
    queue     a worker goes on with the model it holds; where nothing of it is left, it goes to the
              model with the most work for each worker, itself counted

Nothing here knows what a worker is or how long a shard takes: `evaluation.workers` runs the shards
on Ray, `benchmarks/scaling.py` simulates the same queue.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evaluation.benchmarks.contract import Generate, Item, Request, Score

SHARD = 64
"""Items to be generated: few enough to share evenly and to redo, many enough to fill batches."""
BEGINNING = 100
"""Characters that prompts have in common where the engine computes their beginning once."""


class Asked(NamedTuple):
    """Items that the engine is asked for together, their keys, and which of these are done."""

    items: Sequence[Item]
    keys: Sequence[str]
    done: Collection[str]

    def requests(self) -> list[Request]:
        """Of all items, also those that are done: they can belong to the others' batches."""
        return [request for item in self.items for request in item.requests]

    def owners(self) -> list[int]:
        """The place of each request's item."""
        return [place for place, item in enumerate(self.items) for _ in item.requests]

    def settled(self) -> set[int]:
        """Places of requests that need no answer any more."""
        return {n for n, place in enumerate(self.owners()) if self.keys[place] in self.done}


@dataclass
class Shard:
    """Items of one cell that one worker answers in one go."""

    model: Hashable  # what must be loaded
    cell: int
    places: list[int]  # of the items in the cell, ascending
    work: float  # an estimate, to compare with others: items x models that a step runs
    deaths: int = 0  # of its workers, since it last had an answer


def cut(items: Sequence[Item], open_places: Sequence[int], size: int) -> list[list[int]]:
    """The places of a cell's items in shards; the same ones for any number of workers.

    Items to be generated: those that are open, common beginnings together, long prompts first,
    because rows of like length fill a batch with little padding. What is only scored or tagged is
    one shard: it is quick, and its last digits depend on the batches, which are then those of a run
    without shards.
    """
    if not open_places:
        return []
    if not any(isinstance(request, Generate) for item in items for request in item.requests):
        return [list(range(len(items)))]
    prompts = {place: _prompt(items[place]) for place in open_places}
    sharing = Counter(prompt[:BEGINNING] for prompt in prompts.values())
    first: dict[str, int] = {}

    def group(place: int) -> int:
        """Those with the same beginning; what shares with none is one group."""
        beginning = prompts[place][:BEGINNING]
        return first.setdefault(beginning if sharing[beginning] > 1 else "", place)

    order = sorted(open_places, key=lambda place: (group(place), -len(prompts[place]), place))
    return [sorted(order[start : start + size]) for start in range(0, len(order), size)]


def _prompt(item: Item) -> str:
    request = item.requests[0]
    if isinstance(request, Generate):
        return request.prompt
    return request.context if isinstance(request, Score) else request.text


class Queue:
    """The shards that wait for a worker."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._waiting: dict[Hashable, deque[Shard]] = {}
        for shard in shards:
            self._waiting.setdefault(shard.model, deque()).append(shard)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def take(self, holding: Hashable | None, others: Iterable[Hashable]) -> Shard | None:
        """The next shard for a worker; None where none waits.

        Args:
            holding: the model that it has loaded.
            others: the models that other workers are at, one entry a worker.
        """
        waiting = {model: shards for model, shards in self._waiting.items() if shards}
        if not waiting:
            return None
        at_work = Counter(others)
        model = holding
        if model not in waiting:
            model = max(
                waiting, key=lambda m: sum(shard.work for shard in waiting[m]) / (1 + at_work[m])
            )
        return waiting[model].popleft()

    def put_back(self, shard: Shard) -> None:
        """A shard whose worker is lost goes to the front."""
        self._waiting[shard.model].appendleft(shard)
