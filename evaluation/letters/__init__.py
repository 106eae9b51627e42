"""The letters task: small models that are trained here, to see composition with bare eyes."""

from __future__ import annotations

from evaluation.letters.models import letters_checkpoint

__all__ = ["letters_checkpoint"]
