"""GSM8K, MATH and any other task of lm-eval.

Sample problem (GSM8K): "Natalia sold clips to 48 of her friends in April, and then she sold half
as many clips in May. How many clips did Natalia sell altogether in April and May?"  answer: 72

    gsm8k   `gsm8k_cot`, 8 fixed shots; `exact_match` compares the last number of the completion,
            `exact_match_strict` what follows "The answer is"
    math    `minerva_math`, 4 fixed shots, all seven subjects in turn; `math_verify` compares
            expressions, `exact_match` the normalised text after "Final Answer: The final answer is"

Cobbe et al. 2021 (GSM8K), Wei et al. 2022 (its shots), Hendrycks et al. 2021 (MATH), Lewkowycz et
al. 2022 (its shots and normalisation). Source: lm-evaluation-harness 0.4.13. Where we differ: 512
new tokens (minerva's default is 256), and `math` is one benchmark, where lm-eval has seven tasks.

Known of lm-eval's scoring of MATH: a comparison that takes 5 seconds counts as wrong, so hostile
answers cost time but do not hang. All of 210 reference solutions get `math_verify` 1; of 700 that
go on with "Final Answer: ...", 6 get 0 (letters such as `B,E,G`, long numbers).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from evaluation.benchmarks.contract import Benchmark, BenchmarkEntry, Settings
from evaluation.benchmarks.lm_eval_adapter import LmEvalBenchmark, calm, refused, seeded
from evaluation.benchmarks.lm_eval_local import (
    built_in,
    gsm8k_rows,
    local_faults,
    local_splits,
    math_rows,
    task_over,
)
from evaluation.benchmarks.local_data import file_faults, told
from evaluation.errors import InputError

ZERO_OR_ONE = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")
FLEXIBLE = "flexible-extract"


def _open_gsm8k(settings: Settings) -> Benchmark:
    config = built_in("gsm8k/gsm8k-cot.yaml")
    task = task_over(config, {"test": gsm8k_rows(settings)})
    return LmEvalBenchmark("gsm8k", task, settings, FLEXIBLE)


def _open_math(settings: Settings) -> Benchmark:
    config = built_in("minerva_math/minerva_math_algebra.yaml")  # the seven differ in data only
    task = task_over({**config, "training_split": None}, {"test": math_rows(settings)})
    return LmEvalBenchmark("math", task, settings)


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


def lm_eval_entry(
    name: str, num_fewshot: int | None = None, include_path: Path | None = None
) -> BenchmarkEntry:
    """Any task of lm-eval as a benchmark.

    Its primary metric is the first one that is a mean over items, through the filter
    `flexible-extract` where the task has it, else through its first filter. Data come from the
    hub; those of GSM8K and MATH from the local folder, where there is one.

    Args:
        num_fewshot: shots instead of the task's own number.
        include_path: a folder with task definitions to look in instead of lm-eval's own.

    Raises:
        InputError: no single task of that name, or one of a kind that cannot run here.
    """
    config = _definition(name, include_path)
    metric = _primary_metric(name, config)
    dataset = config.get("dataset_path")

    def open_task(settings: Settings) -> Benchmark:
        task = _open_task(name, config, settings, include_path)
        if num_fewshot is not None:
            task.set_config("num_fewshot", num_fewshot)
        return LmEvalBenchmark(name, task, settings, _main_filter(config))

    return BenchmarkEntry(
        summary=f"lm-eval's task {name}",
        metric=str(metric["metric"]),
        # A task's own scoring may give fractions under any name.
        binary=metric["metric"] in ZERO_OR_ONE and "process_results" not in config,
        higher_is_better=bool(metric.get("higher_is_better", True)),
        form="causal",
        faults=lambda settings: local_faults(dataset, settings),
        open=open_task,
    )


def _open_task(
    name: str, config: Mapping[str, Any], settings: Settings, include_path: Path | None
) -> Any:
    splits = local_splits(config.get("dataset_path"), config.get("dataset_name"), settings)
    manager = _manager(include_path)
    if splits is not None:
        from lm_eval.tasks._yaml_loader import load_yaml

        return task_over(
            load_yaml(manager.task_index[name].yaml_path, resolve_func=True), splits, settings.seed
        )
    with (
        told(
            f"lm_eval: the task {name} cannot be loaded; its data come from the hub, so a network "
            "is needed unless they are in the hub's cache"
        ),
        seeded(settings.seed),
    ):
        return manager.load(name)["tasks"][name]


@cache
def _manager(include_path: Path | None) -> Any:
    """lm-eval's index of tasks; its own 13,000 take 10 to 15 seconds."""
    from lm_eval.tasks import TaskManager

    calm()
    return TaskManager(include_path=include_path, include_defaults=include_path is None)


def _definition(name: str, include_path: Path | None) -> dict[str, Any]:
    """A task's configuration, functions left as text."""
    manager = _manager(include_path)
    if name not in manager.all_tasks:
        close = difflib.get_close_matches(name, manager.all_subtasks, n=3)
        guess = f"; did you mean {' or '.join(close)}?" if close else ""
        raise InputError(
            f"lm_eval: there is no task {name!r} among the {len(manager.all_subtasks)} of "
            f"{include_path or 'lm-eval'}{guess}"
        )
    entry = manager.task_index[name]
    if name not in manager.all_subtasks:
        inside = entry.tags or (entry.cfg or {}).get("task") or []
        names = sorted(each for each in inside if isinstance(each, str))
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise InputError(
            f"lm_eval: {name} is a group of tasks; name them one by one: "
            f"{', '.join(names[:5])}{more}"
        )
    config = dict(entry.cfg)
    reason = "it is written in Python" if "class" in config else refused(config)
    if reason is not None:
        raise InputError(f"lm_eval: the task {name} is not supported: {reason}")
    return config


def _primary_metric(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    from lm_eval.api.metrics import mean
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, get_metric_aggregation

    kind = config.get("output_type") or "generate_until"
    listed = config.get("metric_list") or [
        {"metric": each} for each in DEFAULT_METRIC_REGISTRY[kind]
    ]
    for metric in listed:
        own = "/" in str(metric["metric"])  # a function of the task: what it returns is unknown
        stated = metric.get("aggregation")
        how = stated or get_metric_aggregation(metric["metric"])
        if not own and how in ("mean", mean):
            return dict(metric)
    names = ", ".join(str(metric["metric"]).rpartition("/")[2] for metric in listed)
    raise InputError(
        f"lm_eval: the task {name} is not supported: its metrics ({names}) are no means over items"
    )


def _main_filter(config: Mapping[str, Any]) -> str:
    names = [str(each["name"]) for each in config.get("filter_list") or [{"name": "none"}]]
    return FLEXIBLE if FLEXIBLE in names else names[0]
