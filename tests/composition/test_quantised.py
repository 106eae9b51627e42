"""A quantised component beside whole ones: layers whose weights are eight bits and a scale.

What transformers keeps quantised (bitsandbytes, torchao, GGUF with its kernels) replaces linear
layers in the same way; most of it needs a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composition import (
    ComposedForCausalLM,
    compose_logits,
    pack,
    score_continuations,
    speculate,
)

IDS = torch.tensor([[5, 17, 40, 9, 61]])


class EightBits(nn.Module):
    """A linear layer without bias; its weight is an int8 buffer, as bitsandbytes has it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(-1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.weight * self.scale)


@pytest.fixture
def quantised(llama: Any) -> Any:
    model = llama(seed=1)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, EightBits(layer))
    return model


def test_it_composes_as_its_own_logits_say(quantised: Any, llama: Any) -> None:
    whole = llama(seed=2)
    for base, expert in [(whole, quantised), (quantised, whole)]:
        composed = ComposedForCausalLM.from_models(base, [expert])
        with torch.inference_mode():
            exact = compose_logits(base(input_ids=IDS).logits, [expert(input_ids=IDS).logits])
            found = composed(input_ids=IDS).logits
        assert torch.allclose(found.log_softmax(-1), exact.log_softmax(-1), atol=1e-4)
        wanted = torch.tensor([[0, 0, 0, 1, 1]])
        scored, _ = score_continuations(composed, IDS, torch.ones_like(IDS), wanted)
        rows = exact[0, 2:4].log_softmax(-1)
        assert scored[0, 3:].tolist() == pytest.approx(
            [float(rows[0, IDS[0, 3]]), float(rows[1, IDS[0, 4]])], abs=1e-4
        )


def test_it_generates_drafts_and_is_packed_beside_others(quantised: Any, llama: Any) -> None:
    composed = ComposedForCausalLM.from_models(llama(seed=2), [quantised])
    count = 8
    tokens: list[int] = []
    with torch.inference_mode():
        while len(tokens) < count:
            so_far = torch.cat([IDS, torch.tensor([tokens], dtype=torch.long)], dim=1)
            tokens.append(int(composed(input_ids=so_far, use_cache=False).logits[0, -1].argmax()))
    found = composed.generate(IDS, max_new_tokens=count, do_sample=False, eos_token_id=None)
    assert found[0, IDS.shape[1] :].tolist() == tokens
    assert speculate(composed, quantised, IDS, max_new_tokens=count).tokens == [tokens]
    pack(composed)  # the quantised layers stay as they are
    again = composed.generate(IDS, max_new_tokens=count, do_sample=False, eos_token_id=None)
    assert torch.equal(again, found)
