"""LoRA experts of one base in one forward pass: (k+1) B rows, one copy of the base's weights.

The rows of a batch stand (k+1) times under each other, a block a component, the base's first. A
linear layer that an adapter touches multiplies all rows with the base's weight at once and adds
to each expert's block its own (x A_i) B_i, all experts in two batched products. Adapters of
different ranks are padded with zeros; each one's scale is in its B.

What is not a plain low-rank addition to a linear layer (DoRA, whole saved modules, biases,
embeddings) cannot be stacked and is told by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from composition.cache import GrowingLayer, new_cache
from composition.errors import CompositionError
from composition.head import with_wide_head
from composition.prefix import component_at
from composition.sequential import project

PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""Initialisations of LoRA that leave the base's weight as it is."""


class Blocks:
    """Which component the rows belong to: None for all, block under block."""

    def __init__(self) -> None:
        self.selected: int | None = None

    @contextmanager
    def only(self, index: int) -> Iterator[None]:
        """Within it, all rows are one component's."""
        self.selected = index
        try:
            yield
        finally:
            self.selected = None


class StackedLinear(nn.Module):
    """A linear layer with an addition of low rank an expert.

    Args:
        linear: the base's, `(..., in) -> (..., out)`.
        down: (k, in, r), and `up`: (k, r, out), scales included.
    """

    def __init__(self, linear: nn.Module, down: Tensor, up: Tensor, blocks: Blocks) -> None:
        super().__init__()
        self.linear, self._blocks = linear, blocks
        self.register_buffer("down", down)
        self.register_buffer("up", up)

    down: Tensor
    up: Tensor

    def forward(self, rows: Tensor) -> Tensor:
        """(rows, T, in) -> (rows, T, out)."""
        result: Tensor = self.linear(rows)
        index = self._blocks.selected
        if index == 0:
            return result
        if index is not None:
            return result + (rows @ self.down[index - 1]) @ self.up[index - 1]
        experts = len(self.down)
        size = len(rows) // (experts + 1)  # rows a block
        inner = torch.bmm(rows[size:].reshape(experts, -1, rows.shape[-1]), self.down)
        added = result[size:].reshape(experts, -1, result.shape[-1])
        torch.baddbmm(added, inner, self.up, out=added)
        if added.data_ptr() != result[size:].data_ptr():  # reshape has copied
            result[size:] = added.view_as(result[size:])
        return result

    def merged(self, weights: Sequence[float]) -> nn.Module:
        """A copy of the base's layer with Σ w_i A_i B_i in its weight."""
        from copy import deepcopy

        layer: Any = deepcopy(self.linear)
        added = sum(w * (a @ b) for w, a, b in zip(weights, self.down, self.up, strict=True))
        if isinstance(added, Tensor):
            sideways = isinstance(layer, nn.Linear)  # (out, in); a Conv1D's weight is (in, out)
            with torch.no_grad():
                layer.weight.add_(added.T if sideways else added)
        return layer  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """A base whose linear layers are stacked."""

    def __init__(self, model: Any, experts: int, blocks: Blocks) -> None:
        super().__init__()
        self.model, self.count, self._blocks = with_wide_head(model), 1 + experts, blocks

    @property
    def base(self) -> Any:
        """The module whose embeddings and device are the composition's."""
        return self.model

    def devices(self) -> list[torch.device]:
        """Where each component stands: all in one place."""
        return [self.model.device] * self.count

    def config(self) -> Any:
        """The base's own: one cache of L layers holds the rows of all components."""
        from copy import deepcopy

        return deepcopy(self.model.config.get_text_config())

    def new_cache(self, config: Any) -> DynamicCache:
        """An empty cache whose rows are selected and repeated in every block alike."""
        cache = new_cache(config)
        cache.layers = [_stacked(layer, self.count) for layer in cache.layers]
        return cache

    def forward(self, cache: Any, **inputs: Any) -> list[Tensor]:
        """Each component's logits, the base's first, (B, T, V) each."""
        if isinstance(cache, PagedAttentionCache):
            raise CompositionError(
                "stacked adapters cannot be served by continuous batching, whose rows are packed; "
                "compose merged models with from_models"
            )
        output = self.model(cache=cache, **_repeated(inputs, self.count))
        return list(output.logits.chunk(self.count))

    def hidden(self, index: int, **inputs: Any) -> Tensor:
        """One component's last hidden states, (B, T, H)."""
        with self._blocks.only(index), component_at(blocks=slice(index, index + 1)):
            output = self.model.get_decoder()(use_cache=False, **inputs)
        states: Tensor = output.last_hidden_state
        return states

    def project(self, index: int, hidden: Tensor) -> Tensor:
        """One component's logits (..., V) of its hidden states."""
        with self._blocks.only(index):
            return project(self.model, hidden)


