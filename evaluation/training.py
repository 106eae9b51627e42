"""Fine-tuning: one loop for letters models and for experts of a language model.

The loss is the mean negative log-likelihood over completion tokens (EOS among them); prompt and
padding have the label -100. A step's examples go through the model in parts that fit in memory,
and their gradients add up to the step's. AdamW, linear warm-up, cosine decay to a twentieth of the
peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evaluation.errors import InputError

IGNORED = -100  # the label of a token without a loss
FLOOR = 0.05  # of the peak learning rate, at the end of the cosine


SMALL = 5_000_000  # parameters
THREADS = torch.get_num_threads()


def suit_threads(model: Any) -> None:
    """One thread for a small model, all for others, from here on.

    Waking a second thread costs more than a small matrix product: a step of the letters model takes
    37 ms on one thread and 100 ms on two that have to share their cores with anything else.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    torch.set_num_threads(1 if count < SMALL else THREADS)


class Batch(NamedTuple):
    """Ids, attention mask and labels, (B, T) each: what goes through the model at once."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def fit(
    model: Any,
    batches: Iterable[Sequence[Batch]],
    *,
    steps: int,
    learning_rate: float,
    warmup: int,
    shifted: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Trains the parameters that require gradients, in place.

    Args:
        batches: the parts of one step after the other.
        steps: optimiser steps.
        learning_rate: the peak of AdamW's.
        shifted: position t is taught token t + 1, as language models are; else label t, as the
            position-aligned taggers are.

    Returns:
        The loss of every step, nats a token.

    Raises:
        InputError: the loss is not finite, or the batches end too early.
    """
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _schedule(step, steps, warmup)
    )
    losses: list[float] = []
    suit_threads(model)
    model.train()
    for parts in batches:
        taught = [part.labels[:, 1:] if shifted else part.labels for part in parts]
        tokens = sum(int((labels != IGNORED).sum()) for labels in taught)
        optimizer.zero_grad()
        losses.append(0.0)
        for part, labels in zip(parts, taught, strict=True):
            logits = model(input_ids=part.ids, attention_mask=part.mask).logits
            logits = logits[:, : labels.shape[1]]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(),
                labels.flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            loss = loss / tokens
            losses[-1] += loss.item()
            torch.autograd.backward(loss)
        if not math.isfinite(losses[-1]):
            raise InputError(
                f"the loss is {losses[-1]} at step {len(losses)}; use a smaller learning_rate or "
                "dtype float32"
            )
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(len(losses), steps)
        if len(losses) == steps:
            break
    model.eval()
    if len(losses) < steps:
        raise InputError(f"the data end after {len(losses)} of {steps} steps")
    return losses


def _schedule(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(steps - warmup, 1)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
