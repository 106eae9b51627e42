"""Which composition a merge is compared with."""

from __future__ import annotations

from typing import Any

import pytest

from evaluation.equivalence import pairs
from evaluation.experiment import Experiment
from merging import METHODS

EXPECTED: list[tuple[dict[str, Any], str]] = [
    ({"method": "task_arithmetic", "lambda": 0.5}, "product(0.5, 0.5)"),
    ({"method": "task_arithmetic", "weights": [1, 3], "lambda": 0.5}, "product(0.5, 1.5)"),
    ({"method": "linear"}, "product(0.5, 0.5)"),
    ({"method": "linear", "weights": [1, 3]}, "product(0.25, 0.75)"),
    ({"method": "linear", "weights": [1, 3], "normalize": False}, "product(1, 3)"),
    ({"method": "ties"}, "product(1, 1)"),
    ({"method": "dare_linear"}, "product(1, 1)"),
    ({"method": "dare_linear", "normalize": True}, "product(0.5, 0.5)"),
    ({"method": "nuslerp", "weights": [1, 3]}, "product(0.25, 0.75)"),
    ({"method": "model_stock"}, "product(0.5, 0.5)"),
    ({"method": "karcher"}, "product(0.5, 0.5)"),
    ({"method": "consensus", "lambda": 0.3}, "product(0.3, 0.3)"),
]


def experiment(model: dict[str, Any], experts: int = 2) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "x",
            "base": "base",
            "experts": {f"e{i}": f"e{i}" for i in range(experts)},
            "models": [{"name": "m", **model}],
            "benchmarks": ["gsm8k"],
        }
    )


@pytest.mark.parametrize(("model", "expected"), EXPECTED)
def test_a_merge_stands_for_its_composition(model: dict[str, Any], expected: str) -> None:
    (pair,) = pairs(experiment(model))
    assert pair.reference == expected


def test_slerp_stands_for_one_expert_at_its_t() -> None:
    (pair,) = pairs(experiment({"method": "slerp", "t": 0.3}, experts=1))
    assert pair.reference == "product(0.3)"


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_has_a_counterpart(method: str) -> None:
    experts = METHODS[method].most or 2
    (pair,) = pairs(experiment({"method": method}, experts=experts))
    assert len(pair.weights) == experts
