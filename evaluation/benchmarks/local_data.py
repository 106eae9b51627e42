"""Benchmark files from a local folder, checked line by line; the hub where there is none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
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


def read_rows(
    path: Path, fields: Sequence[str], texts: Mapping[str, str] | None = None
) -> list[Row]:
    """The rows of a .jsonl file; every row has the fields.

    Args:
        texts: fields that must be text, each with a regular expression to be found in it; "" for
            any text.

    Raises:
        InputError: the file cannot be read, or a line is no such row; names file and line.
    """
    rows = []
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    rows.append(_row(where, line, fields))
                    _check_texts(where, rows[-1], texts or {})
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise InputError(f"{path} is empty; expected a JSON object a line")
    return rows


def _row(where: str, line: str, fields: Sequence[str]) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: {type(row).__name__}; expected a JSON object")
    missing = [field for field in fields if field not in row]
    if missing:
        raise InputError(
            f"{where}: the fields {', '.join(missing)} are missing; expected {', '.join(fields)}"
        )
    return row


def _check_texts(where: str, row: Row, texts: Mapping[str, str]) -> None:
    for field, pattern in texts.items():
        text = row[field]
        if not isinstance(text, str) or re.search("[\ud800-\udfff]", text):  # half a character
            raise InputError(f"{where}: {field} is {text!a:.60}; expected text")
        if not re.search(pattern, text):
            raise InputError(
                f"{where}: {field} is {text!r:.60}; expected text in which `{pattern}` is found"
            )


def rows_digest(rows: Sequence[Row]) -> str:
    """SHA-256 of the rows' contents, wherever they came from."""
    text = json.dumps(list(rows), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def hub_rows(path: str, name: str | None, split: str) -> list[Row]:
    """The rows of a data set from the hub.

    Raises:
        InputError: it cannot be reached; says what to do without a network.
    """
    import datasets

    with told(
        f"the data set {path} cannot be fetched from the hub; without a network, name a folder "
        "with the benchmark files by --data-dir"
    ):
        return [dict(row) for row in datasets.load_dataset(path, name, split=split)]


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Turns any exception of foreign code into one sentence: the hub's client and the tasks of
    lm-eval raise dozens of kinds."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{what} ({type(error).__name__}: {reason})") from error
