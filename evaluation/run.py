"""Runs an experiment: plan, answer, score, store, compare, report; resumable at every step.

An item's key is the digest of everything that determines its answer: the model's weights and
recipe, the requests, the generation settings and the versions. What the store holds under that
key is not asked again, whichever run put it there.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evaluation import equivalence, merges
from evaluation.benchmarks.contract import Benchmark, BenchmarkEntry, Form, Item, Output
from evaluation.engine import answer
from evaluation.errors import InputError
from evaluation.examples import data_path
from evaluation.experiment import (
    Experiment,
    Letters,
    Loaded,
    ModelReference,
    benchmark_entry,
    benchmark_name,
    settings_for,
)
from evaluation.family import (
    Family,
    choose_device,
    load_tokenizer,
    open_family,
    tokenizer_digest,
)
from evaluation.forecast import (
    WORTH_A_PROBE,
    CellForecast,
    check_only,
    is_wanted,
    seconds_an_item,
    summary,
)
from evaluation.letters import letters_checkpoint
from evaluation.models import PlannedModel, identity, is_served, load, planned_models
from evaluation.progress import Bar, Step, bar, steps, tell
from evaluation.references import Reference, anchored, fetch, resolve, search_path
from evaluation.served import Ready
from evaluation.sharding import Asked
from evaluation.statistics import Gatherer
from evaluation.text import chat_digest
from evaluation.workers import (
    Cluster,
    Collect,
    OpenCell,
    answer_on_workers,
    connected,
    require_ray,
)
from results import Answer, Cell, Store
from results.merges import write_merge_reports
from results.report import write_report

VERSIONS = ("mergescope", "torch", "transformers", "peft", "lm-eval", "evalplus", "datasets")


class Bench(NamedTuple):
    """An opened benchmark with the items of this run."""

    name: str
    entry: BenchmarkEntry
    benchmark: Benchmark
    items: Sequence[Item]


class Task(NamedTuple):
    """One model on one benchmark: its items and the keys of their answers."""

    planned: PlannedModel
    bench: Bench
    keys: list[str]


def run_experiment(
    loaded: Loaded,
    out: Path,
    *,
    limit: int | None = None,
    data_dir: Path | None = None,
    fresh: bool = False,
    unsafe_execution: bool = False,
    only: Sequence[str] = (),
    ray: str | None = None,
) -> list[Path]:
    """Runs what is missing of an experiment and writes its results under `out`.

    Args:
        limit: the first so many items of each benchmark; None for all.
        fresh: forget earlier answers in `out`.
        only: patterns `MODEL/BENCHMARK` of the cells to answer now; the others stay planned.
        ray: the address of a Ray whose workers answer, or `local` to start one here.

    Returns:
        The files of the report.

    Raises:
        InputError: the input is at fault; told before any benchmark is run.
    """
    experiment = loaded.experiment
    choose_device(experiment.generation.device)
    if ray is not None:
        require_ray()
    _check_writable(out)
    with Store(out / "records.sqlite", fresh=fresh) as store:
        settings = settings_for(experiment, data_dir, unsafe_execution)
        benches = _open_benches(experiment, settings, limit)
        families = _families(loaded, out, data_dir, benches)
        tasks = plan(experiment, families, benches)
        chosen = _chosen(tasks, only)
        store.set_plan([_cell(task, experiment) for task in tasks])
        _write_provenance(loaded, out, families, benches, limit, data_dir)
        _answer_all(experiment, families, chosen, store, out, ray)
        if not only:
            _measure(experiment, families.get("causal"), settings, store, limit)
    return write_report(out)


def forecast(
    loaded: Loaded,
    out: Path,
    *,
    limit: int | None = None,
    data_dir: Path | None = None,
    unsafe_execution: bool = False,
    only: Sequence[str] = (),
) -> list[CellForecast]:
    """What `run_experiment` would do; nothing is written but converted and trained models.

    Raises:
        InputError: the input is at fault.
    """
    experiment = loaded.experiment
    choose_device(experiment.generation.device)
    settings = settings_for(experiment, data_dir, unsafe_execution)
    benches = _open_benches(experiment, settings, limit)
    families = _families(loaded, out, data_dir, benches)
    tasks = _chosen(plan(experiment, families, benches), only)
    done: set[str] = set()
    if (out / "records.sqlite").is_file():
        with Store(out / "records.sqlite", read_only=True) as store:
            done = store.finished(key for task in tasks for key in task.keys)
    return _foreseen(experiment, families, tasks, done, probe=True)


def _foreseen(
    experiment: Experiment,
    families: Mapping[Form, Family],
    tasks: Sequence[Task],
    done: set[str],
    probe: bool,
) -> list[CellForecast]:
    """What is left of every cell; with its time where the base is measured."""
    left = {task.bench.name: task.bench for task in tasks if set(task.keys) - done}
    measured = _measured(experiment, families, list(left.values())) if probe else {}
    return [
        CellForecast(
            task.planned.name,
            task.bench.name,
            len(task.keys),
            len(done.intersection(task.keys)),
            len(set(task.keys) - done)
            * task.planned.components
            * measured.get(task.bench.name, 0.0)
            if probe
            else None,
        )
        for task in tasks
    ]


def _measured(
    experiment: Experiment, families: Mapping[Form, Family], benches: Sequence[Bench]
) -> dict[str, float]:
    """Seconds an item of each benchmark takes the base."""
    found = {}
    with bar("measuring the base", len(benches)) as shown:
        for form in dict.fromkeys(bench.entry.form for bench in benches):
            runtime = load(planned_models(experiment)[0], families[form], experiment)
            for bench in benches:
                if bench.entry.form == form:
                    shown.describe(f"measuring the base · {bench.name}")
                    rows = experiment.generation.rows
                    found[bench.name] = seconds_an_item(runtime, bench.items, rows)
                    shown.advance()
    return found


def _chosen(tasks: Sequence[Task], only: Sequence[str]) -> list[Task]:
    check_only([(task.planned.name, task.bench.name) for task in tasks], only)
    return [task for task in tasks if is_wanted(task.planned.name, task.bench.name, only)]


def measure_equivalence(
    loaded: Loaded, out: Path, *, limit: int | None = None, data_dir: Path | None = None
) -> list[Path]:
    """Only the comparison of merges with compositions; the plan in `out` stays as it is."""
    experiment = loaded.experiment
    if experiment.equivalence is None:
        raise InputError(
            f"{loaded.path}: the key `equivalence` is missing; expected prompts, count and alphas"
        )
    _check_writable(out)
    with Store(out / "records.sqlite") as store:
        families = _families(loaded, out, data_dir, [])
        settings = settings_for(experiment, data_dir)
        _measure(experiment, families["causal"], settings, store, limit)
    return write_report(out)


def plan(
    experiment: Experiment, families: Mapping[Form, Family], benches: Sequence[Bench]
) -> list[Task]:
    """Every model on every benchmark, model by model so that each is loaded once."""
    protocol = {
        "device": choose_device(experiment.generation.device).type,
        "seed": experiment.seed,
        "versions": {name: version(name) for name in VERSIONS},
    }
    generation = experiment.generation
    by_transformers = generation.model_copy(update={"engine": "transformers"}).protocol()
    chat = generation.chat
    tasks = []
    for form in dict.fromkeys(bench.entry.form for bench in benches):
        family = families[form]
        shared = {**protocol, "tokenizer": tokenizer_digest(family.base.folder)}
        if chat is not None:
            shared["chat"] = chat_digest(load_tokenizer(family.base.folder), chat)
        for planned in planned_models(experiment):
            who = identity(planned, family) | {"generation": by_transformers}
            if is_served(planned, experiment):
                who |= {"generation": generation.protocol(), "vllm": version("vllm")}
            for bench in benches:
                if bench.entry.form == form:
                    about = {**shared, **who, "benchmark": [bench.name, bench.benchmark.version]}
                    keys = [_digest({**about, "item": _requests(item)}) for item in bench.items]
                    tasks.append(Task(planned, bench, keys))
    return tasks


def _requests(item: Item) -> list[Any]:
    return [item.id, *(asdict(request) for request in item.requests)]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _check_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"the results cannot be written to {out}: {error.strerror}. Name another folder "
            "with --out"
        ) from None


def _open_benches(experiment: Experiment, settings: Any, limit: int | None) -> list[Bench]:
    opened = []
    with bar("reading benchmarks", len(experiment.benchmarks)) as shown:
        for benchmark in experiment.benchmarks:
            opened.append(_open_bench(benchmark, experiment, settings, limit))
            shown.advance()
    return opened


def _open_bench(benchmark: Any, experiment: Experiment, settings: Any, limit: int | None) -> Bench:
    name, entry = benchmark_name(benchmark), benchmark_entry(benchmark)
    opened = entry.open(settings)
    items = opened.items(limit)
    if not items:
        raise InputError(f"benchmarks: {name} has no items; look at its data file")
    return Bench(name, entry, opened, items)


def _families(
    loaded: Loaded, out: Path, data_dir: Path | None, benches: Sequence[Bench]
) -> dict[Form, Family]:
    """The base and experts in each form that the benchmarks need."""
    experiment = loaded.experiment
    forms: list[Form] = ["causal", *(bench.entry.form for bench in benches)]
    folders = search_path(loaded.path.resolve(), data_dir)
    families: dict[Form, Family] = {}
    for form in dict.fromkeys(forms):
        named = {"base": experiment.base, **experiment.experts}
        references: dict[str, Reference] = {}
        for name, reference in named.items():
            base = None if name == "base" else references["base"].path
            references[name] = _reference(reference, form, base, experiment.seed, out, folders)
        base_reference = references.pop("base")
        family = open_family(base_reference, references, experiment.generation.dtype)
        families[form] = family._replace(statistics=_gatherer(experiment, folders, data_dir))
    return families


def _gatherer(
    experiment: Experiment, folders: Sequence[Path], data_dir: Path | None
) -> Gatherer | None:
    if experiment.statistics is None:
        return None
    places = data_path(folders, data_dir)
    generation = experiment.generation
    return Gatherer(
        experiment.statistics, places, generation.dtype, generation.device, experiment.seed
    )


def _reference(
    reference: ModelReference,
    form: Form,
    base: Path | None,
    seed: int,
    out: Path,
    folders: Sequence[Path],
) -> Reference:
    if isinstance(reference, Letters):
        label = f"training {reference.letters} ({form})"
        with steps(label) as step:
            folder = letters_checkpoint(
                reference.letters, form, seed, out / "models", base=base, progress=step
            )
        return Reference(f"letters:{reference.letters}", "checkpoint", folder)
    return fetch(resolve(reference, folders), folders)


def _cell(task: Task, experiment: Experiment) -> Cell:
    entry, planned = task.bench.entry, task.planned
    protocol = {
        "generation": experiment.generation.protocol(),
        "version": task.bench.benchmark.version,
    }
    return Cell(
        model=planned.name,
        kind=planned.kind,
        method=planned.method,
        benchmark=task.bench.name,
        metric=entry.metric,
        binary=entry.binary,
        higher_is_better=entry.higher_is_better,
        protocol=_digest(protocol)[:16],
        items=tuple(zip((item.id for item in task.bench.items), task.keys, strict=True)),
    )


def _answer_all(
    experiment: Experiment,
    families: Mapping[Form, Family],
    tasks: Sequence[Task],
    store: Store,
    out: Path,
    ray: str | None,
) -> None:
    done = store.finished(key for task in tasks for key in task.keys)
    open_tasks = [task for task in tasks if set(task.keys) - done]
    total = sum(_units(task, done) for task in open_tasks)
    left = len({key for task in open_tasks for key in task.keys} - done)
    here = ray is None and experiment.generation.engine == "transformers"
    probe = here and left >= WORTH_A_PROBE
    tell(summary(_foreseen(experiment, families, tasks, done, probe)))
    reports: dict[Form, dict[str, Any]] = {form: {} for form in families}
    device = choose_device(experiment.generation.device).type
    with connected(ray if open_tasks else None, device) as cluster:
        _make_merges(experiment, families, open_tasks, reports)
        with bar("evaluation", total) as shown:
            if cluster is None:
                _answer_here(experiment, families, open_tasks, done, reports, store, shown)
            else:
                _answer_there(
                    cluster, experiment, families, open_tasks, done, reports, store, shown
                )
    told = {
        name if form == "causal" else f"{name} · {form}": report
        for form, found in reports.items()
        for name, report in found.items()
    }
    write_merge_reports(out, told)


def _units(task: Task, done: set[str]) -> int:
    """What is left of a cell, as the progress bars count it: items, times components."""
    return len(set(task.keys) - done) * task.planned.components


def _answer_here(
    experiment: Experiment,
    families: Mapping[Form, Family],
    tasks: Sequence[Task],
    done: set[str],
    reports: Mapping[Form, dict[str, Any]],
    store: Store,
    shown: Bar,
) -> None:
    """One model after the other, in this process."""
    for planned, form, group in _by_model(tasks):
        shown.describe(f"{planned.name} · loading")
        runtime = load(planned, families[form], experiment, reports[form])
        for task in group:
            shown.describe(f"{planned.name} · {task.bench.name}", _units(task, done))
            done |= _answer_task(experiment, runtime, task, done, store, shown)
        del runtime
        gc.collect()  # a GPU's memory is free again before the next model comes


def _answer_there(
    cluster: Cluster,
    experiment: Experiment,
    families: Mapping[Form, Family],
    tasks: Sequence[Task],
    done: set[str],
    reports: Mapping[Form, dict[str, Any]],
    store: Store,
    shown: Bar,
) -> None:
    """On Ray's workers; what they answer is scored and stored in this process."""
    cells = [
        OpenCell(task.planned, task.bench.entry.form, task.bench.name, task.bench.items, task.keys)
        for task in tasks
    ]

    def collector(cell: int, asked: Asked) -> Collect:
        return _collector(experiment, tasks[cell], asked, store, shown)

    answer_on_workers(cluster, experiment, families, cells, done, collector, reports, shown)


