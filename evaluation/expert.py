"""Experts to order: `mergescope train EXPERT.yaml OUT` fine-tunes one from a base.

Every example is `prompt + completion + EOS`, with the loss on completion and EOS. Examples that are
longer than `max_length` are an error unless the file says `too_long: skip`; nothing is ever cut.
LoRA goes through PEFT and leaves an adapter, full fine-tuning leaves a checkpoint.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaluation.errors import InputError
from evaluation.examples import Data, Example, Range, data_path, read_examples
from evaluation.experiment import nearest, read_yaml
from evaluation.family import DTYPES, build, choose_device, load_tokenizer, open_family, weights
from evaluation.references import fetch, resolve, search_path
from evaluation.training import IGNORED, Batch, fit

MULTIPLE = 64  # batches are padded to multiples of it: every new shape costs the CPU a compilation


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lora(_Strict):
    """The adapter's rank, scale and modules; by default every linear layer but the head."""

    r: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    target_modules: str | list[str] = "all-linear"


class ExpertSpec(_Strict):
    """One expert: base, data, and how it is trained."""

    base: str
    data: list[Data] = Field(min_length=1)
    method: Literal["full", "lora"] = "lora"
    lora: Lora = Lora()
    epochs: float = Field(default=1.0, gt=0)
    batch_size: int = Field(default=16, ge=1)
    tokens_at_once: int = Field(default=2048, ge=1)  # bounds the memory, changes no gradient
    learning_rate: float = Field(default=6e-4, gt=0)
    warmup: int = Field(default=20, ge=0)
    max_length: int = Field(default=512, ge=2)
    too_long: Literal["error", "skip"] = "error"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    seed: int = Field(default=0, ge=0)


def load_expert_spec(path: Path) -> ExpertSpec:
    """Reads and checks an expert's file.

    Raises:
        InputError: with a sentence for every fault.
    """
    try:
        return ExpertSpec.model_validate(read_yaml(path))
    except ValidationError as error:
        raise InputError([f"{path}: {_sentence(fault)}" for fault in error.errors()]) from None


def train_expert(
    spec: ExpertSpec,
    out: Path,
    *,
    beside: Path,
    data_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Trains an expert and writes it to `out`, whole or not at all.

    Args:
        beside: the expert's file; relative paths are looked for beside it first.

    Returns:
        The loss of every step, nats a token.

    Raises:
        InputError: base, data or output are at fault.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already; choose another folder, or remove it yourself")
    folders = search_path(beside.resolve(), data_dir)
    family = open_family(fetch(resolve(spec.base, folders), folders), {}, spec.dtype)
    tokenizer = load_tokenizer(family.base.folder)
    places = data_path(folders, data_dir)
    examples = _fitting(
        spec, [e for data in spec.data for e in read_examples(data, places, tokenizer)]
    )
    torch.manual_seed(spec.seed)
    dtype, device = DTYPES[spec.dtype], choose_device(spec.device)
    model = build(family.base.folder, weights(family.base, dtype), dtype, device)
    if spec.method == "lora":
        model = _with_adapter(model, spec)
    steps = max(1, round(spec.epochs * len(examples) / spec.batch_size))
    losses = fit(
        model,
        _batches(examples, spec, device),
        steps=steps,
        learning_rate=spec.learning_rate,
        warmup=min(spec.warmup, steps),
        progress=progress,
    )
    _save(model, tokenizer, spec, out)
    return losses


def _fitting(spec: ExpertSpec, examples: Sequence[Example]) -> list[Example]:
    fitting = [example for example in examples if len(example.ids) <= spec.max_length]
    long = len(examples) - len(fitting)
    if long and spec.too_long == "error":
        longest = max(len(example.ids) for example in examples)
        raise InputError(
            f"{long} of {len(examples)} examples are longer than max_length {spec.max_length} (the "
            f"longest has {longest} tokens); raise it, or leave them out with too_long: skip"
        )
    if not fitting:
        raise InputError("no example is left to train on; look at exclude and max_length")
    return fitting


def _batches(
    examples: Sequence[Example], spec: ExpertSpec, device: torch.device
) -> Iterator[list[Batch]]:
    generator = random.Random(spec.seed)
    while True:  # an epoch after the other; `fit` takes what it needs
        order = generator.sample(range(len(examples)), k=len(examples))
        for start in range(0, len(order), spec.batch_size):
            step = [examples[i] for i in order[start : start + spec.batch_size]]
            yield [_batch(part, device) for part in _parts(step, spec.tokens_at_once)]


def _parts(examples: Sequence[Example], tokens: int) -> list[list[Example]]:
    """A step's examples, like lengths together, in parts of at most so many padded tokens (a
    longer example stands alone)."""
    parts: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        if parts and (len(parts[-1]) + 1) * _width(parts[-1]) <= tokens:
            parts[-1].append(example)
        else:
            parts.append([example])
    return parts


def _width(examples: Sequence[Example]) -> int:
    longest = max(len(example.ids) for example in examples)
    return -(-longest // MULTIPLE) * MULTIPLE


def _batch(examples: Sequence[Example], device: torch.device) -> Batch:
    width = _width(examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(examples):
        size = len(example.ids)
        ids[row, :size] = torch.tensor(example.ids)
        mask[row, :size] = 1
        labels[row, example.start : size] = ids[row, example.start : size]
    return Batch(ids.to(device), mask.to(device), labels.to(device))


def _with_adapter(model: Any, spec: ExpertSpec) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=spec.lora.r,
        lora_alpha=spec.lora.alpha,
        target_modules=spec.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise InputError(f"lora.target_modules: {str(error).splitlines()[0]}") from None


def _save(model: Any, tokenizer: Any, spec: ExpertSpec, out: Path) -> None:
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if spec.method == "lora":
            for config in model.peft_config.values():  # PEFT names what it was given: a None
                config.base_model_name_or_path = spec.base
        else:
            tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        if out.is_dir():
            out.rmdir()  # it was empty
        partial.rename(out)
    except OSError as error:
        raise InputError(f"the expert cannot be written to {out}: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sentence(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"]) or "the file"
    if fault["type"] == "extra_forbidden":
        parents: dict[str, type[BaseModel]] = {"data": Data, "lora": Lora, "exclude": Range}
        inside = [parents[str(part)] for part in fault["loc"][:-1] if str(part) in parents]
        model: type[BaseModel] = inside[-1] if inside else ExpertSpec
        known = list(model.model_fields)
        return f"{where}: unknown key{nearest(str(fault['loc'][-1]), known)}"
    if fault["type"] == "missing":
        return f"{where}: this key is missing"
    return f"{where}: found {fault['input']!r}; {fault['msg']}"
