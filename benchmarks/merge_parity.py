"""Makes the fixtures by which the tests compare our merges with mergekit's.

    python benchmarks/merge_parity.py --mergekit /path/to/mergekit-env/bin/mergekit-yaml

Writes a small base, two experts, mergekit's recipes and what mergekit 0.1.5 makes of them into
tests/merging/mergekit; `pytest tests/merging/test_parity.py` then needs no mergekit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy
import yaml
from merge_speed import shapes
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

FIXTURES = Path(__file__).parents[1] / "tests" / "merging" / "mergekit"
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 16, 32, 48, 2


def _pair(first: dict[str, float], second: dict[str, float]) -> list[dict[str, Any]]:
    return [{"model": "./one", "parameters": first}, {"model": "./two", "parameters": second}]


RECIPES: dict[str, dict[str, Any]] = {
    "linear": {"merge_method": "linear", "models": _pair({"weight": 0.3}, {"weight": 0.9})},
    "linear-sum": {
        "merge_method": "linear",
        "models": _pair({"weight": 0.3}, {"weight": 0.9}),
        "parameters": {"normalize": False},
    },
    "task_arithmetic": {
        "merge_method": "task_arithmetic",
        "base_model": "./base",
        "models": _pair({"weight": 0.3}, {"weight": 0.9}),
        "parameters": {"lambda": 0.7},
    },
    "task_arithmetic-normalized": {
        "merge_method": "task_arithmetic",
        "base_model": "./base",
        "models": _pair({"weight": 0.3}, {"weight": 0.9}),
        "parameters": {"normalize": True},
    },
    "ties": {
        "merge_method": "ties",
        "base_model": "./base",
        "models": _pair({"weight": 0.3, "density": 0.3}, {"weight": 0.9, "density": 0.3}),
        "parameters": {"lambda": 0.7},
    },
    "ties-sum": {
        "merge_method": "ties",
        "base_model": "./base",
        "models": _pair({"weight": 0.5, "density": 0.5}, {"weight": 0.5, "density": 0.5}),
        "parameters": {"normalize": False},
    },
    "breadcrumbs": {
        "merge_method": "breadcrumbs",
        "base_model": "./base",
        "models": _pair({"weight": 0.3, "density": 0.6}, {"weight": 0.9, "density": 0.6}),
        "parameters": {"gamma": 0.05, "lambda": 0.7},
    },
    "breadcrumbs_ties": {
        "merge_method": "breadcrumbs_ties",
        "base_model": "./base",
        "models": _pair({"weight": 0.3, "density": 0.6}, {"weight": 0.9, "density": 0.6}),
        "parameters": {"gamma": 0.05},
    },
    "slerp": {
        "merge_method": "slerp",
        "base_model": "./base",
        "models": [{"model": "./base"}, {"model": "./one"}],
        "parameters": {"t": 0.3},
    },
    "nuslerp": {
        "merge_method": "nuslerp",
        "base_model": "./base",
        "models": _pair({"weight": 0.3}, {"weight": 0.9}),
    },
    "model_stock": {
        "merge_method": "model_stock",
        "base_model": "./base",
        "models": _pair({}, {}),
    },
    "karcher": {"merge_method": "karcher", "models": _pair({}, {})},
    "sce": {
        "merge_method": "sce",
        "base_model": "./base",
        "models": _pair({}, {}),
        "parameters": {"select_topk": 0.4},
    },
    "ties-varying": {
        "merge_method": "ties",
        "base_model": "./base",
        "models": _pair({"weight": [1.0, 0.2]}, {"weight": 0.5}),
        "parameters": {
            "density": [{"filter": "mlp", "value": 0.4}, {"value": [0.8, 0.3]}],
            "lambda": [{"filter": "self_attn.q", "value": 0.5}, {"value": 1.0}],
        },
    },
    "ties-negative": {
        "merge_method": "ties",
        "base_model": "./base",
        "models": _pair({"weight": 1.0, "density": 0.4}, {"weight": -0.4, "density": 0.4}),
    },
}


DRAWN: dict[str, dict[str, Any]] = {
    method: {
        "merge_method": method,
        "base_model": "./base",
        "models": [{"model": "./one", "parameters": {"weight": 1.0, "density": 0.4}}],
        "parameters": parameters,
    }
    for method, parameters in (
        ("dare_linear", {}),
        ("dare_ties", {}),
        ("della_linear", {"epsilon": 0.2}),
        ("della", {"epsilon": 0.2}),
    )
}
DRAWN_ROWS, DRAWN_COLUMNS = 4096, 32
TENSOR = "model.embed_tokens.weight"


def summary(delta: NDArray[Any], merged: NDArray[Any]) -> dict[str, Any]:
    """What a random choice leaves of a task vector (rows, columns): the share of entries kept in
    each quarter of a row's ranks, and the L1 norm against that of the whole."""
    ranks = numpy.abs(delta).argsort(axis=1).argsort(axis=1)
    quarters = ranks * 4 // delta.shape[1]
    kept = numpy.abs(merged) > numpy.abs(delta) / 2  # rounding leaves nothing exactly 0
    return {
        "kept": [float(kept[quarters == quarter].mean()) for quarter in range(4)],
        "l1": float(numpy.abs(merged[kept]).sum() / numpy.abs(delta).sum()),
    }


