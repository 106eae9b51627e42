"""A merge as a folder: weights, config, tokenizer, model card and report, whole or not at all.

Everything is written into a folder beside the target and renamed at the end, so that a killed
merge leaves no half output and a rerun leaves no shard of the run before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import yaml

from merging.adapter import open_adapter
from merging.checkpoint import TensorSource, open_checkpoint, read_json
from merging.engine import Job, Progress, differences, prepare, run
from merging.errors import MergeError
from merging.methods import METHODS
from merging.raw import code_of
from merging.recipe import Recipe, chooser, resolved
from merging.report import MergeReport
from merging.writer import Planned, Shards

REPORT = "merge_report.json"  # also the mark by which an old output of ours is known
SHARD_BYTES = 5_000_000_000
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.py",
)


def merge_to_folder(
    recipe: Recipe,
    out: Path,
    *,
    locate: Callable[[str], Path] = Path,
    shard_bytes: int = SHARD_BYTES,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes the merged model; `from_pretrained` loads it.

    Args:
        locate: finds a model's folder from its name in the recipe.
        device: where it is computed.
        threads: one a core if left out.
        progress: called with (bytes written, bytes in all).

    Returns:
        `out`.

    Raises:
        MergeError: inputs that do not fit, or an output folder that is not ours to replace.
    """
    folders = {name: locate(name) for name in (recipe.base, *(m.model for m in recipe.models))}
    base = open_checkpoint(folders[recipe.base])
    experts = _open_experts(recipe, base, folders)
    if any(out.resolve() == folder.resolve() for folder in folders.values()):
        raise MergeError(f"{out} is one of the inputs; choose another folder for the merged model")
    return write_merged(
        recipe,
        base,
        experts,
        out,
        statistics=[open_checkpoint(locate(m.statistics)) for m in recipe.models if m.statistics],
        shard_bytes=shard_bytes,
        device=device,
        threads=threads,
        progress=progress,
    )


