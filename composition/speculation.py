"""Speculative decoding of a composition: a cheap model drafts, the composition judges many at once.

    draft   gamma tokens by the drafter, one forward each
    judge   one forward of the composition over all of them; a row keeps those that are right and
            gets one more token from the composition itself

Greedy decoding gives the composition's own tokens. Sampling draws from the composition's own
distribution: a drafted token y stays with probability min(1, p(y) / q(y)); where it does not one is
drawn from (p - q)+ (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

Rows of a batch keep different numbers of tokens. After every round the caches of rows that kept
fewer are moved to the right, so that all rows end in the same place: left padding grows, and what
every row has of it is cut. So positions, masks and sliding windows are those of ordinary batches.

A good drafter is the task-arithmetic merge of the components, the composition to first order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from composition.cache import new_cache
from composition.errors import CompositionError
from composition.model import ComposedForCausalLM
from composition.packed import PackedLinear
from composition.stacked import Stacked, StackedLinear

MOST = 16  # tokens drafted at a time
PRIOR = (4.0, 5.0)  # accepted, judged: before anything is known, four of five


class Speculated(NamedTuple):
    """The texts, and what they took."""

    tokens: list[list[int]]  # of each row, an EOS included where it ended with one
    rounds: int
    drafted: int
    accepted: int
    forwards: int  # of single models: those of the drafter, and (k + 1) a round
    per_token: float  # forwards a token, summed over rounds and averaged over rows


class Sampling(NamedTuple):
    """How tokens are drawn; greedy where it is None."""

    temperature: float = 1.0
    generator: torch.Generator | None = None


class _Row:
    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens: list[int] = []

    def take(self, tokens: Sequence[int], ends: frozenset[int], most: int) -> bool:
        """Adds tokens up to the text's end; whether it has ended."""
        for token in tokens:
            self.tokens.append(token)
            if token in ends or len(self.tokens) >= most:
                return True
        return False


@torch.inference_mode()
def speculate(
    model: ComposedForCausalLM,
    drafter: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    gamma: int | None = None,
) -> Speculated:
    """Generates with a drafter.

    Args:
        drafter: a causal LM of the same vocabulary, such as `task_arithmetic_drafter(model)`, or a
            component.
        input_ids, attention_mask: (B, T), padded on the left.
        max_new_tokens: of each row.
        sampling: None for greedy decoding.
        gamma: tokens drafted at a time; adapted to what is accepted if left out.

    Raises:
        CompositionError: `gamma` or `max_new_tokens` below 1, or another vocabulary.
    """
    _check(model, drafter, max_new_tokens, gamma)
    ends = frozenset(model.eos_ids)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = [_Row(index) for index in range(len(input_ids))]
    everyone = list(rows)
    caches = [model.new_cache(), new_cache(drafter.config.get_text_config())]
    for cache in caches:
        cache.activate_past_recording()
    logits = _step(model, input_ids, mask, caches[0])
    _step(drafter, input_ids, mask, caches[1])
    for cache in caches:
        cache.crop(0)
    pending = _draw(_probabilities(logits[:, -1:], sampling), sampling)[:, 0]  # (B,)
    rounds = drafted = accepted = steps = tokens_by_rounds = 0
    rows, pending, mask = _leave(
        rows, [[token] for token in pending.tolist()], pending, mask, caches, ends, max_new_tokens
    )
    forwards_of = (partial(_step, model), partial(_step, drafter))
    acceptance = Acceptance()
    while rows:
        size = gamma or best_gamma(acceptance.rate, model.parts.count)
        size = min(size, max(max_new_tokens - len(row.tokens) for row in rows))
        round_ = speculative_round(forwards_of, caches, pending, mask, size, sampling)
        acceptance = acceptance.after(round_)
        rounds, steps = rounds + 1, steps + size + 1
        drafted, accepted = drafted + size * len(rows), accepted + int(round_.kept.sum())
        tokens_by_rounds += len(rows)
        rows, pending, mask = _leave(
            rows, round_.tokens, round_.pending, round_.mask, caches, ends, max_new_tokens
        )
    found = [row.tokens for row in everyone]
    forwards = steps + rounds * model.parts.count
    made = sum(len(tokens) - 1 for tokens in found)  # the first comes with the prompt
    share = tokens_by_rounds * forwards / rounds if rounds else 0.0
    return Speculated(found, rounds, drafted, accepted, forwards, share / made if made else 0.0)


