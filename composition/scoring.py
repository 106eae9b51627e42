"""Log-likelihoods of given continuations, without the logits of everything else.

A causal LM's forward projects every position on the whole vocabulary: at batch 4, 256 tokens and
a vocabulary of 49 thousand that is 200 MB a model, for a few dozen numbers. Here each component
runs once without its head; then the continuation's positions are projected, composed and
normalised a chunk at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composition.errors import CompositionError
from composition.model import ComposedForCausalLM

CHUNK = 128  # positions projected at a time


def score_continuations(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    continuation_mask: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Log-probability of every continuation token given all before it.

    Args:
        model: a Hugging Face causal LM, single or composed.
        input_ids, attention_mask: (B, T), padded on either side.
        continuation_mask: (B, T), 1 at the tokens to score, never at a row's first token.

    Returns:
        Log-probabilities in nats, (B, T) float32 (float64 for a float64 model), 0 elsewhere; and
        whether each of these tokens is the most probable one, (B, T) bool, False elsewhere.

    Raises:
        CompositionError: a row's first token is to be scored.
    """
    wanted = continuation_mask.bool()
    if bool(wanted[:, 0].any()):
        raise CompositionError("the first token of a row is to be scored; nothing predicts it")
    before = wanted.roll(-1, dims=1)  # position t predicts token t + 1
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    components = model.components if isinstance(model, ComposedForCausalLM) else [model]
    hidden = [
        _last_hidden(component, input_ids, attention_mask, positions)[before]
        for component in components
    ]  # (N, H) each
    targets = input_ids[wanted]  # (N,)
    scored, greedy = [], []
    for start in range(0, len(targets), chunk):
        span = slice(start, start + chunk)
        parts = [_project(c, h[span]) for c, h in zip(components, hidden, strict=True)]
        logits = model.combine(parts) if isinstance(model, ComposedForCausalLM) else parts[0]
        chosen = logits.gather(-1, targets[span, None])[:, 0]
        scored.append(chosen - logits.logsumexp(-1))
        greedy.append(logits.argmax(-1) == targets[span])
    dtype = scored[0].dtype if scored else torch.float32
    logprobs = torch.zeros(input_ids.shape, dtype=dtype, device=input_ids.device)
    is_greedy = torch.zeros_like(wanted)
    if scored:
        logprobs[wanted] = torch.cat(scored)
        is_greedy[wanted] = torch.cat(greedy)
    return logprobs, is_greedy


def _last_hidden(
    model: Any, input_ids: Tensor, attention_mask: Tensor, positions: Tensor
) -> Tensor:
    output = model.get_decoder()(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions,
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def _project(model: Any, hidden: Tensor) -> Tensor:
    """Logits (N, V) in float32 or float64, after the softcap where the model has one."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)
