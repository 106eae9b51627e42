"""Answers requests with a model, in batches; every benchmark and every model goes through here.

Greedy decoding over any Hugging Face causal LM, single or composed. Rows are sorted by length,
padded on the left, and leave the batch at their own EOS or stop string, so that no row pays for
its neighbours. Log-likelihoods go through `composition.score_continuations`, which projects the
continuation's positions only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composition import score_continuations
from evaluation.benchmarks.contract import Generate, Output, Request, Score, Tag
from evaluation.errors import InputError
from evaluation.text import cut_at_stops, decode_completion, encode, encode_pair

Answers = list[tuple[int, Output]]


class Runtime(NamedTuple):
    """A model that is ready to answer."""

    model: Any  # a Hugging Face causal LM in evaluation mode
    tokenizer: Any
    eos_ids: frozenset[int]
    new_cache: Callable[[], Any]
    model_type: str
    max_positions: int | None

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)


@dataclass
class _Row:
    index: int
    prompt: list[int]
    request: Generate
    generated: list[int] = field(default_factory=list)
    seconds: float = 0.0
    text: str = ""
    ended: bool = False


def answer(
    runtime: Runtime, requests: Sequence[Request], batch_size: int
) -> Iterator[list[tuple[int, Output]]]:
    """Yields the outputs of one batch after the other as (index into `requests`, output).

    Raises:
        InputError: a prompt and its continuation are longer than the model takes.
    """
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
            yield from run(runtime, chosen, batch_size)


def _generate(
    runtime: Runtime, requests: Sequence[tuple[int, Generate]], batch_size: int
) -> Iterator[Answers]:
    rows = [
        _Row(index, encode(runtime.tokenizer, request.prompt, runtime.model_type), request)
        for index, request in requests
    ]
    _check_lengths(runtime, [(len(row.prompt), row.request.max_new_tokens) for row in rows])
    rows.sort(key=lambda row: -len(row.prompt))  # the longest first: what fits then, fits always
    for start in range(0, len(rows), batch_size):
        yield _generate_batch(runtime, rows[start : start + batch_size])


@torch.inference_mode()
def _generate_batch(runtime: Runtime, rows: list[_Row]) -> Answers:
    ids, mask = _pad([row.prompt for row in rows], left=True, device=runtime.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # (B, T)
    cache = runtime.new_cache()
    alive, done = list(rows), []
    while True:
        started = time.perf_counter()
        logits = runtime.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # (B, V)
        tokens = logits.argmax(-1)
        keep = []
        for place, (row, token) in enumerate(zip(alive, tokens.tolist(), strict=True)):
            _append(runtime, row, token)
            if not row.ended and len(row.generated) < row.request.max_new_tokens:
                keep.append(place)
        share = (time.perf_counter() - started) / len(alive)
        for row in alive:
            row.seconds += share
        if len(keep) < len(alive):
            kept = set(keep)
            done += [row for place, row in enumerate(alive) if place not in kept]
            if not keep:
                return [(row.index, _output(row)) for row in done]
            alive = [alive[place] for place in keep]
            chosen = torch.tensor(keep, device=runtime.device)
            cache.batch_select_indices(chosen)
            tokens, mask, positions = tokens[chosen], mask[chosen], positions[chosen]
        ids = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=-1)
        positions = positions[:, -1:] + 1


def _append(runtime: Runtime, row: _Row, token: int) -> None:
    """Adds a token to a row and settles whether the row has ended, and with which text."""
    row.generated.append(token)
    if token in runtime.eos_ids:
        row.text = decode_completion(runtime.tokenizer, row.prompt, row.generated[:-1])
        row.ended = True
        return
    last = len(row.generated) >= row.request.max_new_tokens
    if not last and not _stop_in_tail(runtime, row):
        return
    whole = decode_completion(runtime.tokenizer, row.prompt, row.generated)
    row.text, row.ended = cut_at_stops(whole, row.request.stops)


def _stop_in_tail(runtime: Runtime, row: _Row) -> bool:
    """A stop string of n bytes is spread over at most n tokens: only the tail must be decoded."""
    stops = row.request.stops
    if not stops:
        return False
    window = max(len(stop.encode()) for stop in stops) + 4
    before = [*row.prompt, *row.generated[:-window]]
    tail = decode_completion(runtime.tokenizer, before, row.generated[-window:])
    return any(stop in tail for stop in stops)


def _output(row: _Row) -> Output:
    return Output(
        text=row.text,
        tokens=len(row.generated),
        prompt_tokens=len(row.prompt),
        truncated=not row.ended,
        seconds=row.seconds,
    )


def _score(
    runtime: Runtime, requests: Sequence[tuple[int, Score]], batch_size: int
) -> Iterator[Answers]:
    pairs = [
        (index, *encode_pair(runtime.tokenizer, request, runtime.model_type))
        for index, request in requests
    ]
    _check_lengths(runtime, [(len(context), len(rest)) for _, context, rest in pairs])
    pairs.sort(key=lambda pair: -len(pair[1]) - len(pair[2]))
    for start in range(0, len(pairs), batch_size):
        yield _score_batch(runtime, pairs[start : start + batch_size])


@torch.inference_mode()
def _score_batch(runtime: Runtime, batch: Sequence[tuple[int, list[int], list[int]]]) -> Answers:
    started = time.perf_counter()
    ids, mask = _pad(
        [context + rest for _, context, rest in batch], left=False, device=runtime.device
    )
    wanted = torch.zeros_like(mask)
    for place, (_, context, rest) in enumerate(batch):
        wanted[place, len(context) : len(context) + len(rest)] = 1
    logprobs, greedy = score_continuations(runtime.model, ids, mask, wanted)  # (B, T) each
    sums = torch.where(wanted == 1, logprobs.double(), 0.0).sum(-1).tolist()
    all_greedy = (greedy | (wanted == 0)).all(-1).tolist()
    share = (time.perf_counter() - started) / len(batch)
    return [
        (
            index,
            Output(
                tokens=len(rest),
                prompt_tokens=len(context),
                logprob=float(total),
                is_greedy=bool(is_greedy),
                seconds=share,
            ),
        )
        for (index, context, rest), total, is_greedy in zip(batch, sums, all_greedy, strict=True)
    ]


def _tag(
    runtime: Runtime, requests: Sequence[tuple[int, Tag]], batch_size: int
) -> Iterator[Answers]:
    rows = [
        (index, encode(runtime.tokenizer, request.text, runtime.model_type))
        for index, request in requests
    ]
    _check_lengths(runtime, [(len(ids), 0) for _, ids in rows])
    for start in range(0, len(rows), batch_size):
        yield _tag_batch(runtime, rows[start : start + batch_size])


@torch.inference_mode()
def _tag_batch(runtime: Runtime, batch: Sequence[tuple[int, list[int]]]) -> Answers:
    started = time.perf_counter()
    ids, mask = _pad([row for _, row in batch], left=False, device=runtime.device)
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
            ),
        )
        for place, (index, row) in enumerate(batch)
    ]


def _pad(rows: Sequence[Sequence[int]], left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, (B, T) each; padding is id 0, which the mask hides."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for place, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(0, len(row))
        ids[place, span] = torch.tensor(row, dtype=torch.long)
        mask[place, span] = 1
    return ids.to(device), mask.to(device)


def _check_lengths(runtime: Runtime, lengths: Sequence[tuple[int, int]]) -> None:
    empty = sum(1 for prompt, _ in lengths if prompt == 0)
    if empty:
        raise InputError(f"{empty} prompts have no tokens at all; each needs at least one")
    limit = runtime.max_positions
    if limit is None:
        return
    long = [(prompt, more) for prompt, more in lengths if prompt + more > limit]
    if long:
        prompt, more = max(long, key=sum)
        raise InputError(
            f"{len(long)} of {len(lengths)} prompts do not fit: the longest has {prompt} "
            f"tokens and {more} more may follow, {prompt + more} in all, where the model takes "
            f"{limit}. Use fewer shots (num_fewshot), a smaller generation.max_new_tokens, or "
            "another model; prompts are never cut"
        )
