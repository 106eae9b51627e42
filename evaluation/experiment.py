"""The experiment file: its schema, its faults, and the models it stands for.

Everything is checked before any model is loaded, and all faults are told together: an unknown
key and a missing file in one experiment are two sentences in one message.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from composition import CompositionError, parse_combination
from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import BenchmarkEntry, Settings
from evaluation.errors import InputError
from evaluation.examples import Data, data_path, find_file
from evaluation.extras import missing
from evaluation.letters.task import parse_skill
from evaluation.references import resolve, search_path
from evaluation.text import Chat, as_message
from merging import METHODS, MergeError, Recipe, parse_recipe
from merging.recipe import Dtype
from merging.settings import varies

BASE = "base"  # the base model's name in every table


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Letters(_Strict):
    """A model of the letters task, trained on first use: `copy` (the base) or a skill `A->B`."""

    letters: str


ModelReference = str | Letters


FEW = 4
"""Rows of a batch up to which a drafter saves time without being asked for."""


class Vllm(_Strict):
    """What vLLM is told of the machine; nothing here changes what a model says."""

    max_model_len: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    enforce_eager: bool | None = None


class Generation(_Strict):
    """How completions are made; one protocol for every model of the experiment."""

    max_new_tokens: int = Field(default=512, ge=1)
    batch_size: int | Literal["auto"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    chat_template: bool = False  # prompts as user messages of the base tokenizer's template
    system_prompt: str | None = Field(default=None, min_length=1)
    speculate: bool | None = None  # compositions of whole models; None: where batches are small
    engine: Literal["transformers", "vllm"] = "transformers"  # vllm: all but compositions
    vllm: Vllm = Vllm()

    @field_validator("system_prompt")
    @classmethod
    def _seen(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None and not info.data.get("chat_template", True):
            raise ValueError(
                "without a chat template no model sees it; expected `chat_template: true` beside it"
            )
        return text

    @field_validator("batch_size", mode="plain")
    @classmethod
    def _rows_or_auto(cls, found: Any) -> Any:
        if found == "auto" or (type(found) is int and found >= 1):
            return found
        raise ValueError("expected a number of rows from 1 on, or auto")

    @model_validator(mode="after")
    def _served(self) -> Generation:
        if self.engine != "vllm" and self.vllm != Vllm():
            raise ValueError("vllm: its options need `engine: vllm` beside them")
        return self

    @property
    def rows(self) -> int | None:
        """The batch size; None where it is what fits into memory."""
        return None if self.batch_size == "auto" else self.batch_size

    @property
    def speculates(self) -> bool:
        """Do compositions of whole models get a drafter? On two cores it pays up to four rows."""
        if self.speculate is None:
            return self.rows is not None and self.rows <= FEW
        return self.speculate

    @property
    def chat(self) -> Chat | None:
        """How prompts become messages; None where they stay plain text."""
        return Chat(self.system_prompt) if self.chat_template else None

    def protocol(self) -> dict[str, Any]:
        """What completions depend on: not the batches, not the machine. An option of `OPTIONS` is
        left out where it is not used: answers keep the keys they had before it existed."""
        unused = {
            key for key in OPTIONS if getattr(self, key) == type(self).model_fields[key].default
        }
        return self.model_dump(exclude={"batch_size", "speculate", "vllm", *unused})


OPTIONS = ("chat_template", "system_prompt", "engine")


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
    weights: list[Any] | None = None  # one an expert; checked by merging or composition
    exclude: list[str] = []
    allow_non_finite: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """The method's or the rule's own."""
        return dict(self.model_extra or {})


OWN = tuple(Model.model_fields)  # all other keys of a model are its method's or its rule's


class Statistics(_Strict):
    """On what every expert is looked at, for the methods that weigh by statistics."""

    data: dict[str, list[Data]]
    count: int = Field(default=64, ge=1)  # examples an expert
    max_length: int = Field(default=1024, ge=2)  # tokens; longer examples are not drawn


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
    statistics: Statistics | None = None
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
    notes += _without_composition(experiment) + _code_in_chat(experiment)
    faults += _letters_faults(raw)
    faults += _model_faults(raw)
    faults += _chat_faults(experiment, folders) + _engine_faults(experiment)
    faults += _statistics_faults(raw, data_path(folders, data_dir))
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


def merge_recipe(model: Model, experts: Sequence[str], dtype: Dtype | None = None) -> Recipe:
    """A merge of the experiment as a recipe; base and experts by their names there.

    Raises:
        MergeError: a line for every fault.
    """
    return _recipe(model.model_dump(exclude_none=True), experts, dtype)


def _recipe(entry: Mapping[str, Any], experts: Sequence[str], dtype: Dtype | None) -> Recipe:
    weights = entry.get("weights")
    if not isinstance(weights, list) or len(weights) != len(experts):
        weights = [1.0] * len(experts)  # what is wrong with them is told elsewhere
    return parse_recipe(
        {
            "method": entry["method"],
            "base": BASE,
            "models": [
                {"model": name, "weight": weight}
                for name, weight in zip(experts, weights, strict=True)
            ],
            "parameters": {key: value for key, value in entry.items() if key not in OWN},
            "exclude": entry.get("exclude", []),
            "allow_non_finite": entry.get("allow_non_finite", False),
            "dtype": dtype,
            "name": entry["name"],
        }
    )


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
        chat=experiment.generation.chat_template,
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


SECTIONS: dict[str, type[BaseModel]] = {
    "generation": Generation,
    "equivalence": Equivalence,
    "statistics": Statistics,
}


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


def _without_composition(experiment: Experiment | None) -> list[str]:
    """Merges that the equivalence leaves out."""
    if experiment is None or experiment.equivalence is None:
        return []
    return [
        f"models.{model.name}: its weights differ between tensors, so it stands for no "
        "composition; the equivalence leaves it out"
        for model in experiment.models
        if model.method is not None and differs_between_tensors(model)
    ]


def differs_between_tensors(model: Model) -> bool:
    """Whether a merge gives its experts other weights in one tensor than in another."""
    scales = [model.parameters.get(key) for key in ("lambda", "t")]
    return any(map(varies, [*(model.weights or []), *scales]))


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
    names = list(map(str, experts))
    taken = [BASE, *names]
    faults += [f"experts: {BASE!r} is the base's own name; choose another"] * (BASE in experts)
    for place, entry in enumerate(models):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue  # the schema has told it
        name = entry["name"]
        if name in taken:
            faults.append(f"models.{place}: the name {name!r} is taken; names must differ")
        taken.append(name)
        faults += [
            f"models.{name}: {fault}" for fault in _entry_faults(entry, list(map(str, experts)))
        ]
    return faults + _sweep_faults(raw, models, list(map(str, experts)))


def _entry_faults(entry: Mapping[str, Any], experts: Sequence[str]) -> list[str]:
    """The faults of one merge or composition, by the package that will make it."""
    method, rule = entry.get("method"), entry.get("rule")
    if (method is None) == (rule is None):
        return ["expected either `method` (a merge) or `rule` (a composition)"]
    weights = entry.get("weights")
    faults: list[str] = []
    if isinstance(weights, list) and len(weights) != len(experts):
        faults.append(f"{len(weights)} weights for {len(experts)} experts; expected one an expert")
    try:
        if method is not None:
            _recipe({**entry, "method": str(method)}, experts, None)
        else:
            for key in ("exclude", "allow_non_finite"):
                faults += [f"{key}: merges have it, compositions do not"] * bool(entry.get(key))
            rest = {key: value for key, value in entry.items() if key not in OWN}
            if isinstance(weights, list) and not faults:
                rest["weights"] = weights
            parse_combination({"rule": rule, **rest}, len(experts))
    except (MergeError, CompositionError) as error:
        faults += str(error).splitlines()
    return faults


def _sweep_faults(
    raw: Mapping[str, Any], models: Sequence[Any], experts: Sequence[str]
) -> list[str]:
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


def _chat_faults(experiment: Experiment | None, folders: Sequence[Path]) -> list[str]:
    """What the base's tokenizer has against a chat, where it is on this machine."""
    if experiment is None or experiment.generation.chat is None:
        return []
    from evaluation.family import load_tokenizer

    try:
        if isinstance(experiment.base, Letters):
            return ["generation.chat_template: the letters models take no chats; leave it out"]
        base = resolve(experiment.base, folders)
        if base.kind == "checkpoint" and base.path is not None:
            as_message(load_tokenizer(base.path), "1 + 1?", experiment.generation.chat)
    except InputError as error:
        return error.faults
    return []


