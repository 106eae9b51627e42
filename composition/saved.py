"""A composition as a small folder: it names its components with digests and copies no weights.

    config.json             model_type "composed", the combination, and for each component its name,
                            its folder or hub id, and the SHA-256 of its weights (or its revision)
    generation_config.json  the base's

A component that has changed since is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PreTrainedConfig

from composition.errors import CompositionError

MODEL_TYPE = "composed"
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "adapter_config.json")
SPAN = 1 << 22  # bytes hashed at a time


class ComposedConfig(PreTrainedConfig):  # type: ignore[misc]
    """What config.json of a saved composition holds; the loaded model has its base's config."""

    model_type = MODEL_TYPE

    def __init__(
        self,
        combination: Mapping[str, Any] | None = None,
        components: Sequence[Mapping[str, Any]] = (),
        vocab_size: int | None = None,
        eos_ids: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.combination = dict(combination or {})
        self.components = [dict(component) for component in components]
        self.vocab_size = vocab_size
        self.eos_ids = list(eos_ids)


class Source(BaseModel):
    """Where a component comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str  # a folder or a hub id
    adapter: bool = False  # a LoRA adapter on the first component
    digest: str | None = None  # of a folder's weights
    revision: str | None = None  # of a hub id


def source_of(name: str, source: str, revision: str | None = None, adapter: bool = False) -> Source:
    """A component's entry in config.json.

    Raises:
        CompositionError: the component was not loaded from anywhere.
    """
    if not source:
        raise CompositionError(
            f"{name} was not loaded from a folder or a hub id, so a saved composition could not "
            "name it; save it with save_pretrained, load it, and compose what was loaded"
        )
    folder = Path(source)
    if folder.exists():
        return Source(
            name=name, source=str(folder.resolve()), adapter=adapter, digest=weights_digest(folder)
        )
    return Source(name=name, source=source, adapter=adapter, revision=revision)


def checked_sources(config: ComposedConfig, folder: str) -> list[Source]:
    """The components of a saved composition, none of which has changed.

    Raises:
        CompositionError: with a line for every fault.
    """
    try:
        sources = [Source.model_validate(component) for component in config.components]
    except ValidationError as error:
        raise CompositionError(
            f"{folder}/config.json does not describe its components: {error.errors()[0]['msg']}"
        ) from None
    if not sources:
        raise CompositionError(f"{folder}/config.json names no components")
    faults = []
    for one in sources:
        if one.digest is None:
            continue
        if not Path(one.source).exists():
            faults.append(f"{one.name}: {one.source} is no longer there")
        elif weights_digest(Path(one.source)) != one.digest:
            faults.append(
                f"{one.name}: the weights in {one.source} have changed since the composition was "
                "saved; compose them anew"
            )
    if faults:
        raise CompositionError("\n".join(faults))
    return sources


def weights_digest(folder: Path) -> str:
    """SHA-256 over the files of weights, by name and content."""
    total = hashlib.sha256()
    files = {file for pattern in WEIGHTS for file in folder.glob(pattern)}
    if folder.is_file():
        files = {folder}
    if not files:
        raise CompositionError(f"{folder} holds no weights")
    for file in sorted(files):
        total.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while part := stream.read(SPAN):
                total.update(part)
    return total.hexdigest()
