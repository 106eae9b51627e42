"""A run on Ray: the same answers and tables, whatever happens to its workers."""

from __future__ import annotations

import os
import pickle
import signal
import sqlite3
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import yaml
from sums import write_sums

import evaluation.run as run_module
from evaluation import sharding, workers
from evaluation.benchmarks import BENCHMARKS
from evaluation.benchmarks.contract import BenchmarkEntry, Generate, Item, Output, Request, Score
from evaluation.errors import InputError
from evaluation.experiment import load_experiment
from evaluation.run import run_experiment
from evaluation.sharding import Queue, Shard, cut
from evaluation.workers import Cluster, connected
from merging import open_checkpoint

ITEMS = 14
BATCH = 3
SIZE = 5  # items of a shard
ALONE = Cluster("cpu", workers=1, threads=1, share=1.0)


class Copying:
    """Items to be generated, whose score says something about every character of the text."""

    version = "1"

    def items(self, limit: int | None) -> Sequence[Item]:
        return [
            Item(f"copy/{n}", (Generate("copy: " + "ab" * (n % 5) + f"{n} ", ("x",), 8),))
            for n in range(ITEMS)
        ][:limit]

    def score(
        self, items: Sequence[Item], outputs: Sequence[Sequence[Output]]
    ) -> list[dict[str, float]]:
        texts = [output.text for (output,) in outputs]
        return [
            {"mean": sum(ord(c) * n for n, c in enumerate(text, 1)) / (1 + len(text))}
            for text in texts
        ]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of two workers for the tests of this file; no process of it stays."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", partial(ray.init, num_cpus=2))
        with connected("local", "cpu") as cluster:
            assert cluster is not None and (cluster.workers, cluster.threads) == (2, 1)
            started = psutil.Process().children(recursive=True)
            assert any("raylet" in process.name() for process in started)
            yield
    assert not [one for one in started if one.is_running()]
    assert not ray.is_initialized()


