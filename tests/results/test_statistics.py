"""Intervals and tests against SciPy, statsmodels and hand computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from results.errors import ResultsError
from results.statistics import (
    bootstrap_difference,
    bootstrap_mean,
    holm,
    mcnemar,
    percentile_interval,
    resampled_sums,
    score_difference,
    score_equivalence,
    sign_flip,
    wilson,
)

SCORES = np.random.default_rng(7).normal(size=60)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.floats(0, 1))
def test_wilson_equals_statsmodels(n: int, share: float) -> None:
    """statsmodels' `proportion_confint(method="wilson")` is an independent implementation."""
    successes = round(share * n)
    expected = proportion_confint(successes, n, method="wilson")
    assert wilson(successes, n) == pytest.approx(expected, abs=1e-12)


def test_wilson_of_the_papers_mbpp_score() -> None:
    """149 of 378 from Wilson's own formula: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    n, p, z = 378, 149 / 378, 1.959963984540054
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = ((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n))
    assert wilson(149, 378) == pytest.approx(expected, abs=1e-12)


def test_wilson_of_nothing_is_no_interval_and_of_nonsense_an_error() -> None:
    assert all(map(math.isnan, wilson(0, 0)))
    with pytest.raises(ResultsError, match="5 successes of 4"):
        wilson(5, 4)


def test_bootstrap_of_a_mean_agrees_with_scipy() -> None:
    """Two bootstraps of 10 000 samples: their bounds differ by Monte Carlo error, which is about
    2 % of the interval's width (0.5); four times that is allowed."""
    expected = stats.bootstrap((SCORES,), np.mean, n_resamples=10_000, method="percentile", rng=3)
    assert bootstrap_mean(SCORES) == pytest.approx(
        (expected.confidence_interval.low, expected.confidence_interval.high), abs=0.04
    )


def test_clusters_are_resampled_as_wholes() -> None:
    """Two prompts, one of 1 token with value 1, one of 99 tokens with 0: a bootstrap sample holds
    the first twice (mean 1), both (0.01), or the second twice (0), with chances 1/4, 1/2, 1/4."""
    low, high = bootstrap_mean([1.0, 0.0], [1, 99])
    assert (low, high) == (0.0, 1.0)
    sums = resampled_sums(np.array([[1.0, 1.0], [0.0, 99.0]]))
    shares = [np.mean(sums[:, 0] == count) for count in (0, 1, 2)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


def test_resampling_draws_n_rows_with_the_right_moments() -> None:
    """A sum of n draws has mean n·x̄ and variance n·var(x)."""
    sums = resampled_sums(np.column_stack([SCORES, np.ones(60)]))
    assert (sums[:, 1] == 60).all()
    assert sums[:, 0].mean() == pytest.approx(SCORES.sum(), abs=0.3)
    assert sums[:, 0].var() == pytest.approx(60 * SCORES.var(), rel=0.05)


def test_the_seed_decides_the_bootstrap() -> None:
    assert bootstrap_mean(SCORES) == bootstrap_mean(SCORES)
    assert bootstrap_mean(SCORES, seed=1) != bootstrap_mean(SCORES, seed=2)


def test_bootstrap_of_equal_values_is_a_point_and_of_one_value_unknown() -> None:
    assert bootstrap_mean([0.25] * 5) == (0.25, 0.25)
    assert all(map(math.isnan, bootstrap_mean([0.25])))
    assert all(map(math.isnan, bootstrap_mean([])))


def test_a_score_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(ResultsError, match="1 of 2 are not finite"):
        bootstrap_mean([0.5, math.nan])
    with pytest.raises(ResultsError, match="not finite"):
        sign_flip([math.inf], [0.0])


def test_an_undefined_draw_leaves_no_interval() -> None:
    assert all(map(math.isnan, percentile_interval([1.0, math.nan])))


def test_paired_difference_is_narrower_than_unpaired_scores() -> None:
    """left - right is exactly 0.1 on every item, whatever the items' own spread."""
    assert bootstrap_difference(SCORES + 0.1, SCORES) == pytest.approx((0.1, 0.1))
    with pytest.raises(ResultsError, match="3 scores against 2"):
        bootstrap_difference([1, 2, 3], [1, 2])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_mcnemar_equals_statsmodels(pairs: list[tuple[bool, bool]]) -> None:
    """statsmodels' exact McNemar on the 2x2 table of the same pairs."""
    left, right = np.array(pairs, dtype=float).T
    table = [[((left == a) & (right == b)).sum() for b in (1, 0)] for a in (1, 0)]
    assert mcnemar(left, right) == pytest.approx(statsmodels_mcnemar(table, exact=True).pvalue)


def test_mcnemar_by_hand() -> None:
    """Five items differ, all in favour of the first: p = 2 · (1/2)^5 = 0.0625."""
    assert mcnemar([1] * 5 + [0, 1], [0] * 5 + [0, 1]) == 0.0625
    assert mcnemar([1, 0], [1, 0]) == 1.0
    assert math.isnan(mcnemar([], []))
    with pytest.raises(ResultsError, match="0 and 1"):
        mcnemar([0.5], [1])


def test_sign_flip_by_hand() -> None:
    """Differences 1, 2, 3: of 8 sign patterns, |mean| is as large as observed for 2: p = 1/4."""
    assert sign_flip([1, 2, 3], [0, 0, 0]) == pytest.approx(0.25)
    assert sign_flip([1, 1], [1, 1]) == 1.0
    assert sign_flip([1], [0]) == 1.0
    assert math.isnan(sign_flip([], []))


def test_sign_flip_agrees_with_the_paired_t_test_on_normal_differences() -> None:
    """On 60 normal differences both p-values are near; a permutation has Monte Carlo error."""
    expected = stats.ttest_1samp(SCORES + 0.2, 0).pvalue
    assert sign_flip(SCORES + 0.2, np.zeros(60)) == pytest.approx(expected, abs=0.02)


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.03, 0.04 times 3, 2, 1, made monotone: 0.03, 0.06, 0.06."""
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([]) == []
    with pytest.raises(ResultsError, match=r"\[0, 1\]"):
        holm([1.5])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_equals_statsmodels(p_values: list[float]) -> None:
    """statsmodels' `multipletests(method="holm")` is an independent implementation."""
    assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1])


