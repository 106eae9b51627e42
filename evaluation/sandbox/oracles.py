"""Tasks with more than one right answer, judged as evalplus judges them.

evalplus's special oracles (`evalplus.eval`, 0.3.1) sit inside the function that runs the program;
here each is a function of its own, fed with evalplus's constants and helpers:

    HumanEval/32 find_zero            any root within the tolerance. 0.3.1 never marks it as
                                      passed; its repository does (#241), and so do we
    Mbpp/164 are_equivalent           whatever is returned
    Mbpp/295 sum_div                  the expected value, or 0
    Mbpp/581 surface_Area             the expected value, or a pyramid's by its height
    Mbpp/558 digit_distance_nums      the expected value, or that of zero-padded numbers
    MBPP_OUTPUT_SET_EQ_TASKS          the same set; the sandbox returns set(value)
    MBPP_OUTPUT_NOT_NONE_TASKS        None where None is expected, else anything but None

Arguments are the problem's own, where evalplus takes those that the program may have changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from evaluation.sandbox.problems import Problem

Oracle = Callable[[Sequence[Any], Any, Any, float], bool]
"""(arguments, returned, expected, atol): is it right? May raise for a value of a wrong type."""


def oracle(problem: Problem) -> Oracle | None:
    """What judges this problem's values beside equality: None for nearly all."""
    return _oracles().get((problem.dataset, problem.entry_point))


def wants_set(problem: Problem) -> bool:
    """Whether the order and number of the returned items do not matter."""
    from evalplus.eval import MBPP_OUTPUT_SET_EQ_TASKS

    return problem.dataset == "mbpp" and problem.entry_point in MBPP_OUTPUT_SET_EQ_TASKS


@functools.cache
def _oracles() -> dict[tuple[str, str], Oracle]:
    from evalplus.eval import (
        MBPP_OUTPUT_NOT_NONE_TASKS,
        _digit_distance_nums,
        _poly,
        _surface_Area,
    )

    def find_zero(arguments: Sequence[Any], returned: Any, _: Any, atol: float) -> bool:
        return bool(abs(_poly(*arguments, returned)) <= atol)

    def surface_area(arguments: Sequence[Any], returned: Any, expected: Any, atol: float) -> bool:
        return bool(returned == expected or abs(returned - _surface_Area(*arguments)) <= atol)

    def digit_distance(arguments: Sequence[Any], returned: Any, expected: Any, _: float) -> bool:
        return bool(returned == expected or returned == _digit_distance_nums(*arguments))

    def sum_div(_: Sequence[Any], returned: Any, expected: Any, __: float) -> bool:
        return bool(returned in (expected, 0))

    def not_none(_: Sequence[Any], returned: Any, expected: Any, __: float) -> bool:
        if isinstance(returned, bool):
            return returned == (expected is not None)
        return (returned is not None) == (expected is not None)

    return {
        ("humaneval", "find_zero"): find_zero,
        ("mbpp", "are_equivalent"): lambda *_: True,
        ("mbpp", "sum_div"): sum_div,
        ("mbpp", "surface_Area"): surface_area,
        ("mbpp", "digit_distance_nums"): digit_distance,
        **{("mbpp", name): not_none for name in MBPP_OUTPUT_NOT_NONE_TASKS},
    }