def _make_merges(
    experiment: Experiment,
    families: Mapping[Form, Family],
    tasks: Sequence[Task],
    reports: Mapping[Form, dict[str, Any]],
) -> None:
    """Makes the merges that are about to be evaluated, one after the other."""
    with ExitStack() as stack:

        def announce(text: str, in_bytes: bool) -> Step:
            stack.close()  # the bar before
            return stack.enter_context(steps(text, in_bytes))

        for form, family in families.items():
            models = {
                task.planned.name: task.planned.model
                for task in tasks
                if task.bench.entry.form == form and task.planned.kind == "merge"
            }
            wanted = [model for model in models.values() if model is not None]
            merges.make(wanted, family, experiment.generation.dtype, reports[form], announce)


def _by_model(tasks: Sequence[Task]) -> Iterator[tuple[PlannedModel, Form, list[Task]]]:
    groups: dict[tuple[str, Form], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.planned.name, task.bench.entry.form), []).append(task)
    for (_, form), group in groups.items():
        yield group[0].planned, form, group


def _answer_task(
    experiment: Experiment,
    runtime: Ready,
    task: Task,
    done: set[str],
    store: Store,
    shown: Bar,
) -> set[str]:
    """Answers, scores and stores the open items of one cell, one batch after the other."""
    asked = Asked(task.bench.items, task.keys, frozenset(done))
    collect = _collector(experiment, task, asked, store, shown)
    rows = experiment.generation.rows
    try:
        for batch in answer(runtime, asked.requests(), rows, asked.settled()):
            collect(batch)
    except InputError as error:
        raise InputError(
            [f"{task.planned.name} on {task.bench.name}: {fault}" for fault in error.faults]
        ) from None
    return set(task.keys)


