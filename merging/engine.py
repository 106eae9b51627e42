"""Merging a model in stretches: what is in memory are a few stretches, never a model.

    survey   where the method asks: every stretch of a tensor (or of the model) is looked at
    merge    read, merge in float32, round once, hand on

Stretches go through a pool of threads, one a core; each is small enough for the core's cache, and
what is learned of task vectors on the way is what the report tells. The stretches of a tensor and
their results are the same for any number of threads.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
from numpy.typing import NDArray

from merging import fused
from merging.checkpoint import TensorSource
from merging.errors import MergeError
from merging.lazy import torch
from merging.methods import METHODS, check_experts, check_weights, parse_parameters
from merging.methods.contract import Inputs, Method, Parameters, RawInputs, settle
from merging.raw import (
    CODES,
    FLOATING,
    Raw,
    dtype_code,
    itemsize,
    to_floats,
    to_raw,
    to_tensor,
    torch_dtype,
)
from merging.report import MergeReport, Moments, moments

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int], None]
Write = Callable[[str, int, Raw], None]
"""(tensor, first entry, entries as bytes): takes a merged stretch; called from threads."""

SHOWN = 5  # names listed in an error
STRETCH = 1 << 19  # entries that are merged at a time: two megabytes in float32
TASK = 2  # stretches a task: enough that handing it to a thread costs nothing
AHEAD = 4  # tasks a thread that are queued before the oldest must be done
SHARE, LEAST, MOST = 64, 1 << 14, 1 << 15  # a sample: one entry in so many, within these bounds
BLOCK = 1 << 12  # entries of a sample that stand together


class Chosen(NamedTuple):
    """What a method is given for one tensor."""

    weights: Sequence[float]
    params: Parameters


class Job(NamedTuple):
    """One merge, checked."""

    base: TensorSource
    experts: Sequence[TensorSource]
    method: Method
    chosen: Mapping[str, Chosen]  # for every tensor that takes part
    dtype: str | None  # the code of what comes out; None for the base's
    allow_non_finite: bool
    device: str
    statistics: Sequence[TensorSource]  # of each expert, where the method wants them

    @property
    def merging(self) -> Collection[str]:
        """The tensors that take part."""
        return self.chosen.keys()

    def stretch(self, name: str) -> int:
        """Entries of a tensor that are worked on at a time; a GPU wants more of them."""
        size = max(prod(self.base.shape(name)), 1)
        if self.method.whole:
            return size
        stretch = STRETCH if self.device == "cpu" else STRETCH * TASK
        if not self.method.rows:
            return stretch
        columns = self.columns(name)
        return max(stretch // columns, 1) * columns

    def columns(self, name: str) -> int:
        """Entries of a tensor's row; a tensor of one dimension is one."""
        shape = self.base.shape(name)
        return max(prod(shape[1:] if len(shape) > 1 else shape), 1)

    def out_code(self, name: str) -> str:
        """The type of a tensor that comes out."""
        found = self.base.code(name)
        return self.dtype if self.dtype is not None and found in FLOATING else found

    def fused_types(self, name: str) -> bytes | None:
        """The types of a tensor's inputs for the fused loop; None where torch must do the work."""
        if self.method.fused is None or self.device != "cpu":
            return None
        if self.out_code(name) not in fused.TYPES:
            return None
        return fused.types_of([source.code(name) for source in (self.base, *self.experts)])


