"""HumanEval+ and MBPP+ as benchmarks: prompts, stops, solutions, faults and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.benchmarks.code import HUMANEVAL_PLUS, MBPP_PLUS
from evaluation.benchmarks.contract import BenchmarkEntry, Generate, Output, Settings
from evaluation.errors import InputError
from evaluation.sandbox import bubblewrap, problems
from evaluation.sandbox.worker import longest_parsing_prefix

FAULTS = bubblewrap.sandbox_faults()
ENTRIES = {"HumanEvalPlus.jsonl": HUMANEVAL_PLUS, "MbppPlus.jsonl": MBPP_PLUS}


def row(number: int) -> dict[str, Any]:
    """`half(x)`; the prompt begins and ends with blank lines, as some real ones do."""
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": '\ndef half(x):\n    """ Half of x. """\n\n',
        "entry_point": "half",
        "canonical_solution": "    return x / 2\n",
        "base_input": [[1]],
        "plus_input": [[3]],
        "atol": 0,
    }


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = "".join(json.dumps(row(number)) + "\n" for number in range(3))
    (tmp_path / "HumanEvalPlus.jsonl").write_text(lines)
    return Settings(data_dir=tmp_path, max_new_tokens=7)


def test_prompts_are_stripped_and_end_in_a_newline(settings: Settings) -> None:
    items = HUMANEVAL_PLUS.open(settings).items(2)
    assert [item.id for item in items] == ["HumanEval/0", "HumanEval/1"]
    ((request,), _) = (item.requests for item in items)
    assert isinstance(request, Generate)
    assert request.prompt == 'def half(x):\n    """ Half of x. """\n'
    assert request.max_new_tokens == 7


def test_stops_are_those_of_evalplus_for_base_models(settings: Settings, tmp_path: Path) -> None:
    """evalplus 0.3.1, `provider/utility.py`: EOS and extra_eos_for_direct_completion."""
    common = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(")
    functions = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")
    (tmp_path / "MbppPlus.jsonl").write_text(json.dumps(row(0)))
    for entry, extra in ((HUMANEVAL_PLUS, functions), (MBPP_PLUS, ('\n"""', "\nassert"))):
        (item,) = entry.open(settings).items(1)
        (request,) = item.requests
        assert isinstance(request, Generate)
        assert request.stops == (*common, *extra)


@pytest.mark.sandbox
@pytest.mark.skipif(bool(FAULTS), reason=f"no sandbox here: {FAULTS}")
def test_completions_are_scored_on_base_and_on_extra_tests(settings: Settings) -> None:
    """Right (with a tab and a line cut at the token limit); right for x = 1 alone; wrong."""
    benchmark = HUMANEVAL_PLUS.open(settings)
    texts = ["\treturn x / 2\n\nhalf(", "    return 0.5\n", "    return None\n"]
    scores = benchmark.score(benchmark.items(None), [[Output(text=text)] for text in texts])
    assert scores == [
        {"pass@1": 1.0, "pass@1_base": 1.0},
        {"pass@1": 0.0, "pass@1_base": 1.0},
        {"pass@1": 0.0, "pass@1_base": 0.0},
    ]
    assert all(HUMANEVAL_PLUS.metric in score for score in scores)


def test_the_version_follows_the_data_and_the_grader(settings: Settings, tmp_path: Path) -> None:
    before = HUMANEVAL_PLUS.open(settings).version
    assert before == HUMANEVAL_PLUS.open(settings).version
    assert "grader 1" in before
    (tmp_path / "HumanEvalPlus.jsonl").write_text(json.dumps(row(0)))
    assert HUMANEVAL_PLUS.open(settings).version != before


@pytest.mark.parametrize(("file", "entry"), ENTRIES.items())
def test_a_folder_without_the_file_is_a_fault_that_says_how_to_get_it(
    tmp_path: Path, file: str, entry: BenchmarkEntry
) -> None:
    settings = Settings(data_dir=tmp_path, unsafe_execution=True)
    (fault,) = entry.faults(settings)
    assert f"{tmp_path} holds neither {file}.gz nor {file}" in fault
    with pytest.raises(InputError, match="holds neither"):
        entry.open(settings)


def test_a_machine_without_a_sandbox_is_a_fault_unless_unsafe_was_asked_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (fault,) = HUMANEVAL_PLUS.faults(settings)
    assert "bwrap" in fault
    assert HUMANEVAL_PLUS.faults(settings._replace(unsafe_execution=True)) == []


def test_a_failed_download_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(url: str, path: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("evalplus.data.utils.make_cache", offline)
    with pytest.raises(
        InputError, match=r"MbppPlus\.jsonl\.gz could not be downloaded .*--data-dir"
    ):
        problems.load_problems("mbpp_plus")


@pytest.mark.parametrize(
    ("program", "kept"),
    [
        ("def f():\n    return 1\n", "def f():\n    return 1\n"),
        ("def f():\n    return 1\nx = (", "def f():\n    return 1\n"),
        ("def f():\n    return 1\n\nprose follows here\nand here", "def f():\n    return 1\n\n"),
        ("def f():\n    for x in y:\n", "def f():\n    for x in y:\n"),  # no prefix parses
        ("x = 1\ndef f():\n    if x:\n", "x = 1\n"),
        ("@cache\ndef f():\n    return 1\n", "@cache\ndef f():\n    return 1\n"),
        ("(" * 100_000, "(" * 100_000),
        ("x = '\0'", "x = '\0'"),
    ],
)
def test_the_longest_prefix_of_lines_that_parses_is_kept(program: str, kept: str) -> None:
    assert longest_parsing_prefix(program) == kept


@pytest.mark.data
def test_the_real_files_have_164_and_378_problems(data_dir: Path) -> None:
    """The counts of HumanEval+ v0.1.10 and MBPP+ v0.2.0."""
    counts = [len(entry.open(Settings(data_dir)).items(None)) for entry in ENTRIES.values()]
    assert counts == [164, 378]
