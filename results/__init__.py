"""Records of a run, and what they say: store, statistics, leaderboard, report, figures.

    with Store("runs/letters/records.sqlite", read_only=True) as store:
        print(leaderboard(store.frame()))

This package knows nothing of models: it reads records and writes tables, pages and pictures.
"""

from __future__ import annotations

from results.comparisons import comparisons
from results.equivalence import equivalence_table
from results.errors import ResultsError
from results.leaderboard import leaderboard, metrics_table, wide
from results.record import Answer, Cell, Divergence, PlannedItem
from results.report import write_report
from results.store import Store

__all__ = [
    "Answer",
    "Cell",
    "Divergence",
    "PlannedItem",
    "ResultsError",
    "Store",
    "comparisons",
    "equivalence_table",
    "leaderboard",
    "metrics_table",
    "wide",
    "write_report",
]
