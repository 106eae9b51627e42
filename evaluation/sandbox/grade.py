"""Programs in, verdicts out.

A program is run twice, on the base and then on the extra inputs, each time in a fresh process;
values come out one by one and are judged here; the first wrong one ends the run. Long values come
as digests first; where one is not the expected digest, the run is made again with whole values,
since 1 and 1.0 are both right. The limits are evalplus's current ones: an input may take 4 s, or
four times what the reference solution took, and all of them together a minute. What hit a time
limit is run once more at the end, alone, since a busy machine must not fail a right program.

pass@1 with one greedy sample a problem is the share of right programs (Chen et al. 2021).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, Self

from evaluation.errors import InputError
from evaluation.sandbox.bubblewrap import sandbox_faults
from evaluation.sandbox.codec import LARGE
from evaluation.sandbox.oracles import wants_set
from evaluation.sandbox.pool import Sandboxes, counter
from evaluation.sandbox.problems import RELEASES, Problem, Tests, load_problems
from evaluation.sandbox.process import Budget, Program, Sandbox, Stopped
from evaluation.sandbox.samples import Sample, read_samples
from evaluation.sandbox.truth import (
    SHORT,
    TESTS,
    Truth,
    find_truth,
    load_truth,
    truth_path,
    whole_path,
)
from evaluation.sandbox.values import Judge, most_bytes

MIN_SECONDS = 4.0  # an input
FACTOR = 4.0  # times the reference solution's seconds
TOTAL_SECONDS = 60.0  # base or plus
REASON_LETTERS = 80  # of a value, in a verdict's reason

Status = Literal["pass", "fail", "timeout", "crash"]
Step = Callable[[int, int], None]
"""Told (done, total) as work goes on."""


class Verdict(NamedTuple):
    """What became of a sample: `base` of the original tests, `plus` of those and the extra ones."""

    task_id: str
    status: Status
    base: bool
    plus: bool
    reason: str  # empty for a pass
    seconds: float  # in the sandbox


class _Prepared(NamedTuple):
    """Where a task's truth is kept, and what the reference solution took."""

    path: Path
    seconds: float


