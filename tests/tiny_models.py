"""Random causal LMs of a few thousand weights, in the four shapes that the tests run on."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 60
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def llama(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return made(seed, LlamaForCausalLM, LlamaConfig(**{**SHAPE, **changes}))


def gemma2(seed: int = 0, **changes: Any) -> Any:
    """Sliding and full attention in turn, a window of 8, softcaps on attention and logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **{**SHAPE, **changes},
        sliding_window=8,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=5.0,
    )
    return made(seed, Gemma2ForCausalLM, config)


def qwen2(seed: int = 0) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return made(seed, Qwen2ForCausalLM, Qwen2Config(**shape))


def gpt2(seed: int = 0) -> Any:
    """Its linear layers are Conv1D, whose weights lie on their side."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made(seed, GPT2LMHeadModel, config)


def cohere(seed: int = 0) -> Any:
    """Its logits are multiplied by 1/16."""
    from transformers import CohereConfig, CohereForCausalLM

    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return made(seed, CohereForCausalLM, CohereConfig(**shape, logit_scale=0.0625))


def granite(seed: int = 0) -> Any:
    """Its logits are divided by 4."""
    from transformers import GraniteConfig, GraniteForCausalLM

    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return made(seed, GraniteForCausalLM, GraniteConfig(**shape, logits_scaling=4.0))


def made(seed: int, kind: Any, config: Any) -> Any:
    """A random model that no token ends."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    model.generation_config.eos_token_id = None
    return model
