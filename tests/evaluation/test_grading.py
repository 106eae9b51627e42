"""From samples to verdicts: comparison, oracles, ground truth, files of samples."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.errors import InputError
from evaluation.sandbox import grade as grading
from evaluation.sandbox import process
from evaluation.sandbox.bubblewrap import sandbox_faults
from evaluation.sandbox.codec import encode
from evaluation.sandbox.grade import Grader, grade, grade_file
from evaluation.sandbox.problems import Problem, load_problems
from evaluation.sandbox.samples import Sample
from evaluation.sandbox.truth import truth_path
from evaluation.sandbox.values import Judge, equal, is_floats, most_bytes

FAULTS = sandbox_faults()
needs_sandbox = [
    pytest.mark.sandbox,
    pytest.mark.skipif(bool(FAULTS), reason=f"no sandbox here: {FAULTS}"),
]


def problem(**changes: Any) -> Problem:
    """`half(x)`, whose values are floats."""
    fields: dict[str, Any] = {
        "dataset": "humaneval",
        "task_id": "Half/0",
        "prompt": "def half(x):\n",
        "entry_point": "half",
        "reference": "def half(x):\n    return x / 2\n",
        "atol": 0.0,
        "raw": {"base": [[1], [3]], "plus": [[5]]},
    }
    return Problem(**{**fields, **changes})


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ------------------------------------------------------------------------------------ comparison


@pytest.mark.parametrize(
    ("value", "expected", "atol", "right"),
    [
        (1, 1.0, 0, True),  # Python's ==
        (True, 1, 0, True),
        ((1, 2), [1, 2], 0, False),
        ({1, 2}, {2, 1}, 0, True),
        ("1", 1, 0, False),
        (0.3, 0.1 + 0.2, 0, False),  # they differ in the last bit
        (0.3, 0.1 + 0.2, 1e-6, True),
        (1, 1.0000001, 1e-6, False),  # a tolerance asks for the same type
        ([0.1, 0.2], [0.1, 0.2 + 1e-8], 1e-6, True),
        ([0.1], [0.1, 0.2], 1e-6, False),
        ((0.1,), [0.1 + 1e-9], 1e-6, False),
        (1e9 + 1, 1e9, 1e-6, True),  # rtol 1e-7 allows 100
        (1e9 + 1000, 1e9, 1e-6, False),
        (math.nan, math.nan, 1e-6, False),
        (np.float64(0.5), 0.5, 0, True),
        (np.float64(0.3), 0.1 + 0.2, 1e-6, False),  # np.float64 is not float
    ],
)
def test_values_are_compared_as_evalplus_does(
    value: Any, expected: Any, atol: float, right: bool
) -> None:
    """Each line follows from the rule in `values.py`, by hand."""
    assert equal(value, expected, atol) is right


def test_floats_are_told_by_value_and_by_flat_lists() -> None:
    assert is_floats(1.0) and is_floats([1.0, 2.0]) and is_floats((0.5,))
    assert not is_floats(1) and not is_floats([]) and not is_floats([1.0, 2]) and not is_floats("a")


def judged(task: Problem, returned: Any, expected: Any, arguments: Any = ()) -> bool:
    return Judge(task, [encode(list(arguments))], [encode(expected)]).right(0, encode(returned))


def test_a_float_brings_a_tolerance_that_later_values_keep() -> None:
    """evalplus sets atol to 1e-6 at the first float; 10**9 + 1 is then within rtol of 10**9."""
    judge = Judge(problem(), ["[]", "[]"], [encode(0.5), encode(10**9)])
    assert judge.right(1, encode(10**9 + 1))
    assert not Judge(problem(), ["[]"], [encode(10**9)]).right(0, encode(10**9 + 1))


def test_an_opaque_value_is_never_right_even_where_one_is_expected() -> None:
    assert not judged(problem(), object(), object())


@pytest.mark.parametrize("text", ["", "nonsense", '{"set":1}', "[" * 10_000, "1e999"])
def test_a_text_that_is_no_right_value_is_wrong(text: str) -> None:
    assert not Judge(problem(), ["[]"], ["1"]).right(0, text)


def test_values_that_cannot_be_compared_are_wrong() -> None:
    assert not judged(problem(atol=1e-4), ["a", [1]], [0.5, 0.5])
    assert not judged(problem(atol=1e-4), [10**400], [0.5])


@pytest.mark.parametrize("expected", [1e22, [1e300] * 10, 5, "a", {0.5: [1e18]}, 2**100])
def test_no_equal_value_has_a_longer_text_than_allowed(expected: Any) -> None:
    """The longest forms: integers for floats, numpy scalars for small numbers."""

    def longest(value: Any) -> Any:
        if isinstance(value, list):
            return [longest(item) for item in value]
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return np.float64(value) if isinstance(value, int) else value

    value = longest(expected)
    assert value == expected
    assert len(encode(value)) <= most_bytes(len(encode(expected)))


# --------------------------------------------------------------------------------------- oracles


def mbpp(name: str) -> Problem:
    return problem(dataset="mbpp", entry_point=name)


@pytest.mark.parametrize(
    ("task", "arguments", "expected", "right", "wrong"),
    [
        # (x - 1)(x + 1): both roots, whatever the reference found
        (problem(entry_point="find_zero", atol=1e-4), [[-1, 0, 1]], 1.0, [-1.0, 1.00001], [0, "1"]),
        (mbpp("are_equivalent"), [1, 2], True, [False, None, "x"], []),
        (mbpp("sum_div"), [8], 7, [7, 0], [1, None]),
        # height 4, base 6: sides 4 * 6 * 5 / 2 = 60, base 36
        (mbpp("surface_Area"), [6, 4], 84, [84, 96], [95, "96", None]),
        # |7 - 1| + |0 - 2| with 7 written as 07: 12 against 07
        (mbpp("digit_distance_nums"), [12, 7], 5, [5, 6], [7]),
        (mbpp("check_str"), ["a"], None, [None, False], [True, "a", object()]),
        (mbpp("check_str"), ["a"], object(), [True, object(), "a"], [None, False]),
    ],
)
def test_tasks_with_several_answers_accept_each_of_them(
    task: Problem, arguments: list[Any], expected: Any, right: list[Any], wrong: list[Any]
) -> None:
    assert all(judged(task, value, expected, arguments) for value in right)
    assert not any(judged(task, value, expected, arguments) for value in wrong)


def test_an_oracle_sees_the_problems_arguments_not_the_programs() -> None:
    """`find_zero` of a program that empties its argument would make any value a root."""
    task = problem(entry_point="find_zero", atol=1e-4)
    assert not judged(task, 5.0, 1.0, [[-1, 0, 1]])


# --------------------------------------------------------------------------------------- verdicts


class TestInTheSandbox:
    pytestmark = needs_sandbox

    def test_right_and_wrong_programs_get_their_verdicts_in_order(self) -> None:
        tasks = {"Half/0": problem()}
        programs = [
            "def half(x): return x * 0.5",
            "def half(x): return x // 2",
            "def half(x): return x / 2 if x < 5 else 0",
            "def half(x): raise KeyError('no')",
            "import os\ndef half(x): os._exit(4)",
        ]
        verdicts = grade(tasks, [Sample("Half/0", text) for text in programs])
        assert [v.status for v in verdicts] == ["pass", "fail", "fail", "fail", "crash"]
        assert [(v.base, v.plus) for v in verdicts[:3]] == [
            (True, True),
            (False, False),
            (True, False),
        ]
        assert verdicts[1].reason == "base tests: input 0 returned 0, expected 0.5"
        assert verdicts[2].reason == "plus tests: input 0 returned 0, expected 2.5"
        assert "KeyError: 'no'" in verdicts[3].reason
        assert "exit code 4" in verdicts[4].reason

    def test_arguments_changed_by_a_program_are_whole_again_for_the_next_input(self) -> None:
        task = problem(
            entry_point="last",
            reference="def last(x):\n    return x.pop()\n",
            raw={"base": [[[1, 2]], [[1, 2]]], "plus": []},
        )
        (verdict,) = grade({"Half/0": task}, [Sample("Half/0", "def last(x): return x.pop()")])
        assert verdict.plus

    def test_base_and_extra_tests_run_in_fresh_processes(self) -> None:
        """A program that counts its calls in a global starts again."""
        text = (
            "calls = []\n"
            "def half(x):\n"
            "    calls.append(x)\n"
            "    return x / 2 if len(calls) < 3 else 0\n"
        )
        (verdict,) = grade({"Half/0": problem()}, [Sample("Half/0", text)])
        assert verdict.plus

    def test_sandboxes_stay_warm_from_one_call_to_the_next(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One for the reference solution, then one for all samples; a program that kills what it
        can costs no later one its verdict."""
        started = []
        inner = process.worker_command

        def counted(unsafe: bool) -> list[str]:
            started.append(1)
            return inner(unsafe)

        monkeypatch.setattr(process, "worker_command", counted)
        right = Sample("Half/0", "def half(x): return x / 2")
        with Grader({"Half/0": problem()}, workers=1) as grader:
            assert all(grader.grade([right])[0].plus for _ in range(3))
            assert len(started) == 2
            harmful = Sample("Half/0", "import os\ndef half(x): os.kill(-1, 9)")
            assert not grader.grade([harmful])[0].base
            assert all(grader.grade([right])[0].plus for _ in range(3))
        assert len(started) <= 3

    def test_trailing_lines_that_do_not_parse_are_dropped_on_request(self) -> None:
        text = "def half(x):\n    return x / 2\n\ndef other(y):\n    return ("
        kept, trimmed = grade(
            {"Half/0": problem()}, [Sample("Half/0", text), Sample("Half/0", text, trim=True)]
        )
        assert kept.status == "fail" and "SyntaxError" in kept.reason
        assert trimmed.status == "pass"

    def test_sets_are_compared_where_the_task_says_so(self) -> None:
        task = problem(
            dataset="mbpp",
            task_id="Mbpp/2",
            entry_point="similar_elements",
            reference="def similar_elements(a, b): return tuple(set(a) & set(b))",
            raw={"base": [[[1, 2, 3], [3, 2]]], "plus": []},
        )
        programs = [
            "def similar_elements(a, b): return [3, 2, 2]",
            "def similar_elements(a, b): return (x for x in a if x in b)",
            "def similar_elements(a, b): return [3]",
            "def similar_elements(a, b): return 5",
        ]
        verdicts = grade({"Mbpp/2": task}, [Sample("Mbpp/2", text) for text in programs])
        assert [v.plus for v in verdicts] == [True, True, False, False]

    def test_a_value_too_large_for_text_is_compared_by_its_digest(self) -> None:
        task = problem(
            reference="def half(x): return [x] * 4_000_000", raw={"base": [[1]], "plus": []}
        )
        programs = [task.reference, "def half(x): return [x] * 3_999_999 + [0]"]
        verdicts = grade({"Half/0": task}, [Sample("Half/0", text) for text in programs])
        assert [v.plus for v in verdicts] == [True, False]

    @pytest.mark.parametrize(
        ("body", "right"),
        [
            ("[x / 2 + n for n in range(40_000)]", True),
            ("[x / 2 + n if n else x // 2 for n in range(40_000)]", True),  # 2 == 2.0
            ("[x / 2 + n + 1e-12 * (n == 9) for n in range(40_000)]", True),  # within 1e-6
            ("[x / 2 + n + 1e-3 * (n == 9) for n in range(40_000)]", False),
            ("tuple(x / 2 + n for n in range(40_000))", False),
            ("[np.float64(x / 2 + n) for n in range(40_000)]", True),
        ],
    )
    def test_a_long_value_that_has_not_the_expected_digest_is_compared_whole(
        self, cache: Path, body: str, right: bool
    ) -> None:
        """40,000 floats are 360 kB marshalled, far above `SHORT`."""
        task = problem(
            reference="def half(x): return [x / 2 + n for n in range(40_000)]",
            raw={"base": [[4]], "plus": [[6]]},
        )
        text = f"import numpy as np\ndef half(x): return {body}"
        (verdict,) = grade({"Half/0": task}, [Sample("Half/0", text)])
        assert (verdict.base, verdict.plus) == (right, right), verdict.reason
        (kept,) = cache.rglob("Half_0-*.json.gz")
        with gzip.open(kept, "rt") as file:
            (value,) = json.load(file)["base"]["values"]
        assert value.startswith('{"digest":')
        assert right or ("returned" in verdict.reason and "expected [2.0,3.0," in verdict.reason)

    def test_long_values_with_nan_are_never_equal_by_their_digests(self) -> None:
        """nan == nan is false, and so is evalplus's verdict."""
        reference = "def half(x): return [float('nan'), *map(float, range(40_000))]"
        task = problem(reference=reference)
        (verdict,) = grade({"Half/0": task}, [Sample("Half/0", reference)])
        assert not verdict.base

    def test_a_nan_among_long_values_is_never_equal_to_itself(self) -> None:
        """The long value of input 0 has the expected digest; input 1 returns nan, as expected."""
        reference = "def half(x): return [0.5] * 40_000 if x == 1 else float('nan')"
        task = problem(reference=reference)
        (verdict,) = grade({"Half/0": task}, [Sample("Half/0", reference)])
        assert verdict.reason.startswith("base tests: input 1 returned")

    def test_damaged_whole_values_are_told_and_then_found_again(self, cache: Path) -> None:
        task = problem(reference="def half(x): return [x] * 40_000")
        other = Sample("Half/0", "def half(x): return [float(x)] * 40_000")
        assert grade({"Half/0": task}, [other])[0].plus
        (path,) = cache.rglob("whole-Half_0-*.json.gz")
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(InputError, match="damaged while grading; start again"):
            grade({"Half/0": task}, [other])
        assert grade({"Half/0": task}, [other])[0].plus
        path.unlink()
        assert grade({"Half/0": task}, [other])[0].plus

    def test_a_timeout_is_tried_once_more_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grading, "MIN_SECONDS", 0.3)
        runs = []
        run = grading._verdict
        monkeypatch.setattr(grading, "_verdict", lambda *a: runs.append(1) or run(*a))
        (verdict,) = grade(
            {"Half/0": problem()}, [Sample("Half/0", "def half(x):\n    while True: pass")]
        )
        assert verdict.status == "timeout" and len(runs) == 2

    def test_ground_truth_is_kept_and_a_damaged_file_made_again(self, cache: Path) -> None:
        samples = [Sample("Half/0", problem().reference)]
        assert grade({"Half/0": problem()}, samples)[0].plus
        (path,) = cache.rglob("Half_0-*.json.gz")
        assert path == truth_path(problem())
        with gzip.open(path, "rt") as file:
            assert json.load(file)["base"]["values"] == ["0.5", "1.5"]
        for damage in (b"", path.read_bytes()[:-20], gzip.compress(b"{}")):
            path.write_bytes(damage)
            assert grade({"Half/0": problem()}, samples)[0].plus
        assert path != truth_path(problem(reference="def half(x): return x * .5"))

    def test_a_reference_that_does_not_run_is_the_data_files_fault(self) -> None:
        broken = problem(reference="def half(x): return x / 0")
        with pytest.raises(InputError, match="Half/0: the reference solution does not run"):
            grade({"Half/0": broken}, [Sample("Half/0", "")])

    def test_progress_is_told_to_the_end(self) -> None:
        told: list[tuple[int, int]] = []
        grade(
            {"Half/0": problem()},
            [Sample("Half/0", "")] * 3,
            progress=lambda done, total: told.append((done, total)),
        )
        assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def test_unsafe_execution_runs_the_same_worker_without_walls(self) -> None:
        programs = ["def half(x): return x / 2", "def half(x): return 0"]
        verdicts = grade(
            {"Half/0": problem()}, [Sample("Half/0", text) for text in programs], unsafe=True
        )
        assert [v.plus for v in verdicts] == [True, False]

    def test_a_file_of_samples_becomes_a_file_of_verdicts(self, tmp_path: Path) -> None:
        (tmp_path / "MbppPlus.jsonl").write_text(json.dumps(ROW) + "\n")
        samples = tmp_path / "samples.jsonl"
        good = {"task_id": "Mbpp/3", "solution": "def half(x): return x / 2"}
        bad = {"task_id": "Mbpp/3", "completion": "def half(x): return 1"}
        samples.write_text(f"{json.dumps(good)}\n\n{json.dumps(bad)}\n")
        summary = grade_file("mbpp_plus", samples, tmp_path / "out.jsonl", data_dir=tmp_path)
        assert (summary.base, summary.plus, summary.samples) == (0.5, 0.5, 2)
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [row["status"] for row in rows] == ["pass", "fail"]
        assert list(rows[0]) == ["task_id", "status", "base", "plus", "reason", "seconds"]