Forward = Callable[[Tensor, Tensor, Any], Tensor]
"""(ids (B, T), mask of all so far, cache) -> logits (B, T, V)."""


class Round(NamedTuple):
    """What one round gave."""

    tokens: list[list[int]]  # of each row: what it kept of the guesses, and one more
    kept: Tensor  # (B,) guesses that were right
    size: int  # tokens that were drafted for each row
    pending: Tensor  # (B,) the last token of each, which no cache holds yet
    mask: Tensor  # (B, T) of all that the caches hold now


class Acceptance(NamedTuple):
    """How often guesses have been right so far."""

    accepted: float = PRIOR[0]
    judged: float = PRIOR[1]

    @property
    def rate(self) -> float:
        return self.accepted / self.judged

    def after(self, round_: Round) -> Acceptance:
        """With one more round counted; of what a row dropped, its first guess was judged."""
        right = int(round_.kept.sum())
        return Acceptance(
            self.accepted + right, self.judged + right + int((round_.kept < round_.size).sum())
        )


def speculative_round(
    forwards: tuple[Forward, Forward],
    caches: Sequence[Any],
    pending: Tensor,
    mask: Tensor,
    size: int,
    sampling: Sampling | None = None,
) -> Round:
    """Drafts `size` tokens for every row and judges them.

    Args:
        forwards: of the judging model and of the drafter.
        caches: theirs; both hold what the mask stands for, and are moved on.
        pending: (B,) the last token of each row, which no cache holds yet.
        mask: (B, T), padded on the left.
    """
    guesses, q, mask = _draft(forwards[1], pending, mask, caches[1], size, sampling)
    logits = forwards[0](torch.cat([pending[:, None], guesses], dim=1), mask, caches[0])
    kept, pending = _judge(logits, guesses, q, sampling)
    mask = _realign(caches, mask, size - kept)
    tokens = [
        [*guess[:count], token]
        for guess, count, token in zip(
            guesses.tolist(), kept.tolist(), pending.tolist(), strict=True
        )
    ]
    return Round(tokens, kept, size, pending, mask)


def best_gamma(rate: float, components: int) -> int:
    """How many tokens to draft: fewest forwards a token, where each is accepted at this rate.

    A round costs gamma + 1 forwards of the drafter and one of every component, and gives
    (1 - rate^(gamma + 1)) / (1 - rate) tokens.
    """

    def cost(gamma: int) -> float:
        tokens = sum(rate**place for place in range(gamma + 1))
        return (gamma + 1 + components) / tokens

    return min(range(1, MOST + 1), key=cost)


def task_arithmetic_drafter(model: ComposedForCausalLM) -> Any:
    """base + Σ w_i (expert_i - base) in the weights: the composition to first order, as a model.

    Raises:
        CompositionError: the components' weights are packed already.
    """
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise CompositionError("the weights are packed; make the drafter before `pack`")
    weights = model.combination.weights or ()
    if isinstance(model.parts, Stacked):
        drafter = deepcopy(model.parts.model)
        for name, module in list(drafter.named_modules()):
            if isinstance(module, StackedLinear):
                parent, _, attribute = name.rpartition(".")
                setattr(drafter.get_submodule(parent), attribute, module.merged(weights))
        return drafter.eval()
    base, *experts = model.parts.components
    drafter = deepcopy(base)
    with torch.no_grad():
        own = dict(drafter.named_parameters())
        for expert, weight in zip(experts, weights, strict=True):
            theirs, ours = dict(expert.named_parameters()), dict(base.named_parameters())
            for name, parameter in own.items():
                parameter.add_(theirs[name].to(parameter) - ours[name], alpha=weight)
    return drafter.eval()


