"""Do all components mean the same by a token id?

Only real tokenizer ids take part in a composition; the rows that padding adds to an embedding are
untrained noise. Models whose tokenizers map one id to different strings cannot be composed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composition.errors import CompositionError

SHOWN = 3  # differing tokens named in an error


def check_vocabularies(tokenizers: Sequence[Any], names: Sequence[str] | None = None) -> None:
    """Compares every tokenizer with the first one.

    Raises:
        CompositionError: sizes or tokens differ; with both sizes and some of the tokens.
    """
    called = names or ["the base", *(f"expert {i}" for i in range(len(tokenizers) - 1))]
    first = tokenizers[0].get_vocab()
    for name, tokenizer in zip(called[1:], tokenizers[1:], strict=True):
        other = tokenizer.get_vocab()
        if other == first:
            continue
        differing = sorted(
            token for token in first.keys() | other.keys() if first.get(token) != other.get(token)
        )
        shown = ", ".join(
            f"{token!r} is {first.get(token, 'absent')} and {other.get(token, 'absent')}"
            for token in differing[:SHOWN]
        )
        raise CompositionError(
            f"the vocabulary of {name} ({len(other)} tokens) differs from that of {called[0]} "
            f"({len(first)} tokens) in {len(differing)} tokens: {shown}; expected the same token "
            "for every id"
        )
