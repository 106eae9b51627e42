"""Merge against composition, token by token: equivalence.csv.

With task vectors scaled by alpha, a merge by task arithmetic (lambda = 1) and the logit
composition of the same experts differ, for small alpha, by

    logit gap ~ alpha^2        KL ~ alpha^4        total variation ~ alpha^2

because the linear terms agree and each expert's self-curvature cancels; what is left is led by
the mixed second derivative D²f[τ1, τ2]. So the slope of log(metric) on log(alpha) tests the
theory: 2, 4 and 2. Slopes are fitted on alpha <= 1/16 only; larger scales are no longer
asymptotic.

Values are means a token, prompts weighted by their tokens. Intervals are bootstraps over
*prompts* (clusters), drawn jointly over the alphas for a slope.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from results.errors import ResultsError
from results.statistics import (
    NO_INTERVAL,
    Floats,
    Interval,
    percentile_interval,
    resampled_sums,
)

GROUP = ["model", "reference", "prompts"]
EQUIVALENCE_COLUMNS = [*GROUP, "alpha", "metric", "value", "ci_low", "ci_high", "n"]
SUMS = ["gap_squared", "kl", "js", "tv", "top1_agreement"]  # over a prompt's tokens
METRICS = ["gap_rms", "kl", "js", "tv", "top1_agreement"]  # in the same order
SLOPES = {"slope_gap": "gap_rms", "slope_kl": "kl", "slope_tv": "tv"}
THEORY = {"slope_gap": 2.0, "slope_kl": 4.0, "slope_tv": 2.0}
LARGEST_ALPHA = 1 / 16
KL_MARGIN = 0.01  # nats a token: distributions closer than this are "equivalent in practice"


def equivalence_table(divergences: pd.DataFrame) -> pd.DataFrame:
    """The tidy table, a row a merge, composition, set of prompts, alpha and metric.

    Args:
        divergences: `Store.divergences()`, sums over each prompt's tokens.

    Returns:
        Columns EQUIVALENCE_COLUMNS; `n` counts prompts. `gap_rms` = sqrt(Σ gap² / Σ tokens), the
        others are Σ / Σ tokens; `kl` and `js` in nats. Slopes have no alpha (NaN); they need two
        alphas <= 1/16 with prompts in common, and use those prompts only. Where a metric is 0 or
        less at one of them (exact equivalence, or rounding), its slope is NaN; where that holds in
        some bootstrap samples only, the slope's interval is NaN.

    Raises:
        ResultsError: a column is missing, or a prompt stands twice at one alpha.
    """
    _check(divergences)
    rows: list[dict[str, object]] = []
    for names, found in divergences.groupby(GROUP, sort=False):
        labels = dict(zip(GROUP, names, strict=True))
        for alpha, at_alpha in found.groupby("alpha", sort=True):
            clusters = at_alpha[[*SUMS, "tokens"]].to_numpy(dtype=np.float64)
            values, draws = means(clusters.sum(axis=0)), means(_resampled(clusters))
            for column, metric in enumerate(METRICS):
                interval = _interval(draws[:, column], len(clusters))
                row = _row(metric, float(values[column]), interval, len(clusters))
                rows.append({**labels, "alpha": alpha, **row})
        rows += [{**labels, "alpha": math.nan, **row} for row in _slope_rows(found)]
    return pd.DataFrame(rows, columns=EQUIVALENCE_COLUMNS)


def means(sums: Floats) -> Floats:
    """(..., 5 sums and the tokens) -> (..., 5): the METRICS, a token."""
    tokens = sums[..., -1:]
    values = sums[..., :-1] / tokens
    # Only the gap is a root of a mean square; the others are plain means.
    values[..., 0] = np.sqrt(values[..., 0])
    return values


def slopes(alphas: Floats, values: Floats) -> Floats:
    """Least squares of log(value) on log(alpha).

    Args:
        alphas: (A,), A >= 2, distinct.
        values: (..., A)

    Returns:
        (...): the slope; NaN where a value is not positive.
    """
    x = np.log(alphas) - np.log(alphas).mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.log(np.where(values > 0, values, np.nan))
    # x is centred, so the mean of y drops out: slope = Σ x y / Σ x².
    return np.asarray((y * x).sum(axis=-1) / (x * x).sum(), dtype=np.float64)


def _slope_rows(found: pd.DataFrame) -> Iterator[dict[str, object]]:
    small = found[found["alpha"] <= LARGEST_ALPHA]
    alphas = sorted(set(small["alpha"]))
    per_prompt = small.groupby("prompt", sort=False)["alpha"].nunique()
    shared = list(per_prompt.index[per_prompt == len(alphas)])
    if len(alphas) < 2 or not shared:
        return
    tables = [
        small[small["alpha"] == alpha].set_index("prompt").loc[shared, [*SUMS, "tokens"]]
        for alpha in alphas
    ]
    # A prompt is one cluster with its sums at every alpha: (prompts, alphas, sums).
    clusters = np.stack([table.to_numpy(dtype=np.float64) for table in tables], axis=1)
    shape = clusters.shape[1:]
    values = means(clusters.sum(axis=0))
    draws = means(_resampled(clusters.reshape(len(shared), -1)).reshape(-1, *shape))
    at = np.asarray(alphas, dtype=np.float64)
    for slope, metric in SLOPES.items():
        column = METRICS.index(metric)
        interval = _interval(slopes(at, draws[:, :, column]), len(shared))
        yield _row(slope, float(slopes(at, values[:, column])), interval, len(shared))


def _resampled(clusters: Floats) -> Floats:
    return resampled_sums(clusters) if len(clusters) > 1 else clusters


def _interval(draws: Floats, clusters: int) -> Interval:
    return percentile_interval(draws) if clusters > 1 else NO_INTERVAL


def _row(metric: str, value: float, interval: Interval, n: int) -> dict[str, object]:
    low, high = interval
    return {"metric": metric, "value": value, "ci_low": low, "ci_high": high, "n": n}


def _check(divergences: pd.DataFrame) -> None:
    needed = [*GROUP, "alpha", "prompt", "tokens", *SUMS]
    missing = [name for name in needed if name not in divergences]
    if missing:
        raise ResultsError(
            f"the frame lacks the columns {', '.join(missing)}; expected one from "
            "Store.divergences()"
        )
    doubles = divergences[divergences.duplicated([*GROUP, "alpha", "prompt"])]
    if len(doubles):
        first = doubles.iloc[0]
        raise ResultsError(
            f"prompt {first['prompt']!r} of {first['prompts']!r} stands twice for "
            f"{first['model']!r} at alpha {first['alpha']}; the store serves two experiments: "
            "run with --fresh"
        )
