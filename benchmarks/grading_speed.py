"""Our grader against evalplus 0.3.1: how long, and whether the verdicts are the same.

    python benchmarks/grading_speed.py DATA [--mutants 240] [--seed 0] [--benchmarks mbpp_plus]

DATA is the folder with HumanEvalPlus.jsonl.gz and MbppPlus.jsonl.gz.

**Speed.** All reference solutions, two at a time: ours in two sandboxes, evalplus's
`check_correctness` in a pool of two processes, as its `evaluate` has it (which needs the official
files and may sleep 20 s at its end). What the references return is found first and by each in its
own way, timed apart: both keep it between runs.

**Parity.** Reference solutions with one thing changed: an integer off by one, a returned value off
by one, of another type, or in another order. The same programs go through both, and every verdict
that differs is listed with what each said. A sample on which they differ goes through evalplus
once more, alone, with 60 s an input, so that a busy machine is told from a rule.

With `--records FILE`, the records.sqlite of a run, the completions of its models go through both
too. With `--evalplus FOLDER`, a checkout of evalplus's repository, that is the peer.

evalplus runs the programs without a sandbox: models' completions only inside of one, for example

    bwrap --dev-bind / / --tmpfs $HOME --unshare-net --unshare-pid --die-with-parent --proc /proc \\
        python benchmarks/grading_speed.py DATA --records ...
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.benchmarks.code import solution
from evaluation.sandbox.grade import Verdict, grade
from evaluation.sandbox.problems import RELEASES, Problem, load_problems
from evaluation.sandbox.samples import Sample
from evaluation.sandbox.worker import longest_parsing_prefix
from results import Store

WORKERS = 2
SECONDS = 4.0  # least time an input, for both: evalplus's own default of 1 fails right programs
PATIENT = 60.0  # when evalplus is asked again

KNOWN = {
    "HumanEval/32": "its oracle unpacks the polynomial and fails whatever the program returns",
    "Mbpp/255": "its process holds the expected values, 781 MB, within its limit of 4 GB",
}
"""Faults of evalplus 0.3.1 that a difference on the task comes from."""


class Peer(NamedTuple):
    """What evalplus said of a sample."""

    base: bool
    plus: bool
    told: str


class Truths(NamedTuple):
    """evalplus's own view of a benchmark: its problems, and what the references return."""

    problems: Mapping[str, Any]
    expected: Mapping[str, Any]


def peer_truths(benchmark: str, problems: Mapping[str, Problem]) -> Truths:
    """evalplus's ground truth, found in this process, as it does, and kept in the cache folder."""
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.evaluate import get_groundtruth

    dataset = RELEASES[benchmark].dataset
    rows = {
        problem.task_id: {
            "task_id": problem.task_id,
            "prompt": problem.prompt,
            "canonical_solution": problem.reference.removeprefix(problem.prompt),
            "entry_point": problem.entry_point,
            "base_input": problem.inputs("base"),
            "plus_input": problem.inputs("plus"),
            "atol": problem.atol,
        }
        for problem in problems.values()
    }
    not_none = MBPP_OUTPUT_NOT_NONE_TASKS if dataset == "mbpp" else []
    return Truths(rows, get_groundtruth(rows, f"mergescope-{benchmark}", not_none))


def peer_grade(
    benchmark: str, truths: Truths, samples: Sequence[Sample], workers: int, seconds: float
) -> list[Peer]:
    """evalplus's verdicts, in the samples' order."""
    from evalplus.evaluate import check_correctness

    dataset = RELEASES[benchmark].dataset
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        running = [
            pool.submit(
                check_correctness,
                dataset,
                place,
                truths.problems[sample.task_id],
                sample.solution,
                truths.expected[sample.task_id],
                fast_check=True,
                min_time_limit=seconds,
            )
            for place, sample in enumerate(samples)
        ]
        return [_peer(future.result()) for future in running]


def _peer(found: Mapping[str, Any]) -> Peer:
    base, plus = (found[tests][0] == "pass" for tests in ("base", "plus"))
    tests = "plus" if base else "base"
    status, details = found[tests]
    told = "pass" if base and plus else f"{tests} tests: {status} after {len(details)} inputs"
    return Peer(base, base and plus, told)


