"""What an expert knows of its own data, for the merges that weigh by it.

    fisher   for every parameter the mean over examples of (d log p(completion | prompt))^2: the
             diagonal of the empirical Fisher information
    gram     for every linear layer X^T X of the inputs that it meets, (in, in)

Both are gathered on the reference completions, one example at a time, and written as one
safetensors file with the names of the checkpoint's tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from evaluation.errors import InputError
from evaluation.examples import Data, Example, data_path, find_file, read_examples
from evaluation.experiment import Statistics, read_yaml
from evaluation.family import (
    DTYPES,
    build,
    cache_folder,
    choose_device,
    load_tokenizer,
    open_family,
    weights,
)
from evaluation.references import fetch, resolve, search_path
from merging import METHODS, TensorSource, file_digest, open_checkpoint
from merging.methods import sentence

Kind = Literal["fisher", "gram"]
KINDS: dict[str, Kind] = {"entries": "fisher", "matrix": "gram"}
"""What a method asks for, as it is gathered."""
Progress = Callable[[int, int], None]


class StatisticsSpec(BaseModel):
    """What `mergescope statistics` gathers: of the model, an expert of the base; on some data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    base: str
    model: str
    data: list[Data] = Field(min_length=1)
    count: int = Field(default=64, ge=1)
    max_length: int = Field(default=1024, ge=2)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    seed: int = Field(default=0, ge=0)


def load_statistics_spec(path: Path) -> StatisticsSpec:
    """Reads and checks the file.

    Raises:
        InputError: with a sentence for every fault.
    """
    try:
        return StatisticsSpec.model_validate(read_yaml(path))
    except ValidationError as error:
        known = list(StatisticsSpec.model_fields)
        raise InputError(
            [f"{path}: {sentence(fault, known)}" for fault in error.errors()]
        ) from None


def gather_to_file(
    spec: StatisticsSpec,
    out: Path,
    *,
    beside: Path,
    data_dir: Path | None = None,
    progress: Progress | None = None,
) -> int:
    """Gathers and writes; relative paths are looked for beside the file first.

    Returns:
        How many examples were looked at.

    Raises:
        InputError: models, data or output are at fault.
    """
    folders = search_path(beside.resolve(), data_dir)
    places = data_path(folders, data_dir)
    base, model = (fetch(resolve(one, folders), folders) for one in (spec.base, spec.model))
    family = open_family(base, {"model": model}, spec.dtype)
    how = Statistics(data={"model": spec.data}, count=spec.count, max_length=spec.max_length)
    gatherer = Gatherer(how, places, spec.dtype, spec.device, spec.seed)
    found, count = gatherer.gather(
        "model", spec.kind, family.base, family.experts["model"], progress
    )
    write_statistics(found, out, {"kind": spec.kind, "examples": str(count)})
    return count


