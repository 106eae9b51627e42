"""One flat cache for many models.

`generate` builds one cache with as many layers as the config names. A composition of k experts
has (k+1) L layers: component i works on a view whose layers are the slice [iL : (i+1)L] of the
flat cache, the same layer objects, so that cropping, reordering and selecting rows of the flat
cache reach every component.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from transformers import Cache, DynamicCache
from transformers.generation.continuous_batching.cache import PagedAttentionCache


def flat_config(config: Any, components: int) -> Any:
    """The decoder config of so many models in a row; layer types and sharing repeat."""
    from copy import deepcopy

    flat = deepcopy(config)
    flat.num_hidden_layers = components * config.num_hidden_layers
    if getattr(config, "layer_types", None) is not None:
        flat.layer_types = list(config.layer_types) * components
    return flat


def new_cache(config: Any) -> DynamicCache:
    """An empty flat cache for a composed model's config."""
    return DynamicCache(config=config)


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
