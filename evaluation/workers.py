"""An experiment on Ray: workers answer, the process that was started scores and stores.

    connected           starts or joins a Ray
    Worker              a process with one GPU or a share of the cores; keeps its last loaded model
    answer_on_workers   hands shards to workers and takes their outputs as they come

A worker that is lost is replaced, and what it had not answered yet goes back into the queue. Every
machine must see the models and the cache under the same paths. `ray` is imported only here, and
only when it is asked for.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch

from evaluation import sharding
from evaluation.benchmarks.contract import Form, Item, Output, Request
from evaluation.engine import answer
from evaluation.errors import InputError
from evaluation.experiment import Experiment
from evaluation.extras import require
from evaluation.family import Family
from evaluation.merges import LIMIT
from evaluation.models import PlannedModel, load
from evaluation.progress import Bar
from evaluation.runtime import Runtime
from evaluation.served import Ready
from evaluation.sharding import Asked, Queue, Shard, cut

log = logging.getLogger(__name__)

LOCAL = "local"
THREADS = 4
"""Cores of a worker without a GPU; fewer where that makes two workers of one."""
DEATHS = 3
"""So often a shard may end its worker without an answer in between."""
PASSED_ON = (LIMIT, "XDG_CACHE_HOME")
"""Variables that workers need as they are here."""
STORE_BYTES = 2**27  # of a local Ray's shared memory: outputs are small

Collect = Callable[[Sequence[tuple[int, Output]]], Sequence[str]]
"""Takes outputs as (index into the requests, output); the keys of the items that are now done."""


class OpenCell(NamedTuple):
    """One model on one benchmark: all its items and the keys of their answers."""

    planned: PlannedModel
    form: Form
    benchmark: str
    items: Sequence[Item]
    keys: Sequence[str]


class Cluster(NamedTuple):
    """What a Ray has for this experiment."""

    device: str  # cuda or cpu
    workers: int
    threads: int  # of a worker
    share: float  # of a machine's memory, for one worker


def require_ray() -> Any:
    """The package `ray`.

    Raises:
        InputError: it is not installed.
    """
    return require("ray", "--ray")


@contextmanager
def connected(address: str | None, device: str) -> Iterator[Cluster | None]:
    """A Ray for the block: `local` starts one, `auto` or HOST:PORT joins one; None for none.

    A Ray that this process has joined already is used and left as it is.

    Args:
        device: the kind of device that answers are computed on here.

    Raises:
        InputError: ray is missing, no Ray answers, or it has other devices.
    """
    if address is None:
        yield None
        return
    ray = require_ray()
    if ray.is_initialized():
        yield _cluster(ray.nodes(), device)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    before = set(psutil.Process().children())
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            **(quiet if address == LOCAL else {}),
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"--ray: no Ray answers at {address!r} ({reason}); expected `local`, `auto` or the "
            "HOST:PORT of one that this machine is a part of"
        ) from None
    started = set(psutil.Process().children()) - before
    try:
        yield _cluster(ray.nodes(), device)
    finally:
        started |= {child for parent in started for child in _children(parent)}
        ray.shutdown()
        for late in psutil.wait_procs(started, timeout=10)[1]:
            late.kill()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _cluster(nodes: Sequence[Mapping[str, Any]], device: str) -> Cluster:
    """How many workers there can be: one a GPU, or one for a share of the cores."""
    found = [node["Resources"] for node in nodes if node["Alive"]]
    cores = [int(each.get("CPU", 0)) for each in found]
    gpus = [int(each.get("GPU", 0)) for each in found]
    count = sum(gpus)
    if device == "cuda" and count:
        threads = min(c // g for c, g in zip(cores, gpus, strict=True) if g)
        return Cluster(device, count, threads, 1.0)
    if device != "cpu" or (count and not torch.cuda.is_available()):
        raise InputError(
            f"--ray: this machine would compute on {device}, and Ray has {count} GPUs; answers "
            "of one run come from one kind of device. Start the command on a machine like Ray's "
            "own, or set generation.device: cpu on one with a GPU"
        )
    threads = max(1, min(THREADS, min(filter(None, cores), default=1) // 2))
    workers = [count // threads for count in cores]
    return Cluster(device, max(1, sum(workers)), threads, 1 / max(1, *workers))


class Worker:
    """Answers requests in a process of its own, with the model that it has loaded last."""

    def __init__(
        self, experiment: Experiment, families: Mapping[Form, Family], share: float
    ) -> None:
        from evaluation.cli import keep_freed_memory

        keep_freed_memory()
        self._experiment, self._families, self._share = experiment, families, share
        self._runtime: Ready | None = None

    def ready(self) -> int:
        """The id of the process."""
        return os.getpid()

    def load(self, planned: PlannedModel, form: Form) -> dict[str, Any]:
        """Loads a model in place of the last one; what a merge has told of its inputs."""
        self._runtime = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        told: dict[str, Any] = {}
        found = load(planned, self._families[form], self._experiment, told)
        self._runtime = found._replace(share=self._share) if isinstance(found, Runtime) else found
        return told

    def answer(
        self, requests: Sequence[Request], settled: Collection[int]
    ) -> Iterator[list[tuple[int, Output]]]:
        """Outputs as they come, as (index into `requests`, output), but of the settled ones."""
        assert self._runtime is not None
        yield from answer(self._runtime, requests, self._experiment.generation.rows, settled)


@dataclass
class _Seat:
    """The place of one worker: who sits there now, and what it is asked for."""

    actor: Any
    asked: Any  # what is waited for: a reference, or a stream of them
    pid: int | None = None  # once it is ready
    holding: tuple[str, Form] | None = None  # the model that it has loaded
    shard: Shard | None = None
    collect: Collect | None = None  # once the model is there


def answer_on_workers(
    cluster: Cluster,
    experiment: Experiment,
    families: Mapping[Form, Family],
    cells: Sequence[OpenCell],
    done: Collection[str],
    collector: Callable[[int, Asked], Collect],
    reports: Mapping[Form, dict[str, Any]],
    shown: Bar,
) -> None:
    """Has workers answer all open cells.

    Args:
        done: keys of answers that are there already.
        collector: (place of the cell, what is asked of it) -> what scores and stores the outputs.
        reports: takes what merges have told of their inputs, by form and model.

    Raises:
        InputError: the input is at fault, a shard ends every worker, or none can start.
    """
    generation = experiment.generation.model_copy(update={"device": cluster.device})
    there = experiment.model_copy(update={"generation": generation})
    fleet = _Fleet(cluster, there, families, cells, done, collector, reports, shown)
    try:
        fleet.run()
    finally:
        fleet.dismiss()


class _Fleet:
    """The workers of a run, and the queue of their shards."""

    def __init__(
        self,
        cluster: Cluster,
        experiment: Experiment,
        families: Mapping[Form, Family],
        cells: Sequence[OpenCell],
        done: Collection[str],
        collector: Callable[[int, Asked], Collect],
        reports: Mapping[Form, dict[str, Any]],
        shown: Bar,
    ) -> None:
        self._ray = require_ray()
        self._cells, self._collector, self._reports, self._shown = cells, collector, reports, shown
        self._done = set(done)
        self._failed_starts = 0
        shards = _shards(cells, self._done)
        self._queue = Queue(shards)
        self._inputs = [self._ray.put(each) for each in (experiment, dict(families))]
        self._share = cluster.share
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        variables = {
            "OMP_NUM_THREADS": str(max(1, cluster.threads)),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
            **passed_on,
        }
        self._kind = self._ray.remote(Worker).options(
            num_cpus=cluster.threads,
            num_gpus=1 if cluster.device == "cuda" else 0,
            runtime_env={"env_vars": variables},
        )
        self._seats = [self._seat() for _ in range(min(cluster.workers, len(shards)))]

    def run(self) -> None:
        """Until every shard is answered."""
        while True:
            for seat in self._seats:
                if seat.asked is None:
                    self._give(seat)
            self._describe()
            if not self._queue and all(seat.shard is None for seat in self._seats):
                return
            by_asked = {seat.asked: seat for seat in self._seats if seat.asked is not None}
            self._ray.wait(list(by_asked), num_returns=1)
            ready, _ = self._ray.wait(list(by_asked), num_returns=len(by_asked), timeout=0)
            for asked in ready:
                self._hear(by_asked[asked])

    def dismiss(self) -> None:
        """Ends the workers; their GPUs are free again."""
        for seat in self._seats:
            self._ray.kill(seat.actor)

    def _seat(self) -> _Seat:
        actor = self._kind.remote(*self._inputs, self._share)
        return _Seat(actor, actor.ready.remote())

    def _give(self, seat: _Seat) -> None:
        """The next shard, if there is one; its model first where the worker has another."""
        others = [one.shard.model for one in self._seats if one.shard is not None]
        seat.shard = self._queue.take(seat.holding, others)
        if seat.shard is None:
            return
        if seat.holding == seat.shard.model:
            self._ask(seat)
        else:
            cell, seat.holding = self._cells[seat.shard.cell], None
            seat.asked = seat.actor.load.remote(cell.planned, cell.form)

    def _ask(self, seat: _Seat) -> None:
        assert seat.shard is not None
        cell, places = self._cells[seat.shard.cell], seat.shard.places
        items, keys = [cell.items[p] for p in places], [cell.keys[p] for p in places]
        asked = Asked(items, keys, frozenset(self._done.intersection(keys)))
        seat.collect = self._collector(seat.shard.cell, asked)
        answers = seat.actor.answer.options(num_returns="streaming")
        seat.asked = answers.remote(asked.requests(), asked.settled())

    def _open(self, shard: Shard) -> list[str]:
        """The ids of its items that have no answer yet."""
        cell = self._cells[shard.cell]
        return [cell.items[p].id for p in shard.places if cell.keys[p] not in self._done]

    def _hear(self, seat: _Seat) -> None:
        """Takes what a worker has to tell."""
        lost = self._ray.exceptions
        try:
            if seat.collect is not None:
                self._take(seat)
            elif seat.shard is not None:
                cell = self._cells[seat.shard.cell]
                self._reports[cell.form].update(self._ray.get(seat.asked))
                seat.holding = _model(cell)
                self._ask(seat)
            else:
                seat.pid, seat.asked = self._ray.get(seat.asked), None
                self._failed_starts = 0
        except (
            lost.RayActorError,
            lost.WorkerCrashedError,
            lost.OwnerDiedError,
            lost.NodeDiedError,
            lost.OutOfMemoryError,
        ) as error:
            self._replace(seat, _shortened(str(error)))
        except lost.RayTaskError as error:
            raise self._in_words(seat, error)  # noqa: B904

    def _take(self, seat: _Seat) -> None:
        """Scores and stores a batch; at the end of the stream the worker is free."""
        assert seat.shard is not None and seat.collect is not None
        try:
            batch = self._ray.get(next(seat.asked))
        except StopIteration:
            if self._open(seat.shard):
                self._replace(seat, "its answers ended early")
                return
            seat.shard = seat.asked = seat.collect = None
            return
        self._done.update(seat.collect(batch))
        seat.shard.deaths = 0

    def _replace(self, seat: _Seat, reason: str) -> None:
        """A new worker for a lost one; its shard waits again.

        Raises:
            InputError: it has happened too often.
        """
        log.warning("a worker is lost and replaced; Ray says: %s", reason)
        shard = seat.shard
        if shard is None:
            self._failed_starts += 1
            if self._failed_starts >= DEATHS:
                raise InputError(
                    f"--ray: {DEATHS} workers in a row could not start; is mergescope installed "
                    f"wherever Ray runs, in the same version? Ray says: {reason}"
                )
        else:
            shard.deaths += 1
            if shard.deaths >= DEATHS:
                raise InputError(self._deadly(shard, reason))
            self._queue.put_back(shard)
        self._ray.kill(seat.actor)
        self._seats[self._seats.index(seat)] = self._seat()

    def _deadly(self, shard: Shard, reason: str) -> str:
        cell = self._cells[shard.cell]
        left = self._open(shard)
        return (
            f"{cell.planned.name} on {cell.benchmark}: {DEATHS} workers ended one after the other "
            f"over the same {len(left)} items, {left[0]} first. What is finished is kept. Most "
            "often memory has run out: set a smaller generation.batch_size or max_new_tokens, or "
            f"dtype: bfloat16. Ray says: {reason}"
        )

    def _in_words(self, seat: _Seat, error: Any) -> BaseException:
        """What was raised in a worker, as it would be without Ray."""
        cause: BaseException = error.cause
        if not isinstance(cause, InputError) or seat.shard is None or seat.collect is None:
            cause.__cause__ = error  # its message holds the worker's traceback
            return cause
        cell = self._cells[seat.shard.cell]
        where = f"{cell.planned.name} on {cell.benchmark}"
        return InputError([f"{where}: {fault}" for fault in str(cause).splitlines()])

    def _describe(self) -> None:
        """Which models are at work; a line only where that changes."""
        busy = {shard.cell: shard for seat in self._seats if (shard := seat.shard) is not None}
        names = dict.fromkeys(self._cells[cell].planned.name for cell in sorted(busy))
        ready = sum(seat.pid is not None for seat in self._seats)
        if names:
            workers = "1 worker" if ready == 1 else f"{ready} workers"
            self._shown.describe(f"{workers} · {', '.join(names)}")


def _shards(cells: Sequence[OpenCell], done: Collection[str]) -> list[Shard]:
    """All that is open; of two models that are the same one only is asked."""
    shards, seen = [], set(done)
    for number, cell in enumerate(cells):
        left = [place for place, key in enumerate(cell.keys) if key not in seen]
        for places in cut(cell.items, left, sharding.SHARD):
            work = float(len(places) * cell.planned.components)
            shards.append(Shard(_model(cell), number, places, work))
        seen.update(cell.keys)
    return shards


def _shortened(reason: str) -> str:
    """Why Ray says that a worker is gone, without its long advice."""
    text = " ".join(reason.split())
    return text.split(" Some common causes")[0][:600]


def _model(cell: OpenCell) -> tuple[str, Form]:
    return cell.planned.name, cell.form
