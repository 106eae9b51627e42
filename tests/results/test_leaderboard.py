"""The leaderboard and the paired comparisons, against hand computation, SciPy and statsmodels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from results import ResultsError, comparisons, leaderboard, metrics_table, wide
from results.statistics import score_equivalence

KINDS = {"base": "base", "math": "expert", "code": "expert", "ta": "merge", "logit": "composition"}
CONTRACT = (
    "model,kind,method,benchmark,metric,score,ci_low,ci_high,n,truncated,seconds,tokens_per_second"
)


def records(scores: Mapping[tuple[str, str], Sequence[float]], **changes: object) -> pd.DataFrame:
    """A frame as the store gives it: item k of a benchmark has the k-th score; NaN is absent.

    Benchmarks that begin with `nats` are not binary and lower is better. Every answer took half a
    second for 10 tokens, and every fourth is truncated.
    """
    rows = [
        {
            "model": model,
            "kind": KINDS[model],
            "method": "m",
            "benchmark": benchmark,
            "metric": "exact_match",
            "item": str(place),
            "score": float(score),
            "metrics": {"exact_match": float(score), "strict": float(score) / 2},
            "truncated": place % 4 == 0,
            "completion_tokens": 10,
            "seconds": 0.5,
            "binary": not benchmark.startswith("nats"),
            "higher_is_better": not benchmark.startswith("nats"),
            "protocol": "p",
            "planned": len(values),
        }
        | changes
        for (model, benchmark), values in scores.items()
        for place, score in enumerate(values)
        if not math.isnan(score)
    ]
    columns = ["model", "benchmark", "item", "score", "metrics", "truncated", "seconds", "metric"]
    columns += ["kind", "method", "binary", "higher_is_better", "protocol", "planned"]
    return pd.DataFrame(rows, columns=[*columns, "completion_tokens"])


def test_the_columns_are_the_contract() -> None:
    assert ",".join(leaderboard(records({})).columns) == CONTRACT
    assert ",".join(leaderboard(records({("base", "gsm8k"): [1]})).columns) == CONTRACT


def test_a_row_by_hand() -> None:
    """3 of 4 right, one truncated, 40 tokens in 2 seconds; Wilson's interval from statsmodels."""
    row = leaderboard(records({("base", "gsm8k"): [1, 1, 0, 1]})).iloc[0]
    low, high = proportion_confint(3, 4, method="wilson")
    assert row["score"] == 0.75
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((low, high))
    assert row[["n", "truncated", "seconds", "tokens_per_second"]].tolist() == [4, 0.25, 2.0, 20.0]


def test_other_metrics_get_a_bootstrap_over_items() -> None:
    """SciPy's percentile bootstrap; Monte Carlo error is about 2 % of the interval's width."""
    values = np.random.default_rng(0).exponential(size=80)
    row = leaderboard(records({("base", "nats"): list(values)})).iloc[0]
    expected = stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=1)
    width = expected.confidence_interval.high - expected.confidence_interval.low
    assert row["score"] == pytest.approx(values.mean())
    assert (row["ci_low"], row["ci_high"]) == pytest.approx(
        tuple(expected.confidence_interval), abs=0.08 * width
    )


def test_rows_follow_the_plan_and_one_model_is_enough() -> None:
    board = leaderboard(records({("math", "b"): [1], ("math", "a"): [0], ("base", "b"): [1]}))
    assert board[["model", "benchmark"]].values.tolist() == [
        ["math", "b"],
        ["math", "a"],
        ["base", "b"],
    ]


def test_no_seconds_give_no_speed() -> None:
    board = leaderboard(records({("base", "gsm8k"): [1]}, seconds=0.0))
    assert math.isnan(board["tokens_per_second"][0])


def test_unfinished_cells_are_shown_as_such() -> None:
    """Two of three answers, and a cell with none: the plan's cells say how many there will be."""
    frame = records({("base", "gsm8k"): [1, 0, math.nan]})
    cells = pd.concat([frame.iloc[[0]], frame.iloc[[0]].assign(model="math", kind="expert")])
    board = leaderboard(frame, cells)
    assert board["n"].tolist() == [2, 0]
    assert math.isnan(board["score"][1])
    assert wide(board, cells)["gsm8k"].tolist() == ["0.500 [0.095, 0.905] (2 of 3)", "0 of 3"]


def test_wide_has_a_row_a_model_and_dashes_where_nothing_is_planned() -> None:
    """124 of 125 is 0.992; its interval is Wilson's."""
    board = leaderboard(
        records({("base", "a"): [1] * 124 + [0], ("base", "b"): [0], ("ta", "a"): [1]})
    )
    table = wide(board)
    assert table.columns.tolist() == ["model", "kind", "a", "b"]
    assert table.values.tolist() == [
        ["base", "base", "0.992 [0.956, 0.999]", "0.000 [0.000, 0.793]"],
        ["ta", "merge", "1.000 [0.207, 1.000]", "—"],
    ]
    assert wide(leaderboard(records({}))).empty


def test_two_protocols_in_one_table_are_refused() -> None:
    mixed = pd.concat(
        [
            records({("base", "gsm8k"): [1]}),
            records({("ta", "gsm8k"): [1]}, protocol="another"),
        ]
    )
    with pytest.raises(ResultsError, match="more than one protocol: 'p', 'another'"):
        leaderboard(mixed)


def test_an_item_answered_twice_is_refused() -> None:
    frame = records({("base", "gsm8k"): [1]})
    with pytest.raises(ResultsError, match="answers item '0' of 'gsm8k' twice"):
        leaderboard(pd.concat([frame, frame]))


