"""What of vLLM's offline API is used, on transformers, one request after the other.

Signatures and results as in vLLM 0.8 to 0.11: `LLM(model, *, tokenizer, dtype, seed, ...)`,
`generate(prompts, sampling_params, *, use_tqdm)`, `SamplingParams`, `TokensPrompt`, results with
`outputs[0].token_ids` (the token that ended them included) and `prompt_logprobs` (None for the
first position, else the token's own logprob and rank by its id).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

started: list[dict[str, Any]] = []
"""What every LLM so far was made with."""


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: int | None = None
    detokenize: bool = True


class LLM:
    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        generation_config: str = "auto",
        enable_prefix_caching: bool | None = None,
        max_model_len: int | None = None,
    ) -> None:
        if gpu_memory_utilization > 0.95:
            raise ValueError("Free memory on device is less than desired GPU memory utilization")
        started.append({"model": model, "dtype": dtype, "generation_config": generation_config})
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer or model)
        self._longest = max_model_len

    @torch.inference_mode()
    def generate(
        self, prompts: list[Any], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[Any]:
        assert not use_tqdm
        return [self._one(*pair) for pair in zip(prompts, sampling_params, strict=True)]

    def _one(self, prompt: Any, params: SamplingParams) -> Any:
        assert params.temperature == 0
        ids = prompt["prompt_token_ids"]
        if self._longest is not None and len(ids) >= self._longest:
            raise ValueError(f"The prompt (length {len(ids)}) is longer than {self._longest}")
        told = None if params.prompt_logprobs is None else self._told(ids)
        made: list[int] = []
        while len(made) < (params.max_tokens or 0):
            made.append(int(self._logits([*ids, *made])[-1].argmax()))
            text = self._tokenizer.decode(made, skip_special_tokens=True)
            if made[-1] in params.stop_token_ids or any(stop in text for stop in params.stop):
                break
        output = SimpleNamespace(token_ids=made)
        return SimpleNamespace(outputs=[output], prompt_logprobs=told)

    def _told(self, ids: list[int]) -> list[Any]:
        rows = self._logits(ids).log_softmax(-1)
        return [None] + [
            {
                token: SimpleNamespace(
                    logprob=float(row[token]), rank=int((row > row[token]).sum()) + 1
                )
            }
            for row, token in zip(rows, ids[1:], strict=False)
        ]

    def _logits(self, ids: list[int]) -> Any:
        return self._model(input_ids=torch.tensor([ids])).logits[0]
