"""LoRA experts in one stacked pass against merged models in a plain loop without a cache."""

from __future__ import annotations

import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import gemma2, gpt2, llama
from torch import Tensor

from composition import ComposedForCausalLM, CompositionError, compose_logits, score_continuations
from composition.sequential import Sequential
from composition.stacked import Stacked

TARGETS = {
    "llama": (["q_proj", "v_proj", "down_proj"], "all-linear"),
    "gemma2": (["q_proj", "up_proj"], "all-linear"),
    "gpt2": (["c_attn"], ["c_attn", "c_proj", "c_fc"]),
}


def adapter(base: Any, folder: Path, seed: int, **settings: Any) -> Path:
    """An adapter whose B is not 0."""
    wrapped = get_peft_model(deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    wrapped.save_pretrained(folder)
    return folder


def experts(base: Any, root: Path, kind: str) -> dict[str, Path]:
    """Other ranks, other layers, one with rslora."""
    few, many = TARGETS[kind]
    return {
        "math": adapter(base, root / "math", 1, r=4, lora_alpha=8, target_modules=few),
        "code": adapter(
            base, root / "code", 2, r=7, lora_alpha=16, target_modules=many, use_rslora=True
        ),
    }


def merged(base: Any, folder: Path) -> Any:
    return PeftModel.from_pretrained(deepcopy(base), folder).merge_and_unload().eval()


def plain_greedy(models: list[Any], prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            base, *rest = (m(input_ids=torch.tensor([ids])).logits[0, -1] for m in models)
        ids.append(int(compose_logits(base, rest).argmax()))
    return ids[len(prompt) :]


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    return ids, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])


PROMPTS = [[5, 9, 13], [7, 3, 30, 31, 32, 8, 22], list(range(10, 25))]
BUILDS = {"llama": llama, "gemma2": gemma2, "gpt2": gpt2}


@pytest.mark.parametrize("kind", list(BUILDS))
class TestStacked:
    @pytest.fixture
    def composed(self, kind: str, tmp_path: Path) -> tuple[ComposedForCausalLM, list[Any]]:
        base = BUILDS[kind]()
        folders = experts(base, tmp_path, kind)
        models = [deepcopy(base), *(merged(base, folder) for folder in folders.values())]
        made = ComposedForCausalLM.from_adapters(base, folders)
        assert isinstance(made.parts, Stacked)
        return made, models

    def test_greedy_in_a_left_padded_batch(self, kind: str, composed: Any) -> None:
        model, models = composed
        ids, mask = left_padded(PROMPTS)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
        expected = [plain_greedy(models, prompt, 14) for prompt in PROMPTS]
        assert found[:, ids.shape[1] :].tolist() == expected

    def test_beams_reorder_every_block(self, kind: str, composed: Any) -> None:
        model, models = composed
        ids, mask = left_padded(PROMPTS)
        options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
        found = model.generate(ids, attention_mask=mask, **options)
        sequential = ComposedForCausalLM.from_models(models[0], models[1:])
        assert found.tolist() == sequential.generate(ids, attention_mask=mask, **options).tolist()

    def test_rows_that_leave_and_repeat(self, kind: str, composed: Any) -> None:
        """Two rows of three stay and are doubled: the next logits are those of their texts."""
        model, models = composed
        ids, mask = left_padded(PROMPTS)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            cache = model.new_cache()
            model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
            )
            chosen = torch.tensor([2, 0])
            cache.batch_select_indices(chosen)
            cache.batch_repeat_interleave(2)
            order = chosen.repeat_interleave(2)
            token = torch.tensor([[11], [12], [13], [14]])
            found = model(
                input_ids=token,
                attention_mask=torch.cat([mask[order], torch.ones(4, 1, dtype=torch.long)], 1),
                position_ids=positions[order, -1:] + 1,
                cache=cache,
                use_cache=True,
            ).logits[:, -1]
            for row, place in enumerate(order.tolist()):
                text = torch.tensor([[*PROMPTS[place], int(token[row])]])
                base, *rest = (m(input_ids=text).logits[0, -1] for m in models)
                assert torch.allclose(found[row], compose_logits(base, rest), atol=1e-4)

    def test_scores_equal_those_of_merged_models(self, kind: str, composed: Any) -> None:
        model, models = composed
        sequential = ComposedForCausalLM.from_models(models[0], models[1:])
        ids, mask = left_padded(PROMPTS)
        wanted = mask.clone()
        wanted[:, :-2] = 0
        found, _ = score_continuations(model, ids, mask, wanted)
        expected, _ = score_continuations(sequential, ids, mask, wanted)
        assert torch.allclose(found, expected, atol=1e-4)

    def test_each_components_logits_come_out(self, kind: str, composed: Any) -> None:
        model, models = composed
        ids = torch.tensor([PROMPTS[1]])
        with torch.no_grad():
            found = model(input_ids=ids, output_components=True)
            assert len(found.components) == 3
            for part, single in zip(found.components, models, strict=True):
                assert torch.allclose(part, single(input_ids=ids).logits, atol=1e-4)


