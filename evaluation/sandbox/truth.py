"""What the reference solutions return, found in the sandbox and kept on disk.

One file a problem below `$XDG_CACHE_HOME/mergescope/ground_truth` (`~/.cache` by default), named
by the digest of everything that decides its content, written whole or not at all. Expected values
stay the text they came as (codec.py): most comparisons need no more, and an output of a gigabyte
(Mbpp/255) is a digest. Where values are long (115 MB in HumanEval/130), that file has their digests
and a second one their texts: the right program is told by the first alone.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import tempfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluation.errors import InputError
from evaluation.sandbox.codec import decode, encode
from evaluation.sandbox.oracles import oracle, wants_set
from evaluation.sandbox.problems import Problem, Tests
from evaluation.sandbox.process import Budget, Program, Sandbox, Stopped
from evaluation.sandbox.values import MOST, is_equal_to_itself

VERSION = "1"  # of the grader: raise it when verdicts may change
FORMAT = "2"  # of the files here: raise it when their content does
REFERENCE_SECONDS = 300.0  # the slowest, Mbpp/255, takes ten on an idle core
TESTS: tuple[Tests, Tests] = ("base", "plus")
SHORT = 64 << 10  # marshalled bytes of a value; above, its digest is compared first
LEAST_LETTERS = SHORT // 4  # of a text of so many bytes: a 0 in a list has two letters, five bytes


class Truth(NamedTuple):
    """The tests of one kind, one entry an input."""

    inputs: list[str]  # lists of arguments, as text
    values: list[str]  # what the reference solution returns, as text
    seconds: list[float]  # what it took
    lengths: list[int]  # of the values' whole texts

    @property
    def shortened(self) -> bool:
        """Whether some values are the digests of longer ones."""
        return self.lengths != [len(text) for text in self.values]


def truth_path(problem: Problem) -> Path:
    """The file of a problem's truth; creates the folder, raises `InputError` where it cannot."""
    decisive = (VERSION, FORMAT, platform.python_version(), np.__version__, problem)
    digest = hashlib.sha256(repr(decisive).encode()).hexdigest()
    return _folder() / f"{problem.task_id.replace('/', '_')}-{digest[:20]}.json.gz"


def load_truth(path: Path) -> dict[Tests, Truth] | None:
    """The truth in a file; None where it is missing or damaged, and so to be found again."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            stored = json.load(file)
        truth = {tests: Truth(**stored[tests]) for tests in TESTS}
        lacking = any(each.shortened for each in truth.values()) and not whole_path(path).exists()
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        return None
    return None if lacking else truth


def find_truth(problem: Problem, path: Path, sandbox: Sandbox) -> dict[Tests, Truth]:
    """Runs the reference solution, stores what it returns, and returns that.

    Raises:
        InputError: it raises, ends or takes too long: the data file is not evalplus's.
    """
    found = {tests: _run(problem, tests, sandbox) for tests in TESTS}
    short = {tests: _shorten(problem, truth) for tests, truth in found.items()}
    if any(truth.shortened for truth in short.values()):
        _store(found, whole_path(path))
    _store(short, path)
    return short


def whole_path(path: Path) -> Path:
    """The file of the same truth in which no value is shortened; there if some value is."""
    return path.with_name(f"whole-{path.name}")


def _store(truth: dict[Tests, Truth], path: Path) -> None:
    stored = {tests: each._asdict() for tests, each in truth.items()}
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(gzip.compress(json.dumps(stored).encode("ascii"), 5))
    Path(file.name).replace(path)


def _shorten(problem: Problem, truth: Truth) -> Truth:
    """With digests for long values, where equal texts mean that all values are right."""
    if oracle(problem) is not None or not all(map(is_equal_to_itself, truth.values)):
        return truth
    values = [
        text if len(text) < LEAST_LETTERS else encode(decode(text), SHORT) for text in truth.values
    ]
    return truth._replace(values=values)


def _run(problem: Problem, tests: Tests, sandbox: Sandbox) -> Truth:
    program = Program(problem.reference, problem.entry_point, as_set=wants_set(problem))
    truth = Truth(
        [encode(arguments, large=None) for arguments in problem.inputs(tests)], [], [], []
    )
    count = len(truth.inputs)
    budget = Budget(
        REFERENCE_SECONDS, [REFERENCE_SECONDS] * count, REFERENCE_SECONDS, [MOST] * count
    )
    try:
        with closing(sandbox.run(program, truth.inputs, budget)) as replies:
            for place, reply in enumerate(replies, -1):  # the first tells how loading went
                if reply.returned is None:
                    raise Stopped("fail", f"it raised {reply.raised}")
                if place >= 0:
                    truth.values.append(reply.returned)
                    truth.lengths.append(len(reply.returned))
                    truth.seconds.append(round(reply.seconds, 6))
    except Stopped as stopped:
        raise InputError(
            f"{problem.task_id}: the reference solution does not run in the sandbox "
            f"({stopped.reason}); use the data file of evalplus's release"
        ) from None
    return truth


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "mergescope" / "ground_truth"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written ({error.strerror}); the outputs of the reference "
            "solutions are kept there, set XDG_CACHE_HOME to another folder"
        ) from None
    return folder
