"""The numbers of mergekit and PEFT, where the same is asked of both.

mergekit's are fixtures: mergekit 0.1.5 made them from the recipes beside them, see
benchmarks/merge_parity.py. PEFT is a dependency and computes here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from merging import merge_tensors, merged_tensors, open_checkpoint, parse_recipe
from merging.recipe import chooser

FIXTURES = Path(__file__).parent / "mergekit"
RECIPES = sorted(file.stem for file in FIXTURES.glob("*.yaml"))


def test_the_fixtures_are_there() -> None:
    assert {"linear", "task_arithmetic", "ties"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_mergekit_file_gives_mergekits_model(name: str) -> None:
    recipe = parse_recipe(yaml.safe_load((FIXTURES / f"{name}.yaml").read_text()))
    base = open_checkpoint(FIXTURES / recipe.base)
    experts = [open_checkpoint(FIXTURES / one.model) for one in recipe.models]
    choose = chooser(recipe, base.names())
    found = dict(merged_tensors(base, experts, recipe.method, choose=choose))
    expected = load_file(FIXTURES / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        # Two roundings of numbers below 0.2 in float32; a wrong sign or choice would be 0.01.
        assert torch.allclose(found[tensor], values, rtol=0, atol=3e-8), tensor


@pytest.mark.parametrize("density", [0.1, 0.35, 0.8])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 0.7, 1.5]])
def test_the_preset_peft_is_pefts_ties(density: float, weights: list[float]) -> None:
    from peft.utils.merge_utils import ties

    generator = torch.Generator().manual_seed(0)
    base, *experts = (torch.randn(30, 40, generator=generator) for _ in range(4))
    expected = ties([e - base for e in experts], torch.tensor(weights), density)
    found = merge_tensors("ties", base, experts, weights, density=density, preset="peft")
    assert torch.allclose(found, base + expected, atol=1e-6)


DRAWN = json.loads((FIXTURES / "drawn.json").read_text())


@pytest.mark.parametrize("name", list(DRAWN))
def test_what_is_drawn_follows_mergekits_distribution(name: str) -> None:
    """Of 4096 rows of 32 entries: the shares kept in each quarter of a row's ranks (32,768 entries
    each, so that five deviations between two draws are 0.019), and the L1 norm that is left."""
    recipe = parse_recipe(DRAWN[name]["recipe"])
    delta = torch.randn(4096, 32, generator=torch.Generator().manual_seed(5))
    found = merge_tensors(recipe.method, torch.zeros_like(delta), [delta], **recipe.parameters)
    kept = found != 0
    quarters = delta.abs().argsort(dim=1).argsort(dim=1) * 4 // 32
    for quarter, expected in enumerate(DRAWN[name]["kept"]):
        assert float(kept[quarters == quarter].float().mean()) == pytest.approx(expected, abs=0.019)
    ratio = float(found.abs().sum() / delta.abs().sum())
    assert ratio == pytest.approx(DRAWN[name]["l1"], abs=1e-5)