# --- mutants -------------------------------------------------------------------------------------


class _Change(ast.NodeTransformer):
    """Changes the `wanted`-th place of one kind; `places` counts them."""

    def __init__(self, kind: str, wanted: int = -1) -> None:
        self.kind, self.wanted, self.places = kind, wanted, 0

    def _here(self) -> bool:
        self.places += 1
        return self.places - 1 == self.wanted

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self.kind == "constant" and type(node.value) is int and self._here():
            return ast.Constant(node.value + 1)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is None or self.kind not in RETURNS or not self._here():
            return node
        text = RETURNS[self.kind].format(f"({ast.unparse(node.value)})")
        return ast.Return(ast.parse(text, mode="eval").body)


RETURNS = {
    "off by one": "(lambda v: v + 1 if isinstance(v, (int, float)) else v + v[:1])({})",
    "type": "(lambda v: tuple(v) if isinstance(v, list) else list(v) if isinstance(v, (tuple, set))"
    " else float(v) if type(v) is int else int(v) if isinstance(v, (bool, float)) else [v])({})",
    "text": "str({})",
    "order": "(lambda v: v[::-1] if isinstance(v, (list, tuple, str)) else v)({})",
}
KINDS = ("constant", *RETURNS)


def mutants(problems: Mapping[str, Problem], count: int, seed: int) -> Iterator[tuple[str, Sample]]:
    """Changed reference solutions with what was changed, the problems in turn."""
    generator = random.Random(f"mutants {seed}")
    tasks = list(problems.values())
    generator.shuffle(tasks)
    made: set[tuple[str, str]] = set()
    for turn in range(len(KINDS)):
        for place, problem in enumerate(tasks):
            kind = KINDS[(place + turn) % len(KINDS)]
            tree = ast.parse(problem.reference)
            counting = _Change(kind)
            counting.visit(tree)
            if not counting.places:
                continue
            wanted = generator.randrange(counting.places)
            changed = _Change(kind, wanted).visit(ast.parse(problem.reference))
            text = ast.unparse(ast.fix_missing_locations(changed))
            if (problem.task_id, text) not in made:
                made.add((problem.task_id, text))
                yield kind, Sample(problem.task_id, text)
            if len(made) == count:
                return


# --- tables --------------------------------------------------------------------------------------


class Speed(NamedTuple):
    """Reference solutions through both: seconds, how many passed, seconds of finding the truth."""

    samples: int
    ours: float
    theirs: float
    right: int
    also_right: int
    our_truth: float
    their_truth: float

    def row(self, benchmark: str) -> str:
        return (
            f"| {benchmark} | {self.samples} | {self.ours:.1f} | {self.theirs:.1f} "
            f"| {self.theirs / self.ours:.2f} | {self.right} | {self.also_right} "
            f"| {self.our_truth:.1f} | {self.their_truth:.1f} |"
        )


def speed(
    benchmark: str, problems: Mapping[str, Problem], truths: Truths, their_truth: float
) -> Speed:
    """Reference solutions through both, ours first, with the truths at hand."""
    samples = [Sample(problem.task_id, problem.reference) for problem in problems.values()]
    started = time.perf_counter()
    grade(problems, samples, WORKERS)
    first = time.perf_counter() - started
    started = time.perf_counter()
    verdicts = grade(problems, samples, WORKERS)
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    peers = peer_grade(benchmark, truths, samples, WORKERS, SECONDS)
    theirs = time.perf_counter() - started
    for verdict, peer in zip(verdicts, peers, strict=True):
        if (verdict.base, verdict.plus) != (peer.base, peer.plus):
            print(_difference("reference", verdict, peer, None), flush=True)
    right = sum(verdict.plus for verdict in verdicts)
    also_right = sum(peer.plus for peer in peers)
    return Speed(len(samples), seconds, theirs, right, also_right, first - seconds, their_truth)


def parity(
    benchmark: str, problems: Mapping[str, Problem], truths: Truths, count: int, seed: int
) -> str:
    """A row: mutants through both; prints every difference."""
    row, same = _both(benchmark, problems, truths, list(mutants(problems, count, seed)))
    return f"| {benchmark}, mutants | {same} | {row}"


