"""A combination: which rule with which weights and options makes one model of many."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from composition.eos import ODDS, EosRule, canonical, with_odds
from composition.errors import CompositionError
from composition.gate import Gating
from composition.gate import gate as apply_gate
from composition.plausible import implausible
from composition.rules import RULES

EXCLUDED = -1e30  # stands for -inf while composing: probability 0, and differences are 0


class Combination(BaseModel):
    """Rule, weights and options; the only copy of their defaults.

    Args:
        rule: a name in `RULES`.
        weights: one an expert; None for the rule's own default.
        gate: nats; an expert counts only where KL(p_i ‖ p_b) exceeds it. None for no gate.
        gating: `hard`, or `soft` by the share KL / (KL + gate).
        eos: how the log-odds of stopping compose, see `composition.eos`.
        plausible: in (0, 1]; tokens that no component gives this share of its largest probability
            get none. None for no mask.
        temperatures: what each component's logits are divided by, the base's first; None for 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str = "product"
    weights: tuple[float, ...] | None = None
    gate: float | None = Field(default=None, ge=0)
    gating: Gating = "hard"
    eos: EosRule = "sum"
    plausible: float | None = Field(default=None, gt=0, le=1)
    temperatures: tuple[float, ...] | None = None


def parse_combination(given: Mapping[str, Any], experts: int) -> Combination:
    """A combination for so many experts, its weights filled in.

    Raises:
        CompositionError: with a line for every fault; unknown keys and rules name the nearest.
    """
    faults: list[str] = []
    known = list(Combination.model_fields)
    for key in given:
        if key not in known:
            faults.append(f"{key}: unknown key{_nearest(str(key), known)}")
    rule = given.get("rule", Combination.model_fields["rule"].default)
    if isinstance(rule, str) and rule not in RULES:
        faults.append(f"unknown rule {rule!r}{_nearest(rule, list(RULES))}")
    try:
        chosen = Combination.model_validate({k: v for k, v in given.items() if k in known})
    except ValidationError as error:
        faults += [
            f"{'.'.join(map(str, fault['loc']))}: found {fault['input']!r}; {fault['msg']}"
            for fault in error.errors()
        ]
        raise CompositionError("\n".join(faults)) from None
    if chosen.rule in RULES and chosen.weights is None and experts:
        weight = RULES[chosen.rule].default_weight(experts)
        chosen = chosen.model_copy(update={"weights": (weight,) * experts})
    weights = chosen.weights or ()
    if len(weights) != experts and chosen.rule in RULES:
        faults.append(f"{len(weights)} weights for {experts} experts; expected one an expert")
    if not all(map(math.isfinite, weights)):
        faults.append(f"the weights are {list(weights)}; expected finite numbers")
    temperatures = chosen.temperatures
    if temperatures is not None and (
        len(temperatures) != 1 + experts or not all(0 < one < math.inf for one in temperatures)
    ):
        faults.append(
            f"the temperatures are {list(temperatures)}; expected {1 + experts} numbers above 0, "
            "the base's first"
        )
    if chosen.gating == "soft" and chosen.gate is None:
        faults.append("gating is soft, but there is no gate; expected nats under the key gate")
    if faults:
        raise CompositionError("\n".join(faults))
    return chosen


def compose_logits(
    base_logits: Tensor,
    expert_logits: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    rule: str = "product",
    *,
    eos_ids: Sequence[int] = (),
    names: Sequence[str] | None = None,
    **options: Any,
) -> Tensor:
    """The composition's logits at every prefix, unnormalised.

    Args:
        base_logits: (..., V), any floating type.
        expert_logits: one tensor of the same shape an expert.
        weights, rule: see `Combination`.
        eos_ids: the ids that end a text, needed for every `eos` but "sum".
        names: the experts' names, for errors.
        options: the other fields of `Combination`.

    Returns:
        (..., V) in float32, or float64 where the base's logits are float64.

    Raises:
        CompositionError: shapes differ, a weight too many or too few, NaN in a component.
    """
    chosen = parse_combination({"rule": rule, "weights": weights, **options}, len(expert_logits))
    called = ["the base", *(names or [f"expert {i}" for i in range(len(expert_logits))])]
    for name, logits in zip(called, [base_logits, *expert_logits], strict=True):
        if logits.shape != base_logits.shape:
            raise CompositionError(
                f"the logits of {name} have shape {tuple(logits.shape)} where the base's have "
                f"{tuple(base_logits.shape)}; expected models of one vocabulary on one input"
            )
        if bool(logits.isnan().any()):
            raise CompositionError(f"the logits of {name} hold NaN; look at its weights and dtype")
    return combine(chosen, base_logits, expert_logits, eos_ids)


def combine(
    chosen: Combination, base: Tensor, experts: Sequence[Tensor], eos_ids: Sequence[int]
) -> Tensor:
    """`compose_logits` without its checks, for the inner loop."""
    dtype = torch.promote_types(base.dtype, torch.float32)
    base, experts = base.to(dtype), [expert.to(dtype) for expert in experts]
    # A token that a component excludes (-inf) stays excluded; -inf minus -inf would be NaN.
    least = torch.stack([logits.amin() for logits in (base, *experts)])
    some = bool((least == -torch.inf).any())
    if some:
        excluded = torch.stack([logits == -torch.inf for logits in (base, *experts)]).any(0)
        base, *experts = (logits.masked_fill(excluded, EXCLUDED) for logits in (base, *experts))
    weights = chosen.weights or ()
    if chosen.temperatures is not None:
        base, *experts = (
            logits / one for logits, one in zip((base, *experts), chosen.temperatures, strict=True)
        )
    if chosen.eos != "sum" and not eos_ids:
        raise CompositionError(
            f"eos: {chosen.eos} needs the ids that end a text, and none are known"
        )
    if chosen.eos == "canonical":
        base, *experts = (canonical(logits, eos_ids, EXCLUDED) for logits in (base, *experts))
    taking_part = list(experts)
    if chosen.gate is not None:
        taking_part = apply_gate(base, experts, chosen.gate, chosen.gating)
    composed = RULES[chosen.rule].compose(base, taking_part, weights)
    if some:
        composed = composed.masked_fill(excluded, -torch.inf)
    if chosen.eos in ODDS:
        composed = with_odds(chosen.eos, composed, base, taking_part, weights, eos_ids)
    if chosen.eos == "canonical":
        composed[..., sorted(eos_ids)[1:]] = -torch.inf
    if chosen.plausible is not None:
        mask = implausible((base, *experts), chosen.plausible)
        composed = composed.masked_fill(mask, -torch.inf)
    return composed


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{guess} There are: {', '.join(known)}"