def _code_in_chat(experiment: Experiment | None) -> list[str]:
    """Benchmarks that a chat does not suit."""
    if experiment is None or experiment.generation.chat is None:
        return []
    return [
        f"benchmarks: {name} asks for the rest of a program; in a chat a model may answer with "
        "words around it, and the program fails"
        for name in experiment.benchmarks
        if name in ("humaneval_plus", "mbpp_plus")
    ]


def _engine_faults(experiment: Experiment | None) -> list[str]:
    """What stands against vLLM, where it is asked for."""
    if experiment is None or experiment.generation.engine != "vllm":
        return []
    faults = []
    if find_spec("vllm") is None:
        faults.append(f"{missing('vllm', 'generation.engine')}, or leave engine out")
    named = [name for name in experiment.benchmarks if isinstance(name, str) and name in BENCHMARKS]
    faults += [
        f"benchmarks: {name} asks for a token at every position, which vLLM does not tell; leave "
        "it out, or leave generation.engine out"
        for name in named
        if BENCHMARKS[name].form == "aligned"
    ]
    return faults


def _statistics_faults(raw: Mapping[str, Any], places: Sequence[Path]) -> list[str]:
    """Every expert has data, and their files are there, where a merge weighs by statistics."""
    models, experts = raw.get("models") or [], raw.get("experts")
    wanting = [
        str(entry.get("name"))
        for entry in (models if isinstance(models, list) else ())
        if isinstance(entry, dict)
        and str(entry.get("method")) in METHODS
        and METHODS[str(entry["method"])].statistics
    ]
    try:
        given = Statistics.model_validate(raw["statistics"]) if "statistics" in raw else None
    except ValidationError:
        return []  # the schema has told it
    faults = []
    if wanting and given is None:
        faults.append(
            f"statistics: this key is missing; {', '.join(wanting)} weighs by what is seen of "
            "every expert on data of its own"
        )
    if given is not None and isinstance(experts, dict):
        faults += [
            f"statistics.data: the expert {name} has none" for name in experts.keys() - given.data
        ]
        faults += [
            f"statistics.data.{name}: no expert of that name{nearest(name, list(experts))}"
            for name in given.data.keys() - experts
        ]
    for name, data in (given.data if given else {}).items():
        for one in data:
            try:
                find_file(one, places)
            except InputError as error:
                faults += [f"statistics.data.{name}: {fault}" for fault in error.faults]
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
