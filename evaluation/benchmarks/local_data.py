"""Benchmark files from a local folder, checked line by line; the hub where there is none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.benchmarks.contract import Settings
from evaluation.errors import InputError

Row = dict[str, Any]


def file_faults(settings: Settings, *names: str) -> list[str]:
    """A sentence for the local folder that has none of these files."""
    if settings.data_dir is None or any((settings.data_dir / name).is_file() for name in names):
        return []
    return [
        f"{settings.data_dir} holds no {' or '.join(names)}; put the file there, or leave "
        "--data-dir (MERGESCOPE_DATA) out to take the data from the hub"
    ]


def read_rows(path: Path, fields: Sequence[str]) -> list[Row]:
    """The rows of a .jsonl file; every row has the fields.

    Raises:
        InputError: the file cannot be read, or a line is no such row; names file and line.
    """
    rows = []
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    rows.append(_row(path, number, line, fields))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise InputError(f"{path} is empty; expected a JSON object a line")
    return rows


def _row(path: Path, number: int, line: str, fields: Sequence[str]) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: no valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise InputError(f"{path}, line {number}: {type(row).__name__}; expected a JSON object")
    missing = [field for field in fields if field not in row]
    if missing:
        raise InputError(
            f"{path}, line {number}: the fields {', '.join(missing)} are missing; expected "
            f"{', '.join(fields)}"
        )
    return row


def rows_digest(rows: Sequence[Row]) -> str:
    """SHA-256 of the rows' contents, wherever they came from."""
    text = json.dumps(list(rows), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def hub_rows(path: str, name: str | None, split: str) -> list[Row]:
    """The rows of a data set from the hub.

    Raises:
        InputError: it cannot be reached; says what to do without a network.
    """
    import datasets

    try:
        found = datasets.load_dataset(path, name, split=split)
    except Exception as error:  # the hub's client raises dozens of kinds
        raise InputError(
            f"the data set {path} cannot be fetched from the hub ({str(error).splitlines()[0]}); "
            "without a network, name a folder with the benchmark files by --data-dir"
        ) from None
    return [dict(row) for row in found]