def drawn_state(seed: int) -> dict[str, Any]:
    """One large tensor, all others small; base 0, so that task vectors are exact."""
    change = numpy.random.default_rng(seed)
    found = {}
    for name, shape in shapes(DRAWN_COLUMNS, INTERMEDIATE, 1, DRAWN_ROWS).items():
        found[name] = (change.standard_normal(shape) * bool(seed)).astype(numpy.float32)
    return found


def _state(seed: int) -> dict[str, Any]:
    """Magnitudes of task vectors all differ, so that no sort has a choice."""
    base, change = numpy.random.default_rng(0), numpy.random.default_rng(seed)
    found = {}
    for name, shape in shapes(HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY).items():
        tensor = base.standard_normal(shape) * 0.02
        if seed:
            tensor = tensor + change.standard_normal(shape) * 0.01
        found[name] = tensor.astype(numpy.float32)
    return found


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def _drawn(recipe: dict[str, Any], mergekit: str) -> dict[str, Any]:
    """What mergekit leaves of one expert, and the recipe."""
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        for seed, name in enumerate(("base", "one")):
            (root / name).mkdir()
            save_file(drawn_state(seed), root / name / "model.safetensors", {"format": "pt"})
            config = {**CONFIG, "vocab_size": DRAWN_ROWS, "hidden_size": DRAWN_COLUMNS}
            (root / name / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
        (root / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "dtype": "float32"}))
        command = [mergekit, "recipe.yaml", "out", "--no-copy-tokenizer", "--random-seed", "1"]
        subprocess.run(command, cwd=root, check=True)
        merged = load_file(root / "out" / "model.safetensors")[TENSOR]
    return {"recipe": recipe, **summary(drawn_state(1)[TENSOR], merged)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mergekit", required=True, help="mergekit-yaml of mergekit 0.1.5")
    arguments = parser.parse_args()
    shutil.rmtree(FIXTURES, ignore_errors=True)
    for seed, name in enumerate(("base", "one", "two")):
        folder = FIXTURES / name
        folder.mkdir(parents=True)
        save_file(_state(seed), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    for name, recipe in RECIPES.items():
        file = FIXTURES / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**recipe, "dtype": "float32"}, sort_keys=False))
        with tempfile.TemporaryDirectory() as out:
            subprocess.run(
                [arguments.mergekit, file.name, out, "--no-copy-tokenizer"],
                cwd=FIXTURES,
                check=True,
            )
            shutil.copyfile(Path(out) / "model.safetensors", FIXTURES / f"{name}.safetensors")
    drawn = {name: _drawn(recipe, arguments.mergekit) for name, recipe in DRAWN.items()}
    (FIXTURES / "drawn.json").write_text(json.dumps(drawn, indent=2) + "\n")
    print(f"The fixtures are in {FIXTURES}")


if __name__ == "__main__":
    main()
