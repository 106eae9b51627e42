"""Plain data as text and back: the only language spoken through the wall of the sandbox.

JSON, and an object with exactly one key, the tag, for whatever JSON lacks:

    {"tuple": [...]}  {"set": [...]}  {"frozenset": [...]}  {"dict": [[key, value], ...]}
    {"int": "0x..."} from 2^63 on     {"float": "nan"}       {"complex": [re, im]}
    {"bytes": "00ff"}                 {"bytearray": "00ff"}  {"fraction": [n, d]}
    {"decimal": "0.1"}                {"numpy": ["<f8", 0.5]}  a scalar
    {"array": ["<f8", [1], 0.5]}      an array of one element, with its shape
    {"digest": [sha256, bytes]}       a string above `LARGE_TEXT`, anything above `LARGE` bytes,
                                      or above fewer where the caller says so
    {"opaque": "module.Class"}        anything else

Equal texts mean equal values, apart from opaque ones, NaN, and digests of what holds NaN. A digest
tells large values apart exactly, where 1 and 1.0 differ: of the two benchmarks' values only some of
Mbpp/255 and, as plain strings, of HumanEval/15 are as large. Subclasses of the built-in types that
compare as these do (named tuples, defaultdict, Counter, IntEnum) are told as the built-in type,
read by the built-in's own methods.

Why not pickle or marshal: a text from a hostile program must be read without running anything
and without a crash. Depth and tags are checked here, length by whoever reads the text.

This file runs on both sides and needs the standard library alone; numpy is used where the
program has imported it.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

LARGE = 16 << 20  # bytes; one output of Mbpp/255 would be a gigabyte of text
LARGE_TEXT = 1 << 20
MAX_DEPTH = 100
MANY = 1000  # items of a set; below, equal hashes cost nothing (-1 and -2 have the same)
SAFE_INT = 1 << 63  # larger ones in hexadecimal, which is read in linear time
WORDS, NUMBERS = {str, bool, type(None)}, {int, float, bool}
DTYPES = {
    *("|b1", "|i1", "|u1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8"),
    *("<f2", "<f4", "<f8", "<c8", "<c16"),
    "|O",  # numpy's type for integers from 2^64 on
}


class CodecError(ValueError):
    """The text is not one that `encode` writes."""


@dataclass(frozen=True, eq=False)
class Opaque:
    """Stands for a value that is no plain data; equal to itself only."""

    name: str


def encode(value: Any, large: int | None = LARGE) -> str:
    """The value as ASCII text; what is no plain data becomes opaque, nothing raises for it.

    Args:
        large: marshalled bytes above which the text is a digest; None for never.
    """
    digest = None if large is None else _digest(value, large)
    tree = {"digest": digest} if digest else _tree(value, 0)
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def decode(text: str) -> Any:
    """The value of a text; raises `CodecError` for any text that is not as described above."""
    try:
        return _value(json.loads(text, parse_constant=_reject), 0)
    except CodecError:
        raise
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise CodecError(f"not the text of a value: {type(error).__name__}: {error}") from None


# ------------------------------------------------------------------------------------- to text


def _digest(value: Any, large: int) -> list[Any] | None:
    """[sha256, bytes] of a large value's marshalled form, which knows no references below 3."""
    if isinstance(value, (bool, int, float, type(None))):
        return None
    try:
        data = marshal.dumps(value, 2)
    except ValueError:  # not built of exact built-in types, or too deep
        return None
    most = min(large, LARGE_TEXT) if isinstance(value, (str, bytes)) else large
    return [hashlib.sha256(data).hexdigest(), len(data)] if len(data) > most else None


def _tree(value: Any, depth: int) -> Any:  # noqa: PLR0911 (one line a type)
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is str:
        return value
    if kind is int:
        return value if -SAFE_INT < value < SAFE_INT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if depth == MAX_DEPTH:
        return {"opaque": f"nesting of more than {MAX_DEPTH}"}
    if kind is list:
        return _branch(value, depth)
    write = _WRITERS.get(kind) or _numpy_writer(value) or _inherited_writer(value)
    return write(value, depth) if write else {"opaque": f"{kind.__module__}.{kind.__qualname__}"}


def _branch(items: Any, depth: int) -> Any:
    """The trees of a list's or tuple's items: itself, where JSON has them all."""
    return items if _is_flat(items) else [_tree(item, depth + 1) for item in items]


def _is_flat(items: Any) -> bool:
    """Whether all are strings, booleans and None, or numbers as JSON has them: told in C."""
    kinds = set(map(type, items))
    if kinds <= WORDS or not kinds <= NUMBERS:
        return kinds <= WORDS
    try:
        finite = all(map(math.isfinite, items))
    except OverflowError:  # an integer beyond the floats
        return False
    return finite and bool(min(items) > -SAFE_INT and max(items) < SAFE_INT)


def _unordered(tag: str) -> Callable[[Any, int], Any]:
    return lambda value, depth: {
        tag: sorted((_tree(item, depth + 1) for item in value), key=json.dumps)
    }


def _pairs(value: Any, depth: int) -> Any:
    pairs = dict.items(value)
    return {"dict": [[_tree(key, depth + 1), _tree(item, depth + 1)] for key, item in pairs]}


