"""What a merge can say about its inputs: sizes and angles of task vectors, sign conflicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from merging.lazy import torch
from merging.settings import LAYER

if TYPE_CHECKING:
    from torch import Tensor


class Moments(NamedTuple):
    """Sums over the entries of one stretch of task vectors."""

    products: list[list[float]]  # of the task vectors with each other, lower triangle
    conflicts: int  # entries that two experts move in opposite directions
    entries: int
    non_finite: int

    @property
    def finite(self) -> bool:
        """Whether every input is."""
        return self.non_finite == 0


def moments(deltas: Sequence[Tensor]) -> Moments:
    """The sums over one stretch; NaN or infinity in an input shows in its task vector."""
    flat = [delta.flatten() for delta in deltas]
    products = [
        [float(torch.dot(flat[i], flat[j])) for j in range(i + 1)] for i in range(len(flat))
    ]
    entries = flat[0].numel()
    if not all(math.isfinite(products[i][i]) for i in range(len(flat))):
        bad = torch.stack([~delta.isfinite() for delta in flat]).any(0)
        kept = [delta.double().masked_fill(bad, 0.0) for delta in flat]
        products = [
            [float(torch.dot(kept[i], kept[j])) for j in range(i + 1)] for i in range(len(kept))
        ]
        return Moments(products, _conflicts(kept), entries, int(bad.sum()))
    return Moments(products, _conflicts(flat), entries, 0)


def _conflicts(flat: Sequence[Tensor]) -> int:
    up, down = flat[0] > 0, flat[0] < 0
    for delta in flat[1:]:
        up, down = up | (delta > 0), down | (delta < 0)
    return int((up & down).sum())


class MergeReport:
    """Gathers moments tensor by tensor; `summary` makes the report of them."""

    def __init__(self, experts: Sequence[str]) -> None:
        self.notes: list[str] = []
        self._experts = list(experts)
        self._tensors: dict[str, Moments] = {}

    def add(self, name: str, found: Sequence[Moments]) -> None:
        """Takes the moments of all stretches of one tensor."""
        self._tensors[name] = _sum(found, len(self._experts))

    def summary(self, names: Sequence[str]) -> dict[str, Any]:
        """Tensors merged and kept, norms of task vectors, their cosines, shares of conflicts."""
        whole = _sum(list(self._tensors.values()), len(self._experts))
        layers: dict[str, list[Moments]] = {}
        for name, found in self._tensors.items():
            match = LAYER.search(name)
            layers.setdefault(match[1] if match else "others", []).append(found)
        norms = [math.sqrt(whole.products[i][i]) for i in range(len(self._experts))]
        return {
            "tensors_merged": len(self._tensors),
            "tensors_kept_from_base": [name for name in names if name not in self._tensors],
            "task_vector_norms": dict(zip(self._experts, norms, strict=True)),
            "task_vector_cosines": {
                f"{self._experts[i]} ~ {self._experts[j]}": _cosine(whole, i, j)
                for i in range(len(norms))
                for j in range(i)
            },
            "sign_conflict_share": _share(whole),
            "sign_conflict_share_by_layer": {
                layer: _share(_sum(layers[layer], len(self._experts)))
                for layer in sorted(
                    layers, key=lambda layer: (not layer.isdigit(), len(layer), layer)
                )
            },
            "non_finite_entries": {
                name: found.non_finite for name, found in self._tensors.items() if found.non_finite
            },
            "notes": self.notes,
        }


def _sum(found: Sequence[Moments], experts: int) -> Moments:
    return Moments(
        [
            [math.fsum(one.products[i][j] for one in found) for j in range(i + 1)]
            for i in range(experts)
        ],
        sum(one.conflicts for one in found),
        sum(one.entries for one in found),
        sum(one.non_finite for one in found),
    )


def _share(found: Moments) -> float:
    return found.conflicts / max(found.entries, 1)


def _cosine(found: Moments, i: int, j: int) -> float | None:
    scale = math.sqrt(found.products[i][i] * found.products[j][j])
    return found.products[i][j] / scale if scale else None  # None: a task vector of zeros
