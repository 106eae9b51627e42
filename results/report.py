"""Writes everything a finished run is read by: tables, figures and the page.

    leaderboard.csv   a row a model and benchmark          leaderboard.md   the same, wide
    metrics.csv       the secondary metrics                comparisons.csv  paired tests
    equivalence.csv   merge against composition, a token   figures/*.svg    report.html

Each file appears whole or not at all. The same records give the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from results.comparisons import comparisons
from results.equivalence import equivalence_table
from results.errors import ResultsError
from results.figures import alpha_figure, differences_figure, scores_figure
from results.leaderboard import leaderboard, metrics_table, refuse_mixtures
from results.markdown import best_cells, markdown_board
from results.merges import merges_table
from results.page import Provenance, Tables, render_page
from results.store import Store

CSV_FILES = {
    "leaderboard.csv": "board",
    "metrics.csv": "metrics",
    "comparisons.csv": "comparisons",
    "equivalence.csv": "equivalence",
}
CAPTIONS = {
    "figures/scores.svg": "Scores with 95 % intervals. Where two intervals overlap the models may "
    "still differ: the paired comparisons are the sharper test.",
    "figures/differences.svg": "Merge minus composition, paired by item, with 95 % intervals. The "
    "grey band is the margin of equivalence, fixed beforehand.",
    "figures/alpha.svg": "How a merge parts from its composition as the task vectors grow, with "
    "95 % bands over prompts. Dashed: the theory's slopes for small α, 4 for KL and 2 for the gap.",
}


class Run(NamedTuple):
    """One folder's records as tables, and how they came about."""

    name: str
    tables: Tables
    provenance: Provenance


def write_report(*folders: Path | str, out: Path | str | None = None) -> list[Path]:
    """Writes the report of one run, or one report over several.

    Args:
        folders: of runs, each with `records.sqlite` and, if the run wrote it, `experiment.yaml`.
        out: where to write; for a single run its own folder is the default. Over several runs
            the tables get a leading column `run`.

    Returns:
        The files, the page last.

    Raises:
        ResultsError: a folder holds no sound records, runs were made under different protocols,
            or `out` is missing or cannot be written.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ResultsError("no folder of results was named; expected at least one")
    if out is None and len(paths) > 1:
        raise ResultsError(f"{len(paths)} runs, but no folder to write to; name one with --out")
    runs = [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    refuse_mixtures(pd.concat([run.tables.cells for run in runs]))
    target = paths[0] if out is None else Path(out)
    texts = _csv_texts(runs) | _page_texts(runs)
    try:
        for stale in CAPTIONS.keys() - texts.keys():
            (target / stale).unlink(missing_ok=True)
        return [_write(target / name, text) for name, text in texts.items()]
    except OSError as error:
        raise ResultsError(
            f"the report cannot be written to {target}: {error.strerror or error}; choose another "
            "folder with --out"
        ) from error


def _csv_texts(runs: Sequence[Run]) -> dict[str, str]:
    texts = {}
    for name, attribute in CSV_FILES.items():
        parts = [getattr(run.tables, attribute) for run in runs]
        if len(runs) > 1:
            columns = ["run", *parts[0].columns]
            parts = [
                part.assign(run=run.name)[columns] for run, part in zip(runs, parts, strict=True)
            ]
        # pandas writes the shortest digits that give the same float back.
        texts[name] = _stacked(parts).to_csv(index=False, lineterminator="\n")
    return texts


def _page_texts(runs: Sequence[Run]) -> dict[str, str]:
    """leaderboard.md, the figures and the page."""
    labelled = [run.tables if len(runs) == 1 else _labelled(run) for run in runs]
    tables = Tables(*(_stacked(parts) for parts in zip(*labelled, strict=True)))
    cells = tables.cells
    higher = dict(zip(cells["benchmark"], cells["higher_is_better"], strict=True))
    drawn = {
        "figures/scores.svg": scores_figure(tables.board, higher),
        "figures/differences.svg": differences_figure(tables.comparisons),
        "figures/alpha.svg": alpha_figure(tables.equivalence),
    }
    figures = {name: svg for name, svg in drawn.items() if svg is not None}
    captioned = {CAPTIONS[name]: svg for name, svg in figures.items()}
    page = render_page(tables, captioned, [run.provenance for run in runs])
    board = markdown_board(tables.board, cells, best_cells(tables.board, cells))
    return {"leaderboard.md": board, **figures, "report.html": page}


def _read(folder: Path, name: str) -> Run:
    with Store(folder / "records.sqlite", read_only=True) as store:
        frame, cells, divergences = store.frame(), store.cells(), store.divergences()
    tables = Tables(
        cells,
        leaderboard(frame, cells),
        metrics_table(frame),
        comparisons(frame),
        equivalence_table(divergences),
        merges_table(folder),
    )
    provenance = Provenance(
        name,
        _experiment(folder / "experiment.yaml"),
        sorted(set(frame["dtype"])),
        sorted(set(frame["batch_size"])),
    )
    return Run(name, tables, provenance)


def _experiment(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from error


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names; their whole paths where two folders have one name."""
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise ResultsError("a folder of results is named twice; name each run once")
    names = [path.name for path in resolved]
    return names if len(set(names)) == len(names) else [str(path) for path in resolved]


def _labelled(run: Run) -> Tables:
    """The run's tables with its name before the models', so that runs can stand together."""

    def label(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
        return table.assign(
            **{name: [f"{run.name} · {value}" for value in table[name]] for name in columns}
        )

    cells, board, metrics, compared, equivalence, merges = run.tables
    return Tables(
        label(cells, "model"),
        label(board, "model"),
        label(metrics, "model"),
        label(compared, "model", "reference"),
        label(equivalence, "model"),
        label(merges, "model"),
    )


def _stacked(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else parts[0]


def _write(path: Path, text: str) -> Path:
    """Writes a file whole or not at all; what UTF-8 cannot hold is spelled out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(text.encode("utf-8", "backslashreplace"))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