def _both(
    benchmark: str,
    problems: Mapping[str, Problem],
    truths: Truths,
    changed: Sequence[tuple[str, Sample]],
) -> tuple[str, str]:
    """The passes by both, and how many verdicts are the same; prints every difference."""
    samples = [sample for _, sample in changed]
    verdicts = grade(problems, samples, WORKERS)
    peers = peer_grade(benchmark, truths, samples, WORKERS, SECONDS)
    same = 0
    for (kind, sample), verdict, peer in zip(changed, verdicts, peers, strict=True):
        if (verdict.base, verdict.plus) == (peer.base, peer.plus):
            same += 1
            continue
        (again,) = peer_grade(benchmark, truths, [sample], 1, PATIENT)
        print(_difference(kind, verdict, peer, again), flush=True)
    right = sum(verdict.plus for verdict in verdicts)
    also = sum(peer.plus for peer in peers)
    return f"{right} | {also} |", f"{len(samples)} | {same}"


def completions(
    benchmark: str, problems: Mapping[str, Problem], truths: Truths, records: Path
) -> str:
    """A row: the programs that a run's models wrote, each once, through both."""
    with Store(records, read_only=True) as store:
        rows = store.frame()
    rows = rows[rows["benchmark"] == benchmark]
    samples = list(
        dict.fromkeys(
            Sample(item, longest_parsing_prefix(solution(problems[item], text)))
            for item, text in zip(rows["item"], rows["completion"], strict=True)
        )
    )
    row, same = _both(benchmark, problems, truths, [("completion", each) for each in samples])
    return f"| {benchmark}, completions of {rows['model'].nunique()} models | {same} | {row}"


def _difference(kind: str, ours: Verdict, theirs: Peer, again: Peer | None) -> str:
    if again is not None and (ours.base, ours.plus) == (again.base, again.plus):
        cause = "a busy machine: alone and with more time evalplus says the same"
    else:
        cause = KNOWN.get(ours.task_id, "unknown")
    said = "pass" if ours.plus else f"{ours.status}, {ours.reason}"
    return f"* {ours.task_id} ({kind}): ours {said}; evalplus {theirs.told}. Cause: {cause}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--benchmarks", nargs="+", default=list(RELEASES), choices=list(RELEASES))
    parser.add_argument("--mutants", type=int, default=240, help="of all benchmarks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, help="records.sqlite of a run")
    parser.add_argument("--evalplus", type=Path, help="a checkout of evalplus, to be the peer")
    parser.add_argument("--only-verdicts", action="store_true", help="without the speed")
    arguments = parser.parse_args()
    if arguments.evalplus is not None:
        sys.path.insert(0, str(arguments.evalplus.resolve()))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # before evalplus is imported: both begin cold
        speeds: dict[str, Speed] = {}
        verdicts = []
        for benchmark in arguments.benchmarks:
            problems = load_problems(benchmark, arguments.data).by_id
            started = time.perf_counter()
            truths = peer_truths(benchmark, problems)
            found = time.perf_counter() - started
            if not arguments.only_verdicts:
                speeds[benchmark] = speed(benchmark, problems, truths, found)
            count = arguments.mutants // len(arguments.benchmarks)
            if arguments.records is not None:
                verdicts.append(completions(benchmark, problems, truths, arguments.records))
            if count:
                verdicts.append(parity(benchmark, problems, truths, count, arguments.seed))
    if speeds:
        print("\n| references | n | ours, s | evalplus, s | times | right, ours ", end="")
        print("| right, evalplus | truth, ours, s | truth, evalplus, s |\n|---|" + "---:|" * 8)
        for benchmark, each in speeds.items():
            print(each.row(benchmark))
        print(Speed(*map(sum, zip(*speeds.values(), strict=True))).row("all"))
    if verdicts:
        print(
            "\n| programs | n | same verdicts | pass, ours | pass, evalplus |\n|---|" + "---:|" * 4
        )
        print("\n".join(verdicts))


if __name__ == "__main__":
    main()