_WRITERS: dict[type, Callable[[Any, int], Any]] = {
    tuple: lambda value, depth: {"tuple": _branch(value, depth)},
    set: _unordered("set"),
    frozenset: _unordered("frozenset"),
    dict: _pairs,
    Counter: _pairs,
    OrderedDict: _pairs,
    complex: lambda z, depth: {"complex": [_tree(z.real, depth), _tree(z.imag, depth)]},
    bytes: lambda value, _: {"bytes": value.hex()},
    bytearray: lambda value, _: {"bytearray": value.hex()},
    Fraction: lambda value, depth: {
        "fraction": [_tree(value.numerator, depth), _tree(value.denominator, depth)]
    },
    Decimal: lambda value, _: {"decimal": str(value)},
}


def _numpy_writer(value: Any) -> Callable[[Any, int], Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.str_):
        return lambda letters, _: letters.item()
    if numpy is None or getattr(getattr(value, "dtype", None), "str", None) not in DTYPES:
        return None
    if isinstance(value, numpy.generic):
        return lambda scalar, depth: {"numpy": [scalar.dtype.str, _tree(scalar.item(), depth)]}
    if type(value) is numpy.ndarray and value.size == 1:
        # The truth of `array == expected` is ambiguous for any other size: never a right answer.
        return lambda array, depth: {
            "array": [array.dtype.str, list(array.shape), _tree(array.item(), depth)]
        }
    return None


_INHERITED: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (str, str.__str__),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (list, lambda value: list(list.__iter__(value))),
    (dict, lambda value: dict(dict.items(value))),
)


def _inherited_writer(value: Any) -> Callable[[Any, int], Any] | None:
    for base, plain in _INHERITED:
        if isinstance(value, base) and type(value).__eq__ is base.__eq__:
            exact = plain(value)
            return lambda _, depth: _tree(exact, depth)
    return None


# ----------------------------------------------------------------------------------- from text


def _value(tree: Any, depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise CodecError(f"nesting of more than {MAX_DEPTH}")
    if isinstance(tree, list):
        return _sequence(tree, depth + 1)
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise CodecError(f"expected one tag, found {len(tree)}")
    ((tag, body),) = tree.items()
    if tag not in _READERS:
        raise CodecError(f"unknown tag {tag[:40]!r}")
    return _READERS[tag](body, depth + 1)


def _listed(body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise CodecError(f"expected a list, found {type(body).__name__}")
    return body


def _text(body: Any) -> str:
    if not isinstance(body, str):
        raise CodecError(f"expected a string, found {type(body).__name__}")
    return body


def _sequence(body: Any, depth: int) -> list[Any]:
    items = _listed(body)
    if {list, dict}.isdisjoint(map(type, items)):
        return items
    return [_value(item, depth) for item in items]


def _parts(body: Any, depth: int, count: int) -> list[Any]:
    parts = _sequence(body, depth)
    if len(parts) != count:
        raise CodecError(f"expected {count} parts, found {len(parts)}")
    return parts


def _distinct(items: list[Any]) -> list[Any]:
    """Items for a set; many of one hash are refused, since adding them would take for ever."""
    if len(items) > MANY and 2 * len({hash(item) for item in items}) < len(items):
        raise CodecError("most items have the same hash")
    return items


def _dict(body: Any, depth: int) -> dict[Any, Any]:
    pairs = [_parts(pair, depth, 2) for pair in _listed(body)]
    _distinct([key for key, _ in pairs])
    return dict(pairs)


def _integer(body: Any) -> int:
    if not _text(body).removeprefix("-").startswith("0x"):
        raise CodecError("expected a hexadecimal number")
    return int(body, 16)


def _array(dtype: Any, shape: Any, number: Any) -> Any:
    import numpy

    if dtype not in DTYPES or any(size != 1 for size in shape):
        raise CodecError("expected a numeric dtype and a shape of ones")
    if not isinstance(number, (bool, int, float, complex)):
        raise CodecError(f"expected a number, found {type(number).__name__}")
    return numpy.array(number, dtype=dtype).reshape(shape)


def _scalar(body: Any, depth: int) -> Any:
    dtype, number = _parts(body, depth, 2)
    return _array(dtype, [], number)[()]


def _reject(constant: str) -> Any:
    raise CodecError(f"unexpected {constant}")


_READERS: dict[str, Callable[[Any, int], Any]] = {
    "tuple": lambda body, depth: tuple(_sequence(body, depth)),
    "set": lambda body, depth: set(_distinct(_sequence(body, depth))),
    "frozenset": lambda body, depth: frozenset(_distinct(_sequence(body, depth))),
    "dict": _dict,
    "int": lambda body, _: _integer(body),
    "float": lambda body, _: float(_text(body)),
    "complex": lambda body, depth: complex(*_parts(body, depth, 2)),
    "bytes": lambda body, _: bytes.fromhex(_text(body)),
    "bytearray": lambda body, _: bytearray.fromhex(_text(body)),
    "fraction": lambda body, depth: Fraction(*_parts(body, depth, 2)),
    "decimal": lambda body, _: Decimal(_text(body)),
    "numpy": _scalar,
    "array": lambda body, depth: _array(*_parts(body, depth, 3)),
    "digest": lambda body, depth: Opaque(f"a large value, {_parts(body, depth, 2)}"),
    "opaque": lambda body, _: Opaque(_text(body)),
}
