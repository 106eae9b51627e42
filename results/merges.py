"""merges.json: what each merge of a run has told of its inputs, by the model's name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from results.errors import ResultsError

FILE = "merges.json"
COLUMNS = ["model", "tensors", "kept", "norms", "cosines", "conflicts", "notes"]


def write_merge_reports(folder: Path, reports: Mapping[str, Any]) -> None:
    """Adds to what the folder holds; a model's report replaces its earlier one.

    Raises:
        ResultsError: the file that is there cannot be read, or not be written.
    """
    if not reports:
        return
    path = folder / FILE
    content = {**_read(path), **reports}
    partial = folder / f".{FILE}.{os.getpid()}"
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ResultsError(f"{path} cannot be written: {error.strerror}") from None


def merges_table(folder: Path) -> pd.DataFrame:
    """A row a merge: tensors merged and kept from the base, norms of the task vectors and their
    cosines by expert, the share of entries that two experts move in opposite directions.

    Raises:
        ResultsError: the file is damaged.
    """
    rows = []
    for model, report in _read(folder / FILE).items():
        try:
            rows.append(
                {
                    "model": model,
                    "tensors": int(report["tensors_merged"]),
                    "kept": len(report["tensors_kept_from_base"]),
                    "norms": _named(report["task_vector_norms"]),
                    "cosines": _named(report["task_vector_cosines"]),
                    "conflicts": float(report["sign_conflict_share"]),
                    "notes": "; ".join(map(str, report["notes"])),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ResultsError(
                f"{folder / FILE}: the report of {model} lacks or misstates {error}; delete the "
                "file and run again"
            ) from None
    return pd.DataFrame(rows, columns=COLUMNS)


def _named(values: Mapping[str, float | None]) -> str:
    return ", ".join(
        f"{name} {'–' if value is None else f'{value:.3g}'}" for name, value in values.items()
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read: {error}; delete it and run again") from None
    if not isinstance(content, dict):
        raise ResultsError(f"{path} holds no mapping; delete it and run again")
    return content
