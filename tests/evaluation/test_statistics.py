"""Statistics of an expert on its data, against their definitions; and the merges that use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from sums import write_sums
from torch import Tensor
from transformers import AutoModelForCausalLM

from evaluation.equivalence import keep_double
from evaluation.errors import InputError
from evaluation.examples import Example
from evaluation.experiment import load_experiment
from evaluation.run import run_experiment
from evaluation.statistics import draw, gather, gather_to_file, load_statistics_spec

EXAMPLES = [Example([5, 6, 7, 8, 2], 2), Example([9, 10, 11, 2], 3)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(family: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(family["first"]).eval()


def test_fisher_is_the_mean_of_squared_gradients(model: Any) -> None:
    """One entry by a difference quotient of the log-likelihood of each completion."""
    found = gather(model, EXAMPLES, "fisher")
    assert found.keys() == {name for name, _ in model.named_parameters()}
    model.double()
    weight = model.model.layers[1].mlp.up_proj.weight
    expected = 0.0
    for example in EXAMPLES:
        values = []
        for step in (1e-5, -2e-5):  # to one side, then to the other
            with torch.no_grad(), keep_double():
                weight[3, 4] += step
                logits = model(torch.tensor([example.ids])).logits[0].log_softmax(-1)
            places = range(example.start, len(example.ids))
            values.append(sum(float(logits[i - 1, example.ids[i]]) for i in places))
        with torch.no_grad():
            weight[3, 4] += 1e-5
        expected += ((values[0] - values[1]) / 2e-5) ** 2 / len(EXAMPLES)
    name = "model.layers.1.mlp.up_proj.weight"
    assert float(found[name][3, 4]) == pytest.approx(expected, rel=1e-3)


def test_gram_is_the_product_of_a_layers_inputs(model: Any) -> None:
    seen: list[Tensor] = []
    layer = model.model.layers[1].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        for example in EXAMPLES:
            model(torch.tensor([example.ids]))
    handle.remove()
    found = gather(model, EXAMPLES, "gram")
    inputs = torch.cat(seen)
    expected = inputs.T @ inputs
    assert torch.allclose(found["model.layers.1.mlp.down_proj.weight"], expected, atol=1e-5)
    assert "lm_head.weight" not in found
    assert "model.embed_tokens.weight" not in found
    assert len(found) == 2 * 7  # layers times linear maps


def test_examples_are_drawn_among_those_that_fit() -> None:
    examples = [Example(list(range(size)), 1) for size in (3, 50, 4, 5, 60, 6)]
    drawn = draw(examples, 3, longest=10, seed=0)
    assert drawn == draw(examples, 3, longest=10, seed=0)
    assert len(drawn) == 3
    assert all(len(example.ids) <= 10 for example in drawn)
    assert len(draw(examples, 100, longest=10, seed=0)) == 4
    with pytest.raises(InputError, match="all 6 examples are longer than max_length 2"):
        draw(examples, 3, longest=2, seed=0)


def spec(tmp_path: Path, family: dict[str, Path], **changes: Any) -> Path:
    rows = [{"q": f"say {letter}", "a": letter * 3} for letter in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "kind": "fisher",
        "base": str(family["base"]),
        "model": str(family["first"]),
        "data": [{"file": "rows.jsonl", "prompt": "{q}:", "completion": " {a}"}],
        "count": 4,
        **changes,
    }
    path = tmp_path / "statistics.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("kind", ["fisher", "gram"])
def test_gathered_into_a_file(tmp_path: Path, family: dict[str, Path], kind: str) -> None:
    path = spec(tmp_path, family, kind=kind)
    out = tmp_path / "statistics.safetensors"
    assert gather_to_file(load_statistics_spec(path), out, beside=path) == 4
    found = load_file(out)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    assert max(float(tensor.max()) for tensor in found.values()) > 0
    assert [file.name for file in tmp_path.glob(".*")] == []


def test_faults_of_the_file_are_told_together(tmp_path: Path, family: dict[str, Path]) -> None:
    path = spec(tmp_path, family, kind="fischer", cuont=3)
    with pytest.raises(InputError) as raised:
        load_statistics_spec(path)
    text = str(raised.value)
    assert "kind: found 'fischer'" in text
    assert "cuont: unknown key; did you mean 'count'?" in text


@pytest.fixture
def experiment(tmp_path: Path, family: dict[str, Path]) -> dict[str, Any]:
    spec(tmp_path, family)
    data = [{"file": "rows.jsonl", "prompt": "{q}:", "completion": " {a}"}]
    write_sums(tmp_path, 1)
    return {
        "name": "weighed",
        "base": str(family["base"]),
        "experts": {"first": str(family["first"]), "second": str(family["second"])},
        "models": [
            {"name": "fisher", "method": "fisher"},
            {"name": "regmean", "method": "regmean", "reduce": 0.5},
            {"name": "mean", "method": "linear"},
        ],
        "statistics": {"data": {"first": data, "second": data}, "count": 3},
        "benchmarks": ["gsm8k_loglik"],
    }


def test_an_experiment_weighs_by_statistics(
    tmp_path: Path, experiment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weighed.yaml"
    path.write_text(yaml.safe_dump(experiment))
    loaded = load_experiment(path, tmp_path)
    run_experiment(loaded, tmp_path / "out", data_dir=tmp_path)
    board = (tmp_path / "out" / "leaderboard.csv").read_text().splitlines()
    scores = {row.split(",")[0]: row.split(",")[5] for row in board[1:]}
    assert len({scores["fisher"], scores["regmean"], scores["mean"]}) == 3
    files = list((tmp_path / "cache" / "mergescope" / "statistics").iterdir())
    assert len(files) == 4
    # A second run in another folder gathers and merges nothing again.
    monkeypatch.setattr("evaluation.statistics.gather", lambda *_: pytest.fail("gathered again"))
    run_experiment(loaded, tmp_path / "again", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        (None, "statistics: this key is missing; fisher, regmean weighs by"),
        ({"data": {"first": []}}, "statistics.data: the expert second has none"),
        ({"data": {"first": [], "secnd": []}}, "no expert of that name; did you mean 'second'?"),
        ({"data": {}, "cuont": 1}, "statistics.cuont: unknown key; did you mean 'count'?"),
        (
            {"data": {"first": [{"file": "no.jsonl", "prompt": "", "completion": ""}]}},
            "statistics.data.first: there is no file no.jsonl",
        ),
    ],
)
def test_faults_of_an_experiment(
    tmp_path: Path, experiment: dict[str, Any], statistics: Any, expected: str
) -> None:
    path = tmp_path / "weighed.yaml"
    changed = {**experiment, "statistics": statistics}
    if statistics is None:
        del changed["statistics"]
    path.write_text(yaml.safe_dump(changed))
    with pytest.raises(InputError) as raised:
        load_experiment(path, tmp_path)
    assert expected in str(raised.value)
