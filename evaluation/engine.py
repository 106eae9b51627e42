"""Answers requests with a model, in batches; every benchmark and every model goes through here.

Completions are decoded greedily (`evaluation.decoding`). Log-likelihoods go through
`composition.score_continuations`, which projects the continuation's positions only. Both compute
what their prompts share once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from composition import Prefix, fill_prefix, score_continuations
from evaluation.benchmarks.contract import Generate, Output, Request, Score, Tag
from evaluation.decoding import SHARED, Row, by_beginning, common_beginning, decode, smaller
from evaluation.runtime import Runtime, check_lengths, fitting_batch, is_out_of_memory, pad
from evaluation.served import Ready, Served, answer_served
from evaluation.text import decode_completion, encode, encode_pair

Row_ = TypeVar("Row_", bound=tuple[Any, ...])
Answers = list[tuple[int, Output]]
Done = Collection[int]

SCORED = 4096
"""Tokens that are scored at once where the batch size is left to the engine."""


def answer(
    runtime: Ready,
    requests: Sequence[Request],
    batch_size: int | None,
    done: Collection[int] = frozenset(),
) -> Iterator[list[tuple[int, Output]]]:
    """Yields outputs as they come, as (index into `requests`, output).

    Args:
        batch_size: rows at a time; None for as many as fit into memory. Where memory runs out,
            half as many go on.
        done: places of requests that need no answer any more. The scored batches are those of all
            requests, so that a number does not depend on where a run was interrupted; a batch
            that is not done as a whole is answered as a whole.

    Raises:
        InputError: a prompt and its continuation are longer than the model takes.
    """
    if isinstance(runtime, Served):
        yield from answer_served(runtime, requests, batch_size, done)
        return
    kinds: dict[type[Request], Callable[..., Iterator[Answers]]] = {
        Generate: _generate,
        Score: _score,
        Tag: _tag,
    }
    for kind, run in kinds.items():
        chosen = [
            (index, request) for index, request in enumerate(requests) if isinstance(request, kind)
        ]
        if chosen:
            yield from run(runtime, chosen, batch_size, done)


def _generate(
    runtime: Runtime, requests: Sequence[tuple[int, Generate]], batch_size: int | None, done: Done
) -> Iterator[Answers]:
    rows = [
        Row(
            index,
            encode(runtime.tokenizer, request.prompt, runtime.model_type, runtime.chat),
            request,
        )
        for index, request in requests
    ]
    check_lengths(
        runtime.max_positions, [(len(row.prompt), row.request.max_new_tokens) for row in rows]
    )
    longest = max(len(row.prompt) + row.request.max_new_tokens for row in rows)
    size = batch_size or fitting_batch(runtime, longest)
    for finished in decode(runtime, rows, size, done):
        yield [(row.index, row.output()) for row in finished]


def _score(
    runtime: Runtime, requests: Sequence[tuple[int, Score]], batch_size: int | None, done: Done
) -> Iterator[Answers]:
    pairs = [
        Pair(index, *encode_pair(runtime.tokenizer, request, runtime.model_type, runtime.chat))
        for index, request in requests
    ]
    yield from score_tokens(runtime, pairs, batch_size, done)


def score_tokens(
    runtime: Runtime, pairs: Sequence[Pair], batch_size: int | None, done: Done = frozenset()
) -> Iterator[Answers]:
    """Yields the log-likelihood of every pair's rest, as `answer` does for texts.

    Raises:
        InputError: a pair is longer than the model takes; its last token is not fed to it.
    """
    check_lengths(
        runtime.max_positions, [(len(pair.context), len(pair.rest) - 1) for pair in pairs]
    )
    for places in by_beginning([pair.context for pair in pairs]):
        group = [pairs[place] for place in places]
        group.sort(key=lambda pair: -len(pair.context) - len(pair.rest))
        longest = len(group[0].context) + len(group[0].rest)
        if all(pair.place in done for pair in group):
            continue
        prefix = _shared_context(runtime, group, longest)
        skipped = 0 if prefix is None else prefix.length
        size = batch_size or max(1, SCORED // (longest - skipped))
        yield from in_batches(group, size, done, partial(_score_batch, runtime, prefix))


class Pair(NamedTuple):
    """Tokens to score, and those before them."""

    place: int  # of the request; what the answer is called by
    context: list[int]
    rest: list[int]


def _shared_context(runtime: Runtime, pairs: Sequence[Pair], reach: int) -> Prefix | None:
    """What all contexts begin with, less a token of each: something must predict its rest."""
    length = common_beginning([pair.context for pair in pairs])
    if len(pairs) < 2 or length < SHARED:
        return None
    return fill_prefix(runtime.model, pairs[0].context[:length], runtime.new_cache(), reach)


@torch.inference_mode()
def _score_batch(runtime: Runtime, prefix: Prefix | None, batch: Sequence[Pair]) -> Answers:
    started = time.perf_counter()
    skipped = 0 if prefix is None else prefix.length
    tokens = [(pair.context + pair.rest)[skipped:] for pair in batch]
    ids, mask = pad(tokens, left=False, device=runtime.device)
    wanted = torch.zeros_like(mask)
    for place, pair in enumerate(batch):
        first = len(pair.context) - skipped
        wanted[place, first : first + len(pair.rest)] = 1
    logprobs, greedy = score_continuations(runtime.model, ids, mask, wanted, prefix=prefix)
    sums = torch.where(wanted == 1, logprobs.double(), 0.0).sum(-1).tolist()
    all_greedy = (greedy | (wanted == 0)).all(-1).tolist()
    share = (time.perf_counter() - started) / len(batch)
    return [
        (
            pair.place,
            Output(
                tokens=len(pair.rest),
                prompt_tokens=len(pair.context),
                logprob=float(total),
                is_greedy=bool(is_greedy),
                seconds=share,
                batch_size=len(batch),
            ),
        )
        for pair, total, is_greedy in zip(batch, sums, all_greedy, strict=True)
    ]


def in_batches(
    rows: Sequence[Row_], size: int, done: Done, run: Callable[[Sequence[Row_]], Answers]
) -> Iterator[Answers]:
    """Runs rows batch by batch; where memory runs out the same rows go again in half as many."""
    start = 0
    while start < len(rows):
        batch = rows[start : start + size]
        try:
            if not all(row[0] in done for row in batch):
                yield run(batch)
            start += size
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = smaller(size, error)


def _tag(
    runtime: Runtime, requests: Sequence[tuple[int, Tag]], batch_size: int | None, done: Done
) -> Iterator[Answers]:
    rows = [
        (index, encode(runtime.tokenizer, request.text, runtime.model_type))
        for index, request in requests
    ]
    check_lengths(runtime.max_positions, [(len(ids), 0) for _, ids in rows])
    size = batch_size or fitting_batch(runtime, max(len(ids) for _, ids in rows))
    yield from in_batches(rows, size, done, partial(_tag_batch, runtime))


@torch.inference_mode()
def _tag_batch(runtime: Runtime, batch: Sequence[tuple[int, list[int]]]) -> Answers:
    started = time.perf_counter()
    ids, mask = pad([row for _, row in batch], left=False, device=runtime.device)
    tags = runtime.model(input_ids=ids, attention_mask=mask).logits.argmax(-1)  # (B, T)
    share = (time.perf_counter() - started) / len(batch)
    return [
        (
            index,
            Output(
                text=decode_completion(runtime.tokenizer, [], tags[place, : len(row)].tolist()),
                tokens=len(row),
                prompt_tokens=len(row),
                seconds=share,
                batch_size=len(batch),
            ),
        )
        for place, (index, row) in enumerate(batch)
    ]
