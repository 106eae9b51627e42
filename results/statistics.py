"""Intervals and tests: thin, typed wrappers over SciPy, checked against statsmodels.

Two rules hold throughout. Uncertainty is over *items* (or prompts), never over tokens: tokens of
one text are not independent. Two models that answered the same items are compared in pairs.

What cannot be known is NaN: an interval from no item, a bootstrap interval from a single one.
What makes no sense (NaN among the scores, more successes than trials) is a `ResultsError`.

Sources:
    Wilson, "Probable inference", JASA 22 (1927); Brown, Cai & DasGupta (2001) on why not Wald.
    Efron & Tibshirani, "An Introduction to the Bootstrap" (1993), ch. 13: percentile intervals.
    McNemar, Psychometrika 12 (1947), in its exact binomial form.
    Holm, Scandinavian Journal of Statistics 6 (1979).
    Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15 (1987): two one-sided tests.
    Tango, Statistics in Medicine 17 (1998): equivalence of and interval for paired proportions.
    Miller, "Adding Error Bars to Evals" (2024): clustered and paired errors for benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from results.errors import ResultsError

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 10_000  # the bounds' own Monte Carlo error is then about 2 % of the interval's width
SEED = 0  # the same records give the same bytes
DRAWS_AT_ONCE = 2_000_000  # bounds the memory of a bootstrap: 16 MB of counts


class Interval(NamedTuple):
    """A two-sided confidence interval; NaN on both sides where there is none."""

    low: float
    high: float


NO_INTERVAL = Interval(math.nan, math.nan)


def wilson(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a proportion; within [0, 1], sound near its ends.

    Returns:
        The interval; NaN for n = 0.

    Raises:
        ResultsError: not 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ResultsError(f"{successes} successes of {n}; expected between 0 and {n}")
    if n == 0:
        return NO_INTERVAL
    from scipy.stats import binomtest

    found = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Interval(float(found.low), float(found.high))


def resampled_sums(clusters: ArrayLike, seed: int = SEED, resamples: int = RESAMPLES) -> Floats:
    """Column sums over bootstrap samples of the rows.

    Every statistic here is a function of sums over clusters, so this is the whole bootstrap.
    Equal rows are exchangeable: it is enough to draw how often each *distinct* row appears,
    Multinomial(n, frequencies), which makes 0/1 scores of any number cheap and is exact.

    Args:
        clusters: (n, k) or (n,), one row a cluster, n >= 1.

    Returns:
        (resamples, k)
    """
    rows = np.asarray(clusters, dtype=np.float64)
    rows = rows.reshape(len(rows), -1)
    distinct, frequency = np.unique(rows, axis=0, return_counts=True)
    generator = np.random.default_rng(seed)
    sums = np.empty((resamples, rows.shape[1]))
    step = max(1, DRAWS_AT_ONCE // len(distinct))
    for first in range(0, resamples, step):
        block = sums[first : first + step]
        counts = generator.multinomial(len(rows), frequency / len(rows), size=len(block))
        # einsum, not BLAS: its order of summation does not depend on the number of threads.
        block[:] = np.einsum("ru,uk->rk", counts.astype(np.float64), distinct)
    return sums


def percentile_interval(draws: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """The central interval of bootstrap draws; NaN if any draw is undefined."""
    values = np.asarray(draws, dtype=np.float64)
    tail = (1 - confidence) / 2
    if not np.isfinite(values).all():
        return NO_INTERVAL
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def bootstrap_mean(values: ArrayLike, sizes: ArrayLike | None = None, seed: int = SEED) -> Interval:
    """Percentile interval of a mean, clusters resampled as wholes.

    Args:
        values: (n,) one value a cluster: an item's score, or a sum over a prompt's tokens.
        sizes: (n,) what each value is a sum of; the mean is then sum(values) / sum(sizes).
            None: 1 each.
        seed: of the resampling.

    Returns:
        The interval; NaN for fewer than two clusters, a point where all clusters are equal.

    Raises:
        ResultsError: a value or size is not finite.
    """
    numerators = _finite(values)
    denominators = np.ones_like(numerators) if sizes is None else _finite(sizes)
    if len(numerators) < 2:
        return NO_INTERVAL
    sums = resampled_sums(np.column_stack([numerators, denominators]), seed)
    return percentile_interval(sums[:, 0] / sums[:, 1])


def bootstrap_difference(left: ArrayLike, right: ArrayLike, seed: int = SEED) -> Interval:
    """Percentile interval of mean(left - right) over pairs: (n,) and (n,), the same items."""
    return bootstrap_mean(_differences(left, right), seed=seed)


def mcnemar(left: ArrayLike, right: ArrayLike) -> float:
    """Exact two-sided McNemar test of two models' 0/1 scores on the same items.

    Only items on which they differ count: of those, Binomial(b + c, 1/2) under the null.

    Returns:
        The p-value: 1 where they differ nowhere, NaN for no item.

    Raises:
        ResultsError: a score is neither 0 nor 1.
    """
    better, worse, count = _discordant(left, right)
    if not count:
        return math.nan
    if not better + worse:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue)


def score_difference(left: ArrayLike, right: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Tango's score interval of mean(left - right) for 0/1 scores on the same items.

    Unlike a bootstrap it does not shrink to a point where the models differ on no item: four items
    without a difference leave [-0.49, 0.49].

    Returns:
        The interval, within [-1, 1]; NaN for no item.

    Raises:
        ResultsError: a score is neither 0 nor 1.
    """
    better, worse, count = _discordant(left, right)
    if not count:
        return NO_INTERVAL
    from scipy.optimize import brentq
    from scipy.stats import norm

    limit = float(norm.ppf((1 + confidence) / 2))
    middle = (better - worse) / count

    def bound(end: float, wanted: float) -> float:
        if abs(_tango(better, worse, count, end)) <= limit:
            return end
        return float(brentq(lambda d: _tango(better, worse, count, d) - wanted, end, middle))

    return Interval(bound(-1.0, limit), bound(1.0, -limit))


