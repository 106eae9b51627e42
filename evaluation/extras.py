"""Packages that only those install who use them: the extras `mergescope[NAME]`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from evaluation.errors import InputError


def missing(package: str, asked_by: str) -> str:
    """What to do about an extra that is asked for and not there."""
    return (
        f"{asked_by}: the package {package} is not installed; install it with "
        f"`pip install 'mergescope[{package}]'`"
    )


def require(package: str, asked_by: str) -> Any:
    """The imported package.

    Raises:
        InputError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError:
        raise InputError(missing(package, asked_by)) from None
