"""What is told to a user whose composition is at fault."""

from __future__ import annotations


class CompositionError(ValueError):
    """The components, weights or options of a composition do not fit; says what to do."""
