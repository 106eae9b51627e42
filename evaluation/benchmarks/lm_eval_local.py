"""GSM8K's and MATH's rows, from a local folder or the hub, and lm-eval tasks over such rows.

    folder                                      fields
    gsm8k_train.jsonl, gsm8k_test.jsonl         question, answer (ends in `#### N`)
    math_test.jsonl                             problem, type, solution (with a `\\boxed{}` answer)

A task gets its rows in memory, so no cache on disk can hand it those of an older file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from evaluation.benchmarks.contract import Settings
from evaluation.benchmarks.lm_eval_adapter import ID, calm, seeded
from evaluation.benchmarks.local_data import Row, file_faults, hub_rows, read_rows, told
from evaluation.errors import InputError

GSM8K, HENDRYCKS = "openai/gsm8k", "EleutherAI/hendrycks_math"  # the data sets' names on the hub
LOCAL_FILES = {
    GSM8K: ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
    HENDRYCKS: ("math_test.jsonl",),
}

SUBJECTS = {  # name on the hub -> what a row's `type` says
    "algebra": "Algebra",
    "counting_and_probability": "Counting & Probability",
    "geometry": "Geometry",
    "intermediate_algebra": "Intermediate Algebra",
    "number_theory": "Number Theory",
    "prealgebra": "Prealgebra",
    "precalculus": "Precalculus",
}


def gsm8k_rows(settings: Settings, split: str = "test") -> list[Row]:
    """GSM8K's rows of a split, in the file's order."""
    if settings.data_dir is None:
        return hub_rows(GSM8K, "main", split)
    texts = {"question": "", "answer": r"####\s*\S"}
    rows = read_rows(settings.data_dir / f"gsm8k_{split}.jsonl", list(texts), texts)
    return [{field: row[field] for field in texts} for row in rows]


def math_rows(settings: Settings, subjects: Sequence[str] = tuple(SUBJECTS)) -> list[Row]:
    """MATH's test rows, the subjects in turn, so that the first few cover all of them.

    Within a subject the order is the file's; rows are named `algebra/0`, `algebra/1`, ...
    """
    if settings.data_dir is None:
        found = {subject: hub_rows(HENDRYCKS, subject, "test") for subject in subjects}
    else:
        titles = "|".join(SUBJECTS.values())
        texts = {"problem": "", "type": f"^({titles})$", "solution": r"\\boxed *\S"}
        rows = read_rows(settings.data_dir / "math_test.jsonl", list(texts), texts)
        found = {
            subject: [row for row in rows if row["type"] == SUBJECTS[subject]]
            for subject in subjects
        }
    named = [
        [
            {"problem": row["problem"], "solution": row["solution"], ID: f"{subject}/{number}"}
            for number, row in enumerate(rows)
        ]
        for subject, rows in found.items()
    ]
    return [row for turn in zip_longest(*named) for row in turn if row is not None]


def local_faults(dataset: str | None, settings: Settings) -> list[str]:
    """A sentence for each file of this data set that the local folder lacks."""
    files = LOCAL_FILES.get(dataset or "", ())
    return [fault for file in files for fault in file_faults(settings, file)]


def local_splits(
    dataset: str | None, name: str | None, settings: Settings
) -> dict[str, list[Row]] | None:
    """The rows of a data set of the hub, if the local folder is where they come from.

    MATH's training split is not in the folder: empty, so a task that draws its shots there says so.
    """
    if settings.data_dir is None:
        return None
    if dataset == GSM8K:
        return {split: gsm8k_rows(settings, split) for split in ("train", "test")}
    if dataset == HENDRYCKS and name in SUBJECTS:
        return {"train": [], "test": math_rows(settings, [name])}
    return None


def built_in(file: str) -> dict[str, Any]:
    """One of lm-eval's own task definitions, by its path below `lm_eval/tasks`.

    Reading the file takes milliseconds; a `TaskManager` reads all 13,000 tasks first.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise InputError(
            "the package lm-eval is not installed; install it with `pip install lm-eval`"
        )
    with told(f"lm-eval's task {file} cannot be read; lm-eval 0.4.13 or newer has it"):
        return dict(load_yaml(Path(spec.origin).parent / "tasks" / file, resolve_func=True))


def task_over(config: Mapping[str, Any], splits: Mapping[str, Sequence[Row]], seed: int = 0) -> Any:
    """An lm-eval task over rows in memory.

    Raises:
        InputError: lm-eval refuses the definition or the rows.
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    calm()
    tables = {split: datasets.Dataset.from_list(list(rows)) for split, rows in splits.items()}
    given = {
        key: value for key, value in config.items() if key not in ("tag", "group", "task_list")
    }
    given["custom_dataset"] = lambda **_: tables
    with told(f"lm-eval's task {config.get('task')} cannot be made of these rows"), seeded(seed):
        return ConfigurableTask(config=given)
