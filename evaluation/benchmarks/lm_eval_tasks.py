"""GSM8K, MATH and any other task of lm-eval: its prompts, shots, stops, filters and metrics.

The task definitions are lm-eval's own; only where the data come from and who answers is ours. Per
item: the task's context becomes a request, the answer goes through the task's filters and
`process_results`. lm-eval's caches are not used (their keys lack the model).

    gsm8k   `gsm8k_cot`, 8 fixed shots; `exact_match` is the flexible extraction
    math    `minerva_math`, 4 fixed shots, all seven subjects; `math_verify` is primary

Source: lm-evaluation-harness 0.4.13. Deviations: 512 new tokens for every task (minerva's own
default is 256), and `math` takes subjects in turn, so that its first items cover all of them.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.benchmarks.contract import (
    Benchmark,
    BenchmarkEntry,
    Generate,
    Item,
    Output,
    Request,
    Score,
    Settings,
)
from evaluation.benchmarks.local_data import Row, file_faults, hub_rows, read_rows, rows_digest
from evaluation.errors import InputError

Rename = Callable[[str, str], str]
"""(metric, filter) -> the metric's name in our tables"""

ACCURACIES = ("acc", "acc_norm", "exact_match", "math_verify", "em")


class Document(NamedTuple):
    """What the score of an item needs."""

    task: Any
    doc: Any
    context: str


class LmEvalBenchmark:
    """Tasks of lm-eval as one benchmark; see `Benchmark`."""

    def __init__(
        self, tasks: Mapping[str, Any], settings: Settings, digest: str, rename: Rename
    ) -> None:
        self._tasks, self._settings, self._rename = dict(tasks), settings, rename
        versions = [f"{name} {task.VERSION}" for name, task in self._tasks.items()]
        self.version = f"lm-eval {version('lm-eval')}, {', '.join(versions)}, data {digest}"

    def items(self, limit: int | None) -> Sequence[Item]:
        streams = [self._of_task(prefix, task) for prefix, task in self._tasks.items()]
        found: list[Item] = []
        for group in zip_longest(*streams):
            found += [item for item in group if item is not None]
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    def score(
        self, items: Sequence[Item], outputs: Sequence[Sequence[Output]]
    ) -> list[dict[str, float]]:
        return [self._score(item, answers) for item, answers in zip(items, outputs, strict=True)]

    def _of_task(self, prefix: str, task: Any) -> Iterator[Item]:
        task.set_fewshot_seed(self._settings.seed)  # shots are drawn document by document
        for number, doc in enumerate(task.eval_docs):
            context = task.fewshot_context(
                doc, task.config.num_fewshot or 0, gen_prefix=task.doc_to_prefix(doc)
            )
            instances = _instances(task, doc, context)
            requests = tuple(self._request(prefix, instance) for instance in instances)
            name = doc.get("mergescope_id", f"{prefix}/{number}")
            yield Item(str(name), requests, Document(task, doc, context))

    def _request(self, prefix: str, instance: Any) -> Request:
        if instance.request_type == "loglikelihood":
            context, continuation = instance.args
            return Score(context, continuation)
        context, asked = instance.args
        if asked.get("do_sample") or asked.get("temperature", 0) not in (0, 0.0, None):
            raise InputError(f"{prefix}: the task samples; only greedy decoding is supported")
        until = asked.get("until") or []
        stops = (until,) if isinstance(until, str) else tuple(until)
        return Generate(context, stops, self._settings.max_new_tokens)

    def _score(self, item: Item, answers: Sequence[Output]) -> dict[str, float]:
        task, doc, context = item.doc
        instances = _instances(task, doc, context)
        for instance, output in zip(instances, answers, strict=True):
            scored = instance.request_type == "loglikelihood"
            instance.resps = [(output.logprob, output.is_greedy) if scored else output.text]
        for each in task._filters:
            each.apply(instances)
        metrics: dict[str, float] = {}
        for name in instances[0].filtered_resps:
            results = [instance.filtered_resps[name] for instance in instances]
            for metric, value in task.process_results(doc, results).items():
                metrics[self._rename(metric, name)] = _number(item.id, metric, value)
        return metrics


def _instances(task: Any, doc: Any, context: str) -> list[Any]:
    made = task.construct_requests(doc=doc, ctx=context, metadata=(task.config.task, 0, 1))
    return list(made) if isinstance(made, list) else [made]


def _number(item: str, metric: str, value: Any) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    raise InputError(
        f"{item}: the metric {metric} has no number for a single item ({type(value).__name__}); "
        "metrics over a whole corpus are not supported"
    )


def _config(file: str) -> dict[str, Any]:
    """One of lm-eval's own task definitions."""
    from lm_eval.tasks._yaml_loader import load_yaml

    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise InputError(
            "the package lm-eval is not installed; install it with `pip install lm-eval`"
        )
    return dict(load_yaml(Path(spec.origin).parent / "tasks" / file, resolve_func=True))


