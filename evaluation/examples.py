"""Examples to learn from: rows of a file as a prompt and its completion, in token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from evaluation.benchmarks.local_data import read_rows
from evaluation.errors import InputError
from evaluation.text import encode


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(_Strict):
    """Rows whose integer `field` lies in [first, last]."""

    field: str
    first: int
    last: int


class Data(_Strict):
    """A .jsonl file and how a row becomes a prompt and a completion (`{name}` is a row's field)."""

    file: str
    prompt: str
    completion: str
    exclude: Range | None = None


class Example(NamedTuple):
    """Ids of one example; its completion begins at `start`."""

    ids: list[int]
    start: int


def data_path(folders: Sequence[Path], data_dir: Path | None) -> list[Path]:
    """The folders in which a file of examples is looked for: those of models, then the data's."""
    return [*folders, *([data_dir] if data_dir is not None else [])]


def find_file(data: Data, places: Sequence[Path]) -> Path:
    """The file in the first of the folders that holds it.

    Raises:
        InputError: none does.
    """
    found = next((place / data.file for place in places if (place / data.file).is_file()), None)
    if found is None:
        looked = ", ".join(map(str, places))
        raise InputError(
            f"there is no file {data.file} (looked in {looked}); name its folder with --data-dir"
        )
    return found


def read_examples(data: Data, places: Sequence[Path], tokenizer: Any) -> Iterator[Example]:
    """Every row as `prompt + completion + EOS`.

    Raises:
        InputError: the file is missing or broken, or a template does not fit its rows.
    """
    found = find_file(data, places)
    limits = data.exclude
    fields = [limits.field] if limits else []
    for number, row in enumerate(read_rows(found, fields), start=1):
        if limits and limits.first <= row[limits.field] <= limits.last:
            continue
        try:
            prompt, completion = (text.format_map(row) for text in (data.prompt, data.completion))
        except (KeyError, IndexError, ValueError) as error:
            raise InputError(
                f"{found}, row {number}: the template needs {error}, which the row does not have; "
                f"it has {', '.join(row)}"
            ) from None
        first = encode(tokenizer, prompt)
        second = tokenizer(completion, add_special_tokens=False)["input_ids"]
        yield Example([*first, *second, tokenizer.eos_token_id], len(first))
