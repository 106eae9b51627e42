"""What is told to a user whose input is at fault."""

from __future__ import annotations

from collections.abc import Sequence


class InputError(ValueError):
    """The user's input is at fault: the command ends with exit code 2 and these sentences.

    Args:
        faults: one sentence a fault; each says what was found, what was expected, what to do.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))
