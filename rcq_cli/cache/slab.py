"""A tensor that grows along its second dimension."""

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

LINE = 64
"""Bytes of a cache line."""


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised tensor; in host memory it is NumPy's, which asks for huge pages.

    A step reads tier 1 from end to end, and a page of 4 KiB ends every hardware prefetch.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    raw = torch.from_numpy(aligned(np.empty, prod(shape) * like.element_size()))
    return raw.view(like.dtype).view(shape)


def aligned(make: Callable[[int, type], np.ndarray], count: int) -> np.ndarray:
    """Return `count` bytes that `make` allocates, from the start of a cache line on.

    NumPy starts 16 bytes into one, where every other vector crosses into the next.
    """
    raw = make(count + LINE, np.uint8)
    skip = -raw.ctypes.data % LINE
    return raw[skip : skip + count]


_moves = itertools.count(1)


class Slab:
    """`[H, length, ...]` rows in a buffer with little slack: what is allocated is what the ledger counts.

    Rows are never rewritten once a fork exists: a fork shares them and copies on its next growth.
    """

    moves: ClassVar[int] = 0
    """Another number whenever the buffer of any slab is replaced: kept addresses are looked up again."""

    def __init__(
        self, heads: int, tail: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.data = torch.empty(heads, 0, *tail, dtype=dtype, device=device)
        self.length = 0

    @property
    def data(self) -> Tensor:
        """Return the buffer, `[H, capacity, ...]`."""
        return self._data

    @data.setter
    def data(self, buffer: Tensor) -> None:
        self._data = buffer
        Slab.moves = next(_moves)

    def extend(self, rows: Tensor) -> None:
        """Add `[H, n, ...]` rows at the end."""
        self.make_room(rows.shape[1])
        self.data[:, self.length : self.length + rows.shape[1]] = rows
        self.length += rows.shape[1]

    def make_room(self, count: int) -> None:
        """Make room for `count` more rows, with a little slack unless they are the first."""
        need = self.length + count
        if need > self.data.shape[1]:
            self.reserve(need if self.length == 0 else need + max(4, need // 64))

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows in all."""
        if capacity > self.data.shape[1]:
            grown = _empty(self.data, (self.data.shape[0], capacity, *self.data.shape[2:]))
            grown[:, : self.length] = self.rows
            self.data = grown

    @property
    def rows(self) -> Tensor:
        """Return the `[H, length, ...]` rows, a view."""
        return self.data[:, : self.length]

    def fork(self) -> "Slab":
        """Return a copy that shares the rows; its first growth moves it to a buffer of its own."""
        twin = Slab(0, (), self.data.dtype)
        twin.data, twin.length = self.rows, self.length
        return twin

    @property
    def nbytes(self) -> int:
        """Return the bytes allocated."""
        return self.data.untyped_storage().nbytes()
