"""Inputs that break other tools: each works, or is refused in words. (More of them, such as tied
heads, pickles and adapters, stand in the tests of the engine and of adapters.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merging import MergeError, merge_to_folder, open_checkpoint, parse_recipe

CONFIG = {"model_type": "x", "vocab_size": 8}


def tensors(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def checkpoint(folder: Path, state: dict[str, Tensor], config: Any = None) -> Path:
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def sharded(folder: Path, state: dict[str, Tensor]) -> Path:
    """A tensor a file, as save_pretrained does with small shards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    places = {}
    for number, (name, tensor) in enumerate(state.items(), start=1):
        file = f"model-{number:05}-of-{len(state):05}.safetensors"
        save_file({name: tensor}, folder / file)
        places[name] = file
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def recipe(base: Path, experts: list[Path], method: str = "task_arithmetic", **changes: Any) -> Any:
    models = [str(expert) for expert in experts]
    return parse_recipe({"method": method, "base": str(base), "models": models, **changes})


SHAPES: dict[str, tuple[int, ...]] = {
    "model__embed_tokens__weight": (8, 4),
    "model__layers__0__self_attn__q_norm__weight": (4,),  # which no list of Llama's tensors has
    "model__layers__0__mlp__up_proj__bias": (6,),
    "model__rotary__cache": (3, 2),
    "scalar": (),
    "one": (1,),
    "empty": (0, 4),
}


def test_no_tensor_is_dropped_whatever_its_name_and_size(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / str(seed), tensors(seed, **SHAPES)) for seed in range(3)]
    for method in ("linear", "task_arithmetic", "ties", "dare_ties", "della", "model_stock"):
        out = merge_to_folder(recipe(folders[0], folders[1:], method), tmp_path / f"out-{method}")
        found = load_file(out / "model.safetensors")
        assert {n: tuple(t.shape) for n, t in found.items()} == {
            name.replace("__", "."): shape for name, shape in SHAPES.items()
        }
        assert all(bool(tensor.isfinite().all()) for tensor in found.values())


def test_shards_and_single_files_are_the_same_model(tmp_path: Path) -> None:
    base, one, two = (tensors(seed, **SHAPES) for seed in range(3))
    single = [checkpoint(tmp_path / n, s) for n, s in (("b", base), ("1", one), ("2", two))]
    parts = [sharded(tmp_path / n, s) for n, s in (("B", base), ("I", one), ("II", two))]
    first = merge_to_folder(recipe(single[0], single[1:]), tmp_path / "first")
    second = merge_to_folder(recipe(parts[0], parts[1:]), tmp_path / "second")
    found, expected = open_checkpoint(second), open_checkpoint(first)
    for name in expected.names():
        assert torch.equal(found.read(name), expected.read(name))


@pytest.mark.parametrize(("ours", "theirs"), [(32000, 32007), (151665, 152064)])
def test_other_vocabularies_are_refused_with_both_sizes(
    tmp_path: Path, ours: int, theirs: int
) -> None:
    base = checkpoint(tmp_path / "b", {"model.embed_tokens.weight": torch.zeros(ours, 1)})
    expert = checkpoint(tmp_path / "e", {"model.embed_tokens.weight": torch.zeros(theirs, 1)})
    with pytest.raises(MergeError, match=rf"\({theirs}, 1\) where the base has \({ours}, 1\)"):
        merge_to_folder(recipe(base, [expert]), tmp_path / "out")


def test_padding_of_the_vocabulary_survives(tmp_path: Path) -> None:
    """Eight rows for a tokenizer of five tokens: eight rows come out, and config agrees."""
    states = [tensors(seed, model__embed_tokens__weight=(8, 4)) for seed in range(2)]
    base, expert = (checkpoint(tmp_path / str(i), state) for i, state in enumerate(states))
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": dict.fromkeys("abcde")}}))
    out = merge_to_folder(recipe(base, [expert]), tmp_path / "out")
    (merged,) = load_file(out / "model.safetensors").values()
    assert merged.shape == (8, 4)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 8


def test_files_of_the_base_are_copied_and_differences_told(tmp_path: Path) -> None:
    base, expert = (checkpoint(tmp_path / str(seed), tensors(seed, **SHAPES)) for seed in range(2))
    files = {
        "generation_config.json": '{"eos_token_id": 2}',
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "modeling_x.py": "raise SystemExit",  # remote code is copied, never run
    }
    for name, text in files.items():
        (base / name).write_text(text)
    (expert / "chat_template.jinja").write_text("{{ other }}")
    out = merge_to_folder(recipe(base, [expert]), tmp_path / "out")
    assert {name: (out / name).read_text() for name in files} == files
    notes = json.loads((out / "merge_report.json").read_text())["notes"]
    assert notes == [f"chat_template.jinja of {expert} differs; the base's is kept"]


def test_the_same_expert_twice_counts_twice(tmp_path: Path) -> None:
    base, expert = (checkpoint(tmp_path / str(seed), tensors(seed, **SHAPES)) for seed in range(2))
    out = merge_to_folder(recipe(base, [expert, expert], "linear"), tmp_path / "mean")
    expected = load_file(expert / "model.safetensors")
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, expected[name])


def test_relative_paths_work_from_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("base", "one")):
        checkpoint(tmp_path / name, tensors(seed, **SHAPES))
    monkeypatch.chdir(tmp_path)
    merge_to_folder(recipe(Path("base"), [Path("one")]), Path("out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_output_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    """Other processes, other hash seeds, other orders of sets: the same bytes."""
    folders = [checkpoint(tmp_path / str(seed), tensors(seed, **SHAPES)) for seed in range(3)]
    program = (
        "import sys; from pathlib import Path; from merging import merge_to_folder, parse_recipe\n"
        "base, one, two, out = sys.argv[1:]\n"
        "recipe = {'method': 'dare_ties', 'base': base, 'models': [one, two], 'name': 'same'}\n"
        "merge_to_folder(parse_recipe(recipe), Path(out))"
    )
    outs = [tmp_path / f"out{seed}" for seed in (1, 2)]
    for seed, out in enumerate(outs, start=1):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        command = [sys.executable, "-c", program, *map(str, folders), str(out)]
        subprocess.run(command, env=environment, check=True)
    first, second = ({f.name: f.read_bytes() for f in out.iterdir()} for out in outs)
    assert first == second
