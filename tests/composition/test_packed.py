"""Packed layers and the cache that grows in place change nothing but the time."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, gemma2, gpt2, llama, qwen2
from torch import nn
from transformers import DynamicCache

from composition import ComposedForCausalLM, new_cache, pack, score_continuations
from composition.packed import PackedLinear

PACKS = pack(nn.Sequential(nn.Linear(2, 2))) == 1
needs_onednn = pytest.mark.skipif(not PACKS, reason="this build of torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 40), (3, 40), (100, 40), (2, 5, 40), (3, 0, 40)])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_packed_layer_is_the_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 70, bias).double()
    rows = torch.randn(shape, dtype=torch.float64)
    exact = layer(rows)
    packed = PackedLinear(layer.float())
    assert torch.allclose(packed(rows.float()).double(), exact, atol=1e-5)
    assert torch.equal(packed.weight, layer.weight)
    transposed = rows.float().transpose(0, -1).contiguous().transpose(0, -1)  # not contiguous
    assert torch.allclose(packed(transposed).double(), exact, atol=1e-5)


@needs_onednn
@torch.inference_mode()
def test_a_packed_layer_in_bfloat16() -> None:
    """Each entry is the exact sum rounded once: eight bits, half a unit in the last place."""
    torch.manual_seed(0)
    layer, rows = nn.Linear(64, 30).bfloat16(), torch.randn(5, 64).bfloat16()
    exact = rows.double() @ layer.weight.double().T + layer.bias.double()
    found = PackedLinear(layer)(rows)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=2**-8)


@needs_onednn
def test_what_is_packed_and_what_stays() -> None:
    class Own(nn.Linear):
        pass

    shared = nn.Linear(4, 4)
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "first": shared,
            "again": shared,
            "own": Own(4, 4),
            "hooked": hooked,
            "narrow": nn.Linear(4, 4).half(),
        }
    )
    assert pack(model) == 1
    assert isinstance(model["first"], PackedLinear)
    assert [type(model[name]) for name in ("own", "hooked", "narrow")] == [
        Own,
        nn.Linear,
        nn.Linear,
    ]
    assert pack(model) == 0
    assert type(deepcopy(model["first"])) is nn.Linear


@needs_onednn
@pytest.mark.parametrize("build", [llama, gemma2, qwen2, gpt2])
@torch.inference_mode()
def test_a_packed_model_is_the_model(build: Callable[[int], Any]) -> None:
    models = [build(seed) for seed in range(3)]
    plain = ComposedForCausalLM.from_models(models[0], models[1:])
    base, *experts = deepcopy(models)
    packed = ComposedForCausalLM.from_models(base, experts)
    linears = [module for module in packed.modules() if type(module) is nn.Linear]
    assert pack(packed) == len(linears) > 0
    ids = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    found, expected = packed(**inputs).logits[mask == 1], plain(**inputs).logits[mask == 1]
    assert torch.allclose(found, expected, atol=1e-4)
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(packed.generate(ids, **options), plain.generate(ids, **options))
    wanted = mask.clone()
    wanted[:, :10] = 0
    scores = [score_continuations(model, ids, mask, wanted)[0] for model in (packed, plain)]
    assert torch.allclose(*scores, atol=1e-4)


def test_a_growing_cache_holds_what_a_dynamic_one_holds() -> None:
    """A thousand random steps of everything that is done to a cache."""
    draw = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    config = llama().config
    for inference in (True, False):
        with torch.inference_mode(inference):
            ours, theirs, rows = new_cache(config), DynamicCache(config=config), 3
            for _ in range(500):
                length = theirs.get_seq_length()
                step = number(0, 10)
                if step == 0 and length > 5:
                    cut = number(1, 5)
                    for cache in (ours, theirs):
                        cache.crop(-cut)
                elif step == 1 and length:
                    chosen = torch.randint(rows, (number(1, 5),), generator=draw)
                    for cache in (ours, theirs):
                        cache.batch_select_indices(chosen)
                    rows = len(chosen)
                elif step == 2 and length:
                    order = torch.randperm(rows, generator=draw)
                    for cache in (ours, theirs):
                        cache.reorder_cache(order)
                elif length > 300:
                    for cache in (ours, theirs):
                        cache.reset()
                else:
                    for layer in range(2):
                        new = torch.randn(2, rows, 2, number(1, 40), 8, generator=draw)
                        found = ours.update(new[0], new[1], layer)
                        expected = theirs.update(new[0], new[1], layer)
                        assert all(map(torch.equal, found, expected))
                assert ours.get_seq_length() == theirs.get_seq_length()


def test_growing_copies_rarely() -> None:
    """A hundred tokens after a prompt: the buffer is moved twice, not a hundred times."""
    cache, places = new_cache(llama().config), set()
    for new in (10, *[1] * 100):
        keys, _ = cache.update(torch.ones(2, 2, new, 8), torch.ones(2, 2, new, 8), 0)
        places.add(keys.data_ptr())
    assert len(places) <= 3


def test_a_cache_filled_in_inference_mode_can_be_used_outside() -> None:
    cache = new_cache(llama().config)
    with torch.inference_mode():
        cache.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), 0)
    keys, values = cache.update(torch.zeros(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    assert keys.shape == values.shape == (1, 2, 4, 8)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 0]
