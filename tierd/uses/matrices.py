# SPDX-License-Identifier: Apache-2.0
"""Equal matrices in an arena's blocks, each in blocks of its own: weights of layers, or experts."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tierd.arena import Arena, Held
from tierd.errors import NotFound, TierdError
from tierd.uses.rows import Ids, Rows, chunks, exactly

Parts: TypeAlias = tuple[NDArray[Any], ...]
"""A matrix in place, cut along its first axis: np.concatenate(parts) has its shape."""


class Matrices:
    """So many matrices of one shape, each in one block or in several, cut between rows.

    Args:
        arena: has the blocks.
        count: of matrices.
        shape: of each, (rows, ...). Weights of several shapes go flat, one after the other.
        dtype: of its elements; bfloat16 goes as uint16.
        first_block: they are in `blocks` blocks from this one on.

    Raises:
        TierdError: a row is larger than a block, or nothing is to be kept.
        NotFound: the arena has fewer blocks.
    """

    def __init__(
        self,
        arena: Arena,
        count: int,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        first_block: int = 0,
    ) -> None:
        if not shape or count < 1:
            raise TierdError(f"{count} matrices of shape {shape}: nothing is to be kept")
        self.arena, self.count, self.shape = arena, count, shape
        self._rows = Rows(arena, shape[0], shape[1:], dtype, first_block)
        self.dtype = self._rows.dtype
        self.blocks_each = self._rows.blocks
        self.blocks = count * self.blocks_each
        self._first_block = first_block
        if first_block + self.blocks > arena.blocks:
            raise NotFound(
                f"{self.blocks} blocks from {first_block} on, of an arena with {arena.blocks}",
                hint="make the arena larger, or keep fewer",
            )

    def ids(self, number: int) -> Ids:
        """The arena's blocks of a matrix.

        Raises:
            NotFound: there is none of this number.
        """
        if not 0 <= number < self.count:
            raise NotFound(
                f"there is no matrix {number}", hint=f"they are numbered from 0 to {self.count - 1}"
            )
        first = self._first_block + number * self.blocks_each
        return np.arange(first, first + self.blocks_each)

    def write(self, number: int, values: NDArray[Any]) -> None:
        """Replaces a matrix.

        Raises:
            NotFound, NoRoom: there is none of this number; the arena's tiers are too small.
            TierdError: of another shape or dtype.
        """
        exactly(values, self.shape, self.dtype, f"matrix {number}")
        for at, block in enumerate(self.ids(number)):
            rows = values[at * self._rows.per_block : (at + 1) * self._rows.per_block]
            with self.arena.acquire([block], write=True) as held:
                self._rows.shaped(held[0])[: len(rows)] = rows

    def read(self, number: int) -> NDArray[Any]:
        """Copies a matrix out.

        Raises:
            NotFound: there is none of this number, or it was never written.
        """
        out = np.empty(self.shape, self.dtype)
        for first, ids in chunks(self.ids(number), self.arena):
            with self.arena.acquire(ids) as held:
                for at in range(len(held)):
                    begin = (first + at) * self._rows.per_block
                    part = self._rows.shaped(held[at])
                    out[begin : begin + len(part)] = part[: len(out) - begin]
        return out

    def parts(self, held: Held, first: int = 0) -> Parts:
        """Shows a matrix in place, of which the blocks are held from a number on."""
        size = self._rows.per_block
        return tuple(
            self._rows.shaped(held[first + at])[: self.shape[0] - at * size]
            for at in range(self.blocks_each)
        )
