"""GSM8K and MATH through lm-eval: its prompts, its filters, its scores, item by item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.benchmarks.contract import Generate, Output, Score, Settings
from evaluation.benchmarks.lm_eval_tasks import (
    GSM8K,
    MATH,
    LmEvalBenchmark,
    _task,
    lm_eval_entry,
)
from evaluation.benchmarks.loglik import GSM8K_LOGLIK, MATH_LOGLIK
from evaluation.errors import InputError


@pytest.fixture
def local(tmp_path: Path) -> Settings:
    gsm8k = [
        {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        for n in (3, 500, 21)
    ]
    math = [
        {
            "problem": f"Find ${n}/4$.",
            "type": kind,
            "solution": rf"It is $\boxed{{\frac{{{n}}}{{4}}}}$.",
        }
        for kind in ("Algebra", "Geometry")
        for n in (1, 3)
    ]
    for name, rows in (("gsm8k_test", gsm8k), ("math_test", math)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return Settings(data_dir=tmp_path)


def texts(*completions: str) -> list[list[Output]]:
    return [[Output(text=completion)] for completion in completions]


def test_gsm8k_has_eight_shots_and_the_tasks_stops(local: Settings) -> None:
    items = GSM8K.open(local).items(None)
    request = items[1].requests[0]
    assert isinstance(request, Generate)
    assert request.prompt.count("Q: ") == 9
    assert request.prompt.endswith("Q: What is 500 + 500?\nA:")
    assert request.stops == ("Q:", "</s>", "<|im_end|>")
    assert request.max_new_tokens == 512


def test_gsm8k_flexible_takes_the_last_number_and_strict_the_sentence(local: Settings) -> None:
    benchmark = GSM8K.open(local)
    items = benchmark.items(None)[:1] * 4
    found = benchmark.score(
        items,
        texts(" 3 + 3 = 6. The answer is 6.", " It is 7, no: 6", " The answer is 7.", " no idea"),
    )
    assert [m["exact_match"] for m in found] == [1, 1, 0, 0]
    assert [m["exact_match_strict"] for m in found] == [1, 0, 0, 0]


def test_math_knows_equal_fractions_and_keeps_nested_braces(local: Settings) -> None:
    r"""1/4 is written three ways; \frac{3}{4} differs, which cutting at the first brace hides."""
    benchmark = MATH.open(local)
    items = [item for item in benchmark.items(None) if item.id == "algebra/0"] * 5
    found = benchmark.score(
        items,
        texts(
            r" Final Answer: The final answer is $\frac{1}{4}$. I hope it is correct.",
            r" so $\boxed{\frac{1}{4}}$",
            r" so $\boxed{0.25}$",
            r" so $\boxed{\frac{3}{4}}$",
            "",
        ),
    )
    assert [m["math_verify"] for m in found] == [1, 1, 1, 0, 0]
    assert [m["exact_match"] for m in found] == [1, 0, 0, 0, 0]


def test_math_takes_its_subjects_in_turn(local: Settings) -> None:
    benchmark = MATH.open(local)
    ids = [item.id for item in benchmark.items(None)]
    assert ids == ["algebra/0", "geometry/0", "algebra/1", "geometry/1"]
    assert [item.id for item in benchmark.items(3)] == ids[:3]
    request = benchmark.items(1)[0].requests[0]
    assert isinstance(request, Generate)
    assert request.prompt.count("Problem:") == 5
    assert request.prompt.endswith("Problem:\nFind $1/4$.\n\nSolution:")


def test_a_score_does_not_depend_on_its_batch(local: Settings) -> None:
    benchmark = GSM8K.open(local)
    items = list(benchmark.items(None))
    answers = texts(" The answer is 6.", " The answer is 1,000.", " The answer is 9.")
    together = benchmark.score(items, answers)
    apart = [benchmark.score([i], [a])[0] for i, a in zip(items[::-1], answers[::-1], strict=True)]
    assert together == apart[::-1]
    assert [m["exact_match"] for m in together] == [1, 1, 0]


@pytest.mark.parametrize(
    "hostile",
    ["\\boxed{9**9**9**9}", "\\boxed{" * 2000, "$" * 5000, "\ud800 \x00", "\\frac{1}{0}" * 50],
)
def test_hostile_answers_score_zero_and_return(local: Settings, hostile: str) -> None:
    for entry in (GSM8K, MATH):
        benchmark = entry.open(local)
        items = benchmark.items(1)
        metrics = benchmark.score(items, texts(hostile))[0]
        assert metrics[entry.metric] == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"question": "x", "answer": "y #### 1"}\n{"question": "x"}\n',
            "line 2: the fields answer",
        ),
        ("not json\n", "line 1: no valid JSON"),
        ("[1]\n", "line 1: list; expected a JSON object"),
        ("", "is empty"),
    ],
)
def test_a_broken_file_is_told_with_its_line(local: Settings, content: str, expected: str) -> None:
    assert local.data_dir is not None
    (local.data_dir / "gsm8k_test.jsonl").write_text(content)
    with pytest.raises(InputError, match=expected):
        GSM8K.open(local)


def test_a_missing_file_is_a_fault_before_anything_is_opened(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert "gsm8k_test.jsonl" in GSM8K.faults(settings)[0]
    assert "math_test.jsonl" in MATH_LOGLIK.faults(settings)[0]
    assert GSM8K.faults(Settings(data_dir=None)) == []


def test_changed_data_are_another_version(local: Settings) -> None:
    before = GSM8K.open(local).version
    assert local.data_dir is not None
    file = local.data_dir / "gsm8k_test.jsonl"
    file.write_text(file.read_text().replace("21", "22"))
    assert GSM8K.open(local).version != before


def test_multiple_choice_is_scored_by_log_likelihood(local: Settings) -> None:
    config: dict[str, Any] = {
        "task": "colours",
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_choice": ["red", "green"],
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    rows = [{"q": "Grass is", "answer": 1}, {"q": "Blood is", "answer": 0}]
    task = _task(config, {"test": rows})
    benchmark = LmEvalBenchmark({"colours": task}, local, "", lambda metric, _: metric)
    items = benchmark.items(None)
    assert items[0].requests == (Score("Grass is", " red"), Score("Grass is", " green"))
    outputs = [[Output(logprob=-5.0), Output(logprob=-1.0)]] * 2
    assert [m["acc"] for m in benchmark.score(items, outputs)] == [1.0, 0.0]


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(InputError, match="no single task 'gsm8k_cott'; did you mean gsm8k_cot"):
        lm_eval_entry("gsm8k_cott")
    with pytest.raises(InputError, match="group or tag"):
        lm_eval_entry("minerva_math")
    assert lm_eval_entry("arc_easy").metric == "acc"


def test_reference_solutions_are_scored_apart_from_their_problem(local: Settings) -> None:
    benchmark = GSM8K_LOGLIK.open(local)
    request = benchmark.items(1)[0].requests[0]
    assert request == Score(
        "Question: What is 3 + 3?\nAnswer:", " 3 + 3 = 6\n#### 6", separate=True, max_tokens=600
    )
    (metrics,) = benchmark.score(benchmark.items(1), [[Output(logprob=-12.0, tokens=8)]])
    assert metrics == {"nats_per_token": 1.5, "nats": 12.0}


@pytest.mark.data
def test_gold_answers_of_the_real_data_score_one(data_dir: Path) -> None:
    settings = Settings(data_dir=data_dir)
    gsm8k, math = GSM8K.open(settings), MATH.open(settings)
    assert (len(gsm8k.items(None)), len(math.items(None))) == (1319, 5000)
    items = gsm8k.items(100)
    golds = [f" The answer is {item.doc.doc['answer'].split('#### ')[1]}." for item in items]
    assert all(m["exact_match"] == 1 for m in gsm8k.score(items, texts(*golds)))
    items = math.items(70)
    solutions = [item.doc.doc["solution"] for item in items]
    assert all(m["math_verify"] == 1 for m in math.score(items, texts(*solutions)))
