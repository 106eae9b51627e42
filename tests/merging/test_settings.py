"""Weights and parameters that differ between tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merging import MergeError, merge_tensors, merge_to_folder, parse_recipe
from merging.settings import depths, value_at

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{part}.weight" for i in range(3) for part in ("mlp", "attn")),
    "lm_head.weight",
]


def test_layers_stand_between_0_and_1_and_the_rest_at_0() -> None:
    found = depths(NAMES)
    assert [found[f"model.layers.{i}.mlp.weight"] for i in range(3)] == [0.0, 0.5, 1.0]
    assert found["lm_head.weight"] == found["model.embed_tokens.weight"] == 0.0


@pytest.mark.parametrize(
    ("setting", "name", "depth", "expected"),
    [
        (0.3, "x", 0.7, 0.3),
        ([1.0, 0.0], "x", 0.25, 0.75),
        ([0.0, 1.0, 0.0], "x", 0.5, 1.0),
        ([0.0, 1.0, 0.0], "x", 1.0, 0.0),
        ([0.4], "x", 0.6, 0.4),
        ([{"filter": "mlp", "value": 1}, {"value": 2}], "a.mlp.b", 0.0, 1),
        ([{"filter": "mlp", "value": 1}, {"value": [2, 4]}], "a.attn.b", 0.5, 3),
        ([{"filter": r"^a\..*b$", "value": 1}, {"value": 2}], "a.attn.b", 0.5, 1),
        ({"value": 7}, "x", 0.0, 7),
    ],
)
def test_the_value_at_a_tensor(setting: Any, name: str, depth: float, expected: float) -> None:
    assert value_at(setting, name, depth) == pytest.approx(expected)


def test_a_name_that_no_filter_finds_is_told() -> None:
    with pytest.raises(MergeError, match="no filter is found in the name x"):
        value_at([{"filter": "mlp", "value": 1}], "x", 0.0)


def content(**parameters: Any) -> dict[str, Any]:
    return {"method": "ties", "base": "b", "models": ["x"], "parameters": parameters}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"density": []}, r"parameters\.density: the list is empty"),
        ({"density": [0.5, 2.0]}, r"density: found 2\.0"),
        (
            {"density": [{"filter": "(", "value": 0.1}]},
            r"0\.filter: no regular expression",
        ),
        ({"density": [{"filtre": "x", "value": 0.1}]}, "expected the keys filter and value"),
        ({"density": [0.1, {"value": 0.2}]}, "expected numbers"),
        ({"density": [{"value": 3}]}, "density: found 3"),
        ({"densty": [0.1, 0.2]}, "densty: unknown key"),
    ],
)
def test_faults_of_a_setting_are_told(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(MergeError, match=expected):
        parse_recipe(content(**parameters))


def test_a_merge_takes_each_tensors_own_values(tmp_path: Path) -> None:
    folders = []
    for seed, name in enumerate(("base", "one", "two")):
        generator = torch.Generator().manual_seed(seed)
        folder = tmp_path / name
        folder.mkdir()
        state = {tensor: torch.randn(8, 6, generator=generator) for tensor in NAMES}
        save_file(state, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
        folders.append(folder)
    recipe = parse_recipe(
        {
            "method": "ties",
            "base": str(folders[0]),
            "models": [{"model": str(folders[1]), "weight": [1.0, 0.0]}, str(folders[2])],
            "parameters": {"density": [{"filter": "mlp", "value": 0.25}, {"value": 0.75}]},
        }
    )
    out = merge_to_folder(recipe, tmp_path / "out")
    states = [load_file(folder / "model.safetensors") for folder in (*folders, out)]
    for name in NAMES:
        base, *experts = (state[name] for state in states[:3])
        weight = 1 - depths(NAMES)[name]
        density = 0.25 if "mlp" in name else 0.75
        expected = merge_tensors("ties", base, experts, [weight, 1.0], density=density)
        assert torch.equal(states[3][name], expected), name


def test_over_the_whole_model_parameters_cannot_differ(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({name: torch.zeros(4) for name in NAMES}, folder / "model.safetensors")
    given = {"preset": "paper", "density": [0.1, 0.2]}
    recipe = parse_recipe({**content(**given), "base": str(folder), "models": [str(folder)]})
    with pytest.raises(MergeError, match="the same parameters for every tensor"):
        merge_to_folder(recipe, tmp_path / "out")
