"""Rows behind a shared beginning give what their whole prompts give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCABULARY, gemma2, gpt2, llama, qwen2

from composition import ComposedForCausalLM, behind, fill_prefix, new_cache, score_continuations

DRAW = torch.Generator().manual_seed(0)
BEGINNING = torch.randint(1, VOCABULARY, (30,), generator=DRAW).tolist()
ENDS = [torch.randint(1, VOCABULARY, (size,), generator=DRAW).tolist() for size in (9, 4, 1)]


def wide_gemma2(seed: int) -> Any:
    """Its window is wider than all of these texts; the softcaps stay."""
    model = gemma2(seed)
    model.config.sliding_window = 100
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 100 if layer.self_attn.sliding_window else None
    return model


def single(build: Callable[[int], Any], folder: Path) -> tuple[Any, Callable[[], Any]]:
    model = build(0)
    return model, lambda: new_cache(model.config)


def whole_models(build: Callable[[int], Any], folder: Path) -> tuple[Any, Callable[[], Any]]:
    model = ComposedForCausalLM.from_models(build(0), [build(1), build(2)])
    return model, model.new_cache


def adapters(build: Callable[[int], Any], folder: Path) -> tuple[Any, Callable[[], Any]]:
    base = build(0)
    for seed in (1, 2):
        settings = LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False
        )
        torch.manual_seed(seed)
        get_peft_model(build(0), settings).save_pretrained(folder / str(seed))
    model = ComposedForCausalLM.from_adapters(base, {s: folder / s for s in ("1", "2")})
    return model, model.new_cache


FORMS = [single, whole_models, adapters]
ARCHITECTURES = [llama, wide_gemma2, qwen2, gpt2]
CASES = [(form, build) for form in FORMS[:2] for build in ARCHITECTURES] + [(adapters, llama)]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@pytest.mark.parametrize(("form", "build"), CASES)
@torch.inference_mode()
def test_steps_behind_a_beginning(form: Any, build: Any, tmp_path: Path) -> None:
    """A left-padded batch, its prompt and then five tokens one by one, against whole prompts."""
    model, empty = form(build, tmp_path)
    prefix = fill_prefix(model, BEGINNING, empty(), reach=60)
    assert prefix is not None and prefix.length == 30
    ids, mask = padded(ENDS)
    cache, rows = empty(), [list(end) for end in ENDS]
    for _ in range(6):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :] + prefix.length
        with behind(model, prefix):
            found = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache
            ).logits[:, -1]
        for place, row in enumerate(rows):
            expected = model(input_ids=torch.tensor([BEGINNING + row])).logits[0, -1]
            assert torch.allclose(found[place], expected, atol=2e-4)
            row.append(int(expected.argmax()))
        ids = found.argmax(-1)[:, None]
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=mask.dtype)], dim=1)
    assert cache.get_seq_length() == 9 + 5  # the beginning is in no row's cache


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_scores_behind_a_beginning(form: Any, tmp_path: Path) -> None:
    model, empty = form(llama, tmp_path)
    prefix = fill_prefix(model, BEGINNING, empty(), reach=60)
    ids, mask = padded(ENDS[:2])
    wanted = mask.clone()
    wanted[:, :6] = 0
    found, _ = score_continuations(model, ids, mask, wanted, prefix=prefix)
    whole, whole_mask = padded([BEGINNING + end for end in ENDS[:2]])
    shift = whole.shape[1] - ids.shape[1]
    all_wanted = torch.cat([torch.zeros(2, shift, dtype=torch.long), wanted], dim=1)
    expected, _ = score_continuations(model, whole, whole_mask, all_wanted)
    assert torch.allclose(found, expected[:, shift:], atol=2e-4)
    assert bool((found[wanted == 1] != 0).all())


def test_the_models_own_attention_is_put_back(tmp_path: Path) -> None:
    model, empty = whole_models(llama, tmp_path)
    before = model.parts.base.config._attn_implementation
    prefix = fill_prefix(model, BEGINNING, empty(), reach=60)
    with pytest.raises(ZeroDivisionError), behind(model, prefix):
        raise ZeroDivisionError
    assert model.parts.base.config._attn_implementation == before
    ids = torch.tensor([BEGINNING])
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_window_shorter_than_the_rows_has_no_shared_beginning(tmp_path: Path) -> None:
    model, empty = single(gemma2, tmp_path)  # a window of 8
    assert fill_prefix(model, BEGINNING, empty(), reach=60) is None


def test_an_attention_of_its_own_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that never asks transformers for its attention would not see the beginning."""
    model, empty = single(llama, tmp_path)
    for layer in model.model.layers:
        layer.self_attn.config = llama(0).config  # of its own: it stays at sdpa
    assert fill_prefix(model, BEGINNING, empty(), reach=60) is None
    assert "every row computes its whole prompt" in caplog.text
