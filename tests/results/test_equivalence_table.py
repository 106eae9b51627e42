"""equivalence.csv: token-weighted means, and slopes that find the theory's exponents."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from results import ResultsError, equivalence_table
from results.equivalence import EQUIVALENCE_COLUMNS, SUMS, slopes

ALPHAS = [1 / 256, 1 / 64, 1 / 16, 1.0]


def rows(
    alphas: list[float], prompts: int = 12, kl_power: float = 4, factor: float = 1.0
) -> pd.DataFrame:
    """Prompt i has 10 + i tokens, and per token gap² = c α⁴, kl = c α^power, tv = c α²."""
    size = np.random.default_rng(0).uniform(0.5, 2, prompts) * factor
    return pd.DataFrame(
        [
            {
                "model": "ta",
                "reference": "product(1, 1)",
                "prompts": "gsm8k",
                "alpha": alpha,
                "prompt": str(i),
                "tokens": 10 + i,
                "gap_squared": (10 + i) * size[i] * alpha**4,
                "kl": (10 + i) * size[i] * alpha**kl_power,
                "js": 0.0,
                "tv": (10 + i) * size[i] * alpha**2,
                "top1_agreement": float(10 + i),
            }
            for alpha in alphas
            for i in range(prompts)
        ],
        columns=[*EQUIVALENCE_COLUMNS[:4], "prompt", "tokens", *SUMS],
    )


def value(table: pd.DataFrame, metric: str, alpha: float | None = None) -> pd.Series[float]:
    chosen = table[table["metric"] == metric]
    return chosen[chosen["alpha"].isna() if alpha is None else chosen["alpha"] == alpha].iloc[0]


def test_the_columns_are_the_contract() -> None:
    expected = "model,reference,prompts,alpha,metric,value,ci_low,ci_high,n"
    assert ",".join(equivalence_table(rows([])).columns) == expected
    assert ",".join(equivalence_table(rows([1.0])).columns) == expected


def test_means_are_weighted_by_tokens_and_the_gap_is_a_root() -> None:
    """Two prompts of 1 and 3 tokens: kl (0.2 + 1) / 4 = 0.3, gap √((7 + 9) / 4) = 2, top-1 3/4."""
    frame = rows([1.0], prompts=2).assign(
        tokens=[1, 3], kl=[0.2, 1.0], gap_squared=[7.0, 9.0], top1_agreement=[1.0, 2.0]
    )
    table = equivalence_table(frame)
    assert value(table, "kl", 1.0)["value"] == pytest.approx(0.3)
    assert value(table, "gap_rms", 1.0)["value"] == 2.0
    assert value(table, "top1_agreement", 1.0)["value"] == 0.75
    assert value(table, "kl", 1.0)["n"] == 2


def test_intervals_are_bootstraps_over_prompts() -> None:
    """SciPy's paired percentile bootstrap of Σ kl / Σ tokens; Monte Carlo error about 2 %."""
    frame = rows([1.0], prompts=40)
    expected = stats.bootstrap(
        (frame["kl"].to_numpy(), frame["tokens"].to_numpy()),
        lambda kl, tokens, axis: kl.sum(axis=axis) / tokens.sum(axis=axis),
        paired=True,
        n_resamples=10_000,
        method="percentile",
        rng=1,
    ).confidence_interval
    row = value(equivalence_table(frame), "kl", 1.0)
    assert (row["ci_low"], row["ci_high"]) == pytest.approx(
        tuple(expected), abs=0.08 * (expected.high - expected.low)
    )


def test_slopes_find_the_exponents_of_the_theory() -> None:
    """gap ~ α², KL ~ α⁴, TV ~ α² by construction, exactly, for every prompt."""
    table = equivalence_table(rows(ALPHAS))
    for metric, expected in (("slope_gap", 2), ("slope_kl", 4), ("slope_tv", 2)):
        row = value(table, metric)
        assert row[["value", "ci_low", "ci_high"]].tolist() == pytest.approx([expected] * 3)
        assert row["n"] == 12


def test_slopes_do_not_look_beyond_one_sixteenth() -> None:
    frame = rows(ALPHAS)
    frame.loc[frame["alpha"] == 1.0, "kl"] *= 1e6
    assert value(equivalence_table(frame), "slope_kl")["value"] == pytest.approx(4)


def test_slopes_equal_scipys_regression() -> None:
    """Least squares on logarithms: `scipy.stats.linregress` on the same four points."""
    x, y = np.array([0.01, 0.02, 0.03, 0.05]), np.array([1e-6, 3e-5, 2e-5, 9e-4])
    assert slopes(x, y) == pytest.approx(stats.linregress(np.log(x), np.log(y)).slope)


def test_one_small_alpha_has_no_slope() -> None:
    assert not equivalence_table(rows([1 / 16, 1.0]))["metric"].str.startswith("slope").any()


def test_slopes_use_the_prompts_that_every_small_alpha_has() -> None:
    frame = rows(ALPHAS)
    unfinished = frame[~((frame["alpha"] == 1 / 16) & (frame["prompt"] == "3"))]
    table = equivalence_table(unfinished)
    assert value(table, "slope_kl")["n"] == 11
    assert value(table, "kl", 1 / 16)["n"] == 11
    assert value(table, "kl", 1 / 64)["n"] == 12


@pytest.mark.parametrize("factor", [0.0, -1e-20])
def test_exact_equivalence_has_no_slope_but_says_so(factor: float) -> None:
    frame = rows(ALPHAS).assign(kl=factor)
    row = value(equivalence_table(frame), "slope_kl")
    assert all(map(math.isnan, (row["value"], row["ci_low"], row["ci_high"])))


def test_one_prompt_has_a_value_but_no_interval() -> None:
    row = value(equivalence_table(rows(ALPHAS, prompts=1)), "slope_kl")
    assert row["value"] == pytest.approx(4)
    assert math.isnan(row["ci_low"])


def test_a_prompt_that_stands_twice_or_a_missing_column_is_refused() -> None:
    frame = rows([1.0])
    with pytest.raises(ResultsError, match="stands twice"):
        equivalence_table(pd.concat([frame, frame]))
    with pytest.raises(ResultsError, match="lacks the columns tokens"):
        equivalence_table(frame.drop(columns="tokens"))
