"""The registry of benchmarks."""

from __future__ import annotations

from evaluation.benchmarks.code import HUMANEVAL_PLUS, MBPP_PLUS
from evaluation.benchmarks.contract import BenchmarkEntry
from evaluation.benchmarks.letters import LETTERS, LETTERS_ALIGNED, LETTERS_LOGLIK, LETTERS_LONG
from evaluation.benchmarks.lm_eval_tasks import GSM8K, MATH
from evaluation.benchmarks.loglik import (
    GSM8K_LOGLIK,
    HUMANEVAL_PLUS_LOGLIK,
    MATH_LOGLIK,
    MBPP_PLUS_LOGLIK,
)

BENCHMARKS: dict[str, BenchmarkEntry] = {
    "gsm8k": GSM8K,
    "math": MATH,
    "humaneval_plus": HUMANEVAL_PLUS,
    "mbpp_plus": MBPP_PLUS,
    "letters": LETTERS,
    "letters_long": LETTERS_LONG,
    "letters_aligned": LETTERS_ALIGNED,
    "letters_loglik": LETTERS_LOGLIK,
    "gsm8k_loglik": GSM8K_LOGLIK,
    "math_loglik": MATH_LOGLIK,
    "humaneval_plus_loglik": HUMANEVAL_PLUS_LOGLIK,
    "mbpp_plus_loglik": MBPP_PLUS_LOGLIK,
}

__all__ = ["BENCHMARKS"]
