"""The merges of an experiment: made once, kept by the digest of recipe and inputs.

A merge that fits is written to the cache (`MERGESCOPE_CACHE_GB`, 20 by default, for all of them;
the longest unused go first) as an ordinary checkpoint with its model card, and found there by every
later run; a larger one is made in memory whenever it is loaded. Several merges of the same experts,
such as a sweep over lambda or density, read them once where memory allows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

import merging
from evaluation.errors import InputError
from evaluation.experiment import Model, merge_recipe
from evaluation.family import Family, cache_folder
from merging import METHODS, MergeError, TensorSource, open_checkpoint, read_json
from merging.engine import tensors_of
from merging.held import hold
from merging.output import REPORT, named_faults, prepare_recipe, write_merged
from merging.raw import code_of, itemsize
from merging.recipe import Dtype, resolved
from merging.report import MergeReport

LIMIT = "MERGESCOPE_CACHE_GB"
GIGABYTES = 20.0
RECENT = 3600.0  # seconds in which a merge that was used is not dropped

Progress = Callable[[int, int], None]
Announce = Callable[[str, bool], Progress]
"""(what begins, whether its units are bytes) -> what is told of its progress."""


def silent(text: str, in_bytes: bool) -> Progress:
    """An `Announce` that shows nothing."""
    return lambda done, total: None


def make(
    models: Sequence[Model],
    family: Family,
    dtype: Dtype,
    reports: dict[str, Any],
    announce: Announce = silent,
) -> None:
    """Makes those merges that are not in the cache, as far as they fit into it together, and
    gathers the statistics for all of them."""
    for model in models:
        statistics(model, family, announce)
    size = _bytes(family.base, dtype)
    room = _limit()
    missing = []
    for model in models:
        if size <= room and _found(model, family, dtype, reports) is None:
            missing.append(model)
        room -= size
    sources = [family.base, *family.experts.values()]
    with hold(sources) if len(missing) > 1 else nullcontext(sources) as (base, *experts):
        held = family._replace(base=base, experts=dict(zip(family.experts, experts, strict=True)))
        for model in missing:
            if _fits(size):
                _write(model, held, dtype, reports, announce)


def merged(
    model: Model,
    family: Family,
    dtype: Dtype,
    reports: dict[str, Any],
    announce: Announce = silent,
) -> Mapping[str, Tensor]:
    """The tensors of a merge, from the cache where it is or fits.

    Args:
        reports: takes what the merge has told of its inputs, by the model's name.

    Raises:
        InputError: the inputs cannot be merged.
    """
    folder = checkpoint(model, family, dtype, reports, announce)
    if folder is not None:
        source = open_checkpoint(folder)
        return {name: source.read(name) for name in source.names()}
    recipe = merge_recipe(model, list(family.experts), dtype)
    told = MergeReport(list(family.experts))
    with _told(model), named_faults(recipe):
        experts = list(family.experts.values())
        job = prepare_recipe(recipe, family.base, experts, statistics(model, family, announce))
        found = dict(tensors_of(job, announce(f"merging {model.name}", False), report=told))
    reports[model.name] = told.summary(family.base.names())
    return found


def checkpoint(
    model: Model,
    family: Family,
    dtype: Dtype,
    reports: dict[str, Any],
    announce: Announce = silent,
) -> Path | None:
    """The folder of a merge in the cache, made where it is not there; None where it does not fit.

    Raises:
        InputError: the inputs cannot be merged.
    """
    folder = _found(model, family, dtype, reports)
    if folder is None and _fits(_bytes(family.base, dtype)):
        _write(model, family, dtype, reports, announce)
        folder = _found(model, family, dtype, reports)
    return folder


def _write(
    model: Model, family: Family, dtype: Dtype, reports: dict[str, Any], announce: Announce
) -> None:
    with _told(model):
        write_merged(
            merge_recipe(model, list(family.experts), dtype),
            family.base,
            list(family.experts.values()),
            _folder(model, family, dtype),
            statistics=statistics(model, family, announce),
            progress=announce(f"merging {model.name}", True),
        )
    _found(model, family, dtype, reports)


def _found(model: Model, family: Family, dtype: Dtype, reports: dict[str, Any]) -> Path | None:
    """The merge in the cache; noted as used now."""
    folder = _folder(model, family, dtype)
    if not (folder / REPORT).is_file():
        return None
    os.utime(folder)
    reports[model.name] = read_json(folder / REPORT)
    return folder


def _folder(model: Model, family: Family, dtype: Dtype) -> Path:
    """Its place in the cache, by everything that determines it."""
    recipe = resolved(merge_recipe(model, list(family.experts), dtype))
    known = family.statistics if METHODS[recipe["method"]].statistics else None
    content = {
        "recipe": {key: value for key, value in recipe.items() if key != "name"},
        "inputs": [family.base.digest(), *(one.digest() for one in family.experts.values())],
        "statistics": [known.digest(name) for name in family.experts] if known else [],
        "code": _code(),
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "merges" / key[:32]


@cache
def _code() -> str:
    """Digest of the package that merges: another version of it may merge otherwise."""
    total = hashlib.sha256()
    folder = Path(merging.__file__).parent
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.c")]):
        total.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return total.hexdigest()


def statistics(model: Model, family: Family, announce: Announce = silent) -> list[TensorSource]:
    """What a merge weighs its experts by, gathered where it is not yet; nothing for most."""
    if family.statistics is None:
        return []
    return family.statistics.sources(
        str(model.method), family.base, family.experts, lambda text: announce(text, False)
    )


@contextmanager
def _told(model: Model) -> Iterator[None]:
    try:
        yield
    except MergeError as error:
        faults = [f"models.{model.name}: {line}" for line in str(error).splitlines()]
        raise InputError(faults) from None


def _bytes(base: TensorSource, dtype: Dtype) -> int:
    return sum(prod(base.shape(name)) * itemsize(code_of(dtype)) for name in base.names())


def _limit() -> float:
    """Bytes that the cached merges may take.

    Raises:
        InputError: the environment variable is no number.
    """
    given = os.environ.get(LIMIT, str(GIGABYTES))
    try:
        return max(float(given), 0.0) * 1e9
    except ValueError:
        raise InputError(f"{LIMIT} is {given!r}; expected a number of gigabytes") from None


def _fits(size: int) -> bool:
    """Makes room for so many bytes; whether there is."""
    root = cache_folder() / "merges"
    root.mkdir(parents=True, exist_ok=True)
    kept = sorted((f for f in root.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime)
    sizes = {f: sum(file.stat().st_size for file in f.iterdir()) for f in kept}
    taken, limit = sum(sizes.values()), _limit()
    for folder in kept:
        if taken + size <= limit or time.time() - folder.stat().st_mtime < RECENT:
            break
        shutil.rmtree(folder, ignore_errors=True)
        taken -= sizes[folder]
    return taken + size <= limit and 2 * size <= shutil.disk_usage(root).free