def _check(
    model: ComposedForCausalLM, drafter: Any, max_new_tokens: int, gamma: int | None
) -> None:
    ours = model.config.get_text_config().vocab_size
    theirs = drafter.config.get_text_config().vocab_size
    faults = []
    if ours != theirs:
        faults.append(f"the drafter has {theirs} tokens where the composition has {ours}")
    if max_new_tokens < 1:
        faults.append(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    if gamma is not None and gamma < 1:
        faults.append(f"gamma is {gamma}; expected at least 1")
    if faults:
        raise CompositionError("\n".join(faults))


def _step(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Logits (B, T, V) of the next `ids`, which the mask's last columns stand for."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
    )
    logits: Tensor = output.logits
    return logits


def _draft(
    forward: Forward,
    pending: Tensor,
    mask: Tensor,
    cache: Any,
    size: int,
    sampling: Sampling | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Guesses (B, gamma), their distributions (B, gamma, V), and the mask with all of them."""
    guesses, q = [pending], []
    for place in range(size + 1):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = forward(guesses[-1][:, None], mask, cache)
        if place < size:  # the last guess only goes into the cache
            q.append(_probabilities(logits, sampling))
            guesses.append(_draw(q[-1], sampling)[:, 0])
    return torch.stack(guesses[1:], dim=1), torch.cat(q, dim=1), mask


def _judge(
    logits: Tensor, guesses: Tensor, q: Tensor, sampling: Sampling | None
) -> tuple[Tensor, Tensor]:
    """How many guesses each row keeps (B,), and the token that comes after them (B,)."""
    size = guesses.shape[1]
    p = _probabilities(logits, sampling)  # (B, gamma + 1, V)
    rows = torch.arange(len(guesses), device=guesses.device)
    if sampling is None:
        chosen = p.argmax(-1)
        kept = (chosen[:, :size] == guesses).long().cumprod(-1).sum(-1)
        return kept, chosen[rows, kept]
    here = p[:, :size].gather(-1, guesses[..., None])[..., 0]
    there = q.gather(-1, guesses[..., None])[..., 0]
    coins = torch.rand(guesses.shape, generator=sampling.generator, device=guesses.device)
    kept = (coins * there < here).long().cumprod(-1).sum(-1)
    after = p[rows, kept]  # (B, V)
    rejected = kept < size
    left = (after - q[rows, kept.clamp(max=size - 1)]).clamp(min=0)
    usable = rejected & (left.sum(-1) > 0)
    after = torch.where(usable[:, None], left, after)
    return kept, _draw(after[:, None], sampling)[:, 0]


def _probabilities(logits: Tensor, sampling: Sampling | None) -> Tensor:
    """What is drawn from; where nothing is drawn, what is compared."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if sampling is None else (logits / sampling.temperature).softmax(-1)


def _draw(weights: Tensor, sampling: Sampling | None) -> Tensor:
    """(B, T, V) -> (B, T)."""
    if sampling is None:
        return weights.argmax(-1)
    flat = weights.flatten(0, 1)
    drawn = torch.multinomial(flat, 1, generator=sampling.generator)
    return drawn.view(weights.shape[:2])


def _leave(
    rows: list[_Row],
    taken: Sequence[Sequence[int]],
    pending: Tensor,
    mask: Tensor,
    caches: Sequence[Any],
    ends: frozenset[int],
    most: int,
) -> tuple[list[_Row], Tensor, Tensor]:
    """Gives every row its tokens; those whose text has ended leave the batch."""
    staying = [
        place
        for place, (row, tokens) in enumerate(zip(rows, taken, strict=True))
        if not row.take(tokens, ends, most)
    ]
    if len(staying) == len(rows) or not staying:
        return [rows[place] for place in staying], pending, mask
    chosen = torch.tensor(staying, device=mask.device)
    for cache in caches:
        cache.batch_select_indices(chosen)
    return [rows[place] for place in staying], pending[chosen], mask[chosen]


def _realign(caches: Sequence[Any], mask: Tensor, shifts: Tensor) -> Tensor:
    """Moves each row so far to the right that its last kept token is the last column; cuts the
    padding that all rows have. Returns the new mask."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    mask = mask.gather(1, (columns - shifts[:, None]).clamp(min=0))
    mask = torch.where(columns < shifts[:, None], 0, mask)
    trim = int((mask.cumsum(-1) == 0).sum(-1).min())
    for cache in caches:
        for layer in cache.layers:
            _realign_layer(layer, shifts.repeat(getattr(layer, "blocks", 1)), trim)
    return mask[:, trim:]


def _realign_layer(layer: Any, shifts: Tensor, trim: int) -> None:
    keys, values = (_shifted(states, shifts) for states in (layer.keys, layer.values))
    first = trim
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length -= trim
        first = keys.shape[2] - min(layer.sliding_window - 1, layer.cumulative_length)
    layer.keys, layer.values = keys[:, :, first:], values[:, :, first:]


def _shifted(states: Tensor, shifts: Tensor) -> Tensor:
    """(rows, heads, T, D), each row moved to the right; what comes in from the left is masked."""
    if not bool(shifts.any()):
        return states
    shifts = shifts.to(states.device)
    columns = torch.arange(states.shape[2], device=states.device)
    index = (columns - shifts[:, None]).clamp(min=0)[:, None, :, None]
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
