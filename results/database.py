"""The store's file: its layout, who may write it, and how it is opened.

WAL mode: what is committed survives `kill -9`, and readers may look on while a run writes. With
`synchronous=NORMAL` a power cut may cost the last transactions, never the file.

There is one writer. It holds an `flock` on a file beside the store, which the operating system
releases however the process ends, so no stale lock can remain.
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from results.errors import ResultsError

SCHEMA_VERSION = 1
APPLICATION_ID = 0x6D736370  # "mscp", in the file's header

SCHEMA = """
CREATE TABLE cells (
    cell INTEGER PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, method TEXT NOT NULL,
    benchmark TEXT NOT NULL, metric TEXT NOT NULL, binary INTEGER NOT NULL,
    higher_is_better INTEGER NOT NULL, protocol TEXT NOT NULL, planned INTEGER NOT NULL,
    UNIQUE (model, benchmark)
) STRICT;
CREATE TABLE plan (
    cell INTEGER NOT NULL REFERENCES cells, position INTEGER NOT NULL, item TEXT NOT NULL,
    key TEXT NOT NULL, PRIMARY KEY (cell, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE answers (
    key TEXT PRIMARY KEY, benchmark TEXT NOT NULL, item TEXT NOT NULL,
    prompt_digest TEXT NOT NULL, completion TEXT NOT NULL, score REAL NOT NULL,
    metrics TEXT NOT NULL, truncated INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL, dtype TEXT NOT NULL,
    batch_size INTEGER NOT NULL
) STRICT;
CREATE TABLE divergences (
    key TEXT NOT NULL, model TEXT NOT NULL, reference TEXT NOT NULL, prompts TEXT NOT NULL,
    alpha REAL NOT NULL, prompt TEXT NOT NULL, tokens INTEGER NOT NULL,
    gap_squared REAL NOT NULL, kl REAL NOT NULL, js REAL NOT NULL, tv REAL NOT NULL,
    top1_agreement REAL NOT NULL, current INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (key, model, reference, prompts, prompt)
) STRICT;
CREATE VIEW records AS
    SELECT model, kind, method, cells.benchmark, metric, plan.item, prompt_digest, completion,
           score, metrics, truncated, prompt_tokens, completion_tokens, seconds, dtype, batch_size,
           plan.key, binary, higher_is_better, protocol, planned, cells.cell, position
    FROM cells JOIN plan USING (cell) JOIN answers USING (key);
"""


def lock(path: Path) -> IO[str]:
    """The only writer's lock. Closing the file, or the end of the process, releases it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise ResultsError(f"{path} is a folder; expected the file of a store, or nothing yet")
    held = path.with_name(path.name + ".lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise ResultsError(
            f"{path} is being written by another process; wait for that run to end, stop it, "
            "or choose another folder"
        ) from None
    return held


def forget(path: Path) -> None:
    """Deletes a store, damaged or whole; never a file that does not begin as one of ours."""
    if not path.exists():
        return
    with path.open("rb") as file:
        header = file.read(72)
    # The file format of SQLite: a magic string, and the application's id at offset 68.
    ours = header[:16] == b"SQLite format 3\0" and int.from_bytes(header[68:72]) == APPLICATION_ID
    if header and not ours:
        raise ResultsError(
            f"{path} is not a store of mergescope, so it is not deleted. Choose another folder"
        )
    for suffix in ("-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def open_for_writing(path: Path) -> sqlite3.Connection:
    connection = _connect(path)
    try:
        if not _is_new(connection):
            _check(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if _is_new(connection):
            header = (
                f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}"
            )
            connection.executescript(f"BEGIN;{SCHEMA};{header};COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ResultsError(f"{path}: no such file; expected the records of a run")
    connection = _connect(path, "mode=ro")
    try:
        _check(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def close(connection: sqlite3.Connection) -> None:
    """Folds the log into the store, so that what stays is one file, readable anywhere."""
    with suppress(sqlite3.Error):  # someone is reading: the log stays, nothing is lost
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()


def _connect(path: Path, mode: str = "mode=rwc") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None
    )
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogatepass")
    return connection


def _is_new(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Raises unless the file is a whole store of a version we know."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise ResultsError(
            f"{path} is a database, but not a store of mergescope; it is left as it is. "
            "Choose another folder"
        )
    if version != SCHEMA_VERSION:
        raise ResultsError(
            f"{path} has version {version} of the store's layout, this mergescope reads "
            f"{SCHEMA_VERSION}; update mergescope or choose another folder"
        )
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Turns what SQLite and the file system report into a sentence about this store."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise ResultsError(
            f"{path} cannot be used as a store: {error}. The file is left as it is; restore it "
            "from a copy, move it away, or choose another folder"
        ) from error
    except OSError as error:
        raise ResultsError(
            f"{path} cannot be opened: {error.strerror or error}; choose a folder you may write"
        ) from error
