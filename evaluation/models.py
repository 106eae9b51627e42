"""The models of an experiment: their sources of tensors, their identity, and loading them.

Every model is either the base, an expert, a merge (`evaluation.merges`) or a composition
(`composition`) of the base with the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from composition import (
    Combination,
    ComposedForCausalLM,
    new_cache,
    pack,
    parse_combination,
    task_arithmetic_drafter,
)
from evaluation import merges
from evaluation.errors import InputError
from evaluation.experiment import BASE, Experiment, Model, expand
from evaluation.family import (
    DTYPES,
    Family,
    build,
    check_unchanged,
    choose_device,
    eos_ids,
    load_tokenizer,
    read_config,
    weights,
)
from evaluation.runtime import Runtime
from evaluation.served import Ready, Served, start
from evaluation.training import suit_threads
from merging import METHODS, Adapter, parse_parameters
from merging.recipe import Dtype
from merging.settings import first_of, varies

Kind = Literal["base", "expert", "merge", "composition"]


class PlannedModel(NamedTuple):
    """A model of the experiment before it is loaded."""

    name: str
    kind: Kind
    method: str  # the method or rule; "none" for base and experts
    model: Model | None  # None for base and experts
    components: int  # models that a forward pass runs


def planned_models(experiment: Experiment) -> list[PlannedModel]:
    """Base, experts, then the merges and compositions after the sweep."""
    planned = [PlannedModel(BASE, "base", "none", None, 1)]
    planned += [PlannedModel(name, "expert", "none", None, 1) for name in experiment.experts]
    for model in expand(experiment):
        if model.method is not None:
            planned.append(PlannedModel(model.name, "merge", model.method, model, 1))
        else:
            count = 1 + len(experiment.experts)
            planned.append(PlannedModel(model.name, "composition", str(model.rule), model, count))
    return planned


def identity(planned: PlannedModel, family: Family) -> dict[str, Any]:
    """What determines the model's distribution: digests of its weights and its recipe."""
    if planned.kind == "base":
        return {"weights": family.base.digest()}
    if planned.kind == "expert":
        return {"weights": family.experts[planned.name].digest()}
    model = planned.model
    assert model is not None
    content = {
        planned.kind: planned.method,
        "weights": model.weights,
        "parameters": resolved_parameters(model, len(family.experts)),
        "components": [family.base.digest(), *(e.digest() for e in family.experts.values())],
    }
    if model.exclude:
        content["exclude"] = model.exclude
    if model.method is not None and METHODS[model.method].statistics and family.statistics:
        content["statistics"] = [family.statistics.digest(name) for name in family.experts]
    return content


def resolved_parameters(model: Model, experts: int) -> dict[str, Any]:
    """A merge's or a composition's parameters with every default filled in."""
    if model.method is None:
        chosen = combination(model, experts)
        return chosen.model_dump(mode="json", exclude_defaults=True) | {"rule": chosen.rule}
    plain = parse_parameters(model.method, first_of(model.parameters))
    settings = {key: value for key, value in model.parameters.items() if varies(value)}
    return {**plain.model_dump(mode="json", by_alias=True), **settings}


def combination(model: Model, experts: int) -> Combination:
    """The composition that a model of the experiment stands for."""
    return parse_combination(
        {"rule": model.rule, "weights": model.weights, **model.parameters}, experts
    )


def _adapters(family: Family) -> dict[str, Path] | None:
    """The experts' folders where all are LoRA adapters, which run in one pass on one base.

    In a narrower type than float32 the factors beside a rounded base would be another model than
    the expert alone, whose weights are rounded after they are added.
    """
    folders = {
        name: expert.adapter_folder
        for name, expert in family.experts.items()
        if isinstance(expert, Adapter)
    }
    return folders if folders and len(folders) == len(family.experts) else None


def tensors(
    planned: PlannedModel, family: Family, dtype: Dtype, reports: dict[str, Any]
) -> Mapping[str, Tensor]:
    """The weights of a base, an expert or a merge, in `dtype`."""
    if planned.kind == "merge":
        assert planned.model is not None
        return merges.merged(planned.model, family, dtype, reports)
    source = family.base if planned.kind == "base" else family.experts[planned.name]
    return weights(source, DTYPES[dtype])


