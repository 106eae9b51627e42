"""Plain data as text: what `evaluation.sandbox.codec` keeps, changes and refuses."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.sandbox.codec import (
    LARGE,
    LARGE_TEXT,
    MAX_DEPTH,
    CodecError,
    Opaque,
    decode,
    encode,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())  # lone surrogates too
    | st.binary()
    | st.fractions()
)
HASHABLE = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equal, and of equal types at every level (True == 1 == 1.0 otherwise)."""
    return bool(left == right) and type(left) is type(right) and repr(left) == repr(right)


@given(VALUES)
def test_plain_data_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    text = encode(value)
    assert text.isascii()
    back = decode(text)
    assert back == value
    assert type(back) is type(value)
    assert encode(back) == text


@given(
    st.lists(
        st.sampled_from([2**63 - 1, 2**63, -(2**63), 1 - 2**63, 10**400, 0, True, 0.5, 1e300])
        | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, None, "a", (), [1]]),
        max_size=4,
    )
)
def test_lists_that_json_has_whole_are_written_as_item_by_item(items: list[Any]) -> None:
    written = [json.loads(encode(item)) for item in items]
    assert json.loads(encode(items)) == written
    assert json.loads(encode(tuple(items))) == {"tuple": written}
    assert repr(decode(encode(items))) == repr(items)


@pytest.mark.parametrize(
    "value", [float("inf"), -0.0, 2**64, -(2**70), bytearray(b"a"), Decimal("0.10")]
)
def test_special_numbers_come_back_as_they_were(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_nan_comes_back_as_nan() -> None:
    assert math.isnan(decode(encode(float("nan"))))


class Colour(IntEnum):
    RED = 3


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Point(1, 2), (1, 2)),
        (defaultdict(int, a=1), {"a": 1}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (Colour.RED, 3),
        (np.str_("a"), "a"),
    ],
)
def test_types_that_compare_as_a_builtin_are_told_as_the_builtin(value: Any, plain: Any) -> None:
    back = decode(encode(value))
    assert back == plain
    assert type(back) is type(plain)


def test_numpy_scalars_and_arrays_of_one_element_stay_numpy() -> None:
    scalar, array = decode(encode([np.float32(0.5), np.array([[7]])]))
    assert same(scalar, np.float32(0.5))
    assert array.shape == (1, 1) and array.dtype == np.int64 and array.item() == 7
    assert decode(encode(np.array(2**70))) == 2**70


class Always:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class AlwaysInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    "value",
    [Always(), AlwaysInt(3), object(), iter([1]), len, np.arange(3), np.array(["a"]), range(2)],
)
def test_anything_else_is_opaque_and_equal_to_nothing(value: Any) -> None:
    back = decode(encode([value]))
    assert isinstance(back[0], Opaque)
    assert back != [3]
    assert back != decode(encode([value]))


def test_a_value_that_holds_itself_ends_at_the_depth_limit() -> None:
    value: list[Any] = []
    value.append(value)
    assert f"more than {MAX_DEPTH}" in encode(value)


def test_a_large_value_is_a_digest_that_tells_values_apart() -> None:
    """LARGE // 4 small ints marshal to five bytes each, more than LARGE."""
    zeros = [0] * (LARGE // 4)
    text = encode(zeros)
    assert text.startswith('{"digest":') and len(text) < 200
    assert text == encode(list(zeros))
    assert text != encode([*zeros[:-1], 1])
    assert encode("a" * LARGE_TEXT).startswith('{"digest":')


def hostile_texts() -> list[str]:
    colliding = ",".join(f'{{"int":"{hex(k * (2**61 - 1))}"}}' for k in range(1, 2000))
    return [
        "", "[", "NaN", "[NaN]", "Infinity", "[" * 100_000, '{"tuple":' * 5000 + "1" + "}" * 5000,
        "9" * 10_000, '{"int":"12"}', '{"int":12}', '{"int":"0xzz"}', '{"tuple":1}',
        '{"set":[[1]]}',
        '{"dict":[[1]]}', '{"dict":{"a":1}}', '{"a":1,"b":2}', "{}", '{"__class__":"os"}',
        '{"fraction":[1,0]}', '{"decimal":"x"}', '{"bytes":"0"}', '{"complex":[1]}', '{"float":[]}',
        '{"numpy":["|O",[]]}', '{"numpy":["|V8",1]}', '{"numpy":["<f8",[1,2]]}',
        '{"numpy":[["<f8"],1]}', '{"opaque":1}',
        '{"array":["<f8",[1000000000],1]}', '{"array":["<f8",[-1],1]}', '{"array":["<i8",[],1e99]}',
        f'{{"set":[{colliding}]}}', "[" * 300 + "]" * 300,
    ]  # fmt: skip


@pytest.mark.parametrize("text", hostile_texts())
def test_a_hostile_text_is_refused_with_one_kind_of_error(text: str) -> None:
    with pytest.raises(CodecError):
        decode(text)
