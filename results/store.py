"""The store: one SQLite file a run, from which every table can be made again.

The file answers queries by itself, for example `SELECT model, item, score FROM records`. How it
is opened, locked and laid out is in `results.database`.

    cells ──< plan >── answers          records = cells x plan x answers, one row an item and model
    divergences                         one row a prompt, merge, composition and alpha
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

import pandas as pd

from results.database import close, forget, in_words, lock, open_for_reading, open_for_writing
from results.errors import ResultsError
from results.record import (
    Answer,
    Cell,
    Divergence,
    answer_faults,
    cell_faults,
    divergence_faults,
)

ANSWER_COLUMNS = [field.name for field in fields(Answer)]
PLAN_COLUMNS = [field.name for field in fields(Cell) if field.name != "items"]
DIVERGENCE_COLUMNS = [field.name for field in fields(Divergence)]
CELL_COLUMNS = [*PLAN_COLUMNS, "planned", "finished"]
FLOATS = ["score", "seconds", "alpha", "gap_squared", "kl", "js", "tv", "top1_agreement"]
INTEGERS = ["prompt_tokens", "completion_tokens", "batch_size", "planned", "finished", "tokens"]
INTEGERS += ["cell", "position"]
FLAGS = ["truncated", "binary", "higher_is_better"]
COLUMN_TYPES = (
    dict.fromkeys(FLOATS, "float64")
    | dict.fromkeys(INTEGERS, "int64")
    | dict.fromkeys(FLAGS, "bool")
)

Record = TypeVar("Record")


class Store:
    """The records of one run. `with Store(path) as store: ...`

    Args:
        path: the SQLite file, by habit `records.sqlite`; made, with its folder, if missing.
        read_only: look at an existing store, also while a run is writing it.
        fresh: forget what the store holds and begin anew.

    Raises:
        ResultsError: the place cannot be written, another process writes there, or the file is
            damaged, something else, or of a newer mergescope. Such a file is left as it is.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, read_only: bool = False, fresh: bool = False
    ) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None
        with in_words(self.path):
            if read_only:
                self._connection = open_for_reading(self.path)
                return
            self._lock = lock(self.path)
            try:
                if fresh:
                    forget(self.path)
                self._connection = open_for_writing(self.path)
            except BaseException:
                self._lock.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file and lets the next writer in."""
        if self._lock is None:
            self._connection.close()
            return
        close(self._connection)
        self._lock.close()

    def set_plan(self, cells: Sequence[Cell]) -> None:
        """Replaces the plan; answers stay, so what the new plan shares with the old is done.

        Raises:
            ResultsError: a cell is not sound, stands twice, or two items share one answer.
        """
        _refuse(cells, cell_faults, lambda cell: f"{cell.model!r} on {cell.benchmark!r}")
        _refuse_ambiguous(cells)
        with self._transaction() as connection:
            connection.execute("DELETE FROM plan")
            connection.execute("DELETE FROM cells")
            for number, cell in enumerate(cells):
                row = [number, *(getattr(cell, name) for name in PLAN_COLUMNS), len(cell.items)]
                connection.execute("INSERT INTO cells VALUES (?,?,?,?,?,?,?,?,?,?)", row)
                connection.executemany(
                    "INSERT INTO plan VALUES (?,?,?,?)",
                    (
                        (number, position, item, key)
                        for position, (item, key) in enumerate(cell.items)
                    ),
                )

    def add(self, answers: Iterable[Answer]) -> None:
        """Stores answers in one transaction: all or none. A key that is there already stays.

        Answers outside the plan are kept, and shown once a plan names their keys.

        Raises:
            ResultsError: an answer is not sound, for example its score is NaN.
        """
        found = list(answers)
        _refuse(found, answer_faults, lambda answer: f"{answer.benchmark!r} {answer.item!r}")
        marks = ",".join(
            # Bytes cast to text: SQLite keeps lone surrogates, which Python cannot encode.
            "CAST(? AS TEXT)" if column == "completion" else "?"
            for column in ANSWER_COLUMNS
        )
        with self._transaction() as connection:
            connection.executemany(
                f"INSERT INTO answers VALUES ({marks}) ON CONFLICT DO NOTHING",
                map(_answer_row, found),
            )

    def finished(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose answers are here."""
        return self._known("answers", keys)

    def frame(self) -> pd.DataFrame:
        """One row an item and model, in the order of the plan; what is not answered is absent.

        Beside the columns of the view `records` (but `metrics` as a dict), `planned` says how
        many items the row's cell will have.
        """
        frame = self._select(["*"], "records ORDER BY cell, position")
        frame["metrics"] = frame["metrics"].map(json.loads)
        return frame

    def cells(self) -> pd.DataFrame:
        """One row a planned cell, in order, with how many items are `planned` and `finished`."""
        finished = "SELECT count(*) FROM plan JOIN answers USING (key) WHERE plan.cell = cells.cell"
        return self._select(
            CELL_COLUMNS, f"(SELECT *, ({finished}) AS finished FROM cells) ORDER BY cell"
        )

    def add_divergences(self, rows: Iterable[Divergence]) -> None:
        """Stores divergences in one transaction; what is there already stays.

        Raises:
            ResultsError: a row is not sound.
        """
        found = list(rows)
        _refuse(found, divergence_faults, lambda row: f"{row.model!r} on {row.prompt!r}")
        columns = ",".join(DIVERGENCE_COLUMNS)
        marks = ",".join("?" * len(DIVERGENCE_COLUMNS))
        with self._transaction() as connection:
            connection.executemany(
                f"INSERT INTO divergences ({columns}) VALUES ({marks}) ON CONFLICT DO NOTHING",
                map(astuple, found),
            )

    def finished_divergences(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose divergences are here."""
        return self._known("divergences", keys)

    def select_divergences(self, keys: Iterable[str]) -> None:
        """From now on only these, and rows added later, appear in `divergences()`.

        For a store that served an earlier form of the experiment: other alphas, other prompts.
        """
        wanted = json.dumps(list(keys))
        with self._transaction() as connection:
            connection.execute(
                "UPDATE divergences SET current = key IN (SELECT value FROM json_each(?))",
                (wanted,),
            )

    def divergences(self) -> pd.DataFrame:
        """One row a prompt, merge, composition and alpha, in the order they were added."""
        return self._select(DIVERGENCE_COLUMNS, "divergences WHERE current ORDER BY rowid")

    def _known(self, table: str, keys: Iterable[str]) -> set[str]:
        with in_words(self.path):
            found = self._connection.execute(
                f"SELECT key FROM {table} WHERE key IN (SELECT value FROM json_each(?))",
                (json.dumps(list(keys)),),
            )
            return {str(key) for (key,) in found}

    def _select(self, columns: list[str], rest: str) -> pd.DataFrame:
        with in_words(self.path):
            found = self._connection.execute(f"SELECT {', '.join(columns)} FROM {rest}")
            rows, names = found.fetchall(), [str(column[0]) for column in found.description]
        # Text stays plain Python objects: Arrow strings cannot hold lone surrogates.
        frame = pd.DataFrame(rows, columns=names, dtype=object)
        return frame.astype({name: COLUMN_TYPES[name] for name in names if name in COLUMN_TYPES})

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with in_words(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                if self._connection.in_transaction:  # a full disk has rolled back already
                    self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


def _answer_row(answer: Answer) -> tuple[object, ...]:
    completion = answer.completion.encode("utf-8", "surrogatepass")
    metrics = json.dumps(dict(answer.metrics), allow_nan=False)
    changed = {"completion": completion, "metrics": metrics}
    return tuple(changed.get(name, getattr(answer, name)) for name in ANSWER_COLUMNS)


def _refuse(
    records: Sequence[Record],
    faults_of: Callable[[Record], list[str]],
    name_of: Callable[[Record], str],
) -> None:
    """Raises with every fault of every record, the first ten in words."""
    faults = [f"{name_of(record)}: {fault}" for record in records for fault in faults_of(record)]
    if faults:
        more = [f"and {len(faults) - 10} more"] if len(faults) > 10 else []
        raise ResultsError("\n".join(["the records are refused:", *faults[:10], *more]))


def _refuse_ambiguous(cells: Sequence[Cell]) -> None:
    names = [(cell.model, cell.benchmark) for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise ResultsError(f"{name[0]!r} on {name[1]!r} stands twice in the plan")
    meant: dict[str, tuple[str, str]] = {}
    for cell in cells:
        for item, key in cell.items:
            this = (cell.benchmark, item)
            if meant.setdefault(key, this) != this:
                raise ResultsError(
                    f"key {key} stands for {meant[key]} and for {this}; "
                    "a key must cover everything that determines an answer"
                )
