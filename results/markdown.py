"""leaderboard.md: the wide table as GitHub shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from results.leaderboard import planned_counts, wide

# What would be read as markup, or end a cell or a line.
ESCAPED = {character: f"\\{character}" for character in "\\|*_`<>[]#~&$"}


def markdown_board(board: pd.DataFrame, cells: pd.DataFrame, best: set[tuple[str, str]]) -> str:
    """The table with its notes.

    Args:
        board: from `leaderboard`.
        cells: `Store.cells()`.
        best: the (model, benchmark) whose score stands in bold.
    """
    table = wide(board, cells)
    benchmarks = list(table.columns[2:])
    metrics = dict(zip(cells["benchmark"], cells["metric"], strict=True))
    higher = dict(zip(cells["benchmark"], cells["higher_is_better"], strict=True))
    heads = [
        f"{escaped(name)}<br>{escaped(metrics[name])} {'↑' if higher[name] else '↓'}"
        for name in benchmarks
    ]
    rows = [
        [escaped(row[0]), row[1], *_cells(row, benchmarks, best)]
        for row in table.itertuples(index=False)
    ]
    lines = [
        "# Leaderboard",
        "",
        *_table(["model", "kind", *heads], rows),
        "",
        "Scores with 95 % intervals over items: Wilson's for accuracies (in [0, 1]), a percentile",
        "bootstrap with a fixed seed for other metrics. ↑ higher is better, ↓ lower is better; the",
        "best of each complete column in bold, which says nothing about significance: see",
        "comparisons.csv.",
        *_unfinished(board, cells),
    ]
    return "\n".join(lines) + "\n"


def best_cells(board: pd.DataFrame, cells: pd.DataFrame) -> set[tuple[str, str]]:
    """The (model, benchmark) with the best score among finished cells; all of them on a tie."""
    planned = planned_counts(cells)
    higher = dict(zip(cells["benchmark"], cells["higher_is_better"], strict=True))
    names = zip(board["model"], board["benchmark"], board["n"], strict=True)
    complete = [n > 0 and planned.get((model, of), n) == n for model, of, n in names]
    best = set()
    for benchmark, rows in board.loc[complete].groupby("benchmark", sort=False):
        top = rows["score"].max() if higher[str(benchmark)] else rows["score"].min()
        best |= {(str(model), str(benchmark)) for model in rows[rows["score"] == top]["model"]}
    return best


def escaped(text: str) -> str:
    """Any text as one line of one Markdown cell."""
    return "".join(ESCAPED.get(character, character) for character in " ".join(text.split()))


def _cells(row: Sequence[str], benchmarks: Sequence[str], best: set[tuple[str, str]]) -> list[str]:
    texts = []
    for benchmark, text in zip(benchmarks, row[2:], strict=True):
        score, space, rest = text.partition(" ")
        bold = (row[0], benchmark) in best
        texts.append(f"**{score}**{space}{rest}" if bold else text)
    return texts


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _unfinished(board: pd.DataFrame, cells: pd.DataFrame) -> list[str]:
    planned: Mapping[tuple[str, str], int] = planned_counts(cells)
    missing = sum(planned.values()) - int(board["n"].sum())
    if not missing:
        return []
    return ["", f"**Unfinished:** {missing} of {sum(planned.values())} answers are missing."]
