"""The answer so far, in sentences with numbers; nothing here that the tables do not hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pandas as pd

from results.comparisons import MARGIN
from results.equivalence import KL_MARGIN, LARGEST_ALPHA

QUESTION = "Is adding skills in weight space the same as adding them in probability space?"
MOST_FINDINGS = 8  # a sweep has many merges; the tables have them all


class Finding(NamedTuple):
    """What a run says about one merge."""

    merge: str
    text: str


def headline(comparisons: pd.DataFrame) -> str:
    """All paired comparisons of merges with compositions in one sentence."""
    pairs = _against_compositions(comparisons)
    if pairs.empty:
        return "This run has no merge and composition with answers to the same items yet."
    counts = pairs["verdict"].value_counts()
    total, differ = len(pairs), int(counts.get("better", 0) + counts.get("worse", 0))
    same, neither = int(counts.get("equivalent", 0)), int(counts.get("undecided", 0))
    return (
        f"Of {total} paired comparison{'s' * (total != 1)} of a merge with a composition, "
        f"{differ} show{'s' * (differ == 1)} a difference (p < 0.05 after Holm), "
        f"{same} show{'s' * (same == 1)} equivalence within ±{MARGIN:g}, and {neither} "
        f"decide{'s' * (neither == 1)} neither (too few items, or near the margin)."
    )


def findings(comparisons: pd.DataFrame, equivalence: pd.DataFrame) -> list[Finding]:
    """Merge by merge: scores against compositions, distance of the distributions, slopes."""
    pairs = _against_compositions(comparisons)
    merges = list(dict.fromkeys([*pairs["model"], *equivalence["model"]]))
    found = []
    for merge in merges[:MOST_FINDINGS]:
        mine = equivalence[equivalence["model"] == merge]
        sentences = [
            *_scores(pairs[pairs["model"] == merge]),
            *_distances(mine),
            *_slopes(mine),
        ]
        found.append(Finding(merge, " ".join(sentences)))
    if len(merges) > MOST_FINDINGS:
        rest = len(merges) - MOST_FINDINGS
        found.append(Finding(f"{rest} more", "The tables below hold every merge."))
    return found


def _against_compositions(comparisons: pd.DataFrame) -> pd.DataFrame:
    return comparisons[(comparisons["role"] == "composition") & (comparisons["n"] > 0)]


def _scores(pairs: pd.DataFrame) -> Iterator[str]:
    for reference, rows in pairs.groupby("reference", sort=False):
        parts = [
            f"{row['benchmark']} {row['score']:.3f} and {row['reference_score']:.3f} "
            f"({row['verdict']}, n = {row['n']})"
            for row in rows.to_dict("records")
        ]
        yield f"Its scores and those of {reference}: {', '.join(parts)}."


def _distances(equivalence: pd.DataFrame) -> Iterator[str]:
    """At the largest alpha: KL and top-1 agreement, on every set of prompts."""
    at_alpha = equivalence[equivalence["alpha"] == equivalence["alpha"].max()]
    for reference, rows in at_alpha.groupby("reference", sort=False):
        top = rows[rows["metric"] == "top1_agreement"].set_index("prompts")["value"]
        parts = [
            f"{row['value']:.3g} nats a token{_interval(row, '.3g')} on {row['prompts']}, "
            f"{_beside_margin(row)}, with the same next token "
            f"{100 * top[row['prompts']]:.1f} % of the time"
            for row in rows[rows["metric"] == "kl"].to_dict("records")
        ]
        alpha = rows["alpha"].iloc[0]
        yield f"At α = {alpha:g} its KL from {reference} is {', and '.join(parts)}."


def _beside_margin(row: dict[Any, Any]) -> str:
    """Equivalent in practice? The interval decides, not the value."""
    if row["ci_high"] < KL_MARGIN:
        return f"within the margin of {KL_MARGIN:g}"
    if row["ci_low"] > KL_MARGIN:
        return f"beyond the margin of {KL_MARGIN:g}"
    return f"undecided at the margin of {KL_MARGIN:g}"


def _slopes(equivalence: pd.DataFrame) -> Iterator[str]:
    rows = equivalence[(equivalence["metric"] == "slope_kl") & equivalence["value"].notna()]
    parts = [
        f"{row['value']:.2f}{_interval(row, '.2f')} on {row['prompts']}"
        for row in rows.to_dict("records")
    ]
    if parts:
        yield (
            f"For α ≤ 1/{1 / LARGEST_ALPHA:.0f} the KL grows as α to the power {', '.join(parts)}."
        )


def _interval(row: dict[Any, Any], form: str) -> str:
    if math.isnan(row["ci_low"]):
        return ""
    return f" [{row['ci_low']:{form}}, {row['ci_high']:{form}}]"
