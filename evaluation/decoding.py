"""Greedy decoding of many prompts in one batch that is refilled as rows end.

    beginning   what all prompts share goes through the model once (`composition.prefix`)
    admit       the longest waiting prompts join the batch where rows have left it
    step        one token for every row; a row leaves at its own EOS, stop string or limit
    round       where there is a drafter, in place of a step: it guesses, the composition judges
                (`composition.speculation`); the same tokens

A row's tokens are those it would get alone: its padding is masked and its positions are its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from composition import (
    Acceptance,
    Prefix,
    behind,
    best_gamma,
    can_join,
    fill_prefix,
    join_rows,
    new_cache,
    speculative_round,
    trim_left,
)
from evaluation.benchmarks.contract import Generate, Output
from evaluation.errors import InputError
from evaluation.runtime import Runtime, is_out_of_memory, pad
from evaluation.text import cut_at_stops, decode_completion, decode_ids

log = logging.getLogger(__name__)

SHARED = 32
"""Tokens from which on a common beginning is worth its own pass."""
WORTH_SHARING = 8
"""Prompts with one beginning from which on they get batches of their own."""
PREFILL = 2048
"""Tokens of prompts that go through a model at once, all rows and components together."""
REFILL = 4
"""New rows join when a batch's fourth is free, or all that waits fits."""


@dataclass
class Row:
    """A prompt on its way."""

    index: int
    prompt: list[int]
    request: Generate
    generated: list[int] = field(default_factory=list)
    seconds: float = 0.0
    text: str = ""
    ended: bool = False
    batch_size: int = 1  # of the batch that it ends in

    def restart(self) -> None:
        """Forgets what was generated."""
        self.generated, self.text, self.ended = [], "", False

    def output(self) -> Output:
        """What the engine answers."""
        return Output(
            text=self.text,
            tokens=len(self.generated),
            prompt_tokens=len(self.prompt),
            truncated=not self.ended,
            seconds=self.seconds,
            batch_size=self.batch_size,
        )


def decode(
    runtime: Runtime, rows: Sequence[Row], batch_size: int, done: Collection[int] = frozenset()
) -> Iterator[list[Row]]:
    """Yields rows as they finish, those of one beginning after those of another.

    Args:
        done: indices of rows that are not decoded; they only tell what all have in common.

    Raises:
        InputError: one row alone does not fit into memory.
    """
    for places in by_beginning([row.prompt for row in rows]):
        group = [rows[place] for place in places]
        waiting = [row for row in group if row.index not in done]
        waiting.sort(key=lambda row: -len(row.prompt))  # what fits then, fits always
        prefix, guessing, seconds = _beginning(runtime, group) if waiting else (None, None, 0.0)
        for row in waiting:
            row.seconds += seconds / len(waiting)
        size = batch_size
        while waiting:
            batch = _Batch(runtime, prefix, guessing, size)
            try:
                for ended in batch.run(waiting):
                    finished = {row.index for row in ended}
                    waiting = [row for row in waiting if row.index not in finished]
                    yield ended
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                size = smaller(size, error)
                for row in waiting:
                    row.restart()


