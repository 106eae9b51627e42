"""SHA-256 of files, each computed once for as long as the file stays as it is.

A digest is kept in the cache folder with the file's size, inode and times of change; the time of a
file's last change of any kind cannot be set by a program that writes to it. Hashing three models
takes longer than merging them.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

BLOCK = 1 << 22  # bytes hashed at a time
SMALL = 1 << 20  # bytes; a smaller file is hashed each time


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    state = _state(path)
    if state[0] < SMALL:
        return _hash(path)
    note = _cache() / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["state"] == state:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not known yet, or the note is damaged
    digest = _hash(path)
    if _state(path) == state:  # it did not change meanwhile
        _keep(note, {"file": str(path.resolve()), "state": state, "sha256": digest})
    return digest


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mergescope" / "digests"


def _keep(note: Path, content: dict[str, object]) -> None:
    partial = note.with_suffix(f".{os.getpid()}.partial")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(note)
    except OSError:
        partial.unlink(missing_ok=True)  # no cache, no harm