def _collector(
    experiment: Experiment, task: Task, asked: Asked, store: Store, shown: Bar
) -> Collect:
    """What takes the outputs of one cell as they come, and scores and stores each whole item."""
    owners, settled = asked.owners(), asked.settled()
    outputs: list[dict[int, Output]] = [{} for _ in asked.items]
    first = [owners.index(place) for place in range(len(asked.items))]

    def collect(batch: Sequence[tuple[int, Output]]) -> list[str]:
        complete = []
        for index, output in batch:
            place = owners[index]
            if index in settled:
                continue
            outputs[place][index - first[place]] = output
            if len(outputs[place]) == len(asked.items[place].requests):
                complete.append(place)
        found = [(asked.items[place], asked.keys[place], outputs[place]) for place in complete]
        _store(experiment, task, found, store)
        shown.advance(len(complete) * task.planned.components)
        return [asked.keys[place] for place in complete]

    return collect


def _store(
    experiment: Experiment,
    task: Task,
    complete: Sequence[tuple[Item, str, Mapping[int, Output]]],
    store: Store,
) -> None:
    if not complete:
        return
    items = [item for item, _, _ in complete]
    outputs = [[found[place] for place in sorted(found)] for _, _, found in complete]
    scores = task.bench.benchmark.score(items, outputs)
    answers = []
    for (item, key, _), answered, metrics in zip(complete, outputs, scores, strict=True):
        answers.append(
            Answer(
                key=key,
                benchmark=task.bench.name,
                item=item.id,
                prompt_digest=_digest(_requests(item)),
                completion=_completion(answered),
                score=metrics[task.bench.entry.metric],
                metrics=metrics,
                truncated=any(output.truncated for output in answered),
                prompt_tokens=sum(output.prompt_tokens for output in answered),
                completion_tokens=sum(output.tokens for output in answered),
                seconds=sum(output.seconds for output in answered),
                dtype=experiment.generation.dtype,
                batch_size=max(output.batch_size for output in answered),
            )
        )
    store.add(answers)