def prepare(
    base: TensorSource,
    experts: Sequence[TensorSource],
    method: str,
    *,
    weights: Sequence[float] | None = None,
    parameters: Parameters | None = None,
    choose: Callable[[str], Chosen] | None = None,
    dtype: torch.dtype | str | None = None,
    exclude: Sequence[str] = (),
    allow_non_finite: bool = False,
    device: str = "cpu",
    statistics: Sequence[TensorSource] = (),
) -> Job:
    """A checked merge.

    Args:
        weights: one an expert; 1 each if left out.
        parameters: of the method, from `parse_parameters`; its defaults if left out.
        choose: weights and parameters of a tensor by its name, in place of those two.
        dtype: of the floating tensors that come out, torch's or a code of safetensors; the base's
            own if left out. One rounding.
        exclude: regular expressions; a tensor whose whole name matches stays the base's.
        device: where it is computed.
        statistics: one an expert, for a method that weighs by them.

    Raises:
        MergeError: inputs that do not fit.
    """
    same = Chosen(
        check_weights(weights, len(experts)),
        parse_parameters(method, {}) if parameters is None else parameters,
    )
    check_experts(method, len(experts), weights)
    check_sources(base, experts)
    _check_device(device)
    entry = METHODS[method]
    chosen = {
        name: same if choose is None else choose(name)
        for name in base.names()
        if _takes_part(base, name, exclude)
    }
    if entry.survey is not None and len({repr(one.params) for one in chosen.values()}) > 1:
        scopes = {entry.survey.scope(one.params) for one in chosen.values()}
        if "model" in scopes:
            raise MergeError(
                f"{method} over the whole model needs the same parameters for every tensor"
            )
    _check_statistics(method, base, statistics, chosen, len(experts))
    return Job(
        base,
        experts,
        entry,
        chosen,
        dtype if dtype is None or isinstance(dtype, str) else dtype_code(dtype),
        allow_non_finite,
        device,
        statistics,
    )


