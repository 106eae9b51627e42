"""LoRA adapters as sources: exact BA, equal to PEFT's own merge, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merging import MergeError, merged_tensors, open_adapter, open_checkpoint


def trained_adapter(base: Path, out: Path, **options: Any) -> Any:
    """A LoRA with random factors on a checkpoint, saved by PEFT; the model with it merged in."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(model, LoraConfig(**{**settings, **options}))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(out)
    return model.merge_and_unload().state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8}},
        {"alpha_pattern": {"v_proj": 3}, "rank_pattern": {"v_proj": 2}},
        {"target_modules": ["q_proj", "v_proj"]},
    ],
)
def test_an_adapter_equals_pefts_own_merge(
    tmp_path: Path, family: dict[str, Path], options: dict[str, Any]
) -> None:
    expected = trained_adapter(family["base"], tmp_path / "lora", **options)
    source = open_adapter(open_checkpoint(family["base"]), tmp_path / "lora")
    for name in source.names():
        assert torch.allclose(source.read(name), expected[name], atol=1e-6), name


def test_merging_adapters_works_on_ba_and_not_on_its_factors(
    tmp_path: Path, family: dict[str, Path]
) -> None:
    """Two adapters by task arithmetic: base + B1 A1 + B2 A2 (by hand), times alpha / r = 3."""
    base = open_checkpoint(family["base"])
    for name in ("one", "two"):
        trained_adapter(family["base"], tmp_path / name)
    factors = load_file(tmp_path / "two" / "adapter_model.safetensors")
    save_file(
        {k: v.flip(0) for k, v in factors.items()}, tmp_path / "two" / "adapter_model.safetensors"
    )
    experts = [open_adapter(base, tmp_path / name) for name in ("one", "two")]
    merged = dict(merged_tensors(base, experts, "task_arithmetic"))
    name = "model.layers.0.self_attn.q_proj"
    delta = torch.zeros(())
    for folder in ("one", "two"):
        state = load_file(tmp_path / folder / "adapter_model.safetensors")
        a, b = (state[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        delta = delta + 3 * b @ a
    assert torch.allclose(merged[f"{name}.weight"], base.read(f"{name}.weight") + delta, atol=1e-5)


def changed_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected LORA"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
    ],
)
def test_other_adapters_are_refused_by_name(
    tmp_path: Path, family: dict[str, Path], changes: dict[str, Any], expected: str
) -> None:
    trained_adapter(family["base"], tmp_path / "lora")
    changed_config(tmp_path / "lora", **changes)
    with pytest.raises(MergeError, match=expected):
        open_adapter(open_checkpoint(family["base"]), tmp_path / "lora")


def test_an_adapter_of_another_base_is_refused(
    tmp_path: Path, family: dict[str, Path], llama: Any
) -> None:
    trained_adapter(family["base"], tmp_path / "lora")
    llama(seed=0, intermediate_size=40).save_pretrained(tmp_path / "narrow")
    llama(seed=0, num_hidden_layers=1).save_pretrained(tmp_path / "short")
    with pytest.raises(MergeError, match="trained on another base"):
        open_adapter(open_checkpoint(tmp_path / "narrow"), tmp_path / "lora")
    with pytest.raises(MergeError, match="which the base does not have"):
        open_adapter(open_checkpoint(tmp_path / "short"), tmp_path / "lora")


def test_half_a_pair_of_factors_is_refused(tmp_path: Path, family: dict[str, Path]) -> None:
    trained_adapter(family["base"], tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    state = load_file(file)
    del state[next(name for name in state if "lora_B" in name)]
    save_file(state, file)
    with pytest.raises(MergeError, match="has lora_A only"):
        open_adapter(open_checkpoint(family["base"]), tmp_path / "lora")


def test_a_changed_adapter_has_another_digest(tmp_path: Path, family: dict[str, Path]) -> None:
    trained_adapter(family["base"], tmp_path / "lora")
    base = open_checkpoint(family["base"])
    before = open_adapter(base, tmp_path / "lora").digest()
    changed_config(tmp_path / "lora", lora_alpha=13)
    assert open_adapter(base, tmp_path / "lora").digest() != before


@pytest.mark.data
def test_the_real_experts_are_low_rank_additions(data_dir: Path) -> None:
    """Rank 16, alpha 32: scaling 2, and the factors of every layer are there."""
    folder = data_dir.parent / "experts" / "math"
    if not folder.is_dir():
        pytest.skip("there is no folder `experts` beside MERGESCOPE_DATA")
    factors = load_file(folder / "adapter_model.safetensors")
    assert len(factors) == 30 * 7 * 2  # layers, projections, factors
    assert all(min(tensor.shape) == 16 for tensor in factors.values())
    assert all(math.isfinite(float(tensor.float().norm())) for tensor in factors.values())
