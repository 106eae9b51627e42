"""Whole models: streamed, written whole or not at all, and loadable; every bad input is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merging import (
    MergeError,
    load_recipe,
    merge_tensors,
    merge_to_folder,
    merged_tensors,
    open_checkpoint,
    parse_parameters,
    parse_recipe,
)


def checkpoint(
    folder: Path, state: dict[str, Tensor], config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "x"}))
    return folder


def trio(root: Path, dtype: torch.dtype = torch.float32) -> list[Path]:
    folders = []
    for seed, name in enumerate(("base", "one", "two")):
        generator = torch.Generator().manual_seed(seed)
        state = {
            "a.weight": torch.randn(8, 4, generator=generator).to(dtype),
            "b.bias": torch.randn(3, generator=generator).to(dtype),
            "steps": torch.tensor([7]),
        }
        folders.append(checkpoint(root / name, state))
    return folders


def recipe(folders: list[Path], **changes: Any) -> Any:
    content = {
        "method": "ties",
        "base": str(folders[0]),
        "models": [str(folder) for folder in folders[1:]],
        "parameters": {"density": 0.5},
    }
    return parse_recipe({**content, **changes})


def test_the_engine_merges_every_tensor_as_the_method_does(tmp_path: Path) -> None:
    folders = trio(tmp_path, torch.bfloat16)
    sources = [open_checkpoint(folder) for folder in folders]
    states = [load_file(folder / "model.safetensors") for folder in folders]
    found = dict(merged_tensors(sources[0], sources[1:], "task_arithmetic"))
    assert list(found) == sources[0].names()
    for name in ("a.weight", "b.bias"):
        exact = merge_tensors("task_arithmetic", states[0][name], [s[name] for s in states[1:]])
        assert torch.equal(found[name], exact.to(torch.bfloat16))  # one rounding
    assert torch.equal(found["steps"], torch.tensor([7]))


def test_ties_over_the_model_equals_ties_over_all_tensors_in_one(tmp_path: Path) -> None:
    folders = trio(tmp_path)
    sources = [open_checkpoint(folder) for folder in folders]
    params = parse_parameters("ties", {"density": 0.3, "preset": "paper"})
    found = dict(merged_tensors(sources[0], sources[1:], "ties", parameters=params))
    flat = [
        torch.cat([load_file(f / "model.safetensors")[n].flatten() for n in ("a.weight", "b.bias")])
        for f in folders
    ]
    whole = merge_tensors("ties", flat[0], flat[1:], density=0.3, preset="paper")
    assert torch.equal(torch.cat([found["a.weight"].flatten(), found["b.bias"]]), whole)


def test_a_model_merged_with_itself_is_itself_bit_for_bit(tmp_path: Path) -> None:
    folder = trio(tmp_path, torch.bfloat16)[0]
    state = load_file(folder / "model.safetensors")
    state["b.bias"][0] = -0.0
    save_file(state, folder / "model.safetensors")
    source = open_checkpoint(folder)
    for method in ("linear", "task_arithmetic", "ties"):
        for name, tensor in merged_tensors(source, [source, source], method):
            assert torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8)), method


def test_excluded_tensors_stay_the_bases_and_are_reported(tmp_path: Path) -> None:
    folders = trio(tmp_path)
    out = merge_to_folder(recipe(folders, exclude=[r"a\..*"]), tmp_path / "out")
    base, merged = (load_file(f / "model.safetensors") for f in (folders[0], out))
    assert torch.equal(base["a.weight"], merged["a.weight"])
    assert not torch.equal(base["b.bias"], merged["b.bias"])
    report = json.loads((out / "merge_report.json").read_text())
    assert report["tensors_kept_from_base"] == ["a.weight", "steps"]
    assert report["tensors_merged"] == 1


def test_output_bytes_are_the_same_each_time_and_in_any_sharding(tmp_path: Path) -> None:
    folders = trio(tmp_path)
    first = merge_to_folder(recipe(folders), tmp_path / "first" / "m")
    second = merge_to_folder(recipe(folders), tmp_path / "second" / "m")
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    sharded = merge_to_folder(recipe(folders), tmp_path / "sharded", shard_bytes=100)
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    whole, parts = open_checkpoint(first), open_checkpoint(sharded)
    assert whole.names() == parts.names()
    assert all(torch.equal(whole.read(name), parts.read(name)) for name in whole.names())


def test_a_rerun_replaces_the_old_output_as_a_whole(tmp_path: Path) -> None:
    folders = trio(tmp_path)
    out = merge_to_folder(recipe(folders), tmp_path / "out", shard_bytes=100)
    merge_to_folder(recipe(folders), out)
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_killed_merge_leaves_no_half_output(tmp_path: Path) -> None:
    folders = trio(tmp_path)
    program = f"""
        import os, signal
        from pathlib import Path
        from merging import merge_to_folder, parse_recipe
        def die(done, total):
            if 0 < done < total:
                os.kill(os.getpid(), signal.SIGKILL)
        recipe = parse_recipe({{"method": "linear", "base": {str(folders[0])!r},
                               "models": [{str(folders[1])!r}]}})
        merge_to_folder(recipe, Path({str(tmp_path / "out")!r}), progress=die)
    """
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, check=False
    )
    assert done.returncode == -9
    assert not (tmp_path / "out").exists()


def test_a_failed_merge_keeps_the_old_output(tmp_path: Path) -> None:
    folders = trio(tmp_path)
    out = merge_to_folder(recipe(folders), tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    state = load_file(folders[2] / "model.safetensors")
    state["b.bias"][1] = float("nan")
    save_file(state, folders[2] / "model.safetensors")
    with pytest.raises(MergeError, match=r"b\.bias of .*two holds 1 NaN"):
        merge_to_folder(recipe(folders), out)
    assert (out / "model.safetensors").read_bytes() == before


def test_a_merged_llama_loads_with_its_tokenizer(tmp_path: Path, family: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = [family["base"], family["first"], family["second"]]
    out = merge_to_folder(recipe(folders, dtype="bfloat16"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out)("ab")["input_ids"]
    card = (out / "README.md").read_text()
    assert "base_model:" in card
    assert "preset: mergekit" in card


def test_a_float16_expert_and_a_bfloat16_base_are_merged_in_float32(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "b", {"w": torch.full((2,), 1.0, dtype=torch.bfloat16)})
    expert = checkpoint(tmp_path / "e", {"w": torch.full((2,), 1.001, dtype=torch.float16)})
    out = merge_to_folder(
        recipe([base, expert], method="linear", parameters={}, dtype="float32"), tmp_path / "o"
    )
    assert load_file(out / "model.safetensors")["w"].tolist() == [1.0009765625] * 2  # 1.001 in half


def test_a_tied_head_in_one_checkpoint_only_is_merged_once(tmp_path: Path) -> None:
    embeddings = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    config = {"model_type": "x", "tie_word_embeddings": True}
    base = checkpoint(tmp_path / "b", {"model.embed_tokens.weight": embeddings}, config)
    state = {"model.embed_tokens.weight": embeddings + 1, "lm_head.weight": embeddings + 1}
    expert = checkpoint(tmp_path / "e", state, config)
    found = dict(merged_tensors(open_checkpoint(base), [open_checkpoint(expert)], "linear"))
    assert list(found) == ["model.embed_tokens.weight"]
    wrong = checkpoint(tmp_path / "w", {**state, "lm_head.weight": embeddings}, config)
    with pytest.raises(MergeError, match="ties the head"):
        open_checkpoint(wrong)


def test_bin_checkpoints_are_read_without_running_their_code(tmp_path: Path) -> None:
    folders = trio(tmp_path)
    state = load_file(folders[1] / "model.safetensors")
    (folders[1] / "model.safetensors").unlink()
    torch.save(state, folders[1] / "pytorch_model.bin")
    source = open_checkpoint(folders[1])
    assert all(torch.equal(source.read(name), state[name]) for name in source.names())

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "escaped"),)

    torch.save({"w": Evil()}, folders[1] / "pytorch_model.bin")
    with pytest.raises(MergeError, match="cannot be read as plain tensors"):
        open_checkpoint(folders[1]).names()
    assert not (tmp_path / "escaped").exists()


def spoil(folder: Path, how: str) -> None:
    state = load_file(folder / "model.safetensors")
    if how == "extra":
        state["q_norm.weight"] = torch.ones(2)
    elif how == "lacking":
        del state["b.bias"]
    elif how == "vocabulary":
        state["a.weight"] = torch.zeros(9, 4)
    elif how == "integers":
        state["steps"] = torch.tensor([8])
    save_file(state, folder / "model.safetensors")
    if how == "cut":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif how == "garbage":
        (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    elif how == "quantised":
        config = {"quantization_config": {"quant_method": "gptq"}}
        (folder / "config.json").write_text(json.dumps(config))
    elif how == "empty":
        (folder / "model.safetensors").unlink()
    elif how == "shards":
        index = {"weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "outside":
        index = {"weight_map": {"a.weight": "../secret.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("extra", r"has what the base lacks: 1 tensors \(q_norm\.weight\)"),
        ("lacking", r"lacks 1 tensors \(b\.bias\)"),
        ("vocabulary", r"a\.weight is \(9, 4\) where the base has \(8, 4\)"),
        ("integers", "steps holds int64 numbers"),
        ("cut", "no sound safetensors file"),
        ("garbage", "no sound safetensors file"),
        ("quantised", r"is quantised \(gptq\)"),
        ("empty", "holds no weights"),
        ("shards", "lacks 1 of its shards"),
        ("outside", "expected files of the same folder"),
    ],
)
def test_a_bad_expert_is_told(tmp_path: Path, how: str, expected: str) -> None:
    folders = trio(tmp_path)
    spoil(folders[1], how)
    with pytest.raises(MergeError, match=expected):
        merge_to_folder(recipe(folders), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    folders = trio(tmp_path)
    with pytest.raises(MergeError, match="one of the inputs"):
        merge_to_folder(recipe(folders), folders[0])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(MergeError, match="not empty and no merge of ours"):
        merge_to_folder(recipe(folders), tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(MergeError, match="is a file"):
        merge_to_folder(recipe(folders), tmp_path / "file")


def test_all_faults_of_a_recipe_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("method: ties\nbase: b\nmodel: [x]\nparameters: {densty: 0.2}\nexclude: ['(']")
    with pytest.raises(MergeError) as raised:
        load_recipe(path)
    text = str(raised.value)
    assert "models: this key is missing" in text
    assert "model: unknown key; did you mean 'models'?" in text
    assert "densty: unknown key; did you mean 'density'?" in text
    assert "no regular expression" in text


MERGEKIT = {
    "merge_method": "ties",
    "base_model": "b",
    "models": [
        {"model": "b"},
        {"model": "one", "parameters": {"weight": 0.5, "density": 0.3}},
        {"model": "two", "parameters": {"density": 0.3}},
    ],
    "parameters": {"lambda": 0.7},
    "dtype": "bfloat16",
}


def test_a_mergekit_file_becomes_the_same_recipe() -> None:
    found = parse_recipe(MERGEKIT)
    assert [(model.model, model.weight) for model in found.models] == [("one", 0.5), ("two", 1.0)]
    assert found.parameters == {"lambda": 0.7, "density": 0.3, "preset": "mergekit"}
    assert found.dtype == "bfloat16"
    plain = parse_recipe({**MERGEKIT, "parameters": {"normalize": False}})
    assert plain.parameters["divisor"] == "none"
    arithmetic = {**MERGEKIT, "merge_method": "task_arithmetic", "parameters": {"normalize": True}}
    assert [m.weight for m in parse_recipe(arithmetic).models] == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"merge_method": "arcee_fusion"}, "'arcee_fusion' is not supported"),
        ({"slices": []}, "slices: this part"),
        ({"tokenizer_source": "union"}, "tokenizer_source: this part"),
        ({"parameters": {"gamma": 0.1}}, r"parameters\.gamma: not supported"),
        ({"parameters": {"rescale": True}}, "only False is supported"),
        ({"parameters": {"normalize": [True, False]}}, "gradients and filters are not supported"),
        (
            {"merge_method": "slerp", "parameters": {}, "models": [{"model": "x"}, {"model": "y"}]},
            "exactly 1 experts",
        ),
        ({"base_model": None}, "base_model: this key is missing"),
        (
            {
                "models": [
                    {"model": "x", "parameters": {"density": 0.1}},
                    {"model": "y", "parameters": {"density": 0.2}},
                ]
            },
            "density differs",
        ),
        ({"models": [{"model": "b"}]}, "no model beside the base"),
    ],
)
def test_what_mergekit_asks_for_beyond_that_is_refused(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(MergeError, match=expected):
        parse_recipe({**MERGEKIT, **changes})


class Counting:
    """A source that counts the entries read from it."""

    def __init__(self, source: Any) -> None:
        self._source, self.folder, self.entries = source, source.folder, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read_raw(self, name: str, start: int, stop: int) -> Any:
        self.entries += stop - start
        return self._source.read_raw(name, start, stop)


@pytest.mark.parametrize(
    ("method", "given", "times"),
    [
        ("task_arithmetic", {}, 1),
        ("ties", {}, 2),
        ("ties", {"preset": "paper"}, 2),
        ("ties", {"density": 1.0}, 1),
    ],
)
def test_how_often_the_inputs_are_read(
    tmp_path: Path, method: str, given: dict[str, Any], times: int
) -> None:
    """A sample of at most a sixty-fourth comes on top, or 16384 entries and a block a tensor."""
    size = 3_000_000
    sources = []
    for seed, name in enumerate(("base", "one", "two")):
        generator = torch.Generator().manual_seed(seed)
        state = {"w": torch.randn(size, generator=generator).bfloat16()}
        sources.append(Counting(open_checkpoint(checkpoint(tmp_path / name, state))))
    params = parse_parameters(method, given)
    dict(merged_tensors(sources[0], sources[1:], method, parameters=params))
    for source in sources:
        assert times * size <= source.entries <= (times + 1 / 50) * size


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
@pytest.mark.parametrize("preset", ["mergekit", "paper"])
def test_threads_and_shards_change_nothing(tmp_path: Path, method: str, preset: str) -> None:
    """Equal magnitudes too: a trimmed task vector keeps the same of them in any order of work."""
    folders = []
    for seed, name in enumerate(("base", "one", "two")):
        generator = torch.Generator().manual_seed(seed)
        state = {
            key: (torch.randn(700_000, generator=generator) * 4).round().bfloat16()
            for key in ("a", "b", "c")
        }
        folders.append(checkpoint(tmp_path / name, state))
    parameters = {"preset": preset} if method == "ties" else {}
    outputs = [
        merge_to_folder(
            recipe(folders, method=method, parameters=parameters),
            tmp_path / f"{threads}-{shard}",
            threads=threads,
            shard_bytes=shard,
        )
        for threads, shard in ((1, 10**9), (2, 10**9), (5, 1_500_000))
    ]
    first, *others = (open_checkpoint(out) for out in outputs)
    for other in others:
        for name in first.names():
            assert torch.equal(first.read(name), other.read(name)), name


def test_a_wrong_bracket_is_looked_at_again(tmp_path: Path) -> None:
    """A tensor whose sampled blocks tell nothing of the rest: the threshold is exact all the same.

    Four blocks of 4096 entries are sampled, and just they hold small entries.
    """
    size = 1 << 20
    folders = []
    for seed, name in enumerate(("base", "one")):
        values = torch.zeros(size)
        if seed:
            values = torch.rand(size, generator=torch.Generator().manual_seed(1)) + 10
            for start in range(0, size, size // 4):  # where a sample of 16384 entries stands
                values[start : start + 4096] *= 1e-3
        folders.append(checkpoint(tmp_path / name, {"w": values}))
    sources = [Counting(open_checkpoint(folder)) for folder in folders]
    (found,) = dict(merged_tensors(sources[0], sources[1:], "ties")).values()
    assert sources[1].entries > 3 * size  # two looks and the merge
    kept = int(0.2 * size)
    expected = load_file(folders[1] / "model.safetensors")["w"]
    largest = expected.argsort(descending=True, stable=True)[:kept]
    assert torch.equal(found, torch.zeros(size).index_copy(0, largest, expected[largest]))
