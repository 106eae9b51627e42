"""Models held in memory, for several merges of the same inputs.

What is held are the bytes as they are read (an adapter's in float32, with BA applied), each tensor
from its first reading on. They are held only where they take up less than half of the memory that
is free; otherwise every merge reads its inputs itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import psutil

from merging.checkpoint import TensorSource
from merging.raw import Raw, itemsize, to_tensor

if TYPE_CHECKING:
    from torch import Tensor

SHARE = 0.5  # of the free memory


class Held:
    """A source whose tensors are read once."""

    def __init__(self, source: TensorSource) -> None:
        self.folder, self._source = source.folder, source
        self._kept: dict[str, Raw] = {}
        self._locks = {name: threading.Lock() for name in source.names()}

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def code(self, name: str) -> str:
        return self._source.code(name)

    def read(self, name: str) -> Tensor:
        shape = self.shape(name)
        # A tensor may be changed by who reads it; what is held may not.
        return to_tensor(self.read_raw(name, 0, prod(shape)).copy(), self.code(name)).view(shape)

    def read_raw(self, name: str, start: int, stop: int) -> Raw:
        size = itemsize(self.code(name))
        with self._locks[name]:
            if name not in self._kept:
                self._kept[name] = self._source.read_raw(name, 0, prod(self.shape(name)))
        return self._kept[name][start * size : stop * size]

    def digest(self) -> str:
        return self._source.digest()

    def unchanged(self) -> bool:
        return self._source.unchanged()


@contextmanager
def hold(sources: Sequence[TensorSource]) -> Iterator[list[TensorSource]]:
    """The sources, held until the block ends where memory allows."""
    size = sum(
        prod(source.shape(name)) * itemsize(source.code(name))
        for source in sources
        for name in source.names()
    )
    fits = size <= SHARE * psutil.virtual_memory().available
    yield [Held(source) if fits else source for source in sources]
