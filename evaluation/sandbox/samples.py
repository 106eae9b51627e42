"""Samples to grade, and the file format in which they come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from evaluation.errors import InputError
from evaluation.sandbox.problems import Problem, unknown_task


class Sample(NamedTuple):
    """A program for a task. With `trim`, trailing lines that keep it from parsing are dropped."""

    task_id: str
    solution: str
    trim: bool = False


def read_samples(path: Path, problems: Mapping[str, Problem]) -> list[Sample]:
    """The samples of a JSON-lines file; raises `InputError` with every line at fault."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    samples, faults = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            sample = _sample(line, problems)
            if isinstance(sample, str):
                faults.append(f"{path}, line {number}: {sample}")
            else:
                samples.append(sample)
    if not samples and not faults:
        faults.append(f"{path}: no sample in it; expected lines of JSON with task_id and solution")
    if faults:
        raise InputError(faults)
    return samples


def _sample(line: str, problems: Mapping[str, Problem]) -> Sample | str:
    """The sample of a line, or what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    if not isinstance(row, dict) or not isinstance(row.get("task_id"), str):
        return "expected an object with a string task_id"
    task_id: str = row["task_id"]
    if task_id not in problems:
        return unknown_task(task_id, problems)
    if isinstance(row.get("solution"), str):
        return Sample(task_id, row["solution"])
    if "solution" not in row and isinstance(row.get("completion"), str):
        return Sample(task_id, problems[task_id].prompt + row["completion"])
    return f"{task_id}: expected a string solution or completion; repeat the line for several"
