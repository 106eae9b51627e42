"""A model that is ready to answer, and what its memory holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from evaluation.errors import InputError
from evaluation.text import Chat

MOST = {"cpu": 64, "other": 256}
"""Rows of a batch beyond which nothing is gained."""
UNKNOWN = 16
"""Rows where a model's config does not tell the size of its cache."""


class Runtime(NamedTuple):
    """A model that is ready to answer."""

    model: Any  # a Hugging Face causal LM in evaluation mode
    tokenizer: Any
    eos_ids: frozenset[int]
    new_cache: Callable[[], Any]
    model_type: str
    max_positions: int | None
    components: int = 1  # models that a step runs
    chat: Chat | None = None  # where prompts are user messages
    drafter: Any | None = None  # a causal LM that guesses for a composition
    share: float = 1.0  # of the free memory, where other processes answer beside this one

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)


def fitting_batch(runtime: Runtime, tokens: int) -> int:
    """Rows of so many tokens whose caches fill half of the memory free for it, at most `MOST`."""
    device = runtime.device
    most = MOST.get(device.type, MOST["other"])
    config = runtime.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None)
    heads = heads or getattr(config, "num_attention_heads", None)
    width, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if not heads or not width or not layers:
        return UNKNOWN
    size = getattr(config, "head_dim", None) or width // config.num_attention_heads
    # A composition's config counts the layers of all its parts, but of stacked rows only once.
    count = max(layers, runtime.components * layers if _is_stacked(runtime.model) else layers)
    row = 2 * count * heads * size * runtime.model.dtype.itemsize * max(tokens, 1)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    return int(max(1, min(most, runtime.share * free // 2 // row)))


def _is_stacked(model: Any) -> bool:
    from composition.stacked import Stacked

    return isinstance(getattr(model, "parts", None), Stacked)


def is_out_of_memory(error: BaseException) -> bool:
    """Does it say that memory ran out, on whichever device?"""
    told = str(error).lower()
    named = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return named or "can't allocate memory" in told or "not enough memory" in told


def pad(rows: Sequence[Sequence[int]], left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, (B, T) each; padding is id 0, which the mask hides."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for place, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(0, len(row))
        ids[place, span] = torch.tensor(row, dtype=torch.long)
        mask[place, span] = 1
    return ids.to(device), mask.to(device)


def check_lengths(limit: int | None, lengths: Sequence[tuple[int, int]]) -> None:
    """Every prompt has tokens, and room for what follows it.

    Args:
        limit: positions of the model; None for any number.
        lengths: a prompt's tokens, and how many more may follow them.

    Raises:
        InputError: it has not.
    """
    empty = sum(1 for prompt, _ in lengths if prompt == 0)
    if empty:
        raise InputError(f"{empty} prompts have no tokens at all; each needs at least one")
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