def _completion(outputs: Sequence[Output]) -> str:
    """The generated text; for scored requests their log-probabilities, a line each."""
    return "\n".join(output.text or f"{output.logprob!r}" for output in outputs)


def _measure(
    experiment: Experiment,
    family: Family | None,
    settings: Any,
    store: Store,
    limit: int | None,
) -> None:
    if family is None or experiment.equivalence is None:
        return
    with bar("equivalence", equivalence.steps(experiment, limit)) as shown:
        equivalence.measure(experiment, family, settings, store, shown, limit)


def _write_provenance(
    loaded: Loaded,
    out: Path,
    families: Mapping[Form, Family],
    benches: Sequence[Bench],
    limit: int | None,
    data_dir: Path | None,
) -> None:
    """The resolved experiment beside the results; it can be run again as it is, from anywhere."""
    import torch

    experiment = loaded.experiment
    packages = (*VERSIONS, *(["vllm"] if experiment.generation.engine == "vllm" else []))
    resolved = experiment.model_dump(mode="json", by_alias=True, exclude_none=True)
    folders = search_path(loaded.path.resolve(), data_dir)
    named = {"base": experiment.base, **experiment.experts}
    named = {n: anchored(r, folders) for n, r in named.items() if isinstance(r, str)}
    resolved["base"] = named.pop("base", resolved["base"])
    resolved["experts"] |= named
    resolved["provenance"] = {
        "limit": limit,
        "data_dir": None if data_dir is None else str(data_dir.resolve()),
        "models": {
            form: {
                "base": family.base.digest(),
                **{name: expert.digest() for name, expert in family.experts.items()},
            }
            for form, family in families.items()
        },
        "benchmarks": {bench.name: bench.benchmark.version for bench in benches},
        "items": {bench.name: len(bench.items) for bench in benches},
        "versions": {"python": platform.python_version(), **{n: version(n) for n in packages}},
        "hardware": {
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(choose_device(experiment.generation.device)),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }
    text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
    partial = out / f".experiment.yaml.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(out / "experiment.yaml")
