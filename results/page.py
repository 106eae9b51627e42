"""report.html: one page that needs nothing else, made from `report.html.j2`.

Every string that came from outside is escaped by Jinja2's autoescape; only the figures, which
matplotlib wrote and escaped itself, are passed through. A content security policy in the page
forbids scripts and anything fetched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import pandas as pd
import yaml

from results.comparisons import LEVEL
from results.equivalence import GROUP, SLOPES
from results.errors import ResultsError
from results.figures import GRID, INK, scale_text
from results.leaderboard import planned_counts
from results.markdown import best_cells
from results.verdict import QUESTION, findings, headline

SHOWN_FACTS = ("name", "seed", "generation", "equivalence", "provenance")
MEASURES = {
    "gap_rms": "logit gap, rms",
    "kl": "KL, nats",
    "js": "JS, nats",
    "tv": "TV",
    "top1_agreement": "same top-1",
}


class Tables(NamedTuple):
    """All tables of one run, or of several under each other."""

    cells: pd.DataFrame
    board: pd.DataFrame
    metrics: pd.DataFrame
    comparisons: pd.DataFrame
    equivalence: pd.DataFrame
    merges: pd.DataFrame


class Provenance(NamedTuple):
    """How a run was made: its name, its experiment.yaml ("" if there is none), and what the
    records themselves say."""

    run: str
    experiment: str
    dtypes: list[str]
    batch_sizes: list[int]


def render_page(
    tables: Tables, figures: Mapping[str, str], provenance: Sequence[Provenance]
) -> str:
    """The page as text.

    Args:
        figures: SVG text by caption.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "p_value": p_value, "interval": interval}
    template = environment.from_string(
        files("results").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    planned, done = int(tables.cells["planned"].sum()), int(tables.board["n"].sum())
    text = template.render(
        question=QUESTION,
        runs=[one.run for one in provenance],
        headline=headline(tables.comparisons),
        findings=findings(tables.comparisons, tables.equivalence),
        missing=planned - done,
        planned=planned,
        leaderboard=_leaderboard(tables),
        equivalence=_equivalence(tables.equivalence),
        measures=MEASURES,
        tables=tables,
        level=LEVEL,
        figures=[(caption, Markup(_inline(svg))) for caption, svg in figures.items()],
        provenance=[(one, facts(one.experiment)) for one in provenance],
        rows=lambda frame: frame.to_dict("records"),
    )
    return str(text)


def number(value: Any, digits: int = 3) -> str:
    """A number for reading: three decimals, or three digits where that would show nothing."""
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.2e}"
    return f"{value:,.{digits}f}".replace("-", "−")


def p_value(value: float) -> str:
    """A p-value for reading."""
    if math.isnan(value):
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def interval(row: Mapping[str, Any]) -> str:
    """`[low, high]` of a row, a dash where there is none."""
    if math.isnan(row["ci_low"]):
        return "–"
    return f"[{number(row['ci_low'])}, {number(row['ci_high'])}]"


def facts(experiment: str) -> list[tuple[str, str]]:
    """What experiment.yaml says about how the run was made, as (dotted key, value).

    Raises:
        ResultsError: it is not YAML, or not a mapping.
    """
    try:
        content = yaml.safe_load(experiment) or {}
    except yaml.YAMLError as error:
        raise ResultsError(
            f"experiment.yaml is not valid YAML: {' '.join(str(error).split())}; mend it or "
            "take it out of the folder"
        ) from None
    if not isinstance(content, dict):
        raise ResultsError("experiment.yaml holds no mapping; mend it or take it out of the folder")
    chosen = {key: content[key] for key in SHOWN_FACTS if key in content}
    return [(path.removeprefix("provenance."), value) for path, value in _leaves(chosen, "")]


def _leaves(content: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list):
        yield path, ", ".join(map(str, content))
    elif content is not None:
        yield path, str(content)


def _leaderboard(tables: Tables) -> dict[str, Any]:
    """The wide table as the template wants it: columns, and a row of cells a model."""
    board, planned = tables.board, planned_counts(tables.cells)
    best = best_cells(board, tables.cells)
    columns = tables.cells.drop_duplicates("benchmark").to_dict("records")
    scales = {column["benchmark"]: _scale(board, column) for column in columns}
    models: dict[str, dict[Any, Any]] = {}
    for row in board.to_dict("records"):
        name = (row["model"], row["benchmark"])
        low, high = scales[row["benchmark"]]
        position = {
            part: 100 * (row[column] - low) / (high - low)
            for part, column in (("low", "ci_low"), ("at", "score"), ("high", "ci_high"))
        }
        model = models.setdefault(row["model"], dict(row) | {"cells": {}})
        model["cells"][row["benchmark"]] = {
            **row,
            "best": name in best,
            "planned": planned.get(name, row["n"]),
            "position": None if math.isnan(row["ci_low"]) else position,
        }
    return {"columns": columns, "models": list(models.values())}


def _equivalence(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A group a merge and set of prompts: a row an alpha, its metrics side by side, slopes last."""
    groups = []
    for names, found in table.groupby(GROUP, sort=False):
        rows: dict[str, dict[str, Any]] = {}
        for row in found.to_dict("records"):
            alpha = "slope" if math.isnan(row["alpha"]) else scale_text(row["alpha"])
            rows.setdefault(alpha, {})[SLOPES.get(row["metric"], row["metric"])] = row
        title = "{} against {} on {}".format(*names)
        groups.append({"title": title, "n": int(found["n"].max()), "rows": rows})
    return groups


def _scale(board: pd.DataFrame, column: Mapping[Any, Any]) -> tuple[float, float]:
    """The ends of the little axes under the scores: [0, 1], or all that the column covers."""
    if column["binary"]:
        return 0.0, 1.0
    rows = board[board["benchmark"] == column["benchmark"]]
    low, high = float(rows["ci_low"].min()), float(rows["ci_high"].max())
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _inline(svg: str) -> str:
    """A figure as part of the page: no prolog, no namespace addresses, the page's own colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", svg)
    # As wide as the page allows, but not wider than it was drawn (72 points an inch).
    svg = re.sub(
        r'(<svg[^>]*?) width="([\d.]+)pt" height="[^"]*"',
        lambda found: f'{found[1]} style="max-width: {float(found[2]) / 72 * 6:.0f}rem"',
        svg,
        count=1,
    )
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--line)")
    return svg.replace("'DejaVu Sans'", "system-ui, sans-serif")