def by_beginning(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Places of the prompts that are answered together: those with a beginning in common, and all
    others, of which too few have the same to be worth a batch of their own."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt[:SHARED]), []).append(place)
    large = [places for places in groups.values() if len(places) >= WORTH_SHARING]
    others = [place for p in groups.values() if len(p) < WORTH_SHARING for place in p]
    return [*large, others] if others else large


def common_beginning(prompts: Sequence[list[int]]) -> int:
    """How many tokens all prompts share, less one that each must have of its own."""
    first, last = min(prompts), max(prompts)  # what these two share, all share
    most = min(map(len, prompts)) - 1
    for place in range(most):
        if first[place] != last[place]:
            return place
    return max(most, 0)


def _beginning(runtime: Runtime, rows: Sequence[Row]) -> tuple[Prefix | None, Prefix | None, float]:
    """What all rows share, in the model and in its drafter, and the seconds that took."""
    length = common_beginning([row.prompt for row in rows])
    if len(rows) < 2 or length < SHARED:
        return None, None, 0.0
    started = time.perf_counter()
    reach = max(len(row.prompt) + row.request.max_new_tokens for row in rows)
    shared, drafter = rows[0].prompt[:length], runtime.drafter
    prefix = fill_prefix(runtime.model, shared, runtime.new_cache(), reach)
    guessing = None
    if prefix is not None and drafter is not None:
        guessing = fill_prefix(drafter, shared, new_cache(drafter.config.get_text_config()), reach)
    return prefix, guessing, time.perf_counter() - started


def smaller(size: int, error: BaseException) -> int:
    """Half the rows, after memory ran out.

    Raises:
        InputError: there was only one.
    """
    if size == 1:
        raise InputError(
            "one prompt alone does not fit into memory; use a smaller generation.max_new_tokens, "
            "fewer shots, or generation.dtype: bfloat16"
        ) from error
    log.warning("out of memory at batch size %d; going on with %d", size, size // 2)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return size // 2


class _Batch:
    """The rows that are being decoded, their caches and mask.

    There is a second cache, the drafter's, where one guesses.
    """

    def __init__(
        self, runtime: Runtime, prefix: Prefix | None, guessing: Prefix | None, size: int
    ) -> None:
        self._runtime, self._size = runtime, size
        self._skipped = 0 if prefix is None else prefix.length
        self._forwards = [partial(self._forward, runtime.model, prefix)]
        self._empty: list[Callable[[], Any]] = [runtime.new_cache]
        drafter = runtime.drafter
        if drafter is not None and (guessing is None) == (prefix is None):
            empty = partial(new_cache, drafter.config.get_text_config())
            if _can_go_back(runtime.new_cache()) and _can_go_back(empty()):
                self._forwards.append(partial(self._forward, drafter, guessing))
                self._empty.append(empty)
        self._acceptance = Acceptance()
        self._alive: list[Row] = []
        self._caches: list[Any] = []
        self._mask = self._next = torch.empty(0)  # (rows, T), and the tokens to feed (rows,)

    @torch.inference_mode()
    def run(self, waiting: Sequence[Row]) -> Iterator[list[Row]]:
        queue = list(waiting)
        done: list[Row] = []
        while queue or self._alive:
            free = self._size - len(self._alive)
            if queue and (not self._alive or self._may_join(free, len(queue))):
                if done:
                    yield done
                    done = []
                taken = self._admission(queue, free)
                queue = queue[len(taken) :]
                done += self._admit(taken)
            else:
                done += self._step()
        if done:
            yield done

    def _may_join(self, free: int, waiting: int) -> bool:
        enough = free * REFILL >= self._size or free >= waiting
        return free > 0 and enough and all(can_join(cache) for cache in self._caches)

    def _admission(self, queue: Sequence[Row], free: int) -> list[Row]:
        """As many as are free and go through the model at once; the first is the longest."""
        width = len(queue[0].prompt) - self._skipped
        rows = PREFILL // (width * self._runtime.components)
        return list(queue[: max(1, min(free, rows))])

    def _admit(self, rows: list[Row]) -> list[Row]:
        started = time.perf_counter()
        prompts = [row.prompt[self._skipped :] for row in rows]
        ids, mask = pad(prompts, left=True, device=self._runtime.device)
        caches = [empty() for empty in self._empty]
        tokens, *_ = (
            forward(ids, mask, cache, logits_to_keep=1)[:, -1].argmax(-1)
            for forward, cache in zip(self._forwards, caches, strict=True)
        )
        seconds = time.perf_counter() - started
        done = self._take(rows, tokens[:, None].tolist(), seconds)
        staying = [place for place, row in enumerate(rows) if not _is_done(row)]
        if not staying:
            return done
        mask, tokens = _selected(caches, mask, tokens, staying, len(rows))
        rows = [rows[place] for place in staying]
        if not self._alive:
            self._alive, self._caches, self._mask, self._next = rows, caches, mask, tokens
            return done
        empty = int((self._mask.cumsum(-1) == 0).sum(-1).min())
        for cache, more in zip(self._caches, caches, strict=True):
            trim_left(cache, empty)
            join_rows(cache, more)
        self._mask = _stacked([self._mask[:, empty:], mask])
        self._next = torch.cat([self._next, tokens])
        self._alive += rows
        return done

    def _step(self) -> list[Row]:
        started = time.perf_counter()
        if len(self._forwards) == 2:
            taken, tokens = self._round()
        else:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._alive), 1)], dim=-1)
            logits = self._forwards[0](self._next[:, None], self._mask, self._caches[0])
            tokens = logits[:, -1].argmax(-1)
            taken = tokens[:, None].tolist()
        done = self._take(self._alive, taken, time.perf_counter() - started)
        staying = [place for place, row in enumerate(self._alive) if not _is_done(row)]
        self._mask, self._next = _selected(
            self._caches, self._mask, tokens, staying, len(self._alive)
        )
        self._alive = [self._alive[place] for place in staying]
        return done

    def _round(self) -> tuple[list[list[int]], Tensor]:
        """Some tokens for every row, and the last of each."""
        left = max(row.request.max_new_tokens - len(row.generated) for row in self._alive)
        size = min(best_gamma(self._acceptance.rate, self._runtime.components), left)
        judge, draft = self._forwards
        found = speculative_round((judge, draft), self._caches, self._next, self._mask, size)
        self._acceptance = self._acceptance.after(found)
        self._mask = found.mask
        return found.tokens, found.pending

    def _forward(
        self,
        model: Any,
        prefix: Prefix | None,
        ids: Tensor,
        mask: Tensor,
        cache: Any,
        **options: Any,
    ) -> Tensor:
        """Logits of the tokens that follow, (rows, T, V)."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :] + self._skipped
        with behind(model, prefix):
            logits: Tensor = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                **options,
            ).logits
        return logits

    def _take(
        self, rows: Sequence[Row], taken: Sequence[Sequence[int]], seconds: float
    ) -> list[Row]:
        for row, tokens in zip(rows, taken, strict=True):
            row.seconds += seconds / len(rows)
            row.batch_size = self._size
            for token in tokens:
                _append(self._runtime, row, token)
                if _is_done(row):
                    break
        return [row for row in rows if _is_done(row)]


def _can_go_back(cache: Any) -> bool:
    """Can wrong guesses be taken back? Not where a layer forgets what leaves its window."""
    windows = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return can_join(cache) and not windows


def _selected(
    caches: Sequence[Any], mask: Tensor, tokens: Tensor, staying: Sequence[int], rows: int
) -> tuple[Tensor, Tensor]:
    """Keeps the rows that stay, in the caches too."""
    if len(staying) == rows or not staying:
        return mask[: len(staying)], tokens[: len(staying)]
    chosen = torch.tensor(staying, device=mask.device)
    for cache in caches:
        cache.batch_select_indices(chosen)
    return mask[chosen], tokens[chosen]


def _stacked(masks: Sequence[Tensor]) -> Tensor:
    width = max(mask.shape[1] for mask in masks)
    return torch.cat([torch.nn.functional.pad(m, (width - m.shape[1], 0)) for m in masks])


def _is_done(row: Row) -> bool:
    return row.ended or len(row.generated) >= row.request.max_new_tokens


def _append(runtime: Runtime, row: Row, token: int) -> None:
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


def _stop_in_tail(runtime: Runtime, row: Row) -> bool:
    """A stop string of n bytes is spread over at most n tokens: only the tail must be decoded."""
    stops = row.request.stops
    if not stops:
        return False
    window = max(len(stop.encode()) for stop in stops) + 4
    tail = [*row.prompt[-4:], *row.generated][-window:]  # a stop in the prompt costs a look more
    text = decode_ids(runtime.tokenizer, tail)
    return any(stop in text for stop in stops)
