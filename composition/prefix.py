"""A beginning that all rows share: computed once, held once, read once a step.

Few-shot prompts differ in their last question. Their common tokens go through the model once, in
one row; the rows of a batch then begin behind them. Where attention reads the keys of the
beginning it multiplies the queries of all rows with them at once, instead of every row with its
own copy:

    o = (e_1 V_1 + e_2 V_2) / Σ (e_1 + e_2),    e_1 = exp(q K_1ᵀ - m),  e_2 = exp(q K_2ᵀ - m)

with K_1, V_1 the beginning's and K_2, V_2 the row's own. The cache of the rows holds their own
tokens only, and their positions count on from the beginning's length.

It works for models with full attention that take their attention function from transformers
(`AttentionInterface`); whether it gives what the model itself gives is checked when a beginning
is filled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

log = logging.getLogger(__name__)

NAME = "mergescope_prefix"
PROBE = 8
"""Tokens at a beginning's end that are computed both ways to compare them."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference between logits of both ways, against their spread; 0.2 in other dtypes."""


class Prefix(NamedTuple):
    """Keys and values of a beginning, layer by layer, (blocks, heads, P, D) each."""

    layers: Sequence[tuple[Tensor, Tensor]]
    length: int


_active: Prefix | None = None
_place: tuple[int, slice] = (0, slice(None))
"""Of the component that runs: its first layer in the prefix's list, and its blocks."""


@contextmanager
def component_at(first_layer: int = 0, blocks: slice = slice(None)) -> Iterator[None]:
    """Within it, the model that runs is this part of a composition."""
    global _place  # noqa: PLW0603
    _place = (first_layer, blocks)
    try:
        yield
    finally:
        _place = (0, slice(None))


@contextmanager
def behind(model: Any, prefix: Prefix | None) -> Iterator[None]:
    """Within it, every row of the model's batches stands behind the prefix.

    Caches and masks are those of the rows' own tokens; position ids must count the prefix too.
    """
    global _active  # noqa: PLW0603
    if prefix is None:
        yield
        return
    configs = [component.config for component in _components(model)]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = NAME
    _active = prefix
    try:
        yield
    finally:
        _active = None
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


@torch.inference_mode()
def fill_prefix(model: Any, ids: Sequence[int], cache: Any, reach: int) -> Prefix | None:
    """Runs the beginning through a causal LM, single or composed.

    Args:
        ids: P token ids.
        cache: an empty one of the model's.
        reach: tokens of the longest row, beginning and all that will follow.

    Returns:
        None where the model cannot have one: a window shorter than the beginning, or an attention
        of its own kind.
    """
    if len(ids) <= PROBE or not _can_share(model, reach):
        return None
    tokens = torch.tensor([list(ids)], device=model.device)
    expected = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
    length = len(ids) - PROBE
    whole = Prefix([(layer.keys, layer.values) for layer in cache.layers], len(ids))
    part = Prefix([(k[:, :, :length], v[:, :, :length]) for k, v in whole.layers], length)
    positions = torch.arange(length, len(ids), device=model.device)[None]
    with behind(model, part):
        found = model(
            input_ids=tokens[:, length:],
            attention_mask=torch.ones_like(positions),
            position_ids=positions,
            logits_to_keep=1,
        ).logits
    real = expected.isfinite() & found.isfinite()
    spread = expected[real].float().std()
    difference = (found - expected)[real].float().abs().max()
    if not bool(difference <= TOLERANCE.get(model.dtype, 0.2) * spread):
        log.warning(
            "logits behind a shared beginning differ by %.2g from the model's own, whose spread is "
            "%.2g; every row computes its whole prompt",
            difference,
            spread,
        )
        return None
    return whole


def _components(model: Any) -> list[Any]:
    parts = getattr(model, "parts", None)
    if parts is None:
        return [model]
    return list(getattr(parts, "components", [parts.base]))


def _can_share(model: Any, reach: int) -> bool:
    for component in _components(model):
        config = component.config.get_text_config()
        window = getattr(config, "sliding_window", None) or reach
        if window < reach and getattr(config, "use_sliding_window", True):
            return False
        if not component._can_set_attn_implementation():
            return False
    return True


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention: (rows, heads, T, D) -> (rows, T, heads, D)."""
    prefix = _active
    assert prefix is not None and attention_mask is not None
    first, chosen = _place
    layer: Any = module.layer_idx
    keys, values = (states[chosen] for states in prefix.layers[first + layer])
    rows, heads, queries, size = query.shape
    blocks, shared, _, _ = keys.shape  # heads of keys and values
    scale = size**-0.5 if scaling is None else scaling
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = (query.to(wide) * scale).reshape(rows, shared, -1, size)  # (rows, shared, G T, D)

    own = _capped(grouped @ key.to(wide).transpose(-1, -2), softcap)  # (rows, shared, G T, K)
    groups = heads // shared
    mask = attention_mask.expand(rows, 1, queries, -1)[:, :, None]
    mask = mask.expand(rows, 1, groups, queries, -1).reshape(rows, 1, groups * queries, -1)
    own = own.masked_fill(~mask, -torch.inf)

    together = _to_blocks(grouped, blocks)  # (blocks, shared, rows a block * G T, D)
    common = _capped(together @ keys.to(wide).transpose(-1, -2), softcap)  # (..., P)
    top = torch.maximum(common.amax(-1), _to_blocks(own.amax(-1, keepdim=True), blocks)[..., 0])
    common = common.sub_(top[..., None]).exp_()
    theirs = common @ values.to(wide)
    total = common.sum(-1)

    own = own.sub_(_to_rows(top[..., None], rows)).exp_()
    total = total[..., None] + _to_blocks(own.sum(-1, keepdim=True), blocks)
    mixed = own @ value.to(wide) + _to_rows(theirs, rows)
    mixed = mixed / _to_rows(total, rows)
    mixed = mixed.view(rows, heads, queries, -1).transpose(1, 2).to(query.dtype)
    return mixed.contiguous(), None


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _to_blocks(states: Tensor, blocks: int) -> Tensor:
    """(blocks * B, shared, Q, D) -> (blocks, shared, B * Q, D)."""
    rows, shared, queries, size = states.shape
    split = states.reshape(blocks, rows // blocks, shared, queries, size).transpose(1, 2)
    return split.reshape(blocks, shared, -1, size)


def _to_rows(states: Tensor, rows: int) -> Tensor:
    """(blocks, shared, B * Q, D) -> (blocks * B, shared, Q, D)."""
    blocks, shared, _, size = states.shape
    split = states.reshape(blocks, shared, rows // blocks, -1, size).transpose(1, 2)
    return split.reshape(rows, shared, -1, size)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """A mask is needed always: nothing may be left to a kernel's own idea of causality."""
    mask: Tensor | None = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