class Grader:
    """Grades samples, as often as it is asked, in sandboxes that stay warm; a context manager.

    Args:
        problems: by task id; every sample's task must be among them.
        workers: sandboxes at a time.
        unsafe: without bubblewrap, for those who asked for it.
    """

    def __init__(
        self, problems: Mapping[str, Problem], workers: int = 2, unsafe: bool = False
    ) -> None:
        self._problems, self._workers, self._unsafe = problems, workers, unsafe
        self._sandboxes = Sandboxes(workers, unsafe)
        self._ready: dict[str, _Prepared] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the sandboxes."""
        self._sandboxes.close()

    def grade(self, samples: Sequence[Sample], progress: Step | None = None) -> list[Verdict]:
        """Verdicts in the order of the samples, of which a task may have several.

        Args:
            progress: called as reference solutions and samples are done.

        Raises:
            InputError: there is no sandbox, or the data's reference solutions do not run.
        """
        if faults := sandbox_faults(self._unsafe):
            raise InputError(faults)
        tasks = dict.fromkeys(sample.task_id for sample in samples)
        unknown = [task_id for task_id in tasks if task_id not in self._ready]
        step = counter(len(unknown) + len(samples), progress)
        if unknown:  # in sandboxes of their own: no hostile program was ever near them
            with Sandboxes(self._workers, self._unsafe) as fresh:
                found = fresh.map(self._prepare, unknown, step)
            self._ready |= zip(unknown, found, strict=True)
        verdicts = self._sandboxes.map(self._judge, samples, step, self._seconds)
        with Sandbox(self._unsafe) as alone:
            return [
                self._judge(sample, alone) if verdict.status == "timeout" else verdict
                for sample, verdict in zip(samples, verdicts, strict=True)
            ]

    def _prepare(self, task_id: str, sandbox: Sandbox) -> _Prepared:
        problem = self._problems[task_id]
        path = truth_path(problem)
        truth = load_truth(path) or find_truth(problem, path, sandbox)
        return _Prepared(path, sum(sum(truth[tests].seconds) for tests in TESTS))

    def _judge(self, sample: Sample, sandbox: Sandbox) -> Verdict:
        path = self._ready[sample.task_id].path
        return _verdict(self._problems[sample.task_id], path, sample, sandbox)

    def _seconds(self, sample: Sample) -> float:
        return self._ready[sample.task_id].seconds


def grade(
    problems: Mapping[str, Problem],
    samples: Sequence[Sample],
    workers: int = 2,
    unsafe: bool = False,
    progress: Step | None = None,
) -> list[Verdict]:
    """Grades samples once; see `Grader`."""
    with Grader(problems, workers, unsafe) as grader:
        return grader.grade(samples, progress)


def _verdict(problem: Problem, path: Path, sample: Sample, sandbox: Sandbox) -> Verdict:
    truth = _present(path)
    started = time.monotonic()
    passed: dict[Tests, bool] = dict.fromkeys(TESTS, False)
    status: Status = "pass"
    reason = ""
    for tests in TESTS:
        try:
            if not truth[tests].shortened:
                _run_tests(problem, sample, truth[tests], sandbox)
            elif not _is_same(problem, sample, truth[tests], sandbox):
                _run_tests(problem, sample, _present(whole_path(path))[tests], sandbox)
        except Stopped as stopped:
            status, reason = stopped.status, f"{tests} tests: {stopped.reason}"
            break
        passed[tests] = True
    seconds = round(time.monotonic() - started, 3)
    return Verdict(problem.task_id, status, passed["base"], passed["plus"], reason, seconds)


def _present(path: Path) -> dict[Tests, Truth]:
    truth = load_truth(path)
    if truth is None:
        path.unlink(missing_ok=True)  # so that it is found again
        raise InputError(f"{path}: gone or damaged while grading; start again")
    return truth


def _is_same(problem: Problem, sample: Sample, truth: Truth, sandbox: Sandbox) -> bool:
    """Whether every value is the expected one to the last bit, long ones by their digests.

    False says nothing yet: a value may be right without that.
    """
    with closing(_returned(problem, sample, truth, sandbox, SHORT)) as texts:
        return all(text == wanted for text, wanted in zip(texts, truth.values, strict=True))


def _run_tests(problem: Problem, sample: Sample, truth: Truth, sandbox: Sandbox) -> None:
    """Runs a program on the inputs; raises `Stopped` at the first that is not right."""
    judge = Judge(problem, truth.inputs, truth.values)
    with closing(_returned(problem, sample, truth, sandbox)) as texts:
        for place, text in enumerate(texts):
            if not judge.right(place, text):
                found, wanted = _short(text), _short(truth.values[place])
                raise Stopped("fail", f"input {place} returned {found}, expected {wanted}")


def _returned(
    problem: Problem, sample: Sample, truth: Truth, sandbox: Sandbox, large: int = LARGE
) -> Generator[str, None, None]:
    """What the program returns for each input, as text."""
    limits = [max(MIN_SECONDS, FACTOR * seconds) for seconds in truth.seconds]
    budget = Budget(
        loading_seconds=MIN_SECONDS,
        seconds=limits,
        total_seconds=max(min(TOTAL_SECONDS, sum(limits)), FACTOR * sum(truth.seconds)),
        reply_bytes=[most_bytes(length) for length in truth.lengths],
    )
    program = Program(sample.solution, problem.entry_point, sample.trim, wants_set(problem), large)
    with closing(sandbox.run(program, truth.inputs, budget)) as replies:
        for place, reply in enumerate(replies, -1):  # the first tells how loading went
            if reply.returned is None:
                where = f"input {place}" if place >= 0 else "loading the program"
                raise Stopped("fail", f"{where} raised {reply.raised}")
            if place >= 0:
                yield reply.returned


def _short(text: str) -> str:
    return text if len(text) <= REASON_LETTERS else text[:REASON_LETTERS] + "..."


class Summary(NamedTuple):
    """pass@1, in [0, 1]: the mean over tasks of the share of their samples that pass."""

    benchmark: str
    samples: int
    base: float
    plus: float

    def __str__(self) -> str:
        return (
            f"{self.benchmark}: pass@1 {self.plus:.4f} (base and extra tests), "
            f"{self.base:.4f} (base tests alone), {self.samples} samples"
        )


def grade_file(
    benchmark: str,
    samples_path: Path,
    out: Path,
    *,
    data_dir: Path | None = None,
    unsafe_execution: bool = False,
    progress: Step | None = None,
    workers: int = 2,
) -> Summary:
    """Grades a file of samples made anywhere and writes one JSON line a sample to `out`.

    The samples are lines of JSON with `task_id` and `solution` (a whole program), or `completion`
    (what follows the prompt): evalplus's format, any subset of the tasks.

    Raises:
        InputError: with every fault of the benchmark's name, the file or the sandbox.
    """
    if benchmark not in RELEASES:
        raise InputError(f"unknown benchmark {benchmark!r}; expected one of {', '.join(RELEASES)}")
    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"{out}: expected a file in a folder that exists")
    problems = load_problems(benchmark, data_dir).by_id
    samples = read_samples(samples_path, problems)
    verdicts = grade(problems, samples, workers, unsafe_execution, progress)
    _write(out, "".join(json.dumps(verdict._asdict()) + "\n" for verdict in verdicts))
    by_task: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_task.setdefault(verdict.task_id, []).append(verdict)
    return Summary(
        benchmark,
        samples=len(verdicts),
        base=fmean(fmean(verdict.base for verdict in each) for each in by_task.values()),
        plus=fmean(fmean(verdict.plus for verdict in each) for each in by_task.values()),
    )


def _write(path: Path, text: str) -> None:
    """The whole file or none of it."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
