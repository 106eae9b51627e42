"""What a run spends beside models and grader: examples/smollm2.yaml, the first items of each.

    python benchmarks/harness_overhead.py DATA EXPERTS [--limit 16] [--new 128]

Every forward pass and every call of a benchmark's `score` is timed; the rest of the time between
the plan and the last answer, and what comes before and after it, is told by part: loading models
and merging, decoding's own bookkeeping with tokenizing and storing, reading data, writing results.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiment_speed import written

import evaluation.run as run_module
from evaluation.cli import keep_freed_memory
from evaluation.experiment import load_experiment

spent: dict[str, float] = defaultdict(float)


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its time added to a part's; calls within calls count once."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, started = sum(spent.values()), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            inner = sum(spent.values()) - before
            spent[part] += time.perf_counter() - started - inner

    return call


class Timed:
    """A benchmark whose scores are timed."""

    def __init__(self, benchmark: Any) -> None:
        self.version, self.items = benchmark.version, benchmark.items
        self.score = timed("scores and grader", benchmark.score)


def instrument() -> None:
    """Puts the clock into the run."""
    load, opened = run_module.load, run_module._open_bench

    def loaded(*args: Any, **kwargs: Any) -> Any:
        ready = load(*args, **kwargs)
        ready.model.forward = timed("forward passes", ready.model.forward)
        return ready

    def bench(*args: Any, **kwargs: Any) -> Any:
        found = opened(*args, **kwargs)
        return found._replace(benchmark=Timed(found.benchmark))

    run_module.load = timed("loading models", loaded)
    run_module._open_bench = timed("reading benchmarks", bench)
    run_module._make_merges = timed("merging", run_module._make_merges)
    run_module._families = timed("opening models", run_module._families)
    run_module._answer_all = timed("the rest of answering", run_module._answer_all)
    run_module.write_report = timed("results", run_module.write_report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("experts", type=Path)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        loaded = load_experiment(written(arguments, Path(name)), arguments.data)
        instrument()
        started = time.perf_counter()
        run_module.run_experiment(
            loaded, Path(name) / "out", limit=arguments.limit, data_dir=arguments.data
        )
        whole = time.perf_counter() - started
    spent["everything else"] = whole - sum(spent.values())
    print(f"\n| part | seconds | of {whole:.0f} |\n|---|---:|---:|")
    for part, seconds in sorted(spent.items(), key=lambda found: -found[1]):
        print(f"| {part} | {seconds:.1f} | {seconds / whole:.1%} |")
    own = spent["the rest of answering"] + spent["results"] + spent["everything else"]
    print(f"\nThe harness itself (rest of answering, results, everything else): {own / whole:.1%}")


if __name__ == "__main__":
    main()