# ------------------------------------------------------------------------------------- bad input

ROW = {
    "task_id": "Mbpp/3",
    "prompt": '"""\nHalve.\n"""\n',
    "entry_point": "half",
    "canonical_solution": "def half(x):\n    return x / 2\n",
    "base_input": [[1]],
    "plus_input": {},
    "atol": 0,
}


def fault(tmp_path: Path, lines: str, benchmark: str = "mbpp_plus") -> str:
    (tmp_path / "MbppPlus.jsonl").write_text(json.dumps(ROW) + "\n")
    samples = tmp_path / "samples.jsonl"
    samples.write_text(lines)
    with pytest.raises(InputError) as error:
        grade_file(benchmark, samples, tmp_path / "out.jsonl", data_dir=tmp_path)
    assert not (tmp_path / "out.jsonl").exists()
    return str(error.value)


def test_every_bad_line_of_a_sample_file_is_told_with_its_number(tmp_path: Path) -> None:
    lines = [
        "{",
        "[1]",
        '{"task_id": 3}',
        '{"task_id": "Mbpp/33", "solution": ""}',
        '{"task_id": "Mbpp/3"}',
        '{"task_id": "Mbpp/3", "solution": ["a"]}',
    ]
    told = fault(tmp_path, "\n".join(lines)).splitlines()
    assert [text.split(": ")[0].rsplit(" ", 1)[1] for text in told] == list("123456")
    assert "did you mean 'Mbpp/3'" in told[3]


