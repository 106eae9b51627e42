"""The experiment file: its schema, its faults, and the models it stands for.

Everything is checked before any model is loaded, and all faults are told together: an unknown
key and a missing file in one experiment are two sentences in one message.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from composition import CompositionError, parse_combination
from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import BenchmarkEntry, Settings
from evaluation.errors import InputError
from evaluation.letters.task import parse_skill
from evaluation.references import resolve, search_path
from merging import MergeError, check_experts, parse_parameters

BASE = "base"  # the base model's name in every table


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Letters(_Strict):
    """A model of the letters task, trained on first use: `copy` (the base) or a skill `A->B`."""

    letters: str


ModelReference = str | Letters


class Generation(_Strict):
    """How completions are made; one protocol for every model of the experiment."""

    max_new_tokens: int = Field(default=512, ge=1)
    batch_size: int = Field(default=16, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"


class Equivalence(_Strict):
    """Where a merge's next-token distributions are compared with its composition's."""

    prompts: list[str] = Field(min_length=1)
    count: int = Field(default=64, ge=1)
    alphas: list[float] = Field(default=[1 / 256, 1 / 64, 1 / 16, 1.0], min_length=1)

    @field_validator("alphas")
    @classmethod
    def _positive(cls, alphas: list[float]) -> list[float]:
        if any(not 0 < alpha <= 1 for alpha in alphas) or len(set(alphas)) < len(alphas):
            raise ValueError("expected different numbers above 0 and at most 1")
        return alphas


class LmEvalTask(_Strict):
    """Any task of lm-eval, by its name there."""

    lm_eval: str
    num_fewshot: int | None = Field(default=None, ge=0)


class Model(BaseModel):
    """A merge (`method`) or a composition (`rule`) with its own parameters beside the name."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(min_length=1)
    method: str | None = None
    rule: str | None = None
    weights: list[FiniteFloat] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """What the file says beside name, method, rule and weights."""
        return dict(self.model_extra or {})


class Experiment(_Strict):
    """One experiment: a base, its experts, the merges and compositions, and the benchmarks."""

    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    base: ModelReference
    experts: dict[str, ModelReference] = Field(min_length=1)
    models: list[Model] = []
    sweep: dict[str, dict[str, list[Any]]] = {}
    benchmarks: list[str | LmEvalTask] = Field(min_length=1)
    generation: Generation = Generation()
    equivalence: Equivalence | None = None
    seed: int = Field(default=0, ge=0)
    provenance: dict[str, Any] | None = None  # written by a run; not read


class Loaded(NamedTuple):
    """An experiment and where it was read from."""

    experiment: Experiment
    path: Path
    notes: list[str]  # what could not be checked here, such as a hub id without a network


def load_experiment(
    path: Path, data_dir: Path | None = None, unsafe_execution: bool = False
) -> Loaded:
    """Reads and checks an experiment file.

    Raises:
        InputError: with one sentence for every fault found.
    """
    raw = _read_mapping(path)
    experiment, faults = _parse(raw)
    folders = search_path(path.resolve(), data_dir)
    notes: list[str] = []
    for where, reference in _references(raw):
        try:
            if isinstance(reference, str) and resolve(reference, folders).kind == "hub":
                notes.append(f"{where}: {reference} is taken for a hub id; not checked here")
        except InputError as error:
            faults += [f"{where}: {fault}" for fault in error.faults]
    faults += _letters_faults(raw)
    faults += _model_faults(raw)
    faults += _benchmark_faults(raw, data_dir, unsafe_execution)
    if faults or experiment is None:
        raise InputError([f"{path}: {fault}" for fault in dict.fromkeys(faults)])
    return Loaded(experiment, path, notes)


def expand(experiment: Experiment) -> list[Model]:
    """The models after the sweep: every combination becomes a model named `ta[lambda=0.3]`."""
    models: list[Model] = []
    for model in experiment.models:
        grid = experiment.sweep.get(model.name)
        if not grid:
            models.append(model)
            continue
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            label = ",".join(f"{key}={value}" for key, value in chosen.items())
            given = {**model.model_dump(exclude_none=True), **chosen}
            models.append(Model(**{**given, "name": f"{model.name}[{label}]"}))
    return models


