"""Log-likelihood of reference solutions: what is scored, and the number that comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import Output, Score, Settings
from evaluation.benchmarks.loglik import (
    GSM8K_LOGLIK,
    HUMANEVAL_PLUS_LOGLIK,
    MATH_LOGLIK,
    MBPP_PLUS_LOGLIK,
)
from evaluation.errors import InputError

NAMES = ["gsm8k_loglik", "math_loglik", "humaneval_plus_loglik", "mbpp_plus_loglik"]


@pytest.fixture
def local(tmp_path: Path) -> Settings:
    program: dict[str, Any] = {
        "entry_point": "f",
        "base_input": [[1]],
        "plus_input": [],
        "atol": 0,
    }
    files: dict[str, dict[str, Any]] = {
        "gsm8k_test": {"question": "What is 3 + 3?", "answer": "3 + 3 = 6\n#### 6"},
        "math_test": {"problem": "1 + 1", "type": "Algebra", "solution": r"$\boxed{2}$"},
        "HumanEvalPlus": {
            **program,
            "task_id": "HumanEval/0",
            "prompt": "\ndef f(x):\n",
            "canonical_solution": "\n    return x\n",
        },
        "MbppPlus": {
            **program,
            "task_id": "Mbpp/2",
            "prompt": '"""\nWrite f.\n"""\n',
            "canonical_solution": "\ndef f(x):\n    return x",
        },
    }
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return Settings(data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "item", "context", "continuation"),
    [
        (NAMES[0], "gsm8k/0", "Question: What is 3 + 3?\nAnswer:", " 3 + 3 = 6\n#### 6"),
        (NAMES[1], "algebra/0", "Problem:\n1 + 1\n\nSolution:", r" $\boxed{2}$"),
        (NAMES[2], "HumanEval/0", "\ndef f(x):\n", "\n    return x\n"),
        (NAMES[3], "Mbpp/2", '"""\nWrite f.\n"""\n', "\ndef f(x):\n    return x"),
    ],
)
def test_problem_and_solution_are_scored_apart(
    local: Settings, name: str, item: str, context: str, continuation: str
) -> None:
    (found,) = BENCHMARKS[name].open(local).items(None)
    assert found.id == item
    assert found.requests == (Score(context, continuation, separate=True, max_tokens=600),)


def test_the_score_is_nats_a_token(local: Settings) -> None:
    """12 nats over 8 tokens are 1.5 nats a token."""
    benchmark = GSM8K_LOGLIK.open(local)
    (metrics,) = benchmark.score(benchmark.items(1), [[Output(logprob=-12.0, tokens=8)]])
    assert metrics == {"nats_per_token": 1.5, "nats": 12.0}


def test_a_solution_without_tokens_is_told(local: Settings) -> None:
    benchmark = MATH_LOGLIK.open(local)
    with pytest.raises(InputError, match=r"algebra/0: .*no tokens"):
        benchmark.score(benchmark.items(1), [[Output(tokens=0)]])


@pytest.mark.parametrize("name", NAMES)
def test_the_entry_says_that_lower_is_better(name: str) -> None:
    entry = BENCHMARKS[name]
    assert (entry.metric, entry.binary, entry.higher_is_better) == ("nats_per_token", False, False)


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    for entry, file in (
        (GSM8K_LOGLIK, "gsm8k_test.jsonl"),
        (MATH_LOGLIK, "math_test.jsonl"),
        (HUMANEVAL_PLUS_LOGLIK, "HumanEvalPlus.jsonl"),
        (MBPP_PLUS_LOGLIK, "MbppPlus.jsonl"),
    ):
        (fault,) = entry.faults(settings)
        assert file in fault
        assert entry.faults(Settings()) == []


@pytest.mark.data
def test_the_real_files_have_every_reference_solution(data_dir: Path) -> None:
    settings = Settings(data_dir=data_dir)
    counts = {name: len(BENCHMARKS[name].open(settings).items(None)) for name in NAMES}
    assert counts == dict(zip(NAMES, (1319, 5000, 164, 378), strict=True))
    for name in NAMES:
        for item in BENCHMARKS[name].open(settings).items(20):
            (request,) = item.requests
            assert isinstance(request, Score)
            assert request.context.strip() and request.continuation.strip()
