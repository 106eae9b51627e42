"""A whole experiment on tiny models: resumed, never repeated, and right about equivalence."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from chat_tokenizers import CHATML
from safetensors.torch import load_file, save_file
from sums import write_sums
from transformers import AutoTokenizer

import evaluation.run as run_module
from evaluation.equivalence import keep_double
from evaluation.errors import InputError
from evaluation.experiment import load_experiment
from evaluation.family import open_family
from evaluation.models import load, planned_models
from evaluation.references import Reference
from evaluation.run import measure_equivalence, run_experiment

COLUMNS = (
    "model,kind,method,benchmark,metric,score,ci_low,ci_high,n,truncated,seconds,tokens_per_second"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six problems in GSM8K's format."""
    return write_sums(tmp_path / "data", 6)


@pytest.fixture
def experiment(tmp_path: Path, family: dict[str, Path]) -> Path:
    for name, folder in family.items():
        shutil.copytree(folder, tmp_path / name)
    content = {
        "name": "tiny",
        "base": "base",
        "experts": {"first": "first", "second": "second"},
        "models": [
            {"name": "ta", "method": "task_arithmetic"},
            {"name": "logit", "rule": "product"},
        ],
        "benchmarks": ["gsm8k_loglik"],
        "generation": {"batch_size": 2},
        "equivalence": {"prompts": ["gsm8k"], "count": 3, "alphas": [1 / 256, 1 / 64, 1.0]},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(experiment: Path, out: Path, data: Path, limit: int | None = None) -> None:
    run_experiment(load_experiment(experiment, data), out, limit=limit, data_dir=data)


def test_small_batches_of_whole_experts_get_a_drafter(
    experiment: Path, tmp_path: Path, data: Path
) -> None:
    """The merge that equals the composition to first order; its answers keep their keys."""
    loaded = load_experiment(experiment, data).experiment
    references = {
        name: Reference(name, "checkpoint", tmp_path / name) for name in ("first", "second")
    }
    family = open_family(
        Reference("base", "checkpoint", tmp_path / "base"), references, loaded.generation.dtype
    )
    ta, logit = planned_models(loaded)[-2:]
    drafter = load(logit, family, loaded).drafter
    merge = load(ta, family, loaded)
    assert merge.drafter is None
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        guesses, exact = (model(input_ids=ids).logits for model in (drafter, merge.model))
    assert torch.allclose(guesses, exact, atol=1e-4)
    for changes, expected in [
        ({"batch_size": 5}, False),
        ({"batch_size": "auto"}, False),
        ({"speculate": False}, False),
        ({"batch_size": 64, "speculate": True}, True),
    ]:
        other = loaded.generation.model_copy(update=changes)
        assert other.protocol() == loaded.generation.protocol()
        found = load(logit, family, loaded.model_copy(update={"generation": other}))
        assert (found.drafter is not None) == expected, changes


def test_a_run_writes_what_the_contract_names(experiment: Path, tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    run(experiment, out, data)
    board = pd.read_csv(out / "leaderboard.csv")
    assert ",".join(board.columns) == COLUMNS
    assert board["model"].tolist() == ["base", "first", "second", "ta", "logit"]
    assert (board["n"] == 6).all()
    assert board["score"].between(0, 50).all()
    equivalence = pd.read_csv(out / "equivalence.csv")
    assert (
        ",".join(equivalence.columns)
        == "model,reference,prompts,alpha,metric,value,ci_low,ci_high,n"
    )
    for name in ("leaderboard.md", "report.html", "records.sqlite", "experiment.yaml"):
        assert (out / name).is_file(), name
    resolved = yaml.safe_load((out / "experiment.yaml").read_text())
    assert len(resolved["provenance"]["models"]["causal"]["base"]) == 64
    # The resolved file is an experiment itself, and stands for the same models.
    again = load_experiment(out / "experiment.yaml", data)
    assert again.experiment.models == load_experiment(experiment, data).experiment.models


def test_the_resolved_experiment_runs_from_anywhere(
    experiment: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths become absolute, and the answers are found again under the same keys."""
    out, moved = tmp_path / "out", tmp_path / "elsewhere" / "deep"
    run(experiment, out, data)
    moved.mkdir(parents=True)
    (out / "experiment.yaml").rename(moved / "again.yaml")
    monkeypatch.chdir(moved)
    monkeypatch.setattr("evaluation.run.load", lambda *_: pytest.fail("an item was asked again"))
    run(moved / "again.yaml", out, data)


def test_task_arithmetic_parts_from_its_composition_as_the_theory_says(
    experiment: Path, tmp_path: Path, data: Path
) -> None:
    """gap ~ alpha^2 and KL ~ alpha^4 at small alpha (second-order mixed differences)."""
    out = tmp_path / "out"
    measure_equivalence(load_experiment(experiment, data), out, data_dir=data)
    table = pd.read_csv(out / "equivalence.csv").set_index("metric")["value"]
    assert table["slope_gap"] == pytest.approx(2.0, abs=0.05)
    assert table["slope_kl"] == pytest.approx(4.0, abs=0.1)
    assert table["slope_tv"] == pytest.approx(2.0, abs=0.1)


def test_an_alpha_does_not_depend_on_those_measured_before_it(
    experiment: Path, tmp_path: Path, data: Path
) -> None:
    """The models' weights are replaced from alpha to alpha; nothing of the last one may stay."""
    content = yaml.safe_load(experiment.read_text())
    content["models"].append({"name": "ties", "method": "ties"})
    found = []
    for number, alphas in enumerate(([1.0], [1 / 64, 0.25, 1.0])):
        content["equivalence"]["alphas"] = alphas
        experiment.write_text(yaml.safe_dump(content))
        out = tmp_path / str(number)
        measure_equivalence(load_experiment(experiment, data), out, data_dir=data)
        table = pd.read_csv(out / "equivalence.csv")
        found.append(table[table["alpha"] == 1.0].reset_index(drop=True))
    assert len(found[0]) > 0
    pd.testing.assert_frame_equal(found[0], found[1], check_exact=True)


def test_a_finished_run_answers_nothing_again(
    experiment: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(experiment, out, data)
    before = (out / "leaderboard.csv").read_bytes()

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded although everything is finished")

    monkeypatch.setattr(run_module, "load", fail)
    run(experiment, out, data)
    assert (out / "leaderboard.csv").read_bytes() == before


def test_an_interrupted_run_goes_on_where_it_stopped(
    experiment: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    asked: list[int] = []
    plain = run_module.answer

    def counted(runtime: Any, requests: Any, batch_size: int, done: Any) -> Any:
        for batch in plain(runtime, requests, batch_size, done):
            asked.append(len(batch))
            yield batch
            if sum(asked) == 8:  # the base's six and a batch of the first expert
                raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "answer", counted)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, out, data)
    with sqlite3.connect(out / "records.sqlite") as store:
        assert store.execute("SELECT count(*) FROM answers").fetchone() == (8,)
    run(experiment, out, data)
    assert sum(asked) == 5 * 6  # nothing was asked twice
    whole = tmp_path / "whole"
    run(experiment, whole, data)
    scores = [
        pd.read_csv(folder / "leaderboard.csv")[["model", "score", "ci_low", "ci_high", "n"]]
        for folder in (out, whole)
    ]
    assert scores[0].equals(scores[1])


@pytest.mark.parametrize("place", ["first", "base"])
def test_a_file_that_changes_during_the_run_ends_it(
    experiment: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """After the base's answers: what its key was made of is no longer there."""
    out, plain = tmp_path / "out", run_module.answer
    file = tmp_path / place / "model.safetensors"

    def meddled(*arguments: Any) -> Any:
        yield from plain(*arguments)
        state = load_file(file)
        save_file({name: 1.01 * tensor for name, tensor in state.items()}, file, {"format": "pt"})

    monkeypatch.setattr(run_module, "answer", meddled)
    with pytest.raises(InputError, match=f"{place}: files in .* have changed since the run began"):
        run(experiment, out, data)
    with sqlite3.connect(out / "records.sqlite") as store:
        assert store.execute("SELECT count(*) FROM answers").fetchone() == (6,)  # the base's


def test_a_changed_expert_is_asked_again_and_the_base_is_not(
    experiment: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(experiment, out, data)
    file = tmp_path / "first" / "model.safetensors"
    state = load_file(file)
    save_file({name: 1.01 * tensor for name, tensor in state.items()}, file, {"format": "pt"})
    loaded: list[str] = []
    plain = run_module.load

    def noted(planned: Any, *rest: Any) -> Any:
        loaded.append(planned.name)
        return plain(planned, *rest)

    monkeypatch.setattr(run_module, "load", noted)
    run(experiment, out, data)
    assert loaded == ["first", "ta", "logit"]


def test_a_limit_is_a_part_of_the_whole(experiment: Path, tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    run(experiment, out, data, limit=2)
    assert (pd.read_csv(out / "leaderboard.csv")["n"] == 2).all()
    run(experiment, out, data)
    assert (pd.read_csv(out / "leaderboard.csv")["n"] == 6).all()


def test_an_expert_of_another_shape_or_vocabulary_is_told(
    experiment: Path, tmp_path: Path, data: Path, llama: Any
) -> None:
    shutil.rmtree(tmp_path / "first")
    llama(seed=0, num_hidden_layers=1).save_pretrained(tmp_path / "first")
    shutil.rmtree(tmp_path / "second")
    llama(seed=0, vocab_size=77).save_pretrained(tmp_path / "second")
    with pytest.raises(InputError) as raised:
        run(experiment, tmp_path / "out", data)
    text = str(raised.value)
    assert "experts.first: num_hidden_layers is 1 where the base has 2" in text
    assert "experts.second: vocab_size is 77 where the base has 99" in text


def test_an_expert_that_lacks_a_tensor_is_told_before_anything_is_answered(
    experiment: Path, tmp_path: Path, data: Path
) -> None:
    file = tmp_path / "second" / "model.safetensors"
    state = load_file(file)
    del state["model.norm.weight"]
    save_file(state, file, {"format": "pt"})
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"experts\.second: it lacks 1 tensors \(model\.norm"):
        run(experiment, out, data)
    with sqlite3.connect(out / "records.sqlite") as store:
        assert store.execute("SELECT count(*) FROM answers").fetchone() == (0,)


def test_a_broken_generation_config_is_told(experiment: Path, tmp_path: Path, data: Path) -> None:
    (tmp_path / "first" / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json cannot be read"):
        run(experiment, tmp_path / "out", data)


def test_the_eos_rule_knows_every_id_that_ends_a_text(experiment: Path, tmp_path: Path) -> None:
    """The base ends with id 2; an expert that ends with 40 as well makes both count for all."""
    (tmp_path / "first" / "generation_config.json").write_text('{"eos_token_id": [2, 40]}')
    loaded = load_experiment(experiment).experiment
    named = {
        name: Reference(name, "checkpoint", tmp_path / name) for name in ("base", "first", "second")
    }
    family = open_family(named.pop("base"), named, "float32")
    (logit,) = (m for m in planned_models(loaded) if m.kind == "composition")
    runtime = load(logit, family, loaded)
    assert runtime.eos_ids == {2, 40}
    assert runtime.model.eos_ids == [2, 40]


def test_a_chat_is_another_protocol_with_keys_of_its_own(
    experiment: Path, tmp_path: Path, data: Path
) -> None:
    """Base, experts, merge and composition in a chat; then another system prompt."""
    content = yaml.safe_load(experiment.read_text())
    plain = keys(experiment, tmp_path / "plain", data)
    content["generation"] |= {"chat_template": True}
    experiment.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="tokenizer has no chat template"):
        run(experiment, tmp_path / "chat", data)
    made = AutoTokenizer.from_pretrained(tmp_path / "base")
    made.chat_template = CHATML
    made.save_pretrained(tmp_path / "base")
    chat = keys(experiment, tmp_path / "chat", data)
    content["generation"] |= {"system_prompt": "Be brief."}
    experiment.write_text(yaml.safe_dump(content))
    brief = keys(experiment, tmp_path / "brief", data)
    made.chat_template = CHATML + " "
    made.save_pretrained(tmp_path / "base")
    other = keys(experiment, tmp_path / "other", data)
    assert len(plain[0] | chat[0] | brief[0] | other[0]) == 4 * 30
    assert len(plain[1] | chat[1] | brief[1]) == 3  # protocols, which no table mixes
    assert "Be brief." in (tmp_path / "brief" / "report.html").read_text()


def keys(experiment: Path, out: Path, data: Path) -> tuple[set[str], set[str]]:
    """The keys of all answers of a run, and the digests of its protocols."""
    run(experiment, out, data)
    with sqlite3.connect(out / "records.sqlite") as store:
        found = store.execute("SELECT key FROM answers").fetchall()
        protocols = store.execute("SELECT protocol FROM cells").fetchall()
    return {key for (key,) in found}, {protocol for (protocol,) in protocols}


def test_results_that_cannot_be_written_are_told(
    experiment: Path, tmp_path: Path, data: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="results cannot be written"):
        run(experiment, tmp_path / "file" / "out", data)


def test_double_models_stay_double(llama: Any) -> None:
    """RMSNorm casts to float32 even in a double model: its error is about 1e-7, ours 1e-15."""
    model = llama(seed=0).double()
    ids = torch.arange(5, 25)[None]

    def slope(step: float) -> float:
        """The second difference of a logit along one weight; rounding would drown it."""
        weight = model.model.layers[0].mlp.down_proj.weight
        values = []
        for sign in (-1, 0, 1):
            with torch.no_grad(), keep_double():
                weight.add_(sign * step)
                values.append(model(input_ids=ids).logits[0, -1, 7].item())
                weight.sub_(sign * step)
        return (values[0] - 2 * values[1] + values[2]) / step**2

    assert slope(1e-4) == pytest.approx(slope(1e-3), rel=0.02)
