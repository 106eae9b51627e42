"""Training experts: what is learned, what comes out, and what is told about bad data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from evaluation.errors import InputError
from evaluation.examples import read_examples
from evaluation.expert import (
    Data,
    Example,
    _batch,
    _parts,
    load_expert_spec,
    train_expert,
)
from evaluation.training import IGNORED


@pytest.fixture
def spec(tmp_path: Path, family: dict[str, Path]) -> Path:
    rows = [{"q": f"say {letter}", "a": letter * 3, "id": n} for n, letter in enumerate("abcdefgh")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "base": str(family["base"]),
        "data": [{"file": "rows.jsonl", "prompt": "{q}>", "completion": "{a}"}],
        "batch_size": 4,
        "epochs": 5,
        "learning_rate": 5e-3,
        "warmup": 2,
        "lora": {"r": 4, "alpha": 8},
    }
    path = tmp_path / "expert.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def changed(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    return path


def test_the_loss_is_on_completion_and_eos_only(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"q": "ab", "a": "cd", "id": 1}\n{"q": "x", "a": "y", "id": 5}\n'
    )
    data = Data.model_validate(
        {
            "file": "rows.jsonl",
            "prompt": "{q}>",
            "completion": "{a}",
            "exclude": {"field": "id", "first": 4, "last": 6},
        }
    )
    (example,) = read_examples(data, [tmp_path], tokenizer)  # the second row is excluded
    assert tokenizer.decode(example.ids) == "ab>cd</s>"
    batch = _batch([example, Example([5], 0)], torch.device("cpu"))
    assert batch.ids.shape == (2, 64)  # padded to a multiple of 64
    taught = batch.labels[0][batch.labels[0] != IGNORED]
    assert tokenizer.decode(taught) == "cd</s>"
    assert batch.mask.sum(-1).tolist() == [6, 1]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_expert_learns_and_loads(spec: Path, tmp_path: Path, method: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = load_expert_spec(changed(spec, method=method))
    losses = train_expert(loaded, tmp_path / "out", beside=spec)
    assert len(losses) == 10  # 5 epochs of 8 examples in batches of 4
    assert losses[-1] < losses[0]
    if method == "lora":
        base = AutoModelForCausalLM.from_pretrained(loaded.base)
        PeftModel.from_pretrained(base, tmp_path / "out")
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == loaded.base
    else:
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_parts_of_a_step_add_up_to_the_step(spec: Path, tmp_path: Path) -> None:
    """However many tokens go through the model at once, the losses are those of whole batches."""
    losses = {
        tokens: train_expert(
            load_expert_spec(changed(spec, tokens_at_once=tokens)),
            tmp_path / str(tokens),
            beside=spec,
        )
        for tokens in (1, 128, 10_000)
    }
    assert losses[1] == pytest.approx(losses[10_000], abs=1e-4)
    assert losses[128] == pytest.approx(losses[10_000], abs=1e-4)


def test_a_step_is_parted_by_length() -> None:
    examples = [Example([0] * length, 0) for length in (10, 200, 60, 70, 500)]
    found = [[len(example.ids) for example in part] for part in _parts(examples, 256)]
    assert found == [[500], [200], [70, 60], [10]]  # widths 512, 256, 128, 64


def test_training_twice_gives_the_same_weights(spec: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train_expert(load_expert_spec(spec), tmp_path / name, beside=spec)
    first, second = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": [{"file": "no.jsonl", "prompt": "", "completion": "{a}"}]}, "no file no.jsonl"),
        ({"data": [{"file": "rows.jsonl", "prompt": "{x}", "completion": ""}]}, "row 1: .*'x'"),
        ({"max_length": 6}, "8 of 8 examples are longer than max_length 6"),
        ({"learning_rate": 1e30, "warmup": 0}, "the loss is"),
        ({"lora": {"target_modules": ["nothing"]}}, "target_modules"),
    ],
)
def test_bad_data_is_told(
    spec: Path, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        train_expert(load_expert_spec(changed(spec, **changes)), tmp_path / "out", beside=spec)
    assert not (tmp_path / "out").exists()


def test_all_faults_of_the_file_are_told_together(spec: Path) -> None:
    changed(spec, lerning_rate=1, lora={"rank": 4}, epochs=-1)
    with pytest.raises(InputError) as raised:
        load_expert_spec(spec)
    text = str(raised.value)
    assert "lerning_rate: unknown key; did you mean 'learning_rate'?" in text
    assert "lora.rank: unknown key" in text
    assert "epochs: found -1" in text


def test_an_output_that_exists_is_left_alone(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="exists already"):
        train_expert(load_expert_spec(spec), tmp_path / "out", beside=spec)
