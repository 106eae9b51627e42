"""What is told while work goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from evaluation import progress
from evaluation.progress import bar


def test_the_part_in_work_has_a_bar_of_its_own() -> None:
    """Four of ten units belong to the first part, the second begins at none of its six."""
    shown = Progress(console=Console(file=io.StringIO(), force_terminal=True))
    whole = progress._TerminalBar(shown, "evaluation", 10)
    whole.describe("base · loading")
    assert [task.description for task in shown.tasks] == ["base · loading"]
    whole.describe("base · gsm8k", 4)
    whole.advance(4)
    assert [(task.description, task.completed, task.total) for task in shown.tasks] == [
        ("evaluation", 4, 10),
        ("base · gsm8k", 4, 4),
    ]
    whole.describe("base · math", 6)
    whole.advance()
    assert [(task.description, task.completed, task.total) for task in shown.tasks] == [
        ("evaluation", 5, 10),
        ("base · math", 1, 6),
    ]


def test_lines_tell_whole_part_and_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five of ten units in 11 s leave 11 s; one of the part's six units is 17 %."""
    now = iter([0.0, 5.0, 11.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with bar("evaluation", 10) as shown:
        shown.describe("base · gsm8k", 4)
        shown.advance(4)
        shown.describe("base · math", 6)
        shown.advance()
    assert capsys.readouterr().err.splitlines() == [
        "  0% evaluation",
        "  0% base · gsm8k",
        " 40% base · math",
        " 50% base · math (17%), 0:11 left",
    ]
