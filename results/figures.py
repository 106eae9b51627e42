"""The figures, as SVG text: scores with intervals, divergence against alpha, paired differences.

The same tables give the same bytes: no date, a fixed salt for the ids, no global state of
matplotlib. Colours keep apart under the common colour blindnesses (after Okabe & Ito, 2008) and
on light and dark paper, and every kind of model has its own marker as well.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from results.comparisons import MARGIN
from results.equivalence import LARGEST_ALPHA

INK = "#1d2129"  # text and axes; the report page replaces both by its own colours
GRID = "#d9dde3"
COLOURS = {"base": "#858b96", "expert": "#3a8bd0", "merge": "#dd7f17", "composition": "#12a07a"}
MARKERS = {"base": "o", "expert": "s", "merge": "^", "composition": "D"}
LINES = ["#dd7f17", "#3a8bd0", "#12a07a", "#c065a4", "#858b96", "#b3a129"]
STYLE = {
    "svg.hashsalt": "mergescope",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9.5,
    "legend.frameon": False,
}
PANELS_IN_A_ROW = 4
ALPHA_PANELS = {"kl": ("KL, nats a token", 4), "gap_rms": ("logit gap, rms", 2)}


def scores_figure(board: pd.DataFrame, higher_is_better: Mapping[str, bool]) -> str | None:
    """One panel a benchmark, one dot and whisker a model. None where nothing is scored."""
    done = board[board["n"] > 0]
    models, benchmarks = list(dict.fromkeys(done["model"])), list(dict.fromkeys(done["benchmark"]))
    if not models:
        return None
    with _style():
        figure, panels = _grid(len(benchmarks), 1.1 + 0.3 * len(models), sharey=True)
        for axes, benchmark in zip(panels, benchmarks, strict=True):
            rows = done[done["benchmark"] == benchmark]
            for row in rows.to_dict("records"):
                height, interval = models.index(row["model"]), (row["ci_low"], row["ci_high"])
                _whisker(axes, height, row["score"], interval, row["kind"])
            _panel(axes, benchmark, models)
            better = "higher" if higher_is_better.get(benchmark, True) else "lower"
            axes.set_xlabel(f"{_plain(str(rows['metric'].iloc[0]))}\n{better} is better")
        kinds = [kind for kind in COLOURS if kind in set(done["kind"])]
        _legend(figure, panels[0], kinds)
        return _svg(figure)


def alpha_figure(equivalence: pd.DataFrame) -> str | None:
    """KL and logit gap against alpha, log-log, a line a merge, with the theory's slopes.

    Zeros have no place on a logarithmic axis and are left out. None with fewer than two alphas.
    """
    table = equivalence[equivalence["metric"].isin(ALPHA_PANELS) & (equivalence["value"] > 0)]
    sets = list(dict.fromkeys(table["prompts"]))
    if table["alpha"].nunique() < 2:
        return None
    with _style():
        figure, panels = _grid(2 * len(sets), 2.6, width=2.95)
        shown = [(prompts, metric) for prompts in sets for metric in ALPHA_PANELS]
        for axes, (prompts, metric) in zip(panels, shown, strict=True):
            label, slope = ALPHA_PANELS[metric]
            chosen = (table["prompts"] == prompts) & (table["metric"] == metric)
            _alpha_panel(axes, table[chosen], slope)
            axes.set_ylabel(label)
            axes.set_title(_plain(prompts), loc="left")
        lines: dict[str, Any] = {}
        for axes in panels:
            handles, labels = axes.get_legend_handles_labels()
            lines |= dict(zip(labels, handles, strict=True))
        columns = max(1, len(panels) // 2)  # a label is about two panels wide
        figure.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=columns)
        return _svg(figure)


def differences_figure(comparisons: pd.DataFrame) -> str | None:
    """Merge minus composition on each benchmark, paired, with intervals and the TOST margin."""
    table = comparisons[(comparisons["role"] == "composition") & (comparisons["n"] > 0)]
    table = table.assign(pair=table["model"] + " − " + table["reference"])
    pairs, benchmarks = list(dict.fromkeys(table["pair"])), list(dict.fromkeys(table["benchmark"]))
    if not pairs:
        return None
    with _style():
        figure, panels = _grid(len(benchmarks), 0.9 + 0.3 * len(pairs), sharey=True)
        for axes, benchmark in zip(panels, benchmarks, strict=True):
            rows = table[table["benchmark"] == benchmark]
            margin = rows["margin"].iloc[0]
            if not math.isnan(margin):
                axes.axvspan(-margin, margin, color=GRID, alpha=0.6, linewidth=0)
            axes.axvline(0, color=INK, linewidth=0.9)
            for row in rows.to_dict("records"):
                height, interval = pairs.index(row["pair"]), (row["ci_low"], row["ci_high"])
                _whisker(axes, height, row["difference"], interval, "merge")
            _panel(axes, benchmark, pairs)
            reach = max(1.15 * max(map(abs, axes.dataLim.intervalx)), 2 * MARGIN)
            axes.set_xlim(-reach, reach)
            axes.set_xlabel(f"difference in {_plain(str(rows['metric'].iloc[0]))}")
        return _svg(figure)


def scale_text(alpha: float) -> str:
    """`1/256` for 0.00390625, and for 0.0039; other numbers as they are."""
    if 0 < alpha < 0.75 and abs(1 / alpha - round(1 / alpha)) < 0.005 / alpha:
        return f"1/{round(1 / alpha)}"
    return f"{alpha:g}"


def _alpha_panel(axes: Any, rows: pd.DataFrame, slope: int) -> None:
    groups = rows.groupby(["model", "reference"], sort=False)
    for number, ((model, reference), line) in enumerate(groups):
        colour, points = LINES[number % len(LINES)], line.sort_values("alpha")
        x, y = points["alpha"].to_numpy(), points["value"].to_numpy()
        label = _plain(f"{model} against {reference}")
        marker = "o^sDvP"[number % 6]
        axes.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.5, label=label)
        axes.fill_between(
            x, points["ci_low"], points["ci_high"], color=colour, alpha=0.18, linewidth=0
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if len(rows):
        _guide(axes, rows, slope)
    axes.set_xlabel("α, scale of the task vectors")
    axes.xaxis.set_major_formatter(lambda value, _: scale_text(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    axes.set_xticks(sorted(set(rows["alpha"])))
    axes.minorticks_off()


def _guide(axes: Any, rows: pd.DataFrame, slope: int) -> None:
    """A dashed line of the theory's slope through the middle of the values at small alpha."""
    smallest, largest = rows["alpha"].min(), rows["alpha"].max()
    middle = float(np.exp(np.log(rows[rows["alpha"] == smallest]["value"]).mean()))
    x = np.array([smallest, min(largest, 4 * LARGEST_ALPHA)])
    y = 1.6 * middle * (x / smallest) ** slope
    axes.plot(x, y, color=INK, linestyle=(0, (4, 3)), linewidth=1, alpha=0.75)
    axes.annotate(f"slope {slope}", (x[-1], y[-1]), (-6, 4), textcoords="offset points", ha="right")


