"""Is a returned value the expected one? Decided here, outside the sandbox, on plain data.

evalplus's rule (`evalplus.eval.unsafe_execute`, 0.3.1): values are right if `returned ==
expected`; failing that, and where the problem has a tolerance, if they have the same type and
length and `np.allclose(returned, expected, rtol=1e-7, atol=atol)`. A problem without a tolerance
gets one of 1e-6 as soon as an expected value is a float or a list or tuple of floats, and keeps
it for the inputs that follow. The `==` is that of built-in types and numpy scalars which this
process made itself (codec.py): no object of the program is ever compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evaluation.sandbox.codec import decode
from evaluation.sandbox.oracles import oracle
from evaluation.sandbox.problems import Problem

FLOAT_ATOL = 1e-6
RTOL = 1e-7  # np.testing.assert_allclose's default
# The longest text of a number that equals a short one, {"int":"0x..."} for a large float, is
# some fifty times as long.
LONGER = 64
SLACK = 4096
MOST = 64 << 20  # bytes of one reply


def most_bytes(expected: int) -> int:
    """No right value has a longer text than this, so nothing longer need be read.

    Args:
        expected: length of the expected value's text.
    """
    return min(LONGER * expected + SLACK, MOST)


class Judge:
    """Judges one run's values.

    Args:
        problem: whose tolerance and oracle apply.
        inputs: the lists of arguments as text, needed by some oracles.
        expected: the reference solution's values as text (codec.py), one an input.
    """

    def __init__(self, problem: Problem, inputs: Sequence[str], expected: Sequence[str]) -> None:
        self._problem = problem
        self._inputs = inputs
        self._expected = expected
        self._oracle = oracle(problem)

    def right(self, index: int, returned: str) -> bool:
        """Whether the value of input `index` is right; False for a text that is no value."""
        wanted = self._expected[index]
        if self._oracle is None and returned == wanted and is_equal_to_itself(wanted):
            return True
        try:
            value = decode(returned)
            expected = decode(wanted)
            with np.errstate(all="ignore"):
                if self._oracle is not None:
                    arguments = decode(self._inputs[index])
                    return self._oracle(arguments, value, expected, self._problem.atol)
                return equal(value, expected, self._tolerance(index))
        except Exception:  # comparing what a program returned may raise anything
            return False

    def _tolerance(self, index: int) -> float:
        seen = (is_floats(decode(text)) for text in self._expected[: index + 1])
        return FLOAT_ATOL if self._problem.atol == 0 and any(seen) else self._problem.atol


def is_equal_to_itself(text: str) -> bool:
    """Whether a value's text is that of a value which equals itself: no NaN, nothing opaque."""
    return '{"opaque":' not in text and '{"float":"nan"}' not in text


def equal(value: Any, expected: Any, atol: float) -> bool:
    """evalplus's comparison; raises what numpy raises for values that cannot be compared."""
    if value == expected:
        return True
    if atol == 0 or type(value) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)) and len(value) != len(expected):
        return False
    return bool(np.allclose(value, expected, rtol=RTOL, atol=atol))


def is_floats(value: Any) -> bool:
    """A float, or a list or tuple of nothing but floats."""
    if isinstance(value, float):
        return True
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(item, float) for item in value)
    )