def test_a_binary_score_of_a_half_is_refused() -> None:
    with pytest.raises(ResultsError, match=r"has the score 0\.5"):
        leaderboard(records({("base", "gsm8k"): [0.5]}))


def test_a_frame_of_something_else_is_refused() -> None:
    with pytest.raises(ResultsError, match="lacks the columns kind, method"):
        leaderboard(pd.DataFrame({"model": ["base"], "benchmark": ["a"]}))


def test_secondary_metrics_leave_out_the_primary() -> None:
    """`strict` is half the score here: not 0 or 1, so its interval is a bootstrap's."""
    table = metrics_table(records({("base", "gsm8k"): [1, 1, 0, 0]}))
    assert table["metric"].tolist() == ["strict"]
    assert table[["score", "n"]].values.tolist() == [[0.25, 4]]
    assert table["ci_low"][0] == 0.0  # all four zero: has chance 1/16 in a bootstrap


def test_a_secondary_accuracy_gets_wilsons_interval() -> None:
    table = metrics_table(records({("base", "gsm8k"): [1, 1, 1]}, metrics={"strict": 1.0}))
    low, high = proportion_confint(3, 3, method="wilson")
    assert (table["ci_low"][0], table["ci_high"][0]) == pytest.approx((low, high))


def test_nats_are_also_told_by_the_token() -> None:
    """Two short solutions at 2 nats a token and a long one at 1: 5/3 by the item, (20 + 20 + 980)
    / 1000 tokens by the token."""
    frame = records({("base", "gsm8k_loglik"): [2.0, 2.0, 1.0]})
    frame["metrics"] = [{"strict": 0.5, "nats": nats} for nats in (20.0, 20.0, 980.0)]
    frame["completion_tokens"] = [10, 10, 980]
    table = metrics_table(frame).set_index("metric")
    pooled = table.loc["nats_per_token_pooled"]
    assert pooled["score"] == pytest.approx(1.02)
    assert pooled["n"] == 3
    assert (pooled["ci_low"], pooled["ci_high"]) == pytest.approx((1.0, 2.0))
    assert table.loc["nats", "score"] == pytest.approx(340)


def test_a_merge_is_compared_with_the_composition_on_the_items_both_answered() -> None:
    """Items 0-5: the merge is right alone on five, wrong on none; item 6 is not answered by the
    composition. McNemar: 2 · (1/2)^5 = 0.0625."""
    table = comparisons(records({("ta", "a"): [1] * 7, ("logit", "a"): [0] * 5 + [1, math.nan]}))
    row = table.iloc[0]
    assert row[["model", "reference", "role", "n"]].tolist() == ["ta", "logit", "composition", 6]
    assert row["difference"] == pytest.approx(5 / 6)
    assert row["p"] == row["p_holm"] == 0.0625
    assert row["verdict"] == "undecided"


def test_holm_runs_over_the_benchmarks_of_a_pair() -> None:
    """McNemar's p is 2·2^-6 = 1/32 on `a` and 2·2^-10 = 1/512 on `b`; Holm: 2/512 and 1/32."""
    scores = {("ta", "a"): [1] * 6, ("ta", "b"): [0] * 10}
    table = comparisons(records(scores | {("logit", "a"): [0] * 6, ("logit", "b"): [1] * 10}))
    assert table["p_holm"].tolist() == [1 / 32, 2 / 512]
    assert table["verdict"].tolist() == ["better", "worse"]


def test_lower_is_better_turns_the_verdict_round() -> None:
    """Ten items, each 1 nat lower: of 1024 sign patterns two are as extreme, p = 1/512."""
    table = comparisons(
        records({("ta", "nats"): list(range(10)), ("logit", "nats"): list(range(1, 11))})
    )
    row = table.iloc[0]
    assert (row["test"], row["difference"], row["verdict"]) == ("sign flip", -1.0, "better")
    assert row["p"] == pytest.approx(1 / 512)
    assert math.isnan(row["p_equivalence"])


def test_equivalence_is_claimed_only_within_the_margin() -> None:
    """400 items, two discordant, one each way; the p-value's own test is in test_statistics."""
    left, right = [1.0] * 400, [1.0] * 400
    left[0], right[1] = 0.0, 0.0
    row = comparisons(records({("ta", "a"): left, ("logit", "a"): right})).iloc[0]
    assert row["p_equivalence"] == score_equivalence(left, right, 0.02) < 0.05
    assert (row["p"], row["verdict"]) == (1.0, "equivalent")


def test_four_items_without_a_difference_are_undecided() -> None:
    """A bootstrap of four equal scores has no width; it must not pass for certainty."""
    row = comparisons(records({("ta", "a"): [0.0] * 4, ("logit", "a"): [0.0] * 4})).iloc[0]
    assert row["verdict"] == "undecided"
    assert row["ci_low"] < -0.4 < 0.4 < row["ci_high"]


def test_the_best_expert_is_chosen_per_benchmark() -> None:
    scores = {
        ("math", "a"): [1, 1],
        ("math", "nats"): [2.0, 2.0],
        ("code", "a"): [0, 1],
        ("code", "nats"): [1.0, 1.0],
        ("ta", "a"): [1, 1],
        ("ta", "nats"): [1.0, 1.0],
    }
    table = comparisons(records(scores))
    assert table[["reference", "role"]].values.tolist() == [
        ["math", "best expert"],
        ["code", "best expert"],
    ]


def test_nothing_to_compare_is_an_empty_table() -> None:
    assert comparisons(records({("base", "a"): [1]})).empty
    assert comparisons(records({})).empty
    with pytest.raises(ResultsError, match="margin"):
        comparisons(records({}), margin=0)
