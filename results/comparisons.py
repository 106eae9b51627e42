"""Paired comparisons: every merge against every composition, and both against the best expert.

Two models that answered the same items differ by mean(model - reference) over those items. For 0/1
scores its interval is Tango's score interval (a few items without a difference prove little), for
others a bootstrap over items; whether it is real is asked by the exact McNemar test for 0/1 scores
and by a sign-flip permutation test for others, with Holm's adjustment over the benchmarks of a
pair. "No difference shown" is not "equal": equality within a margin that was fixed beforehand is
shown by two one-sided score tests (TOST), for accuracies only. To call a pair equivalent
on *all* benchmarks each must pass at 5 %, which needs no adjustment (an intersection-union test).

The best expert of a benchmark is picked by its score on the same items, so it is flattered by
the choice: a model that beats it does so against the odds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from results.errors import ResultsError
from results.leaderboard import cell_records
from results.statistics import (
    bootstrap_difference,
    holm,
    mcnemar,
    score_difference,
    score_equivalence,
    sign_flip,
)

MARGIN = 0.02  # accuracies closer than two points are "equivalent in practice"
LEVEL = 0.05
COMPARISON_COLUMNS = ["model", "reference", "role", "benchmark", "metric"]
COMPARISON_COLUMNS += ["score", "reference_score", "difference", "ci_low", "ci_high", "n"]
COMPARISON_COLUMNS += ["test", "p", "p_holm", "margin", "p_equivalence", "verdict"]


class Scored(NamedTuple):
    """A model's scores on a benchmark, by item, and what they are."""

    cell: Mapping[str, object]
    scores: pd.Series[float]

    @property
    def model(self) -> str:
        return str(self.cell["model"])


def comparisons(frame: pd.DataFrame, margin: float = MARGIN) -> pd.DataFrame:
    """One row a pair and benchmark; `difference` is model minus reference, in the metric's units.

    Args:
        frame: `Store.frame()`.
        margin: accuracies that differ by less count as equivalent; fix it before looking.

    Returns:
        Columns COMPARISON_COLUMNS. `role` of the reference is `composition` or `best expert`;
        `n` counts the items that both have answered, the only ones used; `p_holm` is adjusted
        over the benchmarks of the pair; `p_equivalence` is TOST's, NaN for other than 0/1 scores.
        `verdict` on the model, at 5 %: `better` or `worse` (p_holm), else `equivalent`, else
        `undecided`.

    Raises:
        ResultsError: as `leaderboard`; the margin is not positive.
    """
    if not margin > 0:
        raise ResultsError(f"the margin of equivalence is {margin}; expected a positive number")
    rows = [_row(model, other, role, margin) for model, other, role in _pairs(frame)]
    table = pd.DataFrame(rows, columns=COMPARISON_COLUMNS)
    # The best expert differs between benchmarks but is one opponent: one family of tests.
    opponent = table["reference"].where(table["role"] == "composition", "")
    for _, family in table.groupby([table["model"], table["role"], opponent], sort=False):
        table.loc[family.index, "p_holm"] = holm(list(family["p"]))
    sign = dict(
        zip(frame["benchmark"], frame["higher_is_better"].map({True: 1, False: -1}), strict=True)
    )
    table["verdict"] = [
        _verdict(sign[benchmark] * difference, p, p_equivalence)
        for benchmark, difference, p, p_equivalence in zip(
            table["benchmark"],
            table["difference"],
            table["p_holm"],
            table["p_equivalence"],
            strict=True,
        )
    ]
    return table


def _verdict(advantage: float, p: float, p_equivalence: float) -> str:
    if p < LEVEL:
        return "better" if advantage > 0 else "worse"
    return "equivalent" if p_equivalence < LEVEL else "undecided"


def _pairs(frame: pd.DataFrame) -> Iterator[tuple[Scored, Scored, str]]:
    """(model, reference, role), pair by pair, each over the benchmarks in order."""
    found: dict[str, dict[str, Scored]] = {}
    kinds: dict[str, object] = {}
    for cell, records in cell_records(frame):
        scores = records.set_index("item")["score"]
        model, benchmark = str(cell["model"]), str(cell["benchmark"])
        found.setdefault(model, {})[benchmark] = Scored(cell, scores)
        kinds[model] = cell["kind"]
    named = {
        kind: [model for model, of in kinds.items() if of == kind]
        for kind in ("expert", "merge", "composition")
    }
    for merge in named["merge"]:
        for composition in named["composition"]:
            for benchmark, scored in found[merge].items():
                if benchmark in found[composition]:
                    yield scored, found[composition][benchmark], "composition"
    for model in [*named["merge"], *named["composition"]]:
        for benchmark, scored in found[model].items():
            experts = [
                found[expert][benchmark] for expert in named["expert"] if benchmark in found[expert]
            ]
            if experts:
                yield scored, _best(experts), "best expert"


def _best(experts: list[Scored]) -> Scored:
    """The first of those with the best mean."""
    sign = 1 if experts[0].cell["higher_is_better"] else -1
    return max(experts, key=lambda expert: sign * float(expert.scores.mean()))


def _row(model: Scored, reference: Scored, role: str, margin: float) -> dict[str, object]:
    both = model.scores.index.intersection(reference.scores.index, sort=False)
    left = model.scores.loc[both].to_numpy(dtype="float64")
    right = reference.scores.loc[both].to_numpy(dtype="float64")
    binary = bool(model.cell["binary"])
    low, high = (score_difference if binary else bootstrap_difference)(left, right)
    nothing = float("nan")
    return {
        "model": model.model,
        "reference": reference.model,
        "role": role,
        "benchmark": model.cell["benchmark"],
        "metric": model.cell["metric"],
        "score": float(left.mean()) if len(both) else nothing,
        "reference_score": float(right.mean()) if len(both) else nothing,
        "difference": float((left - right).mean()) if len(both) else nothing,
        "ci_low": low,
        "ci_high": high,
        "n": len(both),
        "test": "McNemar, exact" if binary else "sign flip",
        "p": mcnemar(left, right) if binary else sign_flip(left, right),
        "p_holm": nothing,
        "margin": margin if binary else nothing,
        "p_equivalence": score_equivalence(left, right, margin) if binary else nothing,
        "verdict": "",
    }