@pytest.fixture
def experiment(tmp_path: Path, family: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five models on a benchmark to generate, in three shards each, and one to score."""
    entry = BenchmarkEntry(
        "copying", "mean", False, True, "causal", lambda _: [], lambda _: Copying()
    )
    monkeypatch.setitem(BENCHMARKS, "copying", entry)
    monkeypatch.setattr(sharding, "SHARD", SIZE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_sums(tmp_path, ITEMS, uneven=True)
    content: dict[str, Any] = {
        "name": "shared",
        "base": str(family["base"]),
        "experts": {"first": str(family["first"]), "second": str(family["second"])},
        "models": [
            {"name": "ta", "method": "task_arithmetic"},
            {"name": "logit", "rule": "product"},
        ],
        "benchmarks": ["copying", "gsm8k_loglik"],
        "generation": {"batch_size": BATCH},
    }
    path = tmp_path / "shared.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(experiment: Path, out: Path, ray: str | None = None) -> Path:
    data = experiment.parent
    run_experiment(load_experiment(experiment, data), out, data_dir=data, ray=ray)
    return out


def timeless(out: Path) -> str:
    """The leaderboard's bytes without the two columns that tell the time it took."""
    frame = pd.read_csv(out / "leaderboard.csv", dtype=str)
    return frame.drop(columns=["seconds", "tokens_per_second"]).to_csv()


def answers(out: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(out / "records.sqlite") as store:
        return store.execute(
            "SELECT key, item, completion, score, metrics, truncated, prompt_tokens, "
            "completion_tokens FROM answers ORDER BY key"
        ).fetchall()


def test_two_workers_give_the_bytes_of_a_run_without(
    experiment: Path, tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merges, compositions, generated and scored items; no model is loaded in this process."""
    here = run(experiment, tmp_path / "here")
    monkeypatch.setattr(run_module, "load", lambda *_: pytest.fail("a model was loaded here"))
    there = run(experiment, tmp_path / "there", ray="local")
    assert timeless(there) == timeless(here)
    assert answers(there) == answers(here)
    assert len(answers(there)) == 5 * 2 * ITEMS
    assert (there / "merges.json").read_text() == (here / "merges.json").read_text()


def test_a_killed_worker_is_replaced_and_its_items_are_redone(
    experiment: Path, tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker to answer stops after a batch of its shard, until the test kills it there.

    The other one waits until the worker that has come instead answers too.
    """
    marker, started = tmp_path / "pid", tmp_path / "started"

    def shards() -> list[tuple[int, int]]:
        """(process, items asked of it) of every shard that was begun."""
        lines = started.read_text().splitlines()
        return [(int(pid), int(items)) for pid, items in map(str.split, lines)]

    class Mortal(workers.Worker):
        def answer(
            self, requests: Sequence[Request], settled: Collection[int]
        ) -> Iterator[list[tuple[int, Output]]]:
            with started.open("a") as file:
                file.write(f"{os.getpid()} {len(requests) - len(settled)}\n")
            for batch in super().answer(requests, settled):
                try:
                    file = marker.open("x")
                except FileExistsError:
                    while len({pid for pid, _ in shards()}) < 3:
                        time.sleep(0.02)
                    yield batch
                    continue
                with file:
                    file.write(str(os.getpid()))
                yield batch
                signal.pause()

    taken: list[list[tuple[int, Output]]] = []
    killed: list[int] = []
    plain = run_module._collector

    def killing(*arguments: Any) -> Any:
        collect = plain(*arguments)

        def then_kill(batch: Any) -> Any:
            taken.append(batch)
            if marker.is_file() and marker.read_text() and not killed:
                killed.append(int(marker.read_text()))
                os.kill(killed[0], signal.SIGKILL)
            return collect(batch)

        return then_kill

    monkeypatch.setattr(workers, "Worker", Mortal)
    monkeypatch.setattr(run_module, "_collector", killing)
    there = run(experiment, tmp_path / "there", ray="local")
    assert len(killed) == 1
    assert len({pid for pid, _ in shards()}) == 3
    assert len(shards()) == 5 * (3 + 1) + 1  # three shards to generate and one to score; one again
    assert sum(items for _, items in shards()) > 5 * 2 * ITEMS
    assert sum(map(len, taken)) == 5 * 2 * ITEMS  # no answer was taken twice
    monkeypatch.setattr(run_module, "_collector", plain)
    here = run(experiment, tmp_path / "here")
    assert timeless(there) == timeless(here)
    assert answers(there) == answers(here)


def test_items_that_end_every_worker_end_the_run(
    experiment: Path, tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doomed(workers.Worker):
        def answer(
            self, requests: Sequence[Request], settled: Collection[int]
        ) -> Iterator[list[tuple[int, Output]]]:
            os.kill(os.getpid(), signal.SIGKILL)
            yield []

    monkeypatch.setattr(workers, "Worker", Doomed)
    monkeypatch.setattr(workers, "DEATHS", 1)
    monkeypatch.setattr(workers, "_cluster", lambda *_: ALONE)
    with pytest.raises(
        InputError, match=r"workers ended one after the other over the same \d+ item"
    ):
        run(experiment, tmp_path / "out", ray="local")


def test_what_a_worker_finds_wrong_is_told_as_without_ray(
    experiment: Path, tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def items(self: Copying, limit: int | None) -> Sequence[Item]:
        return [Item("long", (Generate("a" * 250, (), 50),))]

    monkeypatch.setattr(Copying, "items", items)
    monkeypatch.setattr(workers, "_cluster", lambda *_: ALONE)
    told = []
    for ray in (None, "local"):
        with pytest.raises(InputError, match="prompts do not fit") as raised:
            run(experiment, tmp_path / str(ray), ray=ray)
        told.append(str(raised.value).split(" on ")[1])  # any model may be the first
    assert told[0] == told[1]


def test_a_missing_ray_is_told_before_anything_is_done(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'mergescope\[ray\]'"):
        run(experiment, tmp_path / "out", ray="local")
    assert not (tmp_path / "out").exists()


def test_a_source_in_another_process_opens_its_files_there(
    family: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes with absolute paths and the digest that was found here."""
    monkeypatch.chdir(family["base"].parent)
    source = open_checkpoint(Path("base"))
    digest, name = source.digest(), source.names()[0]
    shape = source.shape(name)
    sent = pickle.dumps(source)
    monkeypatch.chdir("/")
    again = pickle.loads(sent)
    assert again.folder == family["base"]
    assert again.unchanged() and again.digest() == digest
    assert again.read(name).shape == shape


def test_shards_hold_each_open_item_once_and_beginnings_together() -> None:
    """Ten of one beginning and ten of another in turn, then five that share nothing."""
    shots = ["one " * 40, "two " * 40]
    prompts = [f"{shots[n % 2]}{n}" for n in range(20)] + [f"{n}" * (n + 1) for n in range(5)]
    items = [Item(str(n), (Generate(prompt, (), 8),)) for n, prompt in enumerate(prompts)]
    left = [n for n in range(25) if n != 4]
    shards = cut(items, left, size=5)
    assert sorted(place for shard in shards for place in shard) == left
    assert [len(shard) for shard in shards] == [5, 5, 5, 5, 4]
    assert shards[0] == [10, 12, 14, 16, 18]  # the longer numbers first
    assert all(shard == sorted(shard) for shard in shards)
    assert {place % 2 for place in shards[0]} == {0}
    assert cut(items, [], size=5) == []


def test_what_is_scored_is_one_shard_with_its_finished_items() -> None:
    items = [Item(str(n), (Score("a", str(n)),)) for n in range(9)]
    assert cut(items, [3, 7], size=2) == [list(range(9))]


def test_a_worker_stays_with_its_model_and_then_helps_where_most_is_left() -> None:
    def shard(model: str, work: float = 1.0) -> Shard:
        return Shard(model, 0, [], work)

    queue = Queue([*[shard("a")] * 2, *[shard("b")] * 5, shard("c", 4.0)])
    order = []
    for holding, others in [
        (None, []),  # b: most work
        (None, ["b"]),  # four of b for two workers, so c
        ("a", ["b", "c"]),
        ("a", ["b", "c"]),
        ("a", ["b"]),
        ("c", ["b", "b"]),
        (None, ["b", "b"]),
        (None, []),
        (None, []),
    ]:
        taken = queue.take(holding, others)
        order.append(taken.model if taken else None)
    assert order == ["b", "c", "a", "a", "b", "b", "b", "b", None]


def test_a_shard_that_comes_back_is_the_next_of_its_model() -> None:
    first, second = Shard("a", 0, [0], 1.0), Shard("a", 0, [1], 1.0)
    queue = Queue([first, second])
    taken = queue.take(None, [])
    assert taken is first
    queue.put_back(first)
    assert len(queue) == 2
    assert queue.take("a", []) is first
