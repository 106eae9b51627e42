"""The merges of an experiment: kept, found again, bounded, and told of on the page."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from sums import write_sums

from evaluation import merges
from evaluation.errors import InputError
from evaluation.experiment import Model, load_experiment
from evaluation.family import Family, open_family
from evaluation.references import Reference
from evaluation.run import run_experiment
from merging import merged_tensors, parse_parameters


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(merges.LIMIT, raising=False)
    return tmp_path / "cache" / "mergescope" / "merges"


@pytest.fixture
def opened(family: dict[str, Path]) -> Family:
    references = {name: Reference(name, "checkpoint", path) for name, path in family.items()}
    return open_family(references.pop("base"), references, "float32")


def model(**given: Any) -> Model:
    return Model(**{"name": "m", "method": "ties", **given})


def plain(opened: Family, method: str, **parameters: Any) -> dict[str, torch.Tensor]:
    return dict(
        merged_tensors(
            opened.base,
            list(opened.experts.values()),
            method,
            parameters=parse_parameters(method, parameters),
        )
    )


def test_a_merge_is_made_once_and_found_again(
    opened: Family, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: dict[str, Any] = {}
    first = merges.merged(model(density=0.3), opened, "float32", reports)
    (folder,) = cache.iterdir()
    assert (folder / "config.json").is_file()  # an ordinary checkpoint
    assert reports["m"]["tensors_merged"] == len(first)
    monkeypatch.setattr(merges, "write_merged", lambda *_, **__: pytest.fail("made again"))
    again: dict[str, Any] = {}
    second = merges.merged(model(density=0.3, name="other"), opened, "float32", again)
    assert again["other"] == reports["m"]
    expected = plain(opened, "ties", density=0.3)
    for name, tensor in expected.items():
        assert torch.equal(first[name], tensor)
        assert torch.equal(second[name], tensor)


def test_what_determines_a_merge_makes_another(opened: Family, cache: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"density": 0.3},
        {"weights": [1.0, 0.5]},
        {"exclude": ["lm_head.weight"]},
        {"method": "linear"},
        {"density": [0.2, 0.5]},
    ]
    for change in changes:
        merges.merged(model(**change), opened, "float32", {})
    merges.merged(model(), opened, "bfloat16", {})
    assert len(list(cache.iterdir())) == len(changes) + 1


@pytest.mark.parametrize("limit", ["0", "0.00001"])  # of 10 KB in all
def test_a_merge_that_does_not_fit_is_made_in_memory(
    opened: Family, cache: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(merges.LIMIT, limit)
    reports: dict[str, Any] = {}
    merges.make([model()], opened, "float32", reports)
    found = merges.merged(model(), opened, "float32", reports)
    assert list(cache.iterdir()) == []
    assert reports["m"]["tensors_merged"] == len(found)
    for name, tensor in plain(opened, "ties").items():
        assert torch.equal(found[name], tensor)


def test_the_longest_unused_go_first(
    opened: Family, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merges.merged(model(density=0.1), opened, "float32", {})
    (oldest,) = cache.iterdir()
    merges.merged(model(density=0.2), opened, "float32", {})
    one = sum(file.stat().st_size for file in oldest.iterdir())
    monkeypatch.setenv(merges.LIMIT, str(2.5 * one / 1e9))
    merges.merged(model(density=0.3), opened, "float32", {})
    assert len(list(cache.iterdir())) == 2  # both were used just now: the third stays in memory
    os.utime(oldest, (0, 0))
    merges.merged(model(density=0.3), opened, "float32", {})
    assert len(list(cache.iterdir())) == 2
    assert not oldest.exists()


def test_a_limit_that_is_no_number_is_told(opened: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(merges.LIMIT, "much")
    with pytest.raises(InputError, match="MERGESCOPE_CACHE_GB is 'much'; expected a number"):
        merges.merged(model(), opened, "float32", {})


def test_a_sweep_reads_its_experts_once(opened: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    (expert, *_) = opened.experts.values()
    original = type(expert).read_raw

    def counting(self: Any, name: str, start: int, stop: int) -> Any:
        nonlocal read
        read += stop - start if self is expert else 0
        return original(self, name, start, stop)

    monkeypatch.setattr(type(expert), "read_raw", counting)
    densities = [0.1, 0.2, 0.3, 0.4]
    sweep = [model(name=f"m{density}", density=density) for density in densities]
    reports: dict[str, Any] = {}
    merges.make(sweep, opened, "float32", reports)
    entries = sum(torch.Size(expert.shape(name)).numel() for name in expert.names())
    assert read == entries
    assert list(reports) == [one.name for one in sweep]
    for one, density in zip(sweep, densities, strict=True):
        found = merges.merged(one, opened, "float32", {})
        for name, tensor in plain(opened, "ties", density=density).items():
            assert torch.equal(found[name], tensor)


def test_inputs_that_cannot_be_merged_are_told_with_the_models_name(
    family: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(family["first"], broken)
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    base = Reference("base", "checkpoint", family["base"])
    opened = open_family(base, {"broken": Reference("broken", "checkpoint", broken)}, "float32")
    with pytest.raises(InputError, match=r"models\.m: model\.norm\.weight of broken holds 1 NaN"):
        merges.merged(model(), opened, "float32", {})


def test_a_run_tells_of_its_merges(family: dict[str, Path], tmp_path: Path) -> None:
    data = write_sums(tmp_path / "data", 1)
    content = {
        "name": "tiny",
        "base": str(family["base"]),
        "experts": {"first": str(family["first"]), "second": str(family["second"])},
        "models": [
            {"name": "ties", "method": "ties", "density": [0.2, 0.5], "exclude": ["lm_head.*"]},
            {
                "name": "layered",
                "method": "task_arithmetic",
                "lambda": [{"filter": "mlp", "value": 0.5}, {"value": 1.0}],
            },
        ],
        "benchmarks": ["gsm8k_loglik"],
        "equivalence": {"prompts": ["gsm8k"], "count": 1, "alphas": [1.0]},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    loaded = load_experiment(path, data)
    assert [note for note in loaded.notes if "layered" in note and "leaves it out" in note]
    out = tmp_path / "out"
    run_experiment(loaded, out, data_dir=data)
    told = json.loads((out / "merges.json").read_text())
    assert list(told) == ["ties", "layered"]
    assert told["ties"]["tensors_kept_from_base"] == ["lm_head.weight"]
    page = (out / "report.html").read_text()
    assert "Merges: what they saw of the task vectors" in page
    assert f"{told['ties']['sign_conflict_share']:.3f}" in page
    assert "layered" not in (out / "equivalence.csv").read_text()
