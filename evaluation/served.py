"""A base, an expert or a merge served by vLLM (`generation.engine: vllm`), for GPUs.

The protocol is the engine's own: the same ids of prompts, greedy, the same ends and stop strings,
texts decoded and cut by the same functions. What differs is arithmetic: vLLM batches as it likes,
so that numbers may differ in their last digits between runs. Compositions, which vLLM cannot
run, stay with transformers. `vllm` is imported only here, and only when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.benchmarks.contract import Generate, Output, Request, Score, Tag
from evaluation.errors import InputError
from evaluation.extras import require
from evaluation.runtime import Runtime, check_lengths
from evaluation.text import Chat, cut_at_stops, decode_completion, encode, encode_pair

AT_ONCE = 512
"""Requests that are handed over at once; what an interrupted run may have to repeat."""


class Served(NamedTuple):
    """A model in vLLM that is ready to answer."""

    llm: Any  # vllm.LLM
    tokenizer: Any
    eos_ids: frozenset[int]
    model_type: str
    max_positions: int | None
    chat: Chat | None = None


Ready = Runtime | Served
"""Whatever answers requests."""


class _Prepared(NamedTuple):
    """A request in ids: the completion's prompt, or context and rest of a text to score."""

    place: int
    request: Generate | Score
    prompt: list[int]
    rest: list[int]


def start(folder: Path, tokenizer: Path, dtype: str, seed: int, options: Mapping[str, Any]) -> Any:
    """vLLM with the checkpoint in `folder`.

    Args:
        options: what vLLM is told beside, such as `gpu_memory_utilization`.

    Raises:
        InputError: vLLM is missing or refuses the model.
    """
    vllm = require("vllm", "generation.engine")
    try:
        return vllm.LLM(
            model=str(folder),
            tokenizer=str(tokenizer),
            dtype=dtype,
            seed=seed,
            generation_config="vllm",  # the checkpoint's own would add penalties and temperatures
            enable_prefix_caching=True,
            **options,
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:600]
        raise InputError(
            f"generation.engine: vLLM cannot serve {folder} ({reason}). A smaller "
            "generation.vllm.max_model_len or another gpu_memory_utilization may help; "
            "engine: transformers runs every model"
        ) from None


def answer_served(
    served: Served,
    requests: Sequence[Request],
    batch_size: int | None,
    done: Collection[int] = frozenset(),
) -> Iterator[list[tuple[int, Output]]]:
    """Yields outputs as `evaluation.engine.answer` does; `batch_size` requests at a time.

    Raises:
        InputError: a request is longer than the model takes, or asks for tags.
    """
    prepared = [_prepare(served, place, request) for place, request in enumerate(requests)]
    lengths = [(len(one.prompt), _most_new(one)) for one in prepared]
    check_lengths(served.max_positions, lengths)
    left = [one for one in prepared if one.place not in done]
    size = batch_size or AT_ONCE
    for first in range(0, len(left), size):
        yield _answer(served, left[first : first + size])


def _prepare(served: Served, place: int, request: Request) -> _Prepared:
    if isinstance(request, Tag):
        raise InputError("vLLM has no most probable token at every position; use transformers")
    if isinstance(request, Score):
        pair = encode_pair(served.tokenizer, request, served.model_type, served.chat)
        return _Prepared(place, request, *pair)
    ids = encode(served.tokenizer, request.prompt, served.model_type, served.chat)
    return _Prepared(place, request, ids, [])


def _most_new(one: _Prepared) -> int:
    """Tokens behind the prompt; vLLM always makes one."""
    new = one.request.max_new_tokens if isinstance(one.request, Generate) else 1
    return len(one.rest) + new


def _answer(served: Served, batch: Sequence[_Prepared]) -> list[tuple[int, Output]]:
    vllm = require("vllm", "generation.engine")
    started = time.perf_counter()
    found = served.llm.generate(
        [vllm.TokensPrompt(prompt_token_ids=[*one.prompt, *one.rest]) for one in batch],
        [vllm.SamplingParams(**_sampling(served, one)) for one in batch],
        use_tqdm=False,
    )
    share = (time.perf_counter() - started) / len(batch)
    return [
        (one.place, _output(served, one, result)._replace(seconds=share, batch_size=len(batch)))
        for one, result in zip(batch, found, strict=True)
    ]


def _sampling(served: Served, one: _Prepared) -> dict[str, Any]:
    if isinstance(one.request, Score):
        # The distribution at every position of the prompt, of which the token itself is told.
        return {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    return {
        "temperature": 0.0,
        "max_tokens": one.request.max_new_tokens,
        "stop": list(one.request.stops),
        "stop_token_ids": sorted(served.eos_ids),
    }


def _output(served: Served, one: _Prepared, result: Any) -> Output:
    if isinstance(one.request, Score):
        told = result.prompt_logprobs[len(one.prompt) :]  # a dict a position, by token
        chosen = [at[token] for token, at in zip(one.rest, told, strict=True)]
        return Output(
            tokens=len(one.rest),
            prompt_tokens=len(one.prompt),
            logprob=float(sum(each.logprob for each in chosen)),
            is_greedy=all(each.rank == 1 for each in chosen),
        )
    ids = list(result.outputs[0].token_ids)
    end = next((place for place, token in enumerate(ids) if token in served.eos_ids), None)
    whole = decode_completion(served.tokenizer, one.prompt, ids[:end])
    text, stopped = cut_at_stops(whole, one.request.stops)
    return Output(
        text=text,
        tokens=len(ids),
        prompt_tokens=len(one.prompt),
        truncated=end is None and not stopped,
    )
