"""A saved model, ready to answer outside any experiment.

    open_composed("composed")                       what ComposedForCausalLM.save_pretrained wrote
    open_pretrained("path, hub id or package:NAME") any causal LM, also a LoRA adapter on its base

As in an experiment, a composition has its base's tokenizer, and a text ends at every id that ends
one for the tokenizer or a model.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from composition import ComposedForCausalLM, new_cache, pack
from composition.saved import MODEL_TYPE, ComposedConfig
from evaluation.errors import InputError
from evaluation.family import DTYPES, choose_device, convert_gguf, load_tokenizer, read_config
from evaluation.references import fetch, resolve, search_path
from evaluation.runtime import Runtime
from evaluation.training import suit_threads


def open_composed(folder: str, dtype: str = "float32", device: str = "auto") -> Runtime:
    """Loads a saved composition.

    Raises:
        InputError: the folder holds none, or the dtype or device is unknown.
        CompositionError: a component is gone or has changed.
    """
    config = read_config(Path(folder))
    if config.get("model_type") != MODEL_TYPE:
        raise InputError(
            f"{folder}/config.json says model_type {config.get('model_type')!r}; expected "
            f"{MODEL_TYPE!r}, as ComposedForCausalLM.save_pretrained writes it. Name any other "
            "model with pretrained="
        )
    placed = choose_device(device)
    model = ComposedForCausalLM.from_pretrained(folder, dtype=_dtype(dtype))
    base = ComposedConfig.from_pretrained(folder).components[0]
    return _ready(
        model.to(placed),
        _tokenizer(base["source"], base.get("revision")),
        model.new_cache,
        components=len(model.origins),
        ends=model.eos_ids,
    )


def open_pretrained(name: str, dtype: str = "float32", device: str = "auto") -> Runtime:
    """Loads a causal LM by folder, GGUF file, hub id or `package:NAME`.

    Raises:
        InputError: there is no such model, it is a composition, or the dtype or device is unknown.
    """
    from transformers import AutoModelForCausalLM

    placed, chosen = choose_device(device), _dtype(dtype)
    folders = search_path(Path.cwd() / name, None)
    found = fetch(resolve(name, folders), folders)
    assert found.path is not None
    folder = convert_gguf(found.path, dtype) if found.kind == "gguf" else found.path
    if found.kind == "checkpoint" and read_config(folder).get("model_type") == MODEL_TYPE:
        raise InputError(f"{name} is a saved composition; name it with composed=")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=chosen).eval()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{name} cannot be loaded as a causal LM: {reason}") from None
    empty = partial(new_cache, model.config.get_text_config())
    found_ends = model.generation_config.eos_token_id
    ends = found_ends if isinstance(found_ends, list) else [found_ends]
    return _ready(model.to(placed), load_tokenizer(folder), empty, components=1, ends=ends)


def _ready(model: Any, tokenizer: Any, empty: Any, components: int, ends: list[Any]) -> Runtime:
    suit_threads(model)
    pack(model)
    config = model.config.get_text_config()
    return Runtime(
        model=model,
        tokenizer=tokenizer,
        eos_ids=frozenset(int(i) for i in [*ends, tokenizer.eos_token_id] if i is not None),
        new_cache=empty,
        model_type=str(config.model_type),
        max_positions=getattr(config, "max_position_embeddings", None),
        components=components,
    )


def _dtype(name: str) -> Any:
    if name not in DTYPES:
        raise InputError(f"dtype is {name!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _tokenizer(source: str, revision: str | None) -> Any:
    if Path(source).exists():
        return load_tokenizer(Path(source))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, revision=revision or "main")
