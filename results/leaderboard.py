"""The leaderboard: one row a model and benchmark, with 95 % intervals.

A binary metric (an accuracy) is a proportion and gets Wilson's interval; any other metric is a
mean and gets a percentile bootstrap over items with a fixed seed (`results.statistics`). Both
speak about new items of the same kind, not about another seed of training.

Nothing unfinished is hidden: `n` counts the answers there are, and whoever shows a table marks
cells where the plan has more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from results.errors import ResultsError
from results.statistics import Interval, bootstrap_mean, wilson

METRICS_COLUMNS = ["model", "kind", "method", "benchmark", "metric"]
METRICS_COLUMNS += ["score", "ci_low", "ci_high", "n"]
LEADERBOARD_COLUMNS = [*METRICS_COLUMNS, "truncated", "seconds", "tokens_per_second"]
SAME_FOR_ALL = ["metric", "binary", "higher_is_better", "protocol"]  # models on a benchmark
CELL_COLUMNS = ["model", "kind", "method", "benchmark", *SAME_FOR_ALL]
NEEDED = [*CELL_COLUMNS, "item", "score", "metrics", "truncated", "completion_tokens", "seconds"]


class CellRecords(NamedTuple):
    """One cell of the table: what was planned, and the records there are (perhaps none)."""

    cell: Mapping[str, object]
    records: pd.DataFrame


def leaderboard(frame: pd.DataFrame, cells: pd.DataFrame | None = None) -> pd.DataFrame:
    """The tidy table, a row a model and benchmark, in the order of the plan.

    Args:
        frame: `Store.frame()`.
        cells: `Store.cells()`; with it, cells without any answer appear too, with n = 0.

    Returns:
        Columns LEADERBOARD_COLUMNS. `score` is the mean (accuracies in [0, 1]), `truncated` the
        fraction of answers cut by the token limit, `seconds` a sum, `tokens_per_second` the
        generated tokens over it; NaN where there is nothing to divide by.

    Raises:
        ResultsError: columns are missing, a benchmark was run under two protocols, an item was
            answered twice, or a binary score is neither 0 nor 1.
    """
    rows = []
    for cell, records in cell_records(frame, cells):
        low, high = interval(records["score"], bool(cell["binary"]))
        seconds = float(records["seconds"].sum())
        tokens = float(records["completion_tokens"].sum())
        rows.append(
            {
                **_first_columns(cell, str(cell["metric"]), records["score"], low, high),
                "truncated": float(records["truncated"].mean()),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds if seconds > 0 else math.nan,
            }
        )
    return pd.DataFrame(rows, columns=LEADERBOARD_COLUMNS)


def metrics_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The same for all other metrics of the benchmarks: a row a model, benchmark and metric.

    A metric whose values are 0 or 1 in every answer to the benchmark gets Wilson's interval. What
    `POOLED` names is told once more by the token, all items' tokens together.
    """
    cells = list(cell_records(frame))
    found = [
        (cell, pd.DataFrame(list(records["metrics"])).drop(columns=cell["metric"], errors="ignore"))
        for cell, records in cells
    ]
    binary: dict[tuple[object, str], bool] = {}
    for cell, values in found:
        for metric in values:
            name = (cell["benchmark"], str(metric))
            here = bool(values[metric].dropna().isin((0, 1)).all())
            binary[name] = here and binary.get(name, True)
    rows = []
    for (cell, values), (_, records) in zip(found, cells, strict=True):
        for metric in values:
            scores = values[metric].dropna()
            low, high = interval(scores, binary[cell["benchmark"], str(metric)])
            rows.append(_first_columns(cell, str(metric), scores, low, high))
            if metric in POOLED:
                rows.append(_pooled(cell, POOLED[str(metric)], values[metric], records))
    return pd.DataFrame(rows, columns=METRICS_COLUMNS)


POOLED = {"nats": "nats_per_token_pooled"}
"""Sums over an item's tokens, and what their mean over all tokens is called."""


def _pooled(
    cell: Mapping[str, object], name: str, sums: pd.Series[float], records: pd.DataFrame
) -> dict[str, object]:
    """The mean over the tokens of all items; the interval is over items."""
    tokens = records["completion_tokens"].to_numpy(dtype="float64")
    low, high = bootstrap_mean(sums.to_numpy(dtype="float64"), tokens)
    row = _first_columns(cell, name, sums, low, high)
    return {**row, "score": float(sums.sum() / tokens.sum())}


