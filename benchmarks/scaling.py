"""How the time of a run falls with the number of GPUs: a simulation from measured cell times.

    python benchmarks/scaling.py [LEADERBOARD.csv] [--sizes gsm8k=1319 ...] [--out docs/scaling.svg]

LEADERBOARD.csv is a finished run's; without it `docs/scaling.csv`, which holds the columns that are
used of one. The seconds that an item of a cell took there are taken for every item of the whole
benchmark. The shards and their queue are those of `evaluation.sharding`; a worker starts, loads a
model whenever it takes a shard of another one than it holds, and answers one shard after the other.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from evaluation.sharding import SHARD, Queue, Shard
from results.figures import INK, LINES, STYLE

MEASURED = Path(__file__).parents[1] / "docs" / "scaling.csv"
SIZES = {"gsm8k": 1319, "math": 5000, "humaneval_plus": 164, "mbpp_plus": 378}
WORKERS = (1, 2, 4, 8, 16, 32, 64)
START = 15.0  # seconds until a worker is ready
LOAD = 30.0  # seconds to load a model
FASTER = 50.0  # what if all cells were so much faster?
WHOLE = 10**9  # items of a shard: cells are not cut


class Simulated(NamedTuple):
    """What a run took."""

    seconds: float
    busy: float  # seconds of all workers that were spent on answers
    loads: int


def simulate(
    shards: Sequence[Shard], seconds: Mapping[int, float], workers: int, start: float, load: float
) -> Simulated:
    """Runs shards on so many workers.

    Args:
        seconds: what an item takes, by the shard's cell.
        start: seconds until a worker takes its first shard.
        load: seconds to load a model.
    """
    queue = Queue(shards)
    free = [(start, number) for number in range(workers)]  # a heap: when each worker is idle
    holding: dict[int, Any] = {}
    at_work: dict[int, Any] = {}
    busy, loads, end = 0.0, 0, 0.0
    while free:
        now, worker = heapq.heappop(free)
        at_work.pop(worker, None)
        shard = queue.take(holding.get(worker), at_work.values())
        if shard is None:
            end = max(end, now)
            continue
        needed = len(shard.places) * seconds[shard.cell]
        busy += needed
        if holding.get(worker) != shard.model:
            needed += load
            loads += 1
        holding[worker] = at_work[worker] = shard.model
        heapq.heappush(free, (now + needed, worker))
    return Simulated(end, busy, loads)


def read_cells(path: Path, sizes: Mapping[str, int]) -> pd.DataFrame:
    """A row a cell: model, components, items, seconds an item; models stay in their order."""
    board = pd.read_csv(path)
    cells = board[board["benchmark"].isin(sizes)].copy()
    experts = board.loc[board["kind"] == "expert", "model"].nunique()
    cells["components"] = [1 + experts * (kind == "composition") for kind in cells["kind"]]
    cells["items"] = cells["benchmark"].map(sizes)
    cells["each"] = cells["seconds"] / cells["n"]
    return cells.reset_index(drop=True)


def shards_of(cells: pd.DataFrame, size: int) -> list[Shard]:
    """All items of all cells, cut as a run cuts them."""
    shards = []
    for number, cell in cells.iterrows():
        for first in range(0, cell["items"], size):
            places = list(range(first, min(first + size, cell["items"])))
            shards.append(
                Shard(cell["model"], number, places, float(len(places) * cell["components"]))
            )
    return shards


def draw(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Time against workers, both logarithmic, as shares of the time with one."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        axes = figure.subplots()
        ideal = [1 / count for count in WORKERS]
        axes.plot(WORKERS, ideal, color=INK, linestyle=(0, (4, 3)), linewidth=1, label="ideal")
        for (name, times), colour, marker in zip(curves.items(), LINES, "os^D", strict=False):
            share = [seconds / times[0] for seconds in times]
            axes.plot(WORKERS, share, color=colour, marker=marker, markersize=5, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(WORKERS, [str(count) for count in WORKERS])
        axes.set_yticks(ideal, [f"1/{count}" if count > 1 else "1" for count in WORKERS])
        axes.minorticks_off()
        axes.set_xlabel("GPUs, one worker each (simulated)")
        axes.set_ylabel("time, as a share of that with one")
        axes.legend()
        without = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(path, format="svg", transparent=True, metadata=without)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("leaderboard", type=Path, nargs="?", default=MEASURED)
    parser.add_argument("--sizes", nargs="+", metavar="BENCHMARK=ITEMS", default=[])
    parser.add_argument("--out", type=Path, default=MEASURED.with_suffix(".svg"))
    given = parser.parse_args()
    sizes = {name: int(size) for name, size in (pair.split("=") for pair in given.sizes)} or SIZES
    cells = read_cells(given.leaderboard, sizes)
    seconds = cells["each"].to_dict()
    faster = {cell: value / FASTER for cell, value in seconds.items()}
    cases = {
        f"shards of {SHARD}": (SHARD, seconds),
        f"shards of {SHARD}, cells {FASTER:.0f} times as fast": (SHARD, faster),
        "whole cells": (WHOLE, seconds),
    }
    curves = {}
    for name, (size, each) in cases.items():
        shards = shards_of(cells, size)
        run = partial(simulate, shards, each, start=START, load=LOAD)
        found = [run(workers=count) for count in WORKERS]
        curves[name] = [one.seconds for one in found]
        print(f"\n{name}: {len(shards)} shards\n\n| GPUs | hours | faster | at work | loads |")
        print("|---:|---:|---:|---:|---:|")
        for count, one in zip(WORKERS, found, strict=True):
            gain, share = found[0].seconds / one.seconds, one.busy / (count * one.seconds)
            hours = one.seconds / 3600
            print(f"| {count} | {hours:.2f} | {gain:.1f} | {share:.0%} | {one.loads} |")
    draw(curves, given.out)
    print(f"\nThe figure is {given.out}")


if __name__ == "__main__":
    main()
