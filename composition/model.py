"""`ComposedForCausalLM`: a base and its experts as one ordinary Hugging Face model.

    p̂(y_t | x, y_<t)  =  softmax( rule(z_b, z_1, ..., z_k) )

It generates, samples, searches with beams and scores as any causal LM does. What runs the
components is chosen by what they are: whole models one after the other
(`composition.sequential`), LoRA adapters in one stacked pass (`composition.stacked`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from composition.combination import Combination, combine, parse_combination
from composition.errors import CompositionError
from composition.saved import ComposedConfig, checked_sources, source_of
from composition.sequential import Sequential
from composition.stacked import Stacked, check_init, stack

log = logging.getLogger(__name__)

SAME = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


@dataclass
class ComposedOutput(CausalLMOutputWithPast):  # type: ignore[misc]
    """Composed logits (B, T, V); with `output_components` also each component's, base first."""

    components: tuple[Tensor, ...] | None = None


class ComposedForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The composition of a base and its experts; make it with `from_models` or `from_adapters`."""

    config_class = ComposedConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: Any, parts: Sequential | Stacked, combination: Combination) -> None:
        super().__init__(config)
        self.parts = parts
        self.combination = combination
        self.eval()

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
        origins = [
            (name, str(getattr(model.config, "_name_or_path", "")), False)
            for name, model in zip(["base", *called], [base, *experts], strict=True)
        ]
        return cls._of(Sequential([base, *experts]), chosen, origins, vocab_size, eos_ids)

    @classmethod
    def from_adapters(
        cls,
        base: Any,
        adapters: Mapping[str, str | Path],
        weights: Sequence[float] | None = None,
        rule: str = "product",
        *,
        vocab_size: int | None = None,
        eos_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> Self:
        """Composes LoRA adapters on one base, in one stacked pass where they allow it.

        Args:
            base: a causal LM in evaluation mode; its layers are taken apart for the stack.
            adapters: folders or hub ids of PEFT adapters by the experts' names.
            weights, rule, vocab_size, eos_ids, options: as in `from_models`.

        Adapters that cannot be stacked are merged into copies of the base instead, which the log
        tells.

        Raises:
            CompositionError: an adapter that does not fit the base, or unfit weights and options.
        """
        chosen = parse_combination({"rule": rule, "weights": weights, **options}, len(adapters))
        origin = str(getattr(base.config, "_name_or_path", ""))
        origins = [("base", origin, False)]
        origins += [(name, str(adapter), True) for name, adapter in adapters.items()]
        parts = _of_adapters(base, {name: str(folder) for name, folder in adapters.items()})
        return cls._of(parts, chosen, origins, vocab_size, eos_ids)

    @classmethod
    def _of(
        cls,
        parts: Sequential | Stacked,
        chosen: Combination,
        origins: Sequence[tuple[str, str, bool]],
        vocab_size: int | None,
        eos_ids: Sequence[int] | None,
    ) -> Self:
        base = parts.base
        config = parts.config()
        names = [name for name, _, _ in origins[1:]]
        config.composition = {**chosen.model_dump(mode="json"), "experts": names}
        config._attn_implementation = base.config._attn_implementation
        model = cls(config, parts, chosen)
        model.generation_config = base.generation_config
        model.real_ids = vocab_size or config.vocab_size
        found = base.generation_config.eos_token_id if eos_ids is None else list(eos_ids)
        model.eos_ids = found if isinstance(found, list) else [] if found is None else [found]
        model.origins = list(origins)
        kind = "stacked LoRA" if isinstance(parts, Stacked) else "sequential"
        log.info("composition of %d components: %s", parts.count, kind)
        return model

    real_ids: int
    eos_ids: list[int]
    origins: list[tuple[str, str, bool]]  # name, folder or hub id, whether an adapter

    def new_cache(self) -> Any:
        """An empty cache, as `generate` makes one."""
        return self.parts.new_cache(self.config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_components: bool = False,
        **kwargs: Any,
    ) -> ComposedOutput:
        """Composed logits (B, T, V) in float32; arguments as in any causal LM of transformers.

        Args:
            output_components: whether each component's own logits come out too.
        """
        if use_cache and cache is None:
            cache = self.new_cache()
        logits = self.parts(
            cache,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
        return ComposedOutput(
            logits=self.combine(logits),
            cache=cache,
            components=tuple(logits) if output_components else None,
        )

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Composes the components' logits, base first, and rules out padded vocabulary rows."""
        base, *experts = logits
        composed = combine(self.combination, base, experts, self.eos_ids)
        if bool(composed.isnan().any()):
            called = [name for name, _, _ in self.origins]
            named = [n for n, z in zip(called, logits, strict=True) if bool(z.isnan().any())]
            raise CompositionError(
                f"the logits of {' and '.join(named) or 'the composition'} hold NaN; look at the "
                "weights and the dtype"
            )
        if composed.shape[-1] > self.real_ids:
            composed[..., self.real_ids :] = -torch.inf
        return composed

    # --- as a model of transformers --------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Writes a small folder that names the components; see `composition.saved`.

        Raises:
            CompositionError: a component was not loaded from a folder or a hub id.
        """
        folder = Path(save_directory)
        revision = getattr(self.parts.base.config, "_commit_hash", None)
        sources = [
            source_of(name, origin, revision if place == 0 else None, adapter)
            for place, (name, origin, adapter) in enumerate(self.origins)
        ]
        config = ComposedConfig(
            combination=self.combination.model_dump(mode="json"),
            components=[source.model_dump(exclude_none=True) for source in sources],
            vocab_size=self.real_ids,
            eos_ids=self.eos_ids,
            architectures=[type(self).__name__],
        )
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        self.generation_config.save_pretrained(folder)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any
    ) -> Self:
        """Loads what `save_pretrained` wrote.

        Args:
            kwargs: for loading the components (dtype, device_map, ...); a list as `device_map`
                holds one a component.

        Raises:
            CompositionError: a component is gone or has changed.
        """
        folder = str(pretrained_model_name_or_path)
        config = kwargs.pop("config", None) or ComposedConfig.from_pretrained(folder)
        sources = checked_sources(config, folder)
        for of_the_folder in ("revision", "code_revision", "adapter_kwargs", "_from_auto"):
            kwargs.pop(of_the_folder, None)
        maps = kwargs.pop("device_map", None)
        places = maps if isinstance(maps, list) else [maps] * len(sources)
        if len(places) != len(sources):
            raise CompositionError(
                f"device_map holds {len(places)} entries; expected one a component, {len(sources)}"
            )
        models = [
            AutoModelForCausalLM.from_pretrained(
                source.source, revision=source.revision or "main", device_map=place, **kwargs
            ).eval()
            for source, place in zip(sources, places, strict=True)
            if not source.adapter
        ]
        given = {**config.combination, "vocab_size": config.vocab_size, "eos_ids": config.eos_ids}
        if any(source.adapter for source in sources):
            adapters = {source.name: source.source for source in sources[1:]}
            return cls.from_adapters(models[0], adapters, **given)
        names = [source.name for source in sources[1:]]
        return cls.from_models(models[0], models[1:], names=names, **given)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # The stacked rows of a dynamic cache must be selected block by block.
        dynamic = generation_config.cache_implementation in (None, "dynamic")
        wanted = generation_config.use_cache is not False and dynamic
        if isinstance(self.parts, Stacked) and wanted and model_kwargs.get("cache") is None:
            cache = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs["cache"] = cache
            return None
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )

    def _can_set_attn_implementation(self) -> bool:
        return True

    def get_input_embeddings(self) -> nn.Module:
        """The base's token embeddings."""
        embeddings: nn.Module = self.parts.base.get_input_embeddings()
        return embeddings


