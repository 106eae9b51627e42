"""What a benchmark is: items with requests, and a score for the outputs.

A benchmark never sees a model. It states requests, the engine (`evaluation.engine`) answers
them, and the benchmark scores the answers; so every model in a table runs under one protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Form = Literal["causal", "aligned"]


@dataclass(frozen=True)
class Generate:
    """Greedy continuation of a prompt, ended by a stop string (cut off), EOS or the limit."""

    prompt: str
    stops: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Score:
    """Log-probability of a continuation given its context.

    With `separate`, context and continuation are tokenised apart and joined; else the boundary
    is found as lm-eval finds it: white space at the context's end, line breaks too, moves to the
    continuation, both are encoded together, and the continuation is what exceeds the encoded
    context.
    """

    context: str
    continuation: str
    separate: bool = False
    max_tokens: int | None = None  # the continuation is cut to its first max_tokens tokens


@dataclass(frozen=True)
class Tag:
    """The most probable token at every position of a text (position-aligned models)."""

    text: str


Request = Generate | Score | Tag


class Output(NamedTuple):
    """The engine's answer to one request; what a kind of request has no use for stays empty."""

    text: str = ""
    tokens: int = 0  # generated, scored or tagged tokens
    prompt_tokens: int = 0
    truncated: bool = False  # Generate only: the limit was reached before a stop
    logprob: float = 0.0  # Score only: nats, summed over the continuation
    is_greedy: bool = False  # Score only: the continuation is the greedy one
    seconds: float = 0.0  # its share of the batch's wall time
    batch_size: int = 1  # rows that were computed at once, at most


@dataclass(frozen=True)
class Item:
    """One item: its stable id, its requests, and whatever the score needs (`doc`)."""

    id: str
    requests: tuple[Request, ...]
    doc: Any = None


class Benchmark(Protocol):
    """A loaded benchmark."""

    version: str
    """What determines scores beside model and prompt: data digest, harness and grader versions."""

    def items(self, limit: int | None) -> Sequence[Item]:
        """The first `limit` items (all of them for None), in a fixed order."""
        ...

    def score(
        self, items: Sequence[Item], outputs: Sequence[Sequence[Output]]
    ) -> list[dict[str, float]]:
        """One dict of metrics an item; it holds the benchmark's primary metric."""
        ...


class Settings(NamedTuple):
    """What the experiment and the command line say to every benchmark."""

    data_dir: Path | None = None
    max_new_tokens: int = 512
    seed: int = 0
    unsafe_execution: bool = False
    chat: bool = False  # prompts become user messages; what follows them begins an answer
    options: Mapping[str, Any] = {}  # what the experiment says to this one, e.g. num_fewshot


class BenchmarkEntry(NamedTuple):
    """A row of the registry: what can be known before anything is loaded."""

    summary: str
    metric: str  # name of the primary metric
    binary: bool  # the metric is 0 or 1 an item: an accuracy
    higher_is_better: bool
    form: Form  # which form of the models it runs on; "aligned" exists for letters only
    faults: Callable[[Settings], list[str]]  # sentences on missing data, missing sandbox, ...
    open: Callable[[Settings], Benchmark]