def score_equivalence(left: ArrayLike, right: ArrayLike, margin: float) -> float:
    """Are two models equivalent: |mean(left - right)| < margin, for 0/1 scores on the same items?

    Two one-sided tests with Tango's score statistic. A small p-value speaks *for* equivalence; fix
    the margin before looking.

    Returns:
        The larger of the two one-sided p-values; NaN for no item.

    Raises:
        ResultsError: the margin is not in (0, 1), or a score is neither 0 nor 1.
    """
    if not 0 < margin < 1:
        raise ResultsError(f"the margin of equivalence is {margin}; expected it between 0 and 1")
    better, worse, count = _discordant(left, right)
    if not count:
        return math.nan
    from scipy.stats import norm

    above = norm.sf(_tango(better, worse, count, -margin))
    below = norm.cdf(_tango(better, worse, count, margin))
    return float(max(above, below))


def _tango(better: int, worse: int, count: int, difference: float) -> float:
    """The score statistic of a difference between paired proportions, about normal under it.

    Its variance is that of the constrained maximum likelihood: of all pairs of proportions with
    this difference, the likeliest.
    """
    away = better - worse - count * difference
    if away == 0:
        return 0.0
    a = 2 * count
    b = -better - worse + (2 * count - better + worse) * difference
    c = -worse * difference * (1 - difference)
    losing = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = count * (2 * losing + difference * (1 - difference))
    return away / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, away)


def _discordant(left: ArrayLike, right: ArrayLike) -> tuple[int, int, int]:
    """Items where only the left is right, where only the right is, and all."""
    differences = _differences(left, right)
    if not np.isin(_finite(left), (0, 1)).all() or not np.isin(_finite(right), (0, 1)).all():
        raise ResultsError("this is for scores of 0 and 1; found others")
    return int((differences > 0).sum()), int((differences < 0).sum()), len(differences)


def sign_flip(left: ArrayLike, right: ArrayLike, seed: int = SEED) -> float:
    """Two-sided permutation test of mean(left - right) = 0: each pair may have been swapped.

    Exact up to 13 items, else 9999 random sign patterns.

    Returns:
        The p-value: 1 where all pairs are equal, NaN for no item.
    """
    differences = _differences(left, right)
    if not len(differences):
        return math.nan
    if not differences.any():
        return 1.0
    if len(differences) == 1:
        return 1.0  # either sign is as likely; SciPy wants two observations
    from scipy.stats import permutation_test

    def mean(sample: Floats, axis: int) -> Floats:
        return np.asarray(sample.mean(axis=axis))

    found = permutation_test(
        (differences,),
        mean,
        permutation_type="samples",
        n_resamples=9999,
        batch=max(1, DRAWS_AT_ONCE // len(differences)),
        vectorized=True,
        rng=seed,
    )
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment; NaN (a test that could not be made) stays NaN and does not count.

    The i-th smallest of m p-values is multiplied by m - i + 1, then made monotone. statsmodels'
    `multipletests` gives the same, but collects garbage at every call, a fifth of a second each.
    """
    values = np.array(p_values, dtype=np.float64)
    made = np.flatnonzero(~np.isnan(values))
    if np.any((values[made] < 0) | (values[made] > 1)):
        raise ResultsError(f"p-values must lie in [0, 1]; found {list(p_values)}")
    order = made[np.argsort(values[made], kind="stable")]
    scaled = values[order] * np.arange(len(order), 0, -1)
    values[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in values]


def _differences(left: ArrayLike, right: ArrayLike) -> Floats:
    first, second = _finite(left), _finite(right)
    if first.shape != second.shape:
        raise ResultsError(
            f"{len(first)} scores against {len(second)}; pairs need the same items on both sides"
        )
    return first - second


def _finite(values: ArrayLike) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1:
        raise ResultsError(f"found an array of shape {found.shape}; expected one value an item")
    if not np.isfinite(found).all():
        raise ResultsError(f"{int((~np.isfinite(found)).sum())} of {len(found)} are not finite")
    return found