def benchmark_name(benchmark: str | LmEvalTask) -> str:
    """The name a benchmark has in every table."""
    if isinstance(benchmark, str):
        return benchmark
    shots = "" if benchmark.num_fewshot is None else f"@{benchmark.num_fewshot}"
    return f"{benchmark.lm_eval}{shots}"


def benchmark_entry(benchmark: str | LmEvalTask) -> BenchmarkEntry:
    """The registry's row, or one made for a task of lm-eval.

    Raises:
        InputError: no benchmark of that name; the nearest is named.
    """
    if isinstance(benchmark, str):
        if benchmark not in BENCHMARKS:
            raise InputError(_unknown_benchmark(benchmark))
        return BENCHMARKS[benchmark]
    from evaluation.benchmarks.lm_eval_tasks import lm_eval_entry

    return lm_eval_entry(benchmark.lm_eval, num_fewshot=benchmark.num_fewshot)


def skills(experiment: Experiment) -> list[str]:
    """The letters skills of the experiment's experts, in their order."""
    return [
        reference.letters
        for reference in experiment.experts.values()
        if isinstance(reference, Letters)
    ]


def settings_for(
    experiment: Experiment, data_dir: Path | None, unsafe_execution: bool = False
) -> Settings:
    """What every benchmark of the experiment is told."""
    return Settings(
        data_dir=data_dir,
        max_new_tokens=experiment.generation.max_new_tokens,
        seed=experiment.seed,
        unsafe_execution=unsafe_execution,
        options={"skills": skills(experiment)},
    )


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        InputError: it cannot be read, or is no YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def _read_mapping(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise InputError(f"there is no file {path}; expected an experiment in YAML")
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise InputError(
            f"{path} holds {type(raw).__name__}; expected a mapping with the keys "
            f"{', '.join(_keys(Experiment))}"
        )
    return {str(key): value for key, value in raw.items()}


def _keys(model: type[BaseModel]) -> list[str]:
    return [key for key in model.model_fields if key != "provenance"]


def _parse(raw: Mapping[str, Any]) -> tuple[Experiment | None, list[str]]:
    try:
        return Experiment.model_validate(raw), []
    except ValidationError as error:
        return None, list(dict.fromkeys(_sentence(fault) for fault in error.errors()))


SECTIONS: dict[str, type[BaseModel]] = {"generation": Generation, "equivalence": Equivalence}


def _sentence(fault: Any) -> str:
    location = [str(part) for part in fault["loc"] if part not in ("str", "Letters", "LmEvalTask")]
    where = ".".join(location)
    if fault["type"] == "extra_forbidden":
        parent = SECTIONS.get(location[0], Experiment)
        known = ["letters"] if location[0] in ("base", "experts") else _keys(parent)
        return f"{where}: unknown key{nearest(location[-1], known)}"
    if fault["type"] == "missing":
        return f"{where}: this key is missing"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}: found {_short(fault['input'])}; {message[:1].lower()}{message[1:]}"


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` and the choices, for the end of a sentence."""
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{guess} There are: {', '.join(known)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _references(raw: Mapping[str, Any]) -> list[tuple[str, Any]]:
    experts = raw.get("experts")
    named = experts.items() if isinstance(experts, dict) else ()
    return [("base", raw.get("base")), *((f"experts.{name}", value) for name, value in named)]


def _letters_faults(raw: Mapping[str, Any]) -> list[str]:
    """The base copies, every expert has a skill; letters models and others do not mix."""
    faults = []
    named = [
        (where, value.get("letters") if isinstance(value, dict) else None)
        for where, value in _references(raw)
    ]
    for where, text in named:
        try:
            skill = None if text is None else parse_skill(str(text))
        except InputError as error:
            faults += [f"{where}: {fault}" for fault in error.faults]
            continue
        if text is not None and (skill is None) != (where == "base"):
            expected = "copy" if where == "base" else "a skill such as 'A->B'"
            faults.append(f"{where}: found letters {text!r}; expected {expected}")
    if len({text is None for _, text in named}) > 1:
        faults.append("letters models and others cannot be mixed in one experiment")
    return faults


def _model_faults(raw: Mapping[str, Any]) -> list[str]:
    models, experts = raw.get("models") or [], raw.get("experts")
    if not isinstance(models, list) or not isinstance(experts, dict):
        return []
    faults: list[str] = []
    taken = [BASE, *map(str, experts)]
    faults += [f"experts: {BASE!r} is the base's own name; choose another"] * (BASE in experts)
    for place, entry in enumerate(models):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue  # the schema has told it
        name = entry["name"]
        if name in taken:
            faults.append(f"models.{place}: the name {name!r} is taken; names must differ")
        taken.append(name)
        faults += [f"models.{name}: {fault}" for fault in _entry_faults(entry, len(experts))]
    return faults + _sweep_faults(raw, models, len(experts))


def _entry_faults(entry: Mapping[str, Any], experts: int) -> list[str]:
    """The faults of one merge or composition, by the package that will make it."""
    method, rule = entry.get("method"), entry.get("rule")
    if (method is None) == (rule is None):
        return ["expected either `method` (a merge) or `rule` (a composition)"]
    weights = entry.get("weights")
    rest = {k: v for k, v in entry.items() if k not in ("name", "method", "rule", "weights")}
    faults: list[str] = []
    if isinstance(weights, list) and len(weights) != experts:
        faults.append(f"{len(weights)} weights for {experts} experts; expected one an expert")
    try:
        if method is not None:
            parse_parameters(str(method), rest)
            check_experts(str(method), experts, weights if isinstance(weights, list) else None)
        else:
            parse_combination({"rule": rule, **rest}, experts)
    except (MergeError, CompositionError) as error:
        faults += str(error).splitlines()
    return faults


def _sweep_faults(raw: Mapping[str, Any], models: Sequence[Any], experts: int) -> list[str]:
    sweep = raw.get("sweep") or {}
    if not isinstance(sweep, dict):
        return []
    entries = {
        entry["name"]: entry
        for entry in models
        if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    }
    faults = []
    for name, grid in sweep.items():
        if name not in entries:
            faults.append(f"sweep.{name}: no model of that name{nearest(str(name), list(entries))}")
            continue
        for key, values in grid.items() if isinstance(grid, dict) else ():
            if not isinstance(values, list) or not values:
                faults.append(f"sweep.{name}.{key}: expected a list of values")
                continue
            for value in values:
                faults += [
                    f"sweep.{name}.{key}: {fault}"
                    for fault in _entry_faults({**entries[name], key: value}, experts)
                ]
    return faults


def _benchmark_faults(
    raw: Mapping[str, Any], data_dir: Path | None, unsafe_execution: bool
) -> list[str]:
    named: list[tuple[str, Any]] = []
    benchmarks, equivalence = raw.get("benchmarks"), raw.get("equivalence")
    if isinstance(benchmarks, list):
        named += [("benchmarks", benchmark) for benchmark in benchmarks]
    if isinstance(equivalence, dict) and isinstance(equivalence.get("prompts"), list):
        named += [("equivalence.prompts", benchmark) for benchmark in equivalence["prompts"]]
    letters = [
        value["letters"]
        for _, value in _references(raw)[1:]
        if isinstance(value, dict) and isinstance(value.get("letters"), str)
    ]
    settings = Settings(
        data_dir=data_dir, unsafe_execution=unsafe_execution, options={"skills": letters}
    )
    faults = []
    for where, benchmark in named:
        if isinstance(benchmark, str) and benchmark not in BENCHMARKS:
            faults.append(f"{where}: {_unknown_benchmark(benchmark)}")
        elif isinstance(benchmark, str):
            faults += [f"{where}: {fault}" for fault in BENCHMARKS[benchmark].faults(settings)]
        else:
            faults += [f"{where}: {fault}" for fault in _task_faults(benchmark, settings)]
    return faults


def _task_faults(benchmark: Any, settings: Settings) -> list[str]:
    """An unknown or unfit task of lm-eval; what is no task at all, the schema has told."""
    try:
        return benchmark_entry(LmEvalTask.model_validate(benchmark)).faults(settings)
    except ValidationError:
        return []
    except InputError as error:
        return error.faults


def _unknown_benchmark(name: str) -> str:
    return (
        f"unknown benchmark {name!r}{nearest(name, list(BENCHMARKS))}, or {{lm_eval: NAME}} for "
        "any task of lm-eval"
    )