def test_a_static_cache_gives_the_same_tokens(tmp_path: Path) -> None:
    base = llama()
    folders = experts(base, tmp_path, "llama")
    models = [deepcopy(base), *(merged(base, folder) for folder in folders.values())]
    for model in (
        ComposedForCausalLM.from_adapters(base, folders),
        ComposedForCausalLM.from_models(models[0], models[1:]),
    ):
        ids, mask = left_padded(PROMPTS)
        found = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=14,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )
        expected = [plain_greedy(models, prompt, 14) for prompt in PROMPTS]
        assert found[:, ids.shape[1] :].tolist() == expected


def test_one_expert_none_and_weights(tmp_path: Path) -> None:
    """No adapter is the base; weight 0 is absent."""
    base = llama()
    folders = experts(base, tmp_path, "llama")
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        code = merged(base, folders["code"])(input_ids=ids).logits
        none = ComposedForCausalLM.from_adapters(deepcopy(base), {})
        assert torch.allclose(none(input_ids=ids).logits, plain, atol=1e-5)
        one = ComposedForCausalLM.from_adapters(deepcopy(base), {"code": folders["code"]})
        assert torch.allclose(one(input_ids=ids).logits, code, atol=1e-4)
        half = ComposedForCausalLM.from_adapters(deepcopy(base), folders, weights=[0.0, 1.0])
        assert torch.allclose(half(input_ids=ids).logits, code, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_dora": True}, "odd is a variant of LoRA: Dora"),
        ({"modules_to_save": ["lm_head"]}, "odd replaces whole modules"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "odd adapts a Embedding layer"),
    ],
)
def test_what_cannot_be_stacked_is_merged_into_copies_and_told(
    tmp_path: Path, settings: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = llama()
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], **settings}
    folders = {
        "plain": experts(base, tmp_path, "llama")["math"],
        "odd": adapter(base, tmp_path / "odd", 3, **given),
    }
    models = [deepcopy(base), *(merged(base, folder) for folder in folders.values())]
    with caplog.at_level(logging.WARNING):
        composed = ComposedForCausalLM.from_adapters(base, folders)
    assert expected in caplog.text
    assert isinstance(composed.parts, Sequential)
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        parts = [model(input_ids=ids).logits for model in models]
        found = composed(input_ids=ids).logits
    assert torch.allclose(found, compose_logits(parts[0], parts[1:]), atol=1e-4)


def test_an_adapter_of_another_base_is_told_by_name(tmp_path: Path) -> None:
    folders = experts(llama(), tmp_path, "llama")
    with pytest.raises(CompositionError, match=r"math: the adapter in .* does not fit the base"):
        ComposedForCausalLM.from_adapters(llama(hidden_size=16), {"math": folders["math"]})


def test_an_initialisation_that_moves_the_base_is_refused(tmp_path: Path) -> None:
    base = llama()
    settings = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "pissa"}
    folder = adapter(base, tmp_path / "pissa", 1, **settings)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["init_lora_weights"] == "pissa"
    with pytest.raises(CompositionError, match="math was initialised by pissa"):
        ComposedForCausalLM.from_adapters(base, {"math": folder})
