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
from composition.prefix import Prefix, behind
from composition.sequential import Sequential

CHUNK = {"cpu": 16, "other": 512}
"""Positions projected at a time: with a vocabulary of 49 thousand, 3 MB a component on a CPU."""


def score_continuations(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    continuation_mask: Tensor,
    chunk: int | None = None,
    prefix: Prefix | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of every continuation token given all before it.

    Args:
        model: a Hugging Face causal LM, single or composed.
        input_ids, attention_mask: (B, T), padded on either side.
        continuation_mask: (B, T), 1 at the tokens to score, never at a row's first token.
        chunk: positions projected at a time; None for `CHUNK`.
        prefix: a beginning of all rows that these tokens stand behind, from `fill_prefix`.

    Returns:
        Log-probabilities in nats, (B, T) float32 (float64 for a float64 model), 0 elsewhere; and
        whether each of these tokens is the most probable one, (B, T) bool, False elsewhere.

    Raises:
        CompositionError: a row's first token is to be scored, or a model's logits are more than a
            projection of its hidden states.
    """
    wanted = continuation_mask.bool()
    if bool(wanted[:, 0].any()):
        raise CompositionError("the first token of a row is to be scored; nothing predicts it")
    before = wanted.roll(-1, dims=1)  # position t predicts token t + 1
    before_all = 0 if prefix is None else prefix.length
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0) + before_all
    parts = model.parts if isinstance(model, ComposedForCausalLM) else Sequential([model])
    _check_heads(model, parts)
    fed = slice(0, max(1, input_ids.shape[1] - 1))  # nothing is read off the last position
    before = before[:, fed]
    inputs = {
        "input_ids": input_ids[:, fed],
        "attention_mask": attention_mask[:, fed],
        "position_ids": positions[:, fed],
    }
    with behind(model, prefix):
        hidden = [
            parts.hidden(index, **inputs)[before.to(device)]
            for index, device in enumerate(parts.devices())
        ]  # (N, H) each
    targets = input_ids[wanted]  # (N,)
    scored, greedy = [], []
    chunk = chunk or CHUNK.get(input_ids.device.type, CHUNK["other"])
    for start in range(0, len(targets), chunk):
        span = slice(start, start + chunk)
        each = [parts.project(index, states[span]) for index, states in enumerate(hidden)]
        logits = model.combine(each) if isinstance(model, ComposedForCausalLM) else each[0]
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


@torch.inference_mode()
def _check_heads(model: Any, parts: Any) -> None:
    """Are a model's logits what we make of its hidden states? Asked once, of one token.

    Some families scale their logits after the projection; those that `project` does not know must
    not be scored wrongly.
    """
    if getattr(model, "_mergescope_heads_checked", False):
        return
    ids = torch.ones(1, 1, dtype=torch.long, device=parts.base.device)
    wholes = parts(None, input_ids=ids, use_cache=False)
    for index, (whole, device) in enumerate(zip(wholes, parts.devices(), strict=True)):
        lean = parts.project(index, parts.hidden(index, input_ids=ids.to(device)))
        if not torch.allclose(lean.float(), whole.float(), rtol=0.02, atol=1e-3):
            kind = parts.base.config.get_text_config().model_type
            raise CompositionError(
                f"the logits of a {kind} model are more than a projection of its hidden states; "
                "its log-likelihoods cannot be computed without its whole forward pass"
            )
    model._mergescope_heads_checked = True
