"""What is told to a user whose merge is at fault."""

from __future__ import annotations


class MergeError(ValueError):
    """Inputs, recipe or output of a merge are at fault; a line a fault, says what to do."""