def load(
    planned: PlannedModel,
    family: Family,
    experiment: Experiment,
    reports: dict[str, Any] | None = None,
) -> Ready:
    """Loads a model of the experiment, ready to answer.

    Args:
        reports: takes what a merge has told of its inputs, by the model's name.

    Raises:
        InputError: files have changed since the family was opened, or vLLM refuses the model.
    """
    if is_served(planned, experiment):
        return _serve(planned, family, experiment, {} if reports is None else reports)
    name: Dtype = experiment.generation.dtype
    dtype, told = DTYPES[name], {} if reports is None else reports
    device = choose_device(experiment.generation.device)
    folder = family.base.folder
    tokenizer = load_tokenizer(folder)
    ends = eos_ids(family, tokenizer)
    drafter = None
    if planned.model is not None and planned.kind == "composition":
        parts = planned_models(experiment)[: planned.components]  # the base and the experts
        chosen = dict(combination(planned.model, len(parts) - 1))
        chosen |= {"vocab_size": len(tokenizer), "eos_ids": sorted(ends)}
        adapters = _adapters(family) if name == "float32" else None
        base = build(folder, tensors(parts[0], family, name, told), dtype, device)
        if adapters is not None:
            model = ComposedForCausalLM.from_adapters(base, adapters, **chosen)
        else:
            experts = [
                build(folder, tensors(part, family, name, told), dtype, device)
                for part in parts[1:]
            ]
            model = ComposedForCausalLM.from_models(
                base, experts, names=list(family.experts), **chosen
            )
        empty: Callable[[], Any] = model.new_cache
        if experiment.generation.speculates and adapters is None:
            drafter = task_arithmetic_drafter(model)
    else:
        model = build(folder, tensors(planned, family, name, told), dtype, device)
        empty = partial(new_cache, model.config.get_text_config())
    check_unchanged(family)
    suit_threads(model)
    pack(model)
    if drafter is not None:
        pack(drafter)
    return Runtime(
        model=model,
        tokenizer=tokenizer,
        eos_ids=ends,
        new_cache=empty,
        model_type=str(read_config(folder).get("model_type", "")),
        max_positions=max_positions(model.config),
        components=planned.components,
        chat=experiment.generation.chat,
        drafter=drafter,
    )


def max_positions(config: Any) -> int | None:
    """How long a text may be, by a Hugging Face config; None where it says nothing."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def is_served(planned: PlannedModel, experiment: Experiment) -> bool:
    """Is the model answered by vLLM? Compositions never are."""
    return experiment.generation.engine == "vllm" and planned.kind != "composition"


def _serve(
    planned: PlannedModel, family: Family, experiment: Experiment, reports: dict[str, Any]
) -> Served:
    from transformers import AutoConfig

    generation, folder = experiment.generation, family.base.folder
    tokenizer = load_tokenizer(folder)
    checkpoint = whole_checkpoint(planned, family, generation.dtype, reports)
    check_unchanged(family)
    options = {"max_model_len": max_positions(AutoConfig.from_pretrained(folder))}
    options |= generation.vllm.model_dump(exclude_none=True)
    return Served(
        llm=start(checkpoint, folder, generation.dtype, experiment.seed, options),
        tokenizer=tokenizer,
        eos_ids=eos_ids(family, tokenizer),
        model_type=str(read_config(folder).get("model_type", "")),
        max_positions=options["max_model_len"],
        chat=generation.chat,
    )


def whole_checkpoint(
    planned: PlannedModel, family: Family, dtype: Dtype, reports: dict[str, Any]
) -> Path:
    """The folder of a whole model: its own, a merge's, or an adapter's merged into its base.

    Raises:
        InputError: the cache has no room for a merge.
    """
    if planned.kind == "base":
        return family.base.folder
    model, inputs = planned.model, family
    if planned.kind == "expert":
        expert = family.experts[planned.name]
        if not isinstance(expert, Adapter):
            return expert.folder
        model, reports = Model(name=planned.name, method="linear"), {}
        inputs = family._replace(experts={planned.name: expert})
    assert model is not None
    found = merges.checkpoint(model, inputs, dtype, reports)
    if found is None:
        raise InputError(
            f"{planned.name}: vLLM reads models from files, and this one does not fit into the "
            f"cache; set {merges.LIMIT} higher, or generation.engine: transformers"
        )
    return found
