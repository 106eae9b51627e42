"""`ComposedForCausalLM`: a base and its experts as one ordinary Hugging Face model.

    p̂(y_t | x, y_<t)  =  softmax( rule(z_b, z_1, ..., z_k) )

It generates, samples, searches with beams and scores as any causal LM does: `generate` sees one
config with (k+1) L layers and one flat cache (`composition.cache`). The components stay the
modules they are; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from composition.cache import flat_config, new_cache, view
from composition.combination import Combination, combine, parse_combination
from composition.errors import CompositionError

SAME = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


class ComposedForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The composition of a base and its experts; make it with `from_models`."""

    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: Any, components: Sequence[nn.Module], combination: Combination):
        super().__init__(config)
        self.components = nn.ModuleList(components)
        self.combination = combination
        self._layers = config.num_hidden_layers // len(components)

    @classmethod
    def from_models(
        cls,
        base: Any,
        experts: Sequence[Any],
        weights: Sequence[float] | None = None,
        rule: str = "product",
        *,
        names: Sequence[str] | None = None,
        vocab_size: int | None = None,
        eos_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> Self:
        """Composes models that were fine-tuned from one base.

        Args:
            base: a causal LM in evaluation mode; also k = 0 experts are a composition.
            experts: causal LMs of the base's architecture and vocabulary.
            weights, rule: see `Combination`.
            names: the experts' names, for errors and the config.
            vocab_size: the number of real tokenizer ids; padded rows beyond get probability 0.
            eos_ids: ids that end a text; the base's generation config names them if left out.
            options: the other fields of `Combination`.

        Raises:
            CompositionError: another architecture or vocabulary, or unfit weights and options.
        """
        called = list(names or [f"expert {i}" for i in range(len(experts))])
        chosen = parse_combination({"rule": rule, "weights": weights, **options}, len(experts))
        faults = [
            f
            for name, expert in zip(called, experts, strict=True)
            for f in _unlike(base, name, expert)
        ]
        if faults:
            raise CompositionError("\n".join(faults))
        config = flat_config(base.config.get_text_config(), 1 + len(experts))
        config.composition = {**chosen.model_dump(mode="json"), "experts": called}
        config._attn_implementation = base.config._attn_implementation
        model = cls(config, [base, *experts], chosen)
        model.generation_config = base.generation_config
        model.real_ids = vocab_size or config.vocab_size
        found = base.generation_config.eos_token_id if eos_ids is None else list(eos_ids)
        model.eos_ids = found if isinstance(found, list) else [] if found is None else [found]
        model.eval()
        return model

    real_ids: int
    eos_ids: list[int]

    def new_cache(self) -> Any:
        """An empty cache, as `generate` makes one."""
        return new_cache(self.config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Composed logits (B, T, V) in float32; arguments as in any causal LM of transformers."""
        if use_cache and cache is None:
            cache = self.new_cache()
        parts = []
        for index, component in enumerate(self.components):
            part = None if cache is None else view(cache, index, self._layers)
            output = component(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=part,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
            parts.append(output.logits)
        return CausalLMOutputWithPast(logits=self.combine(parts), cache=cache)

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Composes the components' logits, base first, and rules out padded vocabulary rows."""
        base, *experts = logits
        composed = combine(self.combination, base, experts, self.eos_ids)
        if composed.shape[-1] > self.real_ids:
            composed[..., self.real_ids :] = -torch.inf
        return composed

    def _can_set_attn_implementation(self) -> bool:
        return True

    def get_input_embeddings(self) -> nn.Module:
        """The base's token embeddings."""
        base: Any = self.components[0]
        embeddings: nn.Module = base.get_input_embeddings()
        return embeddings


def _unlike(base: Any, name: str, expert: Any) -> list[str]:
    ours, theirs = base.config.get_text_config(), expert.config.get_text_config()
    return [
        f"{name}: {key} is {getattr(theirs, key, None)!r} where the base has "
        f"{getattr(ours, key, None)!r}; expected an expert fine-tuned from this base"
        for key in SAME
        if getattr(ours, key, None) != getattr(theirs, key, None)
    ]
