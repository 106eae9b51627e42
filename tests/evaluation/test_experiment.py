"""The experiment file: what it stands for, and that all its faults are told together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_tokenizers import GEMMA, LLAMA, chat_tokenizer

from evaluation.errors import InputError
from evaluation.experiment import Generation, expand, load_experiment
from evaluation.models import planned_models

GOOD: dict[str, Any] = {
    "name": "two-skills",
    "base": {"letters": "copy"},
    "experts": {"ab": {"letters": "A->B"}, "cd": {"letters": "C->D"}},
    "models": [
        {"name": "average", "method": "linear"},
        {"name": "ta", "method": "task_arithmetic", "lambda": 1.0},
        {"name": "logit", "rule": "product"},
    ],
    "benchmarks": ["letters"],
}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    )
    return path


def faults(tmp_path: Path, changes: dict[str, Any]) -> list[str]:
    content = {**copy.deepcopy(GOOD), **changes}
    with pytest.raises(InputError) as raised:
        load_experiment(written(tmp_path, content))
    return raised.value.faults


def test_a_good_file_stands_for_base_experts_and_models(tmp_path: Path) -> None:
    loaded = load_experiment(written(tmp_path, GOOD))
    assert [(m.name, m.kind, m.method) for m in planned_models(loaded.experiment)] == [
        ("base", "base", "none"),
        ("ab", "expert", "none"),
        ("cd", "expert", "none"),
        ("average", "merge", "linear"),
        ("ta", "merge", "task_arithmetic"),
        ("logit", "composition", "product"),
    ]
    assert loaded.notes == []


def test_a_sweep_makes_every_combination_a_model(tmp_path: Path) -> None:
    content = {
        **GOOD,
        "models": [
            {"name": "t", "method": "ties", "density": 0.2},
            {"name": "l", "rule": "product"},
        ],
        "sweep": {"t": {"lambda": [0.5, 1.0], "density": [0.1, 0.3]}},
    }
    models = expand(load_experiment(written(tmp_path, content)).experiment)
    assert [model.name for model in models] == [
        "t[lambda=0.5,density=0.1]",
        "t[lambda=0.5,density=0.3]",
        "t[lambda=1.0,density=0.1]",
        "t[lambda=1.0,density=0.3]",
        "l",
    ]
    assert models[1].parameters == {"lambda": 0.5, "density": 0.3}


def test_several_faults_of_every_kind_are_told_together(tmp_path: Path) -> None:
    told = faults(
        tmp_path,
        {
            "benchmark": ["letters"],  # unknown key
            "base": "no/such/folder",
            "models": [
                {"name": "a", "method": "tie"},
                {"name": "b", "rule": "products", "gaet": 1, "gate": -1},
                {"name": "c", "method": "ties", "densty": 0.2, "lambda": "much"},
                {"name": "d", "method": "tie", "tolerance": 0.2},
                {"name": "e", "rule": "product", "weights": [float("nan"), 1]},
            ],
            "benchmarks": ["gsm8"],
        },
    )
    text = "\n".join(told)
    assert "benchmark: unknown key; did you mean 'benchmarks'?" in text
    assert "base: there is no 'no/such/folder'" in text
    assert "models.a: unknown method 'tie'; did you mean 'ties'?" in text
    assert "models.b: unknown rule 'products'; did you mean 'product'?" in text
    assert "models.b: gaet: unknown key; did you mean 'gate'?" in text
    assert "models.b: gate: found -1" in text
    assert "models.c: densty: unknown key; did you mean 'density'?" in text
    assert "models.c: lambda: found 'much'" in text
    assert "models.d: tolerance: unknown key" in text
    assert "models.e: the weights are [nan, 1.0]; expected finite numbers" in text
    assert "benchmarks: unknown benchmark 'gsm8'; did you mean 'gsm8k'?" in text
    assert all(str(tmp_path / "experiment.yaml") in fault for fault in told)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"experts": {}}, "experts: found {}"),
        ({"experts": {"base": {"letters": "A->B"}}}, "'base' is the base's own name"),
        ({"models": [{"name": "ab", "rule": "product"}]}, "the name 'ab' is taken"),
        ({"models": [{"name": "x"}]}, "either `method` (a merge) or `rule`"),
        ({"models": [{"name": "x", "rule": "product", "method": "linear"}]}, "either `method`"),
        (
            {"models": [{"name": "x", "method": "linear", "weights": [1.0]}]},
            "1 weights for 2 experts",
        ),
        ({"generation": {"dtype": "float8"}}, "generation.dtype: found 'float8'"),
        ({"generation": {"batchsize": 4}}, "unknown key; did you mean 'batch_size'?"),
        (
            {"generation": {"batch_size": 0}},
            "generation.batch_size: found 0; expected a number of rows from 1 on, or auto",
        ),
        (
            {"generation": {"system_prompt": "Be brief."}},
            "generation.system_prompt: found 'Be brief.'; without a chat template no model sees it",
        ),
        ({"generation": {"chat_template": True}}, "the letters models take no chats"),
        ({"equivalence": {"prompts": ["letters"], "alphas": [2.0]}}, "above 0 and at most 1"),
        ({"equivalence": {"prompts": ["lettres"]}}, "equivalence.prompts: unknown benchmark"),
        ({"sweep": {"tb": {"lambda": [1]}}}, "sweep.tb: no model of that name"),
        ({"sweep": {"ta": {"lambda": 1}}}, "sweep.ta.lambda: "),
        ({"sweep": {"ta": {"lamda": [1]}}}, "sweep.ta.lamda: "),
        ({"name": "../x"}, "name: found '../x'"),
        ({"base": 3}, "base: found 3"),
        ({"base": {"letters": "A=>B"}}, "A=>B"),
    ],
)
def test_a_fault_is_told_with_what_was_found(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    assert any(expected in fault for fault in faults(tmp_path, changes)), faults(tmp_path, changes)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[1, 2]", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("", "expected a mapping"),
        ("name: x\n\tbase: y", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_experiment_is_told(tmp_path: Path, content: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_experiment(written(tmp_path, content))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        load_experiment(tmp_path / "nothing.yaml")


def test_a_hub_id_is_noted_and_not_asked_for(tmp_path: Path) -> None:
    loaded = load_experiment(
        written(
            tmp_path,
            {
                **GOOD,
                "base": "org/base",
                "experts": {"m": "org/m"},
                "benchmarks": ["gsm8k_loglik"],
            },
        )
    )
    assert loaded.notes[0] == "base: org/base is taken for a hub id; not checked here"


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("gsm8k_cott", "did you mean gsm8k_cot"),
        ("humaneval", "runs generated programs outside any sandbox"),
        ("mbpp", "runs generated programs outside any sandbox"),
    ],
)
def test_a_task_of_lm_eval_is_checked_before_anything_runs(
    tmp_path: Path, task: str, expected: str
) -> None:
    told = faults(tmp_path, {"benchmarks": ["letters", {"lm_eval": task}]})
    assert any(expected in fault for fault in told), told


def test_letters_benchmarks_need_letters_models(tmp_path: Path) -> None:
    told = faults(tmp_path, {"experts": {"m": "org/math"}, "base": "org/base"})
    assert any("letters" in fault for fault in told)


def test_options_that_are_not_used_do_not_change_what_answers_are_kept_under() -> None:
    """The keys of answers that were made before the options existed."""
    before = {"max_new_tokens": 512, "dtype": "float32", "device": "auto"}
    assert Generation(batch_size=3).protocol() == before
    chat = Generation(chat_template=True, system_prompt="Be brief.").protocol()
    assert chat == {**before, "chat_template": True, "system_prompt": "Be brief."}


def with_base(tmp_path: Path, tokenizer: Any) -> dict[str, Any]:
    """An experiment whose base has this tokenizer."""
    (tmp_path / "base").mkdir()
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    return {
        "base": "base",
        "experts": {"first": "org/first"},
        "models": [],
        "benchmarks": ["gsm8k_loglik"],
    }


@pytest.mark.parametrize(
    ("template", "expected"),
    [(None, "the base's tokenizer has no chat template"), (GEMMA, "System role not supported")],
)
def test_a_base_that_cannot_chat_is_told_before_anything_runs(
    tmp_path: Path, template: str | None, expected: str
) -> None:
    changes = with_base(tmp_path, chat_tokenizer(template))
    changes["generation"] = {"chat_template": True, "system_prompt": "Be brief."}
    told = faults(tmp_path, changes)
    assert any(expected in fault for fault in told), told


def test_code_in_a_chat_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.benchmarks.code.sandbox_faults", lambda _: [])
    changes = with_base(tmp_path, chat_tokenizer(LLAMA))
    changes |= {"generation": {"chat_template": True}, "benchmarks": ["humaneval_plus"]}
    notes = load_experiment(written(tmp_path, {**GOOD, **changes})).notes
    assert any("humaneval_plus asks for the rest of a program" in note for note in notes)