AutoConfig.register(ComposedConfig.model_type, ComposedConfig)
AutoModelForCausalLM.register(ComposedConfig, ComposedForCausalLM)


def _of_adapters(base: Any, adapters: Mapping[str, str]) -> Sequential | Stacked:
    """All adapters stacked on the base, or each merged into a copy of it."""
    from copy import deepcopy

    from peft import PeftConfig, PeftModel

    wrapped: Any = None
    for name, folder in adapters.items():
        try:
            check_init(name, PeftConfig.from_pretrained(folder))
            if wrapped is None:
                wrapped = PeftModel.from_pretrained(base, folder, adapter_name=name)
            else:
                wrapped.load_adapter(folder, adapter_name=name)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            if isinstance(error, CompositionError):
                raise
            reason = str(error).strip().splitlines()[0]
            raise CompositionError(
                f"{name}: the adapter in {folder} does not fit the base: {reason}"
            ) from None
    if wrapped is None:
        return Sequential([base])
    try:
        return stack(wrapped, list(adapters)).eval()
    except CompositionError as error:
        told = "; ".join(str(error).splitlines())
    log.warning("%s; every adapter is merged into a copy of the base", told)
    base = wrapped.unload()
    experts = [
        PeftModel.from_pretrained(deepcopy(base), folder).merge_and_unload().eval()
        for folder in adapters.values()
    ]
    return Sequential([base, *experts])


def _unlike(base: Any, name: str, expert: Any) -> list[str]:
    ours, theirs = base.config.get_text_config(), expert.config.get_text_config()
    return [
        f"{name}: {key} is {getattr(theirs, key, None)!r} where the base has "
        f"{getattr(ours, key, None)!r}; expected an expert fine-tuned from this base"
        for key in SAME
        if getattr(ours, key, None) != getattr(theirs, key, None)
    ]
