"""Components one after the other: causal LMs of one architecture, each with its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from composition.cache import flat_config, new_cache, view
from composition.head import with_wide_head
from composition.prefix import component_at


class Sequential(nn.Module):
    """The base and its experts as they were loaded; nothing is copied but narrow heads.

    `generate` sees one config with (k+1) L layers and one flat cache (`composition.cache`).
    Components may stand on different devices; logits come to the base's.
    """

    def __init__(self, components: Sequence[nn.Module]) -> None:
        super().__init__()
        self.components = nn.ModuleList(map(with_wide_head, components))

    @property
    def count(self) -> int:
        """Models: the experts and the base."""
        return len(self.components)

    @property
    def base(self) -> Any:
        """The module whose embeddings and device are the composition's."""
        return self.components[0]

    def devices(self) -> list[torch.device]:
        """Where each component stands."""
        return [component.device for component in self.components]  # type: ignore[misc]

    def config(self) -> Any:
        """The config of a model with all layers of all components."""
        return flat_config(self.base.config.get_text_config(), self.count)

    def new_cache(self, config: Any) -> DynamicCache:
        """An empty cache."""
        return new_cache(config)

    def forward(self, cache: Any, **inputs: Any) -> list[Tensor]:
        """Each component's logits, the base's first, (B, T, V) each."""
        layers = self.base.config.get_text_config().num_hidden_layers
        device = self.base.device
        logits = []
        for index, component in enumerate(self.components):
            part = None if cache is None else view(cache, index, layers)
            with component_at(index * layers):
                output = component(cache=part, **_on(component.device, inputs))
            logits.append(output.logits.to(device))
        return logits

    def hidden(self, index: int, **inputs: Any) -> Tensor:
        """One component's last hidden states, (B, T, H)."""
        component: Any = self.components[index]
        layers = self.base.config.get_text_config().num_hidden_layers
        with component_at(index * layers):
            output = component.get_decoder()(use_cache=False, **_on(component.device, inputs))
        states: Tensor = output.last_hidden_state
        return states

    def project(self, index: int, hidden: Tensor) -> Tensor:
        """One component's logits (..., V) of its hidden states, on the base's device."""
        return project(self.components[index], hidden).to(self.base.device)


def project(model: Any, hidden: Tensor) -> Tensor:
    """Logits (..., V) in float32 or float64, scaled and capped as the model does it itself."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    config = model.config.get_text_config()
    if config.model_type.startswith("cohere"):
        logits = logits * config.logit_scale
    elif config.model_type.startswith("granite"):
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _on(device: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
