"""What a run would do, told before it does it; and runs of a part of the cells."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from sums import write_sums

from evaluation import cli
from evaluation.benchmarks.contract import Generate, Item, Score
from evaluation.errors import InputError
from evaluation.experiment import load_experiment
from evaluation.forecast import PROBED, TOKENS, check_only, is_wanted, seconds_an_item
from evaluation.run import forecast, run_experiment

CELLS = [("base", "gsm8k"), ("ta-0.3", "gsm8k"), ("ta-0.3", "math"), ("logit", "gsm8k_loglik")]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ([], [True, True, True, True]),
        (["base"], [True, False, False, False]),
        (["ta-*/math"], [False, False, True, False]),
        (["*/gsm8k"], [True, True, False, False]),
        (["logit", "*/math"], [False, False, True, True]),
        (["ta-0.3/"], [False, True, True, False]),
    ],
)
def test_patterns_name_cells(only: list[str], expected: list[bool]) -> None:
    assert [is_wanted(*cell, only) for cell in CELLS] == expected


def test_a_pattern_that_names_nothing_is_a_fault_with_the_names() -> None:
    with pytest.raises(InputError, match=r"(?s)ties/gsm8k: no such cell.*ta-0.3.*--only x/math"):
        check_only(CELLS, ["ties/gsm8k", "base", "x/math"])


class Clock:
    """Each request costs a second for its prompt and a tenth for every further token."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def answer(self, runtime: Any, requests: Any, batch_size: Any) -> Any:
        for request in requests:
            more = request.max_new_tokens - 1 if isinstance(request, Generate) else 0
            self.now += 1 + 0.1 * more
            yield []


def test_the_probe_reaches_to_the_limit_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 tokens: one second and 99 tenths."""
    clock = Clock()
    monkeypatch.setattr("evaluation.forecast.answer", clock.answer)
    items = [Item(str(place), (Generate("a", ("b",), 100),)) for place in range(50)]
    assert seconds_an_item(None, items, None, clock) == pytest.approx(1 + 9.9)  # type: ignore[arg-type]
    assert clock.now == pytest.approx(PROBED * 2 + PROBED * 0.1 * TOKENS)
    scored = [Item("0", (Score("a", "b"), Score("a", "c"))), Item("1", (Score("a", "b"),))]
    assert seconds_an_item(None, scored, None, clock) == pytest.approx(1.5)  # type: ignore[arg-type]


@pytest.fixture
def experiment(tmp_path: Path, family: dict[str, Path]) -> Path:
    write_sums(tmp_path, 4)
    content = {
        "name": "part",
        "base": str(family["base"]),
        "experts": {"first": str(family["first"]), "second": str(family["second"])},
        "models": [{"name": "logit", "rule": "product"}],
        "benchmarks": ["gsm8k_loglik"],
    }
    path = tmp_path / "part.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_forecast_knows_what_is_done_and_writes_nothing(experiment: Path, tmp_path: Path) -> None:
    out, loaded = tmp_path / "out", load_experiment(experiment, tmp_path)
    before = forecast(loaded, out, data_dir=tmp_path)
    assert not out.exists()
    assert [(cell.model, cell.items, cell.done) for cell in before] == [
        (name, 4, 0) for name in ("base", "first", "second", "logit")
    ]
    seconds = {cell.model: cell.seconds for cell in before}
    assert seconds["logit"] == pytest.approx(3 * seconds["base"]) and seconds["base"] > 0
    run_experiment(loaded, out, data_dir=tmp_path, only=["base", "logit/gsm8k*"])
    board = pd.read_csv(out / "leaderboard.csv").set_index("model")["n"]
    assert board.to_dict() == {"base": 4, "first": 0, "second": 0, "logit": 4}
    after = forecast(loaded, out, data_dir=tmp_path)
    assert [(cell.done, cell.seconds == 0) for cell in after] == [
        (4, True),
        (0, False),
        (0, False),
        (4, True),
    ]
    run_experiment(loaded, out, data_dir=tmp_path)
    assert (pd.read_csv(out / "leaderboard.csv")["n"] == 4).all()


def test_the_command_tells_the_plan(
    experiment: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", str(experiment), "--data-dir", str(tmp_path), "--dry-run", "--only", "logit"]
    monkeypatch.setattr(sys, "argv", ["mergescope", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    told = capsys.readouterr()
    assert not left.value.code
    assert "1 cells, 4 items, 0 of them done" in told.out
    assert "gsm8k_loglik" in told.out and "Traceback" not in told.err
    assert not (tmp_path / "runs").exists()


def test_a_run_begins_with_its_plan(
    experiment: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few items are not worth a probe; what was done before is not counted again."""
    loaded, out = load_experiment(experiment, tmp_path), tmp_path / "out"
    run_experiment(loaded, out, data_dir=tmp_path, only=["base"])
    assert "1 cells, 4 items, 0 of them done\n" in capsys.readouterr().err
    monkeypatch.setattr("evaluation.run.WORTH_A_PROBE", 12)
    run_experiment(loaded, out, data_dir=tmp_path)
    told = capsys.readouterr().err
    assert "4 cells, 16 items, 4 of them done; 0 min 0" in told and "left at most" in told
    run_experiment(loaded, out, data_dir=tmp_path)
    assert "4 cells, 16 items, 16 of them done\n" in capsys.readouterr().err