def wide(board: pd.DataFrame, cells: pd.DataFrame | None = None) -> pd.DataFrame:
    """Models down, benchmarks across, cells as text: `0.992 [0.971, 0.998]`.

    Args:
        board: from `leaderboard`.
        cells: `Store.cells()`; with it, unfinished cells say so: `... (12 of 64)`.

    Returns:
        Columns `model`, `kind` and one a benchmark, all text; `—` where a model has no such cell.
    """
    planned = planned_counts(cells)
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for row in board.to_dict("records"):
        count = planned.get((row["model"], row["benchmark"]), row["n"])
        found = texts.setdefault((row["model"], row["kind"]), {})
        found[row["benchmark"]] = cell_text(
            row["score"], row["ci_low"], row["ci_high"], row["n"], count
        )
    benchmarks = list(dict.fromkeys(board["benchmark"]))
    rows = [
        [*names, *(found.get(name, "—") for name in benchmarks)] for names, found in texts.items()
    ]
    return pd.DataFrame(rows, columns=["model", "kind", *benchmarks], dtype=object)


def cell_text(score: float, low: float, high: float, n: int, planned: int) -> str:
    """A score with its interval, and how much of the cell is done if not all of it."""
    done = "" if n == planned else f"{n} of {planned}"
    if not n:
        return done or "—"
    interval = "" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"
    return f"{score:.3f}{interval}" + (f" ({done})" if done else "")


def planned_counts(cells: pd.DataFrame | None) -> dict[tuple[str, str], int]:
    """How many items each (model, benchmark) will have."""
    if cells is None:
        return {}
    return {
        (str(model), str(benchmark)): int(planned)
        for model, benchmark, planned in zip(
            cells["model"], cells["benchmark"], cells["planned"], strict=True
        )
    }


def cell_records(frame: pd.DataFrame, cells: pd.DataFrame | None = None) -> Iterator[CellRecords]:
    """The cells in the order of the plan, each with its records, after all checks."""
    _require(frame, NEEDED)
    if cells is None:
        cells = frame[CELL_COLUMNS].drop_duplicates(["model", "benchmark"])
    refuse_mixtures(pd.concat([frame[CELL_COLUMNS], cells[CELL_COLUMNS]]).drop_duplicates())
    doubles = frame[frame.duplicated(["model", "benchmark", "item"])]
    if len(doubles):
        first = doubles.iloc[0]
        raise ResultsError(
            f"{first['model']!r} answers item {first['item']!r} of {first['benchmark']!r} twice; "
            "records of several runs need models of different names"
        )
    groups = dict(list(frame.groupby(["model", "benchmark"], sort=False)))
    for cell in cells.to_dict("records"):
        records = groups.get((cell["model"], cell["benchmark"]), frame.iloc[:0])
        yield CellRecords({str(name): value for name, value in cell.items()}, records)


def interval(scores: pd.Series[float], binary: bool) -> Interval:
    """Wilson's interval of an accuracy, the bootstrap's of any other mean."""
    if not binary:
        return bootstrap_mean(scores.to_numpy(dtype="float64"))
    if not scores.isin((0, 1)).all():
        odd = float(scores[~scores.isin((0, 1))].iloc[0])
        raise ResultsError(f"a binary metric has the score {odd!r}; expected 0 or 1")
    return wilson(int(scores.sum()), len(scores))


def _first_columns(
    cell: Mapping[str, object], metric: str, scores: pd.Series[float], low: float, high: float
) -> dict[str, object]:
    return {
        **{name: cell[name] for name in ("model", "kind", "method", "benchmark")},
        "metric": metric,
        "score": float(scores.mean()),
        "ci_low": low,
        "ci_high": high,
        "n": len(scores),
    }


def refuse_mixtures(cells: pd.DataFrame) -> None:
    """Every model of a table runs under the same protocol, or the table is refused."""
    for what in SAME_FOR_ALL:
        for benchmark, values in cells.groupby("benchmark", sort=False)[what].unique().items():
            if len(values) > 1:
                found = ", ".join(map(repr, values))
                raise ResultsError(
                    f"{benchmark!r} was run under more than one {what}: {found}; scores of "
                    "different protocols cannot stand in one table. Report these runs apart, or "
                    "run them again under one protocol"
                )


def _require(frame: pd.DataFrame, columns: list[str]) -> None:
    missing = [name for name in columns if name not in frame]
    if missing:
        raise ResultsError(
            f"the frame lacks the columns {', '.join(missing)}; expected one from Store.frame()"
        )