def stack(model: Any, names: Sequence[str]) -> Stacked:
    """Stacks the adapters of a `peft.PeftModel`, whose base is taken apart for it.

    Raises:
        CompositionError: an adapter is more than a plain low-rank addition to linear layers.
    """
    from peft.tuners.lora.layer import Linear as LoraLinear

    faults = [fault for name in names for fault in unstackable(model, name)]
    if faults:
        raise CompositionError("\n".join(faults))
    inner, blocks = model.get_base_model(), Blocks()
    places = [
        (name, module) for name, module in inner.named_modules() if isinstance(module, LoraLinear)
    ]
    for place, module in places:
        parent, _, attribute = place.rpartition(".")
        down, up = _factors(module, names)
        stacked = StackedLinear(module.get_base_layer(), down, up, blocks)
        setattr(inner.get_submodule(parent), attribute, stacked)
    return Stacked(inner, len(names), blocks)


def check_init(name: str, config: Any) -> None:
    """An adapter leaves the base's weights as they are.

    Raises:
        CompositionError: its initialisation has moved them.
    """
    init = getattr(config, "init_lora_weights", True)
    if init not in PLAIN_INITS:
        raise CompositionError(
            f"{name} was initialised by {init}, which moves the base's own weights; convert it to "
            "a plain LoRA adapter (PEFT's path_initial_model_for_weight_conversion)"
        )


def unstackable(model: Any, name: str) -> list[str]:
    """Sentences on what makes an adapter of a `PeftModel` more than low-rank additions."""
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.lora.layer import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    config = model.peft_config[name]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return [f"{name} is {kind}; expected LORA"]
    faults = []
    if config.bias != "none":
        faults.append(f"{name} trains biases ({config.bias})")
    for module in model.get_base_model().modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            faults.append(f"{name} replaces whole modules (modules_to_save)")
        elif isinstance(module, LoraLayer) and name in module.r:
            if not isinstance(module, LoraLinear):
                faults.append(f"{name} adapts a {type(module).__name__} layer")
            elif name in module.lora_variant:
                variant = type(module.lora_variant[name]).__name__.removesuffix("LinearVariant")
                faults.append(f"{name} is a variant of LoRA: {variant}")
            elif module.lora_bias.get(name):
                faults.append(f"{name} has biases in its factors")
    return [f"{fault}; such an adapter cannot be stacked" for fault in dict.fromkeys(faults)]


def _factors(module: Any, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """(k, in, r) and (k, r, out) of one layer, zeros where an expert does not adapt it."""
    weight = module.get_base_layer().weight
    own = [name for name in names if name in module.lora_A]
    rank = max(module.lora_A[name].weight.shape[0] for name in own)
    inputs, outputs = module.in_features, module.out_features
    down = weight.new_zeros(len(names), inputs, rank)
    up = weight.new_zeros(len(names), rank, outputs)
    for place, name in enumerate(names):
        if name in own:
            a, b = module.lora_A[name].weight.detach(), module.lora_B[name].weight.detach()
            down[place, :, : len(a)] = a.T
            up[place, : len(a)] = b.T * module.scaling[name]
    return down, up


def _repeated(inputs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Every row once a component, block under block; what has no rows stays."""
    rows = len(inputs["input_ids"])

    def repeat(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != rows:
            return value
        return value.repeat(count, *[1] * (value.dim() - 1))

    return {name: repeat(name, value) for name, value in inputs.items()}


class _Rows:
    """What is done to a cache's rows, done in every block alike."""

    blocks: int

    def _rows(self, indices: Tensor) -> Tensor:
        size = len(self.keys) // self.blocks  # type: ignore[attr-defined]
        return torch.cat([indices + block * size for block in range(self.blocks)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.get_seq_length() > 0:  # type: ignore[attr-defined]
            super().reorder_cache(self._rows(beam_idx))  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.get_seq_length() > 0:  # type: ignore[attr-defined]
            super().batch_select_indices(self._rows(indices))  # type: ignore[misc]


class _StackedLayer(_Rows, GrowingLayer):
    pass


class _StackedWindow(_Rows, DynamicSlidingWindowLayer):  # type: ignore[misc]
    pass


def _stacked(layer: Any, blocks: int) -> Any:
    """The same kind of layer for stacked rows.

    Raises:
        CompositionError: a kind that cannot be stacked.
    """
    if type(layer) is GrowingLayer:
        found: Any = _StackedLayer()
    elif type(layer) is DynamicSlidingWindowLayer:
        found = _StackedWindow(layer.sliding_window)
    else:
        raise CompositionError(
            f"a cache layer of kind {type(layer).__name__} cannot be stacked; compose merged "
            "models instead of adapters"
        )
    found.blocks = blocks
    return found
