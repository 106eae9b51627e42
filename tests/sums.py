"""Sums in GSM8K's format, for tests that need a benchmark's file but not its questions."""

from __future__ import annotations

import json
from pathlib import Path


def write_sums(folder: Path, count: int, uneven: bool = False) -> Path:
    """Writes gsm8k_test.jsonl: `i + i?`, or with `uneven` questions of seven lengths.

    Returns:
        The folder, made if it is not there.
    """
    folder.mkdir(exist_ok=True)
    rows = [
        {"question": f"{i} + {'1' * (i % 7)}?", "answer": f"It is {i}.\n#### {i}"}
        if uneven
        else {"question": f"{i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"}
        for i in range(count)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "gsm8k_test.jsonl").write_text(text)
    return folder
