"""What a method is: tensors of a base and its experts in, one tensor out.

Task vectors are tau_i = expert_i - base. A method computes in the precision it is given (float32,
or float64 for float64 inputs), never changes its inputs, and rounds nothing: the engine rounds
once at the end. A method whose decisions span the whole model (TIES over all tensors) has a
`survey`: it sees every tensor once, and what it returns is handed to every merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict
from torch import Tensor

Read = Callable[[], Iterable[tuple[Tensor, list[Tensor]]]]
"""Starts a pass over the model: (base, experts) tensor by tensor, in the same order each time."""


class Parameters(BaseModel):
    """The parameters of a method: frozen, unknown keys refused, `lambda` for `lambda_`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @classmethod
    def spelled(cls) -> list[str]:
        """The parameters as a recipe spells them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class Method(NamedTuple):
    """A row of the registry."""

    summary: str
    params: type[Parameters]
    merge: Callable[[Tensor, Sequence[Tensor], Sequence[float], Any, Any], Tensor]
    """(base, experts, weights, params, survey's result or None) -> merged"""
    survey: Callable[[Read, Any], Any] | None = None
    """(pass over the model, params) -> whatever `merge` needs of the whole model, or None"""