def test_holm_does_not_count_tests_that_could_not_be_made() -> None:
    adjusted = holm([0.02, math.nan])
    assert adjusted[0] == pytest.approx(0.02)
    assert math.isnan(adjusted[1])


def constrained(better: int, worse: int, count: int, difference: float) -> float:
    """Tango's statistic the slow way: the likeliest losing share is found by looking everywhere."""
    low, high = max(0.0, -difference), (1 - difference) / 2
    losing = np.linspace(low, high, 2_000_001)[1:-1]
    winning = losing + difference
    tied = 1 - losing - winning
    likelihood = better * np.log(winning) + worse * np.log(losing)
    likelihood += (count - better - worse) * np.log(tied)
    best = float(losing[likelihood.argmax()])
    variance = count * (2 * best + difference - difference**2)
    return (better - worse - count * difference) / math.sqrt(variance)


@pytest.mark.parametrize(
    ("better", "worse", "count"), [(9, 4, 60), (1, 1, 400), (3, 0, 20), (0, 7, 30)]
)
def test_the_score_interval_is_where_the_slow_statistic_reaches_the_quantile(
    better: int, worse: int, count: int
) -> None:
    left = [1.0] * better + [0.0] * (count - better)
    right = [0.0] * better + [1.0] * worse + [0.0] * (count - better - worse)
    found = score_difference(left, right)
    assert constrained(better, worse, count, found.low) == pytest.approx(1.95996, abs=2e-3)
    assert constrained(better, worse, count, found.high) == pytest.approx(-1.95996, abs=2e-3)
    margin = 0.15
    expected = max(
        stats.norm.sf(constrained(better, worse, count, -margin)),
        stats.norm.cdf(constrained(better, worse, count, margin)),
    )
    assert score_equivalence(left, right, margin) == pytest.approx(expected, abs=1e-4)


def test_few_items_without_a_difference_prove_nothing() -> None:
    """By hand, four items that agree: the limits solve n d^2 = z^2 |d|(1 - |d|) + ..., that is
    |d| = z^2 / (n + z^2) = 3.8415 / 7.8415, Wilson's upper limit of 0 of 4."""
    found = score_difference([0, 0, 0, 0], [0, 0, 0, 0])
    assert found == pytest.approx((-3.8415 / 7.8415, 3.8415 / 7.8415), abs=1e-4)
    assert score_equivalence([0] * 4, [0] * 4, 0.02) > 0.3
    assert score_equivalence([1] * 400, [1] * 400, 0.02) < 0.01


def test_score_tests_at_their_ends() -> None:
    assert score_difference([1] * 5, [0] * 5).high == pytest.approx(1.0)
    assert score_difference([0] * 5, [1] * 5).low == pytest.approx(-1.0)
    assert score_equivalence([1, 1], [0, 0], 0.02) > 0.9
    assert math.isnan(score_equivalence([], [], 0.02))
    assert math.isnan(score_difference([], []).low)
    with pytest.raises(ResultsError, match="margin"):
        score_equivalence([1, 1], [1, 1], 0)
    with pytest.raises(ResultsError, match="0 and 1"):
        score_difference([0.5], [1])
