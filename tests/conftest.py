"""Tiny models and tokenizers, built in code; where the real data are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


def build_tokenizer() -> Any:
    """One token a character (printable ASCII and newline), `<s>`, `</s>`, no BOS added."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {character: index for index, character in enumerate(CHARACTERS, start=3)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )


def build_llama(seed: int, vocab_size: int = 99, **changes: Any) -> Any:
    """A random two-layer Llama in float32; large weights, so that its choices are decided."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="session")
def llama() -> Callable[..., Any]:
    return build_llama


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Path]:
    """A base and two experts near it, as checkpoints with tokenizer: base, first, second."""
    root = tmp_path_factory.mktemp("family")
    folders = {}
    for name in ("base", "first", "second"):
        model = build_llama(seed=0)
        if name != "base":
            torch.manual_seed(len(name))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        folders[name] = root / name
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The real benchmark files; the test is skipped without them."""
    folder = os.environ.get("MERGESCOPE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("the real benchmark files are not here: set MERGESCOPE_DATA to their folder")
    return Path(folder)
