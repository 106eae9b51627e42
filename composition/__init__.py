"""Composition: many models' next-token distributions as one, in probability space.

    from composition import RULES, compose_logits, ComposedForCausalLM

A rule is one file in `composition.rules`; gate and EOS rule combine with any of them.
"""

from __future__ import annotations

from composition.cache import can_join, join_rows, new_cache, trim_left
from composition.combination import Combination, compose_logits, parse_combination
from composition.divergence import Divergences, Explanation, divergences, explain, log_partition
from composition.errors import CompositionError
from composition.model import ComposedForCausalLM
from composition.packed import pack
from composition.prefix import Prefix, behind, fill_prefix
from composition.rules import RULES
from composition.scoring import score_continuations
from composition.speculation import (
    Acceptance,
    Sampling,
    Speculated,
    best_gamma,
    speculate,
    speculative_round,
    task_arithmetic_drafter,
)
from composition.vocabulary import check_vocabularies

__all__ = [
    "RULES",
    "Acceptance",
    "Combination",
    "ComposedForCausalLM",
    "CompositionError",
    "Divergences",
    "Explanation",
    "Prefix",
    "Sampling",
    "Speculated",
    "behind",
    "best_gamma",
    "can_join",
    "check_vocabularies",
    "compose_logits",
    "divergences",
    "explain",
    "fill_prefix",
    "join_rows",
    "log_partition",
    "new_cache",
    "pack",
    "parse_combination",
    "score_continuations",
    "speculate",
    "speculative_round",
    "task_arithmetic_drafter",
    "trim_left",
]