class Gatherer:
    """Gathers each expert's statistics when a merge first asks for them, and keeps them by the
    digest of everything that determines them."""

    def __init__(
        self, spec: Statistics, places: Sequence[Path], dtype: str, device: str, seed: int
    ) -> None:
        self._spec, self._places = spec, places
        self._dtype, self._device, self._seed = dtype, device, seed

    def digest(self, expert: str) -> str:
        """Of the data, and of how they are used."""
        data = self._spec.data[expert]
        content = {
            "data": [one.model_dump() for one in data],
            "files": [file_digest(find_file(one, self._places)) for one in data],
            "count": self._spec.count,
            "max_length": self._spec.max_length,
            "seed": self._seed,
            "dtype": self._dtype,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def sources(
        self,
        method: str,
        base: TensorSource,
        experts: Mapping[str, TensorSource],
        progress: Callable[[str], Progress],
    ) -> list[TensorSource]:
        """The statistics of all experts that a method weighs by, in their order; none for most."""
        wanted = METHODS[method].statistics
        if wanted is None:
            return []
        return [
            open_checkpoint(self._file(KINDS[wanted], name, base, expert, progress))
            for name, expert in experts.items()
        ]

    def _file(
        self,
        kind: Kind,
        name: str,
        base: TensorSource,
        expert: TensorSource,
        progress: Callable[[str], Progress],
    ) -> Path:
        identity = f"{kind} {expert.digest()} {self.digest(name)}"
        stem = hashlib.sha256(identity.encode()).hexdigest()[:32]
        file = cache_folder() / "statistics" / f"{stem}.safetensors"
        if not file.is_file():
            found, count = self.gather(name, kind, base, expert, progress(f"{kind} of {name}"))
            write_statistics(found, file, {"kind": kind, "examples": str(count)})
        return file

    def gather(
        self,
        name: str,
        kind: Kind,
        base: TensorSource,
        expert: TensorSource,
        progress: Progress | None = None,
    ) -> tuple[dict[str, Tensor], int]:
        """One expert's statistics, and over how many examples."""
        tokenizer = load_tokenizer(base.folder)
        examples = [
            example
            for data in self._spec.data[name]
            for example in read_examples(data, self._places, tokenizer)
        ]
        chosen = draw(examples, self._spec.count, self._spec.max_length, self._seed)
        dtype = DTYPES[self._dtype]
        model = build(base.folder, weights(expert, dtype), dtype, choose_device(self._device))
        return gather(model, chosen, kind, progress), len(chosen)


def draw(examples: Sequence[Example], count: int, longest: int, seed: int) -> list[Example]:
    """So many examples, or all where there are fewer, of those that are not too long.

    Raises:
        InputError: none is short enough.
    """
    fitting = [example for example in examples if len(example.ids) <= longest]
    if not fitting:
        raise InputError(
            f"statistics: all {len(examples)} examples are longer than max_length {longest}; "
            "raise it"
        )
    return random.Random(seed).sample(fitting, min(count, len(fitting)))


def gather(
    model: Any, examples: Sequence[Example], kind: Kind, progress: Progress | None = None
) -> dict[str, Tensor]:
    """The statistics of a model, in float32 on the CPU, by the names of its parameters."""
    one: Callable[[Any, Example], Iterable[tuple[str, Tensor]]]
    one = _square_gradients if kind == "fisher" else _input_products
    found: dict[str, Tensor] = {}
    for number, example in enumerate(examples, start=1):
        for name, value in one(model, example):
            found[name] = found[name].add_(value) if name in found else value
        if progress is not None:
            progress(number, len(examples))
    if kind == "fisher":
        found = {name: value / len(examples) for name, value in found.items()}
    if not found:
        raise InputError("the model has no linear layers to gather statistics of")
    return {name: value.cpu() for name, value in found.items()}


def write_statistics(found: Mapping[str, Tensor], file: Path, about: Mapping[str, str]) -> None:
    """Writes the file whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(found), partial, dict(about))
        partial.replace(file)
    except OSError as error:
        raise InputError(f"the statistics cannot be written to {file}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def _square_gradients(model: Any, example: Example) -> Iterator[tuple[str, Tensor]]:
    """One parameter after the other, so that only one is held twice."""
    model.zero_grad(set_to_none=True)
    ids = torch.tensor([example.ids], device=model.device)
    logits = model(input_ids=ids).logits[0, example.start - 1 : -1].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, example.start :], reduction="sum")
    torch.autograd.backward(loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad.float().square()
            parameter.grad = None


@torch.no_grad()
def _input_products(model: Any, example: Example) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[[Any, Any], None]:
        def see(_: Any, inputs: Any) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            found.append((f"{name}.weight", rows.T @ rows))

        return see

    head = model.get_output_embeddings()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                handle = module.register_forward_pre_hook(hook(name))
                stack.callback(handle.remove)
        model(input_ids=torch.tensor([example.ids], device=model.device), logits_to_keep=1)
    return found