def _task(config: dict[str, Any], splits: Mapping[str, Sequence[Row]]) -> Any:
    """A task over rows in memory: nothing is cached on disk, so nothing stale can be read."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    _calm()
    tables = {split: datasets.Dataset.from_list(list(rows)) for split, rows in splits.items()}
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: tables})


@cache
def _calm() -> None:
    """lm-eval and datasets report much; what matters is told by our own errors."""
    import datasets

    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def gsm8k_rows(settings: Settings) -> list[Row]:
    """GSM8K's test rows, in the file's order."""
    if settings.data_dir is None:
        return hub_rows("openai/gsm8k", "main", "test")
    return read_rows(settings.data_dir / "gsm8k_test.jsonl", ["question", "answer"])


def _open_gsm8k(settings: Settings) -> Benchmark:
    test = gsm8k_rows(settings)
    task = _task(_config("gsm8k/gsm8k-cot.yaml"), {"train": test[:1], "test": test})
    return LmEvalBenchmark({"gsm8k": task}, settings, rows_digest(test), _gsm8k_metric)


def _gsm8k_metric(metric: str, of_filter: str) -> str:
    return metric if of_filter == "flexible-extract" else f"{metric}_strict"


SUBJECTS = {
    "algebra": "Algebra",
    "counting_and_probability": "Counting & Probability",
    "geometry": "Geometry",
    "intermediate_algebra": "Intermediate Algebra",
    "number_theory": "Number Theory",
    "prealgebra": "Prealgebra",
    "precalculus": "Precalculus",
}


def math_rows(settings: Settings) -> list[Row]:
    """MATH's test rows, subjects in turn, each with a stable `mergescope_id`."""
    subjects: list[list[Row]] = []
    rows = (
        None
        if settings.data_dir is None
        else read_rows(settings.data_dir / "math_test.jsonl", ["problem", "type", "solution"])
    )
    for name, title in SUBJECTS.items():
        found = (
            hub_rows("EleutherAI/hendrycks_math", name, "test")
            if rows is None
            else [row for row in rows if row["type"] == title]
        )
        subjects.append(
            [
                {
                    "problem": row["problem"],
                    "solution": row["solution"],
                    "mergescope_id": f"{name}/{number}",
                }
                for number, row in enumerate(found)
            ]
        )
    known = sum(map(len, subjects))
    if rows is not None and known < len(rows):
        raise InputError(
            f"{settings.data_dir}/math_test.jsonl: {len(rows) - known} rows have an unknown type; "
            f"expected one of {', '.join(SUBJECTS.values())}"
        )
    return [row for group in zip_longest(*subjects) for row in group if row is not None]


def _open_math(settings: Settings) -> Benchmark:
    rows = math_rows(settings)
    config = _config("minerva_math/minerva_math_algebra.yaml")  # the seven differ in data only
    task = _task(config, {"train": rows[:1], "test": rows})
    return LmEvalBenchmark({"math": task}, settings, rows_digest(rows), lambda metric, _: metric)


def lm_eval_entry(name: str, num_fewshot: int | None = None) -> BenchmarkEntry:
    """Any task of lm-eval as a benchmark; its data come from the hub.

    Raises:
        InputError: no task of that name, or one of a kind that is not supported.
    """
    config = _task_config(name)
    kind = config.get("output_type", "generate_until")
    if kind not in ("generate_until", "loglikelihood", "multiple_choice"):
        raise InputError(f"{name}: tasks of the kind {kind} are not supported")
    metrics = config.get("metric_list") or [{"metric": "acc"}]
    filters = config.get("filter_list") or [{"name": "none"}]
    first = str(metrics[0]["metric"])

    def rename(metric: str, of_filter: str) -> str:
        return metric if of_filter == filters[0]["name"] else f"{metric},{of_filter}"

    def open_task(settings: Settings) -> Benchmark:
        task = _hub_task(name)
        if num_fewshot is not None:
            task.set_config("num_fewshot", num_fewshot)
        docs = [dict(doc) for doc in task.eval_docs]
        return LmEvalBenchmark({name: task}, settings, rows_digest(docs), rename)

    return BenchmarkEntry(
        summary=f"lm-eval's task {name}",
        metric=first,
        binary=first in ACCURACIES,
        higher_is_better=bool(metrics[0].get("higher_is_better", True)),
        form="causal",
        faults=lambda settings: [],
        open=open_task,
    )


@cache
def _manager() -> Any:
    from lm_eval.tasks import TaskManager

    _calm()
    return TaskManager()


def _task_config(name: str) -> dict[str, Any]:
    manager = _manager()
    if name not in manager.all_subtasks:
        close = difflib.get_close_matches(name, manager.all_subtasks, n=3)
        guess = f"; did you mean {', '.join(close)}?" if close else ""
        group = (
            " It is a group or tag: name its tasks one by one." if name in manager.all_tasks else ""
        )
        raise InputError(f"lm_eval: there is no single task {name!r}{guess}{group}")
    from lm_eval.tasks._yaml_loader import load_yaml

    path = manager.task_index[name].yaml_path
    return dict(load_yaml(path, resolve_func=False)) if path else {}


def _hub_task(name: str) -> Any:
    try:
        return _manager().load(name)["tasks"][name]
    except Exception as error:  # data sets and task code raise anything
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"lm_eval: the task {name} cannot be loaded ({type(error).__name__}: {reason}); its "
            "data come from the hub, so a network is needed"
        ) from None


GSM8K = BenchmarkEntry(
    summary="GSM8K: grade-school word problems, 8 fixed shots, flexible extraction",
    metric="exact_match",
    binary=True,
    higher_is_better=True,
    form="causal",
    faults=lambda settings: file_faults(settings, "gsm8k_test.jsonl"),
    open=_open_gsm8k,
)

MATH = BenchmarkEntry(
    summary="MATH: competition problems of seven subjects, 4 fixed shots, math_verify",
    metric="math_verify",
    binary=True,
    higher_is_better=True,
    form="causal",
    faults=lambda settings: file_faults(settings, "math_test.jsonl"),
    open=_open_math,
)
