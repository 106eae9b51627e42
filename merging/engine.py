"""Merging a model tensor by tensor: the inputs of one tensor are in memory, never a model.

pass 0 (where the method asks)   its survey of the whole model
pass 1                           read, merge in float32, round once, hand on
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from merging.checkpoint import TensorSource
from merging.errors import MergeError
from merging.methods import METHODS, check_weights, parse_parameters
from merging.methods.contract import Parameters

Progress = Callable[[int, int], None]
Observe = Callable[[str, Tensor, Sequence[Tensor]], None]
"""Sees every merged tensor's base and experts, for a report."""

SHOWN = 5  # names listed in an error


def merged_tensors(
    base: TensorSource,
    experts: Sequence[TensorSource],
    method: str,
    *,
    weights: Sequence[float] | None = None,
    parameters: Parameters | None = None,
    dtype: torch.dtype | None = None,
    exclude: Sequence[str] = (),
    allow_non_finite: bool = False,
    progress: Progress | None = None,
    observe: Observe | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, merged tensor) in the base's order.

    Args:
        weights: one an expert; 1 each if left out.
        parameters: of the method, from `parse_parameters`; its defaults if left out.
        dtype: of the floating tensors that come out; the base's own if left out. One rounding.
        exclude: regular expressions; a tensor whose whole name matches stays the base's.
        progress: called with (tensors done, tensors in all), the survey's passes included.

    Raises:
        MergeError: inputs that do not fit, NaN or infinity, integer tensors that differ.
    """
    chosen = check_weights(weights, len(experts))
    check_sources(base, experts)
    params = parse_parameters(method, {}) if parameters is None else parameters
    merging = [name for name in base.names() if _takes_part(base, name, exclude)]

    def read() -> Iterator[tuple[Tensor, list[Tensor]]]:
        for name in merging:
            yield _read(base, experts, name, allow_non_finite)

    entry = METHODS[method]
    surveyed = entry.survey(read, params) if entry.survey else None
    part_of_merge = set(merging)
    names = base.names()
    for done, name in enumerate(names, start=1):
        if name in part_of_merge:
            start, ends = _read(base, experts, name, allow_non_finite)
            if observe is not None:
                observe(name, start, ends)
            merged = entry.merge(start, ends, chosen, params, surveyed)
            merged = torch.where(merged == start, start, merged)  # keeps the sign of a zero
            yield name, merged.to(dtype or base.dtype(name))
        else:
            yield name, _copied(base, experts, name, dtype)
        if progress is not None:
            progress(done, len(names))


def check_sources(base: TensorSource, experts: Sequence[TensorSource]) -> None:
    """The experts have the base's tensors, in the base's shapes.

    Raises:
        MergeError: with a line for every expert and kind of difference.
    """
    faults = [
        fault
        for number, expert in enumerate(experts)
        for fault in differences(base, expert, f"expert {number}")
    ]
    if faults:
        raise MergeError("\n".join(faults))


def differences(base: TensorSource, expert: TensorSource, called: str) -> list[str]:
    """Sentences on tensors that one of the two lacks or that differ in shape."""
    ours, theirs = base.names(), expert.names()
    faults = []
    for present, absent, words in (
        (ours, set(theirs), f"{called} lacks"),
        (theirs, set(ours), f"{called} has what the base lacks:"),
    ):
        missing = [name for name in present if name not in absent]
        if missing:
            faults.append(
                f"{words} {len(missing)} tensors ({_some(missing)}); expected the same tensors in "
                "every model"
            )
    shared = set(theirs)
    other = [n for n in ours if n in shared and base.shape(n) != expert.shape(n)]
    if other:
        first = other[0]
        faults.append(
            f"{called}: {len(other)} tensors have another shape ({_some(other)}); {first} is "
            f"{expert.shape(first)} where the base has {base.shape(first)}. Models with different "
            "vocabularies or sizes cannot be merged"
        )
    return faults


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _takes_part(base: TensorSource, name: str, exclude: Sequence[str]) -> bool:
    return base.dtype(name).is_floating_point and not any(
        re.fullmatch(pattern, name) for pattern in exclude
    )


def _read(
    base: TensorSource, experts: Sequence[TensorSource], name: str, allow_non_finite: bool
) -> tuple[Tensor, list[Tensor]]:
    tensors = [source.read(name) for source in (base, *experts)]
    precision = torch.promote_types(tensors[0].dtype, torch.float32)
    tensors = [tensor.to(precision) for tensor in tensors]
    for index, tensor in enumerate(tensors):
        if not allow_non_finite and not bool(tensor.isfinite().all()):
            model = "the base" if index == 0 else f"expert {index - 1}"
            count = int((~tensor.isfinite()).sum())
            raise MergeError(
                f"{name} of {model} holds {count} NaN or infinite numbers; repair the model, or "
                "set allow_non_finite: true to merge it as it is"
            )
    return tensors[0], tensors[1:]


def _copied(
    base: TensorSource, experts: Sequence[TensorSource], name: str, dtype: torch.dtype | None
) -> Tensor:
    tensor = base.read(name)
    if tensor.is_floating_point():
        return tensor.to(dtype or tensor.dtype)
    for index, expert in enumerate(experts):
        if not torch.equal(tensor, expert.read(name)):
            raise MergeError(
                f"{name} holds {tensor.dtype} numbers, and expert {index} has others than the "
                "base; such a tensor cannot be merged. Exclude it to keep the base's"
            )
    return tensor
