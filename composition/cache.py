"""Caches of keys and values: one that grows in place, and one flat cache for many models.

`generate` builds one cache with as many layers as the config names. A composition of k experts
has (k+1) L layers: component i works on a view whose layers are the slice [iL : (i+1)L] of the
flat cache, the same layer objects, so that cropping, reordering and selecting rows of the flat
cache reach every component.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache


def flat_config(config: Any, components: int) -> Any:
    """The decoder config of so many models in a row; layer types and sharing repeat."""
    from copy import deepcopy

    flat = deepcopy(config)
    flat.num_hidden_layers = components * config.num_hidden_layers
    if getattr(config, "layer_types", None) is not None:
        flat.layer_types = list(config.layer_types) * components
    return flat


SPARE = 64
"""Columns that a growing layer has in reserve, or a quarter of its length where that is more."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values (rows, heads, T, D) as the front of a buffer with room for more.

    `DynamicLayer` copies everything it holds for every new token: at 96 rows and 256 tokens of
    SmolLM2 half of a decoding step's time.
    """

    keys: Tensor
    values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends (rows, heads, new, D) each; returns all."""
        if key_states.requires_grad:  # a buffer that is written again has no gradients
            return super().update(key_states, value_states)  # type: ignore[no-any-return]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = getattr(self, "_buffers", (self.keys, self.values))
        grown = [
            _appended(buffer, held, new)
            for buffer, held, new in zip(
                held, (self.keys, self.values), (key_states, value_states), strict=True
            )
        ]
        self._buffers = (grown[0][0], grown[1][0])
        self.keys, self.values = grown[0][1], grown[1][1]
        return self.keys, self.values


def _appended(buffer: Tensor, held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer, a larger one where need be, and the view of it that holds everything."""
    length = held.shape[2] if held.numel() else 0
    total = length + new.shape[2]
    if not _in_front(buffer, held) or total > buffer.shape[2]:
        room = total + max(SPARE, total // 4)
        buffer = new.new_empty(*new.shape[:2], room, new.shape[3])
        if length:
            buffer[:, :, :length] = held
    buffer[:, :, length:total] = new
    return buffer, buffer[:, :, :total]


def _in_front(buffer: Tensor, held: Tensor) -> bool:
    """Are these the first columns of all rows of the buffer?"""
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        return False  # it may be written in inference mode only
    return (
        held.data_ptr() == buffer.data_ptr()
        and held.dim() == buffer.dim() == 4
        and held.shape[:2] == buffer.shape[:2]
        and held.stride() == buffer.stride()
    )


def can_join(cache: Any) -> bool:
    """Can rows be added to it? They can where all layers are of the two kinds below."""
    kinds = (GrowingLayer, DynamicSlidingWindowLayer)
    return all(isinstance(layer, kinds) for layer in cache.layers)


def join_rows(cache: Any, other: Any) -> None:
    """Adds another cache's rows to a cache's, block by block, both ending in the same column.

    What is shorter is filled up on the left with zeros, which the batch's mask must hide.
    """
    for layer, more in zip(cache.layers, other.layers, strict=True):
        blocks = getattr(layer, "blocks", 1)
        length = max(layer.get_seq_length(), more.get_seq_length())
        columns = max(layer.keys.shape[2], more.keys.shape[2])
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
        layer.keys = _joined(layer.keys, more.keys, columns, blocks)
        layer.values = _joined(layer.values, more.values, columns, blocks)


def _joined(first: Tensor, second: Tensor, columns: int, blocks: int) -> Tensor:
    """(blocks * A, heads, ., D) and (blocks * B, heads, ., D) -> (blocks * (A + B), ...)."""
    rows = (len(first) + len(second)) // blocks
    whole = first.new_zeros(blocks, rows, first.shape[1], columns, first.shape[3])
    own = len(first) // blocks
    whole[:, :own, :, columns - first.shape[2] :] = first.reshape(blocks, own, *first.shape[1:])
    whole[:, own:, :, columns - second.shape[2] :] = second.reshape(blocks, -1, *second.shape[1:])
    return whole.flatten(0, 1)


def trim_left(cache: Any, columns: int) -> None:
    """Forgets the first so many columns, which the mask hides in every row."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= columns
            held = min(layer.keys.shape[2], layer.cumulative_length)
        else:
            held = layer.keys.shape[2] - columns
        first = layer.keys.shape[2] - held
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model's config, or a composition's flat one, that grows in place."""
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def view(flat: Any, index: int, layers: int) -> Any:
    """Component `index`'s part of the flat cache, sharing its layer objects."""
    if isinstance(flat, PagedAttentionCache):
        part = copy(flat)
        part.__class__ = _PagedView
        part.first = index * layers
        return part
    return Cache(layers=flat.layers[index * layers : (index + 1) * layers])


class _PagedView(PagedAttentionCache):  # type: ignore[misc]
    """Continuous batching's cache with the layers counted from a component's first."""

    first: int

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys, values, layer_idx + self.first, *args, **kwargs)
