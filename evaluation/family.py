"""A base and its experts: opened as sources of tensors, checked, and built into models.

A source is a checkpoint, a GGUF file (converted once) or a LoRA adapter on the base (exact BA in
float32). All models of a family run with the base's tokenizer and stop at the same end-of-sequence
ids, so that a table holds one protocol.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from composition import CompositionError, check_vocabularies
from evaluation.errors import InputError
from evaluation.references import Reference
from merging import (
    MergeError,
    TensorSource,
    differences,
    file_digest,
    open_adapter,
    open_checkpoint,
    read_json,
)

if TYPE_CHECKING:
    from evaluation.statistics import Gatherer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model")


class Family(NamedTuple):
    """A base and its experts as sources of tensors, in the experiment's order."""

    base: TensorSource
    experts: dict[str, TensorSource]
    statistics: Gatherer | None = None  # of the experts, where the experiment says on what


def cache_folder() -> Path:
    """Where converted models and ground truths are kept: XDG_CACHE_HOME/mergescope."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mergescope"


def choose_device(wanted: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU.

    Raises:
        InputError: a device that this machine or this torch does not have.
    """
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"generation.device: {wanted!r} cannot be used here ({reason}); use auto, cpu, cuda, "
            "cuda:N or mps"
        ) from None


def open_family(base: Reference, experts: Mapping[str, Reference], dtype: str) -> Family:
    """Opens all sources and checks that the experts can have been fine-tuned from the base.

    Args:
        dtype: what a GGUF file is dequantised to when it is converted to a checkpoint.

    Raises:
        InputError: with every fault; of another architecture, vocabulary, shape or format.
    """
    if base.kind == "adapter":
        raise InputError(
            f"base: {base.text} is a LoRA adapter; expected a whole model. Name the adapter's own "
            "base, and the adapter among the experts"
        )
    try:
        source = open_checkpoint(_checkpoint_folder(base, dtype))
    except MergeError as error:
        raise InputError(f"base: {error}") from None
    opened: dict[str, TensorSource] = {}
    faults: list[str] = []
    for name, reference in experts.items():
        try:
            opened[name] = _open_expert(source, reference, dtype)
        except (MergeError, InputError) as error:
            faults += [f"experts.{name}: {line}" for line in str(error).splitlines()]
            continue
        found = _mismatches(source, opened[name]) or differences(source, opened[name], "it")
        faults += [f"experts.{name}: {fault}" for fault in found]
    if faults:
        raise InputError(faults)
    return Family(source, opened)


def check_unchanged(family: Family) -> None:
    """The files are those that the keys of the answers were made of.

    Raises:
        InputError: a file has changed since; what is computed from now on would be filed as
            another model's.
    """
    faults = []
    for name, source in {"base": family.base, **family.experts}.items():
        try:
            unchanged = source.unchanged()
        except OSError:
            unchanged = False
        if not unchanged:
            faults.append(
                f"{name}: files in {getattr(source, 'adapter_folder', source.folder)} have changed "
                "since the run began; nothing was stored for them. The same command again takes "
                "them as they are now"
            )
    if faults:
        raise InputError(faults)


def _open_expert(base: TensorSource, reference: Reference, dtype: str) -> TensorSource:
    if reference.kind == "adapter" and reference.path is not None:
        return open_adapter(base, reference.path)
    return open_checkpoint(_checkpoint_folder(reference, dtype))


ARCHITECTURE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def _mismatches(base: TensorSource, expert: TensorSource) -> list[str]:
    """What shows that an expert was not fine-tuned from this base."""
    if base.folder == expert.folder:
        return []
    ours, theirs = read_config(base.folder), read_config(expert.folder)
    faults = [
        f"{key} is {theirs.get(key)!r} where the base has {ours.get(key)!r}; expected an expert "
        "fine-tuned from this base"
        for key in ARCHITECTURE
        if ours.get(key) != theirs.get(key)
    ]
    if not faults and _has_tokenizer(expert.folder) and _has_tokenizer(base.folder):
        try:
            check_vocabularies([load_tokenizer(base.folder), load_tokenizer(expert.folder)])
        except CompositionError as error:
            faults = str(error).splitlines()
    return faults


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A model's config.json, or another of its JSON files.

    Raises:
        InputError: it is missing or no JSON object.
    """
    try:
        return read_json(folder / name)
    except MergeError as error:
        raise InputError(str(error)) from None


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; its own code is not run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"the tokenizer in {folder} cannot be loaded: {reason}") from None


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer's files, by name and content."""
    digest = hashlib.sha256()
    files = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def weights(source: TensorSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a source, the floating ones in `dtype`."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name in source.names()
        for tensor in (source.read(name),)
    }


def build(
    folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Any:
    """A Hugging Face causal LM of the config in `folder` with the given weights.

    Raises:
        InputError: transformers does not know the architecture, or weights are missing.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, info = architecture.from_pretrained(
            None, config=config, state_dict=dict(state), dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"the model in {folder} cannot be loaded: {reason}") from None
    missing = sorted(info["missing_keys"])
    if missing or info["unexpected_keys"]:
        names = ", ".join([*missing, *sorted(info["unexpected_keys"])][:5])
        raise InputError(
            f"the weights of {folder} do not fit its config.json: {len(missing)} tensors are "
            f"missing and {len(info['unexpected_keys'])} are unknown to the architecture ({names})"
        )
    return model.to(device).eval()


def eos_ids(family: Family, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text for the tokenizer, the base or an expert."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for source in (family.base, *family.experts.values()):
        for name in ("generation_config.json", "config.json"):
            if (source.folder / name).is_file():
                found = read_config(source.folder, name).get("eos_token_id")
                ids.update(found if isinstance(found, list) else [] if found is None else [found])
    return frozenset(ids)


def _checkpoint_folder(reference: Reference, dtype: str) -> Path:
    if reference.path is None:
        raise InputError(f"{reference.text} has not been downloaded")
    if reference.kind != "gguf":
        return reference.path
    return convert_gguf(reference.path, dtype)


def convert_gguf(file: Path, dtype: str) -> Path:
    """A GGUF file as an ordinary checkpoint in the cache, dequantised, converted once.

    Raises:
        InputError: transformers cannot read the file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = cache_folder() / "gguf" / f"{file.stem}-{file_digest(file)[:16]}-{dtype}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=DTYPES[dtype],
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
        partial.rename(folder)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        if folder.is_dir():  # another process was faster
            return folder
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{file} cannot be read as a GGUF model: {reason}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
