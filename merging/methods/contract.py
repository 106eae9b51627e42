"""What a method is: the base and its experts in, the merged tensor out.

Task vectors are tau_i = expert_i - base. A method computes in the precision it is given (float32,
or float64 for float64 inputs), never changes its inputs, and rounds nothing: the engine rounds
once at the end.

The engine hands a tensor over in flat stretches that fit into a processor's cache, several at a
time in any order. A method whose choices span more than a stretch (TIES trims over the tensor or
the model) says so by a `Survey`: it sees every stretch once before the first is merged, and what
it decides comes back with each. A method that needs the tensor's shape or all of it at once (a
singular value decomposition) is `whole`; one that ranks within rows asks for whole `rows`. The
commonest methods have a fused loop in C beside their definition; it computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from merging.raw import Raw

if TYPE_CHECKING:
    from torch import Tensor


class Parameters(BaseModel):
    """The parameters of a method: frozen, unknown keys refused, `lambda` for `lambda_`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @classmethod
    def spelled(cls) -> list[str]:
        """The parameters as a recipe spells them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


@dataclass(frozen=True)
class Inputs:
    """A base and its experts: one tensor, or the same stretch of it, in one precision."""

    base: Tensor
    experts: Sequence[Tensor]
    name: str = ""  # of the tensor
    start: int = 0  # the stretch's first entry in the flattened tensor
    statistics: Sequence[Tensor | None] = ()  # of each expert, see `Method`; None: not gathered

    @cached_property
    def deltas(self) -> list[Tensor]:
        """The task vectors, computed once; not to be changed."""
        return [expert - self.base for expert in self.experts]


class RawInputs(NamedTuple):
    """The same stretch as bytes, for the fused loops."""

    entries: int
    raw: tuple[Raw, ...]  # the base first
    types: bytes  # of each, in the numbers of kernels.c


class Again(NamedTuple):
    """A survey's answer when its hint was wrong: look at every stretch again with another."""

    hint: Any


class Survey(NamedTuple):
    """How a method learns what a single stretch cannot tell."""

    scope: Callable[[Any], Literal["tensor", "model"] | None]
    """params -> over what it looks; None where these parameters need no survey"""
    begin: Callable[[Sequence[NDArray[Any]], Any], Any]
    """(each expert's task vector in a small, evenly spread part of the scope, params) -> hint"""
    observe: Callable[[Inputs, Any, Any], Any]
    """(stretch, params, hint) -> what was seen"""
    decide: Callable[[Sequence[Any], Any, Any], Sequence[Any] | Again]
    """(seen, params, hint) -> for each stretch what its merge must know, or another look"""
    fused: Callable[[RawInputs, Any, Any], Any] | None = None
    """`observe` on the bytes of a stretch"""


class Fused(NamedTuple):
    """A method's loop in kernels.c."""

    kernel: Literal["combine", "ties"]
    arguments: Callable[[Sequence[float], Any, Any], tuple[Any, ...]]
    """(weights, params, what the survey decided or None) -> the loop's own arguments"""


class Method(NamedTuple):
    """A row of the registry."""

    summary: str
    params: type[Parameters]
    merge: Callable[[Inputs, Sequence[float], Any, Any], Tensor]
    """(inputs, weights, params, what the survey decided or None) -> merged, in the base's shape"""
    survey: Survey | None = None
    whole: bool = False  # wants a tensor in one piece and in its shape
    rows: bool = False  # wants whole rows: (rows, columns), or all of a tensor of one dimension
    fused: Fused | None = None
    least: int = 1  # experts
    most: int | None = None
    weighted: bool = True  # whether it takes weights
    statistics: Literal["entries", "matrix"] | None = None
    """what must be known of each expert on its own data: a number for every entry of a tensor, or
    for a matrix (out, in) one of (in, in)"""


def no_hint(sample: Sequence[NDArray[Any]], params: Any) -> None:
    """`begin` of a survey that needs no sample."""


def settle(
    survey: Survey,
    params: Any,
    hint: Any,
    seen: Sequence[Any],
    look: Callable[[Any], Sequence[Any]],
) -> Sequence[Any]:
    """What the merge of each stretch must know, after as many looks as it takes.

    Args:
        seen: what the first look, with `hint`, has seen of each stretch.
        look: hint -> what is seen of each stretch with it.
    """
    while isinstance(found := survey.decide(seen, params, hint), Again):
        hint = found.hint
        seen = look(hint)
    return found