def merged_tensors(
    base: TensorSource,
    experts: Sequence[TensorSource],
    method: str,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    **options: Any,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, merged tensor) in the base's order.

    Args:
        progress: called with (tensors done, tensors in all).
        threads: one a core if left out.
        options: those of `prepare`.

    Raises:
        MergeError: inputs that do not fit, NaN or infinity, integer tensors that differ.
    """
    yield from tensors_of(prepare(base, experts, method, **options), progress, threads)


def tensors_of(
    job: Job,
    progress: Progress | None = None,
    threads: int | None = None,
    report: MergeReport | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """`merged_tensors` of a merge that is prepared already."""
    base, names = job.base, job.base.names()
    found: dict[str, Raw] = {}

    def begin(name: str) -> None:
        size = prod(base.shape(name)) * itemsize(job.out_code(name))
        found[name] = numpy.empty(size, dtype=numpy.uint8)

    def write(name: str, start: int, entries: Raw) -> None:
        place = start * itemsize(job.out_code(name))
        found[name][place : place + entries.nbytes] = entries

    merged = run(job, write, begin=begin, report=report, threads=threads)
    for done, name in enumerate(merged, start=1):
        yield name, to_tensor(found.pop(name), job.out_code(name)).view(base.shape(name))
        if progress is not None:
            progress(done, len(names))


def run(
    job: Job,
    write: Write,
    *,
    begin: Callable[[str], None] | None = None,
    report: MergeReport | None = None,
    threads: int | None = None,
) -> Iterator[str]:
    """Merges everything through `write`; yields each tensor's name when all of it is written.

    Args:
        begin: told of a tensor before its first stretch is written.
        report: gathers what is learned of the task vectors.
        threads: one a core if left out.
    """
    workers = threads or _cores()
    with _workers(workers, job) as pool:
        stages = _Stages(job, pool, write, report)
        known = stages.learn_model()
        looking: deque[tuple[str, Look | None]] = deque()
        merging: deque[tuple[str, list[Future[Any]]]] = deque()

        def merge_next() -> None:
            name, look = looking.popleft()
            if begin is not None:
                begin(name)
            merging.append((name, stages.merge(name, known.get(name), look)))

        for name in job.base.names():
            looking.append((name, stages.look(name)))
            if len(looking) > 1:  # one tensor is looked at while the one before it is merged
                merge_next()
            queued = sum(len(tasks) for _, tasks in merging)
            while merging and queued > AHEAD * workers:
                done, tasks = merging.popleft()
                stages.finish(done, tasks)
                queued -= len(tasks)
                yield done
        while looking:
            merge_next()
        while merging:
            done, tasks = merging.popleft()
            stages.finish(done, tasks)
            yield done


def _cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _workers(count: int, job: Job) -> Iterator[ThreadPoolExecutor]:
    """Threads that compute with one thread each; what waits is dropped when the block is left."""
    by_torch = any(job.fused_types(name) is None for name in job.merging)
    before = torch.get_num_threads() if by_torch else None
    if before is not None:
        torch.set_num_threads(1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="merge")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if before is not None:
            torch.set_num_threads(before)


Span = tuple[int, int]


class Look(NamedTuple):
    """A tensor that is being looked at with a hint."""

    hint: Any
    tasks: list[Future[Any]]


class _Stages:
    """What is done to a tensor: looked at, merged, accounted for."""

    def __init__(
        self, job: Job, pool: ThreadPoolExecutor, write: Write, report: MergeReport | None
    ) -> None:
        self._job, self._pool, self._write, self._report = job, pool, write, report

    def learn_model(self) -> dict[str, Sequence[Any]]:
        """Where the method's scope is the model: what the merge of every stretch must know."""
        survey, job = self._job.method.survey, self._job
        names = [name for name in job.base.names() if name in job.merging]
        if survey is None or not names:
            return {}
        params = job.chosen[names[0]].params  # of the model's scope: the same for all
        if survey.scope(params) != "model":
            return {}

        def look(hint: Any) -> list[Any]:
            tasks = [task for name in names for task in self._look_with(name, hint)]
            return _results(tasks)

        hint = survey.begin(self._sample(names), params)
        decided = iter(settle(survey, params, hint, look(hint), look))
        return {
            name: [next(decided) for _ in _stretches(self._numel(name), job.stretch(name))]
            for name in names
        }

    def look(self, name: str) -> Look | None:
        """Starts looking at a tensor, where the method wants to before it merges."""
        survey = self._job.method.survey
        if survey is None or name not in self._job.merging:
            return None
        params = self._job.chosen[name].params
        if survey.scope(params) != "tensor":
            return None
        hint = survey.begin(self._sample([name]), params)
        return Look(hint, self._look_with(name, hint))

    def merge(self, name: str, known: Sequence[Any] | None, look: Look | None) -> list[Future[Any]]:
        """Starts merging a tensor, after what was seen of it is decided on."""
        job, survey = self._job, self._job.method.survey
        if name not in job.merging:
            return self._tasks(name, STRETCH, lambda spans, _: self._copy(name, spans))
        if look is not None and survey is not None:
            seen = _results(look.tasks)
            known = settle(
                survey,
                job.chosen[name].params,
                look.hint,
                seen,
                lambda hint: _results(self._look_with(name, hint)),
            )
        return self._tasks(
            name,
            job.stretch(name),
            lambda spans, first: self._merge_spans(name, spans, known, first),
        )

    def finish(self, name: str, tasks: list[Future[Any]]) -> None:
        """Waits until a tensor is merged, and accounts for it."""
        found = _results(tasks)
        if self._report is not None and name in self._job.merging:
            self._report.add(name, found)

    # --- one stretch -----------------------------------------------------------------------------

    def _raw(self, name: str, start: int, stop: int, types: bytes) -> RawInputs:
        sources = (self._job.base, *self._job.experts)
        raw = tuple(source.read_raw(name, start, stop) for source in sources)
        return RawInputs(stop - start, raw, types)

    def _inputs(self, name: str, start: int, stop: int) -> Inputs:
        job = self._job
        sources = (job.base, *job.experts)
        tensors = [to_tensor(s.read_raw(name, start, stop), s.code(name)) for s in sources]
        precision = torch.promote_types(tensors[0].dtype, torch.float32)
        shape = job.base.shape(name)
        if job.method.rows and len(shape) > 1:
            shape = (-1, job.columns(name))
        elif not job.method.whole:
            shape = (-1,)
        tensors = [tensor.to(job.device, precision).view(shape) for tensor in tensors]
        statistics = [self._statistic(one, name, start, stop) for one in job.statistics]
        return Inputs(tensors[0], tensors[1:], name, start, statistics)

    def _statistic(self, source: TensorSource, name: str, start: int, stop: int) -> Tensor | None:
        if name not in source.names():
            return None
        if self._job.method.statistics == "matrix":
            found = source.read(name)
        else:
            found = to_tensor(source.read_raw(name, start, stop), source.code(name))
        if not bool(found.isfinite().all()):
            raise MergeError(f"the statistics of {name} hold NaN or infinity; gather them again")
        return found.to(self._job.device)

    def _merge_spans(
        self, name: str, spans: Sequence[Span], known: Sequence[Any] | None, first: int
    ) -> list[Moments]:
        types, found = self._job.fused_types(name), []
        for place, (start, stop) in enumerate(spans, start=first):
            told = None if known is None else known[place]
            if types is None:
                with torch.no_grad():
                    merged, seen = self._merge_by_torch(name, start, stop, told)
            else:
                merged, seen = self._merge_fused(name, start, stop, told, types)
            if not seen.finite and not self._job.allow_non_finite:
                self._refuse_non_finite(name)
            found.append(seen)
            self._write(name, start, merged)
        return found

    def _merge_fused(
        self, name: str, start: int, stop: int, told: Any, types: bytes
    ) -> tuple[Raw, Moments]:
        job = self._job
        assert job.method.fused is not None
        arguments = job.method.fused.arguments(*job.chosen[name], told)
        inputs = self._raw(name, start, stop, types)
        return fused.merge(job.method.fused, inputs, job.out_code(name), arguments)

    def _merge_by_torch(self, name: str, start: int, stop: int, told: Any) -> tuple[Raw, Moments]:
        job = self._job
        inputs = self._inputs(name, start, stop)
        seen = moments(inputs.deltas)
        merged = job.method.merge(inputs, *job.chosen[name], told)
        merged = _with_zeros_of(inputs.base, merged)
        return to_raw(merged.to(torch_dtype(job.out_code(name)))), seen

    def _refuse_non_finite(self, name: str) -> None:
        for index, source in enumerate((self._job.base, *self._job.experts)):
            count = int((~source.read(name).isfinite()).sum())
            if count == 0:
                continue
            model = "the base" if index == 0 else f"expert {index - 1}"
            raise MergeError(
                f"{name} of {model} holds {count} NaN or infinite numbers; repair the model, or "
                "set allow_non_finite: true to merge it as it is"
            )
        # Finite numbers whose difference is not: float32 ends at 3.4e38.
        raise MergeError(
            f"{name}: experts and base are so far apart that their difference overflows; repair "
            "the model, or set allow_non_finite: true to merge it as it is"
        )

    def _copy(self, name: str, spans: Sequence[Span]) -> list[None]:
        base, code, out_code = self._job.base, self._job.base.code(name), self._job.out_code(name)
        for start, stop in spans:
            entries = base.read_raw(name, start, stop)
            for index, expert in enumerate(() if code in FLOATING else self._job.experts):
                if expert.code(name) != code or not numpy.array_equal(
                    entries, expert.read_raw(name, start, stop)
                ):
                    raise MergeError(
                        f"{name} holds {CODES[code][0]} numbers, and expert {index} has others "
                        "than the base; such a tensor cannot be merged. Exclude it to keep the "
                        "base's"
                    )
            if code != out_code:
                entries = to_raw(to_tensor(entries, code).to(torch_dtype(out_code)))
            self._write(name, start, entries)
        return []

    # --- looking ---------------------------------------------------------------------------------

    def _look_with(self, name: str, hint: Any) -> list[Future[Any]]:
        survey, params = self._job.method.survey, self._job.chosen[name].params
        assert survey is not None

        types = self._job.fused_types(name) if survey.fused is not None else None

        def observe(spans: Sequence[Span], _: int) -> list[Any]:
            if types is not None and survey.fused is not None:
                return [survey.fused(self._raw(name, *span, types), params, hint) for span in spans]
            with torch.no_grad():
                return [survey.observe(self._inputs(name, *span), params, hint) for span in spans]

        return self._tasks(name, self._job.stretch(name), observe)

    def _sample(self, names: Sequence[str]) -> list[NDArray[Any]]:
        """Each expert's task vector in blocks that are spread evenly over some tensors."""
        sizes = [self._numel(name) for name in names]
        wanted = min(max(sum(sizes) // SHARE, LEAST), MOST)
        step = max(BLOCK, sum(sizes) * BLOCK // wanted)
        sources = (self._job.base, *self._job.experts)
        parts: list[list[NDArray[Any]]] = [[] for _ in sources]
        before = 0  # entries of the tensors before
        for name, size in zip(names, sizes, strict=True):
            for start in range(-before % step, size, step):
                for part, source in zip(parts, sources, strict=True):
                    entries = source.read_raw(name, start, min(start + BLOCK, size))
                    part.append(to_floats(entries, source.code(name)))
            before += size
        base, *experts = (numpy.concatenate(part) for part in parts)
        return [expert.astype(base.dtype) - base for expert in experts]

    # --- tasks -----------------------------------------------------------------------------------

    def _tasks(
        self, name: str, size: int, work: Callable[[Sequence[Span], int], list[Any]]
    ) -> list[Future[Any]]:
        spans = _stretches(self._numel(name), size)
        return [
            self._pool.submit(work, spans[first : first + TASK], first)
            for first in range(0, len(spans), TASK)
        ]

    def _numel(self, name: str) -> int:
        return prod(self._job.base.shape(name))


def _results(tasks: Sequence[Future[Any]]) -> list[Any]:
    return [one for task in tasks for one in task.result()]


def _stretches(numel: int, size: int) -> list[Span]:
    """[0, numel) in pieces of `size`."""
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def _with_zeros_of(base: Tensor, merged: Tensor) -> Tensor:
    """A merge that adds nothing to -0.0 keeps its sign: then a model merged with itself is itself,
    bit for bit. (-0.0 alone has the bit pattern of the smallest integer.)"""
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}[base.dtype]
    patterns = base.view(integers)
    smallest = torch.iinfo(integers).min
    if base.numel() == 0 or int(patterns.min()) != smallest:
        return merged
    return torch.where((patterns == smallest) & (merged == 0), base, merged)


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise MergeError(
            f"device {device!r} cannot be used here ({reason}); use cpu or cuda:N"
        ) from None


def check_sources(base: TensorSource, experts: Sequence[TensorSource]) -> None:
    """The experts have the base's tensors, in the base's shapes.

    Raises:
        MergeError: with a line for every expert and kind of difference.
    """
    faults = [
        fault
        for number, expert in enumerate(experts)
        for fault in differences(base, expert, f"expert {number}")
    ]
    if faults:
        raise MergeError("\n".join(faults))


def differences(base: TensorSource, expert: TensorSource, called: str) -> list[str]:
    """Sentences on tensors that one of the two lacks or that differ in shape."""
    ours, theirs = base.names(), expert.names()
    faults = []
    for present, absent, words in (
        (ours, set(theirs), f"{called} lacks"),
        (theirs, set(ours), f"{called} has what the base lacks:"),
    ):
        missing = [name for name in present if name not in absent]
        if missing:
            faults.append(
                f"{words} {len(missing)} tensors ({_some(missing)}); expected the same tensors in "
                "every model"
            )
    shared = set(theirs)
    other = [n for n in ours if n in shared and base.shape(n) != expert.shape(n)]
    if other:
        first = other[0]
        faults.append(
            f"{called}: {len(other)} tensors have another shape ({_some(other)}); {first} is "
            f"{expert.shape(first)} where the base has {base.shape(first)}. Models with different "
            "vocabularies or sizes cannot be merged"
        )
    return faults


def _check_statistics(
    method: str,
    base: TensorSource,
    statistics: Sequence[TensorSource],
    chosen: Collection[str],
    experts: int,
) -> None:
    wanted = METHODS[method].statistics
    if wanted is None:
        if statistics:
            raise MergeError(f"{method} takes no statistics")
        return
    if len(statistics) != experts:
        raise MergeError(
            f"{method} weighs by statistics of every expert and was given {len(statistics)} for "
            f"{experts}; gather them with `mergescope statistics` and name each file beside its "
            "model under the key `statistics`"
        )
    for number, source in enumerate(statistics):
        names = set(source.names())
        missing = [name for name in chosen if name not in names]
        if wanted == "entries" and missing:
            raise MergeError(
                f"the statistics of expert {number} lack {len(missing)} tensors "
                f"({_some(missing)}); {method} expects one number for every parameter"
            )
        for name in (name for name in chosen if name in names):
            shape = base.shape(name)
            expected = shape if wanted == "entries" else (shape[-1], shape[-1])
            if source.shape(name) != expected:
                raise MergeError(
                    f"the statistics of expert {number} for {name} have shape "
                    f"{source.shape(name)}; {method} expects {expected}"
                )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _takes_part(base: TensorSource, name: str, exclude: Sequence[str]) -> bool:
    """Whether a tensor is merged; one without entries has nothing to merge."""
    if base.code(name) not in FLOATING or 0 in base.shape(name):
        return False
    return not any(re.fullmatch(pattern, name) for pattern in exclude)