def _whisker(axes: Any, y: int, x: float, interval: tuple[float, float], kind: str) -> None:
    colour = COLOURS[kind]
    if not math.isnan(interval[0]):
        axes.plot(interval, [y, y], color=colour, linewidth=1.8, solid_capstyle="round")
    axes.plot(x, y, color=colour, marker=MARKERS[kind], markersize=6, linestyle="none")


def _panel(axes: Any, title: str, names: Sequence[str]) -> None:
    axes.set_title(_plain(title), loc="left")
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="y", visible=False)


def _legend(figure: Any, axes: Any, kinds: Sequence[str]) -> None:
    handles = [
        axes.plot([], [], color=COLOURS[kind], marker=MARKERS[kind], linewidth=1.8)[0]
        for kind in kinds
    ]
    figure.legend(handles, kinds, loc="outside upper center", ncols=len(kinds))


def _grid(
    count: int, height: float, sharey: bool = False, width: float = 2.6
) -> tuple[Any, list[Any]]:
    """A figure with `count` panels, a few in a row."""
    from matplotlib.figure import Figure

    columns = min(count, PANELS_IN_A_ROW)
    rows = -(-count // columns)
    labels = 1.4 if sharey else 0.0  # room for the models' names
    size = (max(width * columns, 4.0) + labels, (height + 0.7) * rows + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _style() -> Any:
    import matplotlib as mpl

    return mpl.rc_context(STYLE)


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    without = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # The text stays text, so a browser finds glyphs that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(buffer, format="svg", transparent=True, metadata=without)
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _plain(text: str) -> str:
    """Dollar signs in a name are dollar signs, not mathematics."""
    return text.replace("$", r"\$")
