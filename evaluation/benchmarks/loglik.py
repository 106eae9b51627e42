"""How probable is the reference solution? A sharper measure than accuracy for small models.

    nats_per_token = - log p(solution | problem) / tokens        lower is better

Teacher-forced, problem and solution tokenised apart, no EOS, the solution cut to its first 600
tokens. An item is a row, so models are compared in pairs. A model that solves next to nothing
still shows what it knows here.

    GSM8K       `Question: {question}\\nAnswer:`        ` {answer}`
    MATH        `Problem:\\n{problem}\\n\\nSolution:`   ` {solution}`
    code        the problem's prompt, unstripped       its canonical solution

The leaderboard's mean is over items, each the same weight. The mean over all tokens, which long
solutions dominate, stands in `metrics.csv` as `nats_per_token_pooled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evaluation.benchmarks.contract import (
    Benchmark,
    BenchmarkEntry,
    Item,
    Output,
    Score,
    Settings,
)
from evaluation.benchmarks.lm_eval_adapter import ID
from evaluation.benchmarks.lm_eval_local import gsm8k_rows, math_rows
from evaluation.benchmarks.local_data import file_faults, rows_digest
from evaluation.errors import InputError

MAX_TOKENS = 600

Pair = tuple[str, str, str]
"""(item id, problem, reference solution)"""


class LogLikelihood:
    """Reference solutions to score; see `Benchmark`."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = list(pairs)
        digest = rows_digest([{"pair": list(pair)} for pair in self._pairs])
        self.version = f"{MAX_TOKENS} tokens, data {digest}"

    def items(self, limit: int | None) -> Sequence[Item]:
        return [
            Item(name, (Score(problem, solution, separate=True, max_tokens=MAX_TOKENS),))
            for name, problem, solution in self._pairs[:limit]
        ]

    def score(
        self, items: Sequence[Item], outputs: Sequence[Sequence[Output]]
    ) -> list[dict[str, float]]:
        scores = []
        for item, (output,) in zip(items, outputs, strict=True):
            if output.tokens == 0:
                raise InputError(f"{item.id}: the reference solution has no tokens")
            scores.append(
                {"nats_per_token": -output.logprob / output.tokens, "nats": -output.logprob}
            )
        return scores


def _gsm8k(settings: Settings) -> list[Pair]:
    return [
        (f"gsm8k/{number}", f"Question: {row['question']}\nAnswer:", f" {row['answer']}")
        for number, row in enumerate(gsm8k_rows(settings))
    ]


def _math(settings: Settings) -> list[Pair]:
    return [
        (row[ID], f"Problem:\n{row['problem']}\n\nSolution:", f" {row['solution']}")
        for row in math_rows(settings)
    ]


def _code(benchmark: str) -> Callable[[Settings], list[Pair]]:
    def pairs(settings: Settings) -> list[Pair]:
        from evaluation.sandbox.problems import load_problems

        found = load_problems(benchmark, settings.data_dir).by_id.values()
        return [(p.task_id, p.prompt, p.reference.removeprefix(p.prompt)) for p in found]

    return pairs


def _entry(
    what: str, files: Sequence[str], pairs: Callable[[Settings], list[Pair]]
) -> BenchmarkEntry:
    def open_benchmark(settings: Settings) -> Benchmark:
        return LogLikelihood(pairs(settings))

    return BenchmarkEntry(
        summary=f"log-likelihood of the reference solutions of {what}, nats a token",
        metric="nats_per_token",
        binary=False,
        higher_is_better=False,
        form="causal",
        faults=lambda settings: file_faults(settings, *files),
        open=open_benchmark,
    )


GSM8K_LOGLIK = _entry("GSM8K", ["gsm8k_test.jsonl"], _gsm8k)
MATH_LOGLIK = _entry("MATH", ["math_test.jsonl"], _math)
HUMANEVAL_PLUS_LOGLIK = _entry(
    "HumanEval+", ["HumanEvalPlus.jsonl.gz", "HumanEvalPlus.jsonl"], _code("humaneval_plus")
)
MBPP_PLUS_LOGLIK = _entry("MBPP+", ["MbppPlus.jsonl.gz", "MbppPlus.jsonl"], _code("mbpp_plus"))
