"""What a merge can say about its inputs: sizes and angles of task vectors, sign conflicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Survey:
    """Gathers sums over the merged tensors; `summary` makes the report of them."""

    def __init__(self, experts: Sequence[str]) -> None:
        self.notes: list[str] = []
        self._experts = list(experts)
        self._merged: list[str] = []
        count = len(self._experts)
        self._products = torch.zeros(count, count, dtype=torch.float64)
        self._conflicts, self._entries = 0, 0

    def observe(self, name: str, base: Tensor, experts: Sequence[Tensor]) -> None:
        """Adds one tensor's task vectors to the sums."""
        deltas = [(expert - base).flatten() for expert in experts]
        for i, first in enumerate(deltas):
            for j, second in enumerate(deltas[: i + 1]):
                product = float(torch.dot(first, second))
                self._products[i, j] += product
                if i != j:
                    self._products[j, i] += product
        positive = torch.stack([delta > 0 for delta in deltas]).any(0)
        negative = torch.stack([delta < 0 for delta in deltas]).any(0)
        self._conflicts += int((positive & negative).sum())
        self._entries += base.numel()
        self._merged.append(name)

    def summary(self, names: Sequence[str]) -> dict[str, Any]:
        """Tensors merged and kept, norms of task vectors, their cosines, share of conflicts."""
        norms = self._products.diagonal().sqrt().tolist()
        merged = set(self._merged)
        cosines = {
            f"{self._experts[i]} ~ {self._experts[j]}": self._cosine(i, j, norms)
            for i in range(len(norms))
            for j in range(i)
        }
        return {
            "tensors_merged": len(merged),
            "tensors_kept_from_base": [name for name in names if name not in merged],
            "task_vector_norms": dict(zip(self._experts, norms, strict=True)),
            "task_vector_cosines": cosines,
            "sign_conflict_share": self._conflicts / max(self._entries, 1),
            "notes": self.notes,
        }

    def _cosine(self, i: int, j: int, norms: Sequence[float]) -> float | None:
        scale = norms[i] * norms[j]
        cosine = float(self._products[i, j]) / scale if scale else math.nan
        return cosine if math.isfinite(cosine) else None  # None: a task vector of zeros
