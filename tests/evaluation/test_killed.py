"""A run that is killed at any moment goes on, loses nothing, and ends with the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from sums import write_sums

KILLS = 20
ITEMS = 30
BATCH = 4

# The libraries are imported once, before any thread is started; each attempt is a fork that is
# killed after a random time. Every answer that the engine gives is a line in a file.
ATTEMPTS = """
import os, random, signal, sys, time, traceback
from pathlib import Path
import torch
torch.set_num_threads(1)
import evaluation.run as run
from evaluation.experiment import load_experiment

experiment, out, data, log, kills = sys.argv[1:]
answer = run.answer

def logged(*arguments):
    for batch in answer(*arguments):
        lines = "".join(f"{index}\\n" for index, _ in batch)
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, lines.encode())
        os.close(handle)
        yield batch

run.answer = logged

def attempt(seconds, folder):
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        try:
            run.run_experiment(load_experiment(Path(experiment), Path(data)), folder,
                               data_dir=Path(data))
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            os._exit(1)
    started, draws = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), time.monotonic() - started
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seconds

whole = Path(out) / "whole"
code, length = attempt(600, whole)
assert code == 0, code
Path(log).rename(log + ".whole")
random.seed(0)
done, number = 0, 0
while done < int(kills):
    folder = Path(out) / str(number)
    code, _ = attempt(random.uniform(0.1, 1.0) * length, folder)
    if code == 0:  # finished before its time: begin another
        number += 1
    elif code == -signal.SIGKILL:
        done += 1
    else:
        sys.exit(f"an attempt ended with {code}")
folder = Path(out) / str(number)
code, _ = attempt(600, folder)
assert code == 0, code
print("runs", number + 1, "kills", done)
"""


@pytest.fixture
def experiment(tmp_path: Path, family: dict[str, Path]) -> Path:
    write_sums(tmp_path, ITEMS, uneven=True)
    content: dict[str, Any] = {
        "name": "killed",
        "base": str(family["base"]),
        "experts": {"first": str(family["first"]), "second": str(family["second"])},
        "models": [
            {"name": "ta", "method": "task_arithmetic"},
            {"name": "logit", "rule": "product"},
        ],
        "benchmarks": ["gsm8k_loglik"],
        "generation": {"batch_size": BATCH},
    }
    path = tmp_path / "killed.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="attempts are forks")
def test_twenty_kills(experiment: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "answers.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, experiment, out, tmp_path, log, str(KILLS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    runs = int(ran.stdout.split()[1])
    expected = timeless(out / "whole" / "leaderboard.csv")
    for number in range(runs):
        assert timeless(out / str(number) / "leaderboard.csv") == expected
    cells = 5
    assert len(log.with_name("answers.log.whole").read_text().split()) == cells * ITEMS
    answered = len(log.read_text().split())
    assert cells * ITEMS * runs <= answered <= cells * ITEMS * runs + KILLS * BATCH


def timeless(file: Path) -> str:
    """The table's bytes without the two columns that tell the time it took."""
    frame = pd.read_csv(file, dtype=str)
    return frame.drop(columns=["seconds", "tokens_per_second"]).to_csv()