def test_no_samples_or_no_benchmark_of_that_name_is_told(tmp_path: Path) -> None:
    assert "no sample in it" in fault(tmp_path, "\n")
    assert "humaneval_plus, mbpp_plus" in fault(tmp_path, "", benchmark="mbpp")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt": None}, "expected prompt to be a string"),
        ({"base_input": [1]}, "expected base_input to be a list of lists"),
        ({"atol": "0"}, "expected atol to be a number"),
    ],
)
def test_a_damaged_data_file_is_told_with_the_line(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    path = tmp_path / "MbppPlus.jsonl"
    path.write_text(
        f"{json.dumps({**ROW, 'task_id': 'Mbpp/1'})}\n{json.dumps({**ROW, **change})}\n"
    )
    with pytest.raises(InputError, match=f"line 2: {told}"):
        load_problems("mbpp_plus", tmp_path)


@pytest.mark.parametrize("content", [b"", b"not gzip", gzip.compress(b"{}")[:10]])
def test_a_truncated_archive_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "HumanEvalPlus.jsonl.gz").write_bytes(content)
    with pytest.raises(InputError, match="get the file again"):
        load_problems("humaneval_plus", tmp_path)


# ------------------------------------------------------------------------------------- real data

CHOSEN = {  # 32 find_zero; oracles, sets, matches, complex numbers, no extra tests
    "humaneval_plus": "0 1 32 38 50 53 87 99 106 116 151 163",
    "mbpp_plus": "2 7 124 140 252 278 558 579 581 737 787 793",
}


@pytest.mark.data
@pytest.mark.sandbox
@pytest.mark.skipif(bool(FAULTS), reason=f"no sandbox here: {FAULTS}")
@pytest.mark.parametrize("benchmark", CHOSEN)
def test_reference_solutions_pass_and_changed_ones_fail(benchmark: str, data_dir: Path) -> None:
    """The change: what was v becomes [[v], [v]], which no task wants (no order, tolerance or
    oracle makes it right: `check_str` must return None where nothing matches)."""
    known = load_problems(benchmark, data_dir).by_id
    prefix = next(iter(known)).split("/")[0]
    chosen = [known[f"{prefix}/{number}"] for number in CHOSEN[benchmark].split()]
    samples = [Sample(each.task_id, each.reference) for each in chosen]
    for each in chosen:
        name = each.entry_point
        change = f"_right = {name}\ndef {name}(*a):\n    return [[_right(*a)]] * 2\n"
        samples.append(Sample(each.task_id, f"{each.reference}\n{change}"))
    verdicts = grade(known, samples)
    assert [v for v in verdicts[: len(chosen)] if not v.plus] == []
    assert [v for v in verdicts[len(chosen) :] if v.plus] == []