def write_merged(
    recipe: Recipe,
    base: TensorSource,
    experts: Sequence[TensorSource],
    out: Path,
    *,
    statistics: Sequence[TensorSource] = (),
    shard_bytes: int = SHARD_BYTES,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """`merge_to_folder` for models that are open already, in the recipe's order."""
    _check_target(out)
    told = MergeReport([ingredient.model for ingredient in recipe.models])
    with _whole_or_nothing(out) as partial:
        with named_faults(recipe):
            job = prepare_recipe(recipe, base, experts, statistics, device=device)
            names = base.names()
            planned = [Planned(name, base.shape(name), job.out_code(name)) for name in names]
            total, done = sum(tensor.bytes for tensor in planned), 0
            with closing(Shards(partial, planned, shard_bytes)) as shards:
                merged = run(job, shards.write, report=told, threads=threads)
                for tensor, _ in zip(planned, merged, strict=True):
                    done += tensor.bytes
                    if progress is not None:
                        progress(done, total)
        _copy_files(base, experts, recipe, partial, told)
        digests = {recipe.base: base.digest()} | {
            ingredient.model: expert.digest()
            for ingredient, expert in zip(recipe.models, experts, strict=True)
        }
        _write_card(recipe, digests, partial, recipe.name or out.name)
        report = {"recipe": resolved(recipe), "inputs": digests, **told.summary(base.names())}
        (partial / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return out


def summary(out: Path) -> list[str]:
    """What a merge has told of its inputs, in a few lines."""
    report = read_json(out / REPORT)
    kept = report["tensors_kept_from_base"]
    norms = ", ".join(f"{name} {norm:.4g}" for name, norm in report["task_vector_norms"].items())
    cosines = ", ".join(
        f"{names} {cosine:.3f}"
        for names, cosine in report["task_vector_cosines"].items()
        if cosine is not None
    )
    named = f" ({', '.join(kept[:3])}{', ...' if len(kept) > 3 else ''})" if kept else ""
    lines = [
        f"{report['tensors_merged']} tensors merged, {len(kept)} kept from the base{named}",
        f"norms of task vectors: {norms}",
    ]
    if cosines:
        share = report["sign_conflict_share"]
        lines.append(f"their cosines: {cosines}; {share:.1%} of the entries in sign conflict")
    if report["non_finite_entries"]:
        lines.append(f"NaN or infinite entries in: {', '.join(report['non_finite_entries'])}")
    return [*lines, *(f"note: {note}" for note in report["notes"])]


def prepare_recipe(
    recipe: Recipe,
    base: TensorSource,
    experts: Sequence[TensorSource],
    statistics: Sequence[TensorSource] = (),
    device: str = "cpu",
) -> Job:
    """The checked merge that a recipe asks for."""
    return prepare(
        base,
        experts,
        recipe.method,
        choose=chooser(recipe, base.names()),
        dtype=None if recipe.dtype is None else code_of(recipe.dtype),
        exclude=recipe.exclude,
        allow_non_finite=recipe.allow_non_finite,
        device=device,
        statistics=statistics,
    )


def _open_experts(
    recipe: Recipe, base: TensorSource, folders: dict[str, Path]
) -> list[TensorSource]:
    experts: list[TensorSource] = []
    faults: list[str] = []
    for ingredient in recipe.models:
        folder = folders[ingredient.model]
        try:
            adapter = (folder / "adapter_config.json").is_file()
            expert = open_adapter(base, folder) if adapter else open_checkpoint(folder)
        except MergeError as error:
            faults += str(error).splitlines()
            continue
        faults += differences(base, expert, ingredient.model)
        experts.append(expert)
    if faults:
        raise MergeError("\n".join(faults))
    return experts


@contextmanager
def named_faults(recipe: Recipe) -> Iterator[None]:
    """The engine numbers the experts; a user knows them by their paths."""
    try:
        yield
    except MergeError as error:
        text = str(error)
        for number, ingredient in enumerate(recipe.models):
            text = text.replace(f"expert {number}", ingredient.model)
        raise MergeError(text.replace("the base", f"the base {recipe.base}", 1)) from None


def _check_target(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / REPORT).is_file():
        raise MergeError(
            f"{out} is not empty and no merge of ours (it has no {REPORT}); choose another folder, "
            "or remove it yourself"
        )
    if out.exists() and not out.is_dir():
        raise MergeError(f"{out} is a file; expected a folder for the merged model")


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise MergeError(
            f"the merged model cannot be written to {out}: {error.strerror}; choose another folder"
        ) from None
    try:
        yield partial
        if out.exists():
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _copy_files(
    base: TensorSource,
    experts: Sequence[TensorSource],
    recipe: Recipe,
    target: Path,
    told: MergeReport,
) -> None:
    """Config with the dtype written, and what belongs to the base; differing ones are noted."""
    files = {file for pattern in COPIED for file in base.folder.glob(pattern) if file.is_file()}
    for file in sorted(files):
        shutil.copyfile(file, target / file.name)
        for ingredient, expert in zip(recipe.models, experts, strict=True):
            other = expert.folder / file.name
            if other.is_file() and other.read_bytes() != file.read_bytes():
                told.notes.append(f"{file.name} of {ingredient.model} differs; the base's is kept")
    if (base.folder / "config.json").is_file():
        config = read_json(base.folder / "config.json")
        if recipe.dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = recipe.dtype
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (target / "config.json").write_text(text, encoding="utf-8")


def _write_card(recipe: Recipe, digests: dict[str, str], target: Path, name: str) -> None:
    head = {
        "base_model": [recipe.base, *(ingredient.model for ingredient in recipe.models)],
        "library_name": "transformers",
        "tags": ["merge", "mergescope", recipe.method],
    }
    inputs = "\n".join(f"| `{name}` | `{digest}` |" for name, digest in digests.items())
    (target / "README.md").write_text(
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n"
        f"# {name}\n\n"
        f"A merge by {recipe.method} ({METHODS[recipe.method].summary}), made with mergescope.\n\n"
        f"```yaml\n{yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True)}```\n\n"
        f"| input | SHA-256 of its weights |\n|---|---|\n{inputs}\n",
        encoding="utf-8",
    )
