"""The fault class of this package."""

from __future__ import annotations


class ResultsError(ValueError):
    """Records, a store or a folder of results are not what they should be; the message says how."""
