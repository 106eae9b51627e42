"""The store: exact, idempotent, one writer, and safe against kill -9 and wrong files."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results import Answer, Cell, Divergence, PlannedItem, ResultsError, Store

ANSWER = Answer(
    key="a0",
    benchmark="gsm8k",
    item="1",
    prompt_digest="ff",
    completion="42",
    score=1.0,
    metrics={"exact_match": 1.0, "strict": 0.0},
    truncated=False,
    prompt_tokens=7,
    completion_tokens=3,
    seconds=0.5,
    dtype="float32",
    batch_size=4,
)
DIVERGENCE = Divergence(
    key="d0",
    model="ta",
    reference="product(1, 1)",
    prompts="gsm8k",
    alpha=0.25,
    prompt="1",
    tokens=10,
    gap_squared=1.0,
    kl=0.1,
    js=0.02,
    tv=0.5,
    top1_agreement=9.0,
)
WRITER = """
import sys
from dataclasses import replace
from results import Store
sys.path.insert(0, {folder!r})
from test_store import ANSWER
with Store({path!r}) as store:
    for batch in range(10_000):
        store.add([replace(ANSWER, key=f"{{10 * batch + i:x}}") for i in range(10)])
        print(batch, flush=True)
"""


def cell(model: str = "base", keys: tuple[str, ...] = ("a0", "a1"), **changes: object) -> Cell:
    plan = Cell(
        model=model,
        kind="base",
        method="base",
        benchmark="gsm8k",
        metric="exact_match",
        binary=True,
        higher_is_better=True,
        protocol="p",
        items=tuple(PlannedItem(str(place + 1), key) for place, key in enumerate(keys)),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def child(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_the_frame_is_the_plan_joined_with_the_answers(tmp_path: Path) -> None:
    with Store(tmp_path / "records.sqlite") as store:
        store.set_plan([cell(), cell("expert", ("b0", "b1"), kind="expert")])
        store.add([replace(ANSWER, key="b1", item="2"), ANSWER])
        frame = store.frame()
        cells = store.cells()
    assert frame[["model", "item", "key"]].values.tolist() == [
        ["base", "1", "a0"],
        ["expert", "2", "b1"],
    ]
    assert frame["metrics"][0] == {"exact_match": 1.0, "strict": 0.0}
    assert frame.dtypes[["score", "truncated", "prompt_tokens", "planned"]].astype(
        str
    ).tolist() == [
        "float64",
        "bool",
        "int64",
        "int64",
    ]
    assert cells[["planned", "finished"]].values.tolist() == [[2, 1], [2, 1]]


def test_the_file_answers_queries_by_itself(tmp_path: Path) -> None:
    with Store(tmp_path / "records.sqlite") as store:
        store.set_plan([cell()])
        store.add([ANSWER])
    found = sqlite3.connect(tmp_path / "records.sqlite").execute(
        "SELECT model, kind, method, benchmark, metric, item, prompt_digest, completion, score, "
        "completion_tokens, seconds FROM records"
    )
    assert found.fetchall() == [
        ("base", "base", "base", "gsm8k", "exact_match", "1", "ff", "42", 1.0, 3, 0.5)
    ]


def test_models_with_equal_weights_share_their_answers(tmp_path: Path) -> None:
    with Store(tmp_path / "records.sqlite") as store:
        store.set_plan([cell("base"), cell("twin")])
        store.add([ANSWER])
        assert store.frame()["model"].tolist() == ["base", "twin"]


def test_adding_again_changes_nothing_and_a_new_plan_keeps_answers(tmp_path: Path) -> None:
    with Store(tmp_path / "records.sqlite") as store:
        store.set_plan([cell()])
        store.add([ANSWER])
        store.add([replace(ANSWER, completion="another")])
        store.set_plan([cell(keys=("a1", "a0"))])
        assert store.finished(["a0", "a1", "zz"]) == {"a0"}
        assert store.frame()[["item", "completion"]].values.tolist() == [["2", "42"]]
        store.set_plan([])
        assert store.frame().empty
        assert store.finished(["a0"]) == {"a0"}


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_any_completion_comes_back_exactly(text: str) -> None:
    """All of Unicode, with lone surrogates, NUL and non-characters."""
    with TemporaryDirectory() as folder, Store(Path(folder) / "records.sqlite") as store:
        store.set_plan([cell(keys=("a0",))])
        store.add([replace(ANSWER, completion=text)])
        assert store.frame()["completion"].tolist() == [text]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"score": math.nan}, "score is nan; expected a finite number"),
        ({"score": math.inf}, "score is inf"),
        ({"metrics": {"f1": math.nan}}, r"metrics\['f1'\] is nan"),
        ({"metrics": {"f1": "1"}}, r"metrics\['f1'\] is '1'"),
        ({"seconds": -1.0}, "seconds is -1.0; expected at least 0"),
        ({"prompt_tokens": np.int64(3)}, "prompt_tokens is a int64; expected int"),
        ({"completion_tokens": True}, "completion_tokens is a bool"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"completion": None}, "completion is a NoneType; expected str"),
        ({"key": "not hex"}, "key is 'not hex'; expected a hexadecimal digest"),
        ({"item": "two\nlines"}, "one line of printable text"),
        ({"benchmark": "\ud800"}, "one line of printable text"),
    ],
)
def test_an_unsound_answer_is_refused_and_nothing_is_stored(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with Store(tmp_path / "records.sqlite") as store:
        with pytest.raises(ResultsError, match=words):
            store.add([replace(ANSWER, key="b0"), replace(ANSWER, **changes)])  # type: ignore[arg-type]
        assert store.finished(["a0", "b0"]) == set()


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([cell(kind="merged")], "expected one of base, expert, merge, composition"),
        ([cell(items=())], "no items"),
        ([cell(keys=("a0", "a0"))], "2 of its items have the key 'a0'"),
        ([cell(items=(("1", "a0"), ("1", "a1")))], "2 of its items have the item '1'"),
        ([cell(), cell()], "stands twice in the plan"),
        ([cell(), cell("b", benchmark="math")], "key a0 stands for"),
        ([cell(model="<b>\n")], "one line of printable text"),
        ([cell(binary=1)], "binary is a int; expected bool"),
    ],
)
def test_an_unsound_plan_is_refused_and_the_old_one_stays(
    tmp_path: Path, cells: list[Cell], words: str
) -> None:
    with Store(tmp_path / "records.sqlite") as store:
        store.set_plan([cell("old")])
        with pytest.raises(ResultsError, match=words):
            store.set_plan(cells)
        assert store.cells()["model"].tolist() == ["old"]


def test_divergences_are_kept_once_and_can_be_selected(tmp_path: Path) -> None:
    twin = replace(DIVERGENCE, model="twin")
    other = replace(DIVERGENCE, key="d1", alpha=1.0)
    with Store(tmp_path / "records.sqlite") as store:
        store.add_divergences([DIVERGENCE, twin, other, DIVERGENCE])
        assert store.finished_divergences(["d0", "d1", "d2"]) == {"d0", "d1"}
        assert store.divergences()[["model", "alpha"]].values.tolist() == [
            ["ta", 0.25],
            ["twin", 0.25],
            ["ta", 1.0],
        ]
        store.select_divergences(["d1"])
        assert store.divergences()["key"].tolist() == ["d1"]
        store.select_divergences(["d0", "d1"])
        assert len(store.divergences()) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alpha": 0.0}, "alpha is 0.0; expected a positive scale"),
        ({"kl": math.nan}, "kl is nan"),
        ({"tokens": 0}, "tokens is 0; expected at least 1"),
        ({"gap_squared": -1.0}, "gap_squared is -1.0"),
    ],
)
def test_an_unsound_divergence_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with Store(tmp_path / "records.sqlite") as store, pytest.raises(ResultsError, match=words):
        store.add_divergences([replace(DIVERGENCE, **changes)])  # type: ignore[arg-type]


def test_what_was_committed_survives_kill_9_and_the_lock_does_not(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    writer = child(WRITER.format(folder=str(Path(__file__).parent), path=str(path)))
    assert writer.stdout is not None
    told = [int(writer.stdout.readline()) for _ in range(5)]
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    told += [int(line) for line in writer.stdout.read().split()]
    with Store(path, read_only=True) as reader:
        assert reader.finished([f"{10 * told[-1]:x}"])
    with Store(path) as store:
        stored = store.finished(f"{number:x}" for number in range(100_000))
        assert {f"{number:x}" for number in range(10 * (told[-1] + 1))} <= stored
        assert len(stored) % 10 == 0  # a batch is there whole or not at all
        store.add([replace(ANSWER, key="fffff")])


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    writer = child(
        f"from results import Store\nwith Store({str(path)!r}):\n print(1, flush=True)\n input()"
    )
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(ResultsError, match="is being written by another process"):
            Store(path)
        with Store(path, read_only=True) as store:
            assert store.frame().empty
    finally:
        writer.kill()
        writer.wait()
    Store(path).close()


def test_a_closed_store_is_one_file_and_a_reader_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    with Store(path) as store:
        store.set_plan([cell()])
        assert path.with_name("records.sqlite-wal").exists()
    assert not path.with_name("records.sqlite-wal").exists()
    with Store(path, read_only=True) as store:
        assert len(store.cells()) == 1
        with pytest.raises(ResultsError, match="readonly"):
            store.add([ANSWER])


def test_a_reader_sees_what_a_running_writer_has_committed(tmp_path: Path) -> None:
    with Store(tmp_path / "records.sqlite") as store:
        store.set_plan([cell()])
        store.add([ANSWER])
        with Store(tmp_path / "records.sqlite", read_only=True) as reader:
            assert len(reader.frame()) == 1


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE photos (name TEXT)")
    connection.commit()
    connection.close()


def newer(path: Path) -> None:
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def damaged(path: Path) -> None:
    with Store(path) as store:
        store.set_plan([cell(keys=tuple(f"{number:x}" for number in range(3000)))])
    content = bytearray(path.read_bytes())
    content[8192:-4096] = b"\xff" * (len(content) - 12288)
    path.write_bytes(content)


def cut(path: Path) -> None:
    damaged(path)
    path.write_bytes(path.read_bytes()[:6000])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("notes of mine" * 100), "not a database"),
        (foreign, "not a store of mergescope"),
        (newer, "version 99"),
        (damaged, "cannot be used as a store"),
        (cut, "cannot be used as a store"),
    ],
    ids=["text", "foreign", "newer", "damaged", "cut"],
)
def test_a_wrong_file_is_refused_and_left_as_it_is(
    tmp_path: Path, make: object, words: str
) -> None:
    path = tmp_path / "records.sqlite"
    make(path)  # type: ignore[operator]
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(ResultsError, match=words):
            Store(path, read_only=read_only)
    assert path.read_bytes() == before


def test_fresh_forgets_a_store_even_a_damaged_one_but_no_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    damaged(path)
    with Store(path, fresh=True) as store:
        assert store.cells().empty
    other = tmp_path / "photos.sqlite"
    foreign(other)
    with pytest.raises(ResultsError, match="it is not deleted"):
        Store(other, fresh=True)
    assert other.exists()


def test_places_that_cannot_hold_a_store_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot be opened"):
        Store(tmp_path / "file" / "records.sqlite")
    with pytest.raises(ResultsError, match="is a folder"):
        Store(tmp_path)
    with pytest.raises(ResultsError, match="no such file"):
        Store(tmp_path / "nothing.sqlite", read_only=True)
    with pytest.raises(ResultsError, match="choose"):
        Store("/proc/records.sqlite")


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    """A process killed before its first commit leaves one."""
    path = tmp_path / "records.sqlite"
    path.touch()
    with Store(path) as store:
        assert store.frame().empty
