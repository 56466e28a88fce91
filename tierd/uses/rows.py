# SPDX-License-Identifier: Apache-2.0
"""Equal rows in an arena's blocks: how many fit, where each is, and copies of many at once."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from tierd.arena import Arena, Held
from tierd.errors import NotFound, TierdError

Ids: TypeAlias = NDArray[np.int64]

_MOST_HELD = 256
"""Blocks that are held at the same time, at most, by who copies many."""


class Rows:
    """So many rows of one shape, in blocks from one on; no row is in two blocks.

    Args:
        arena: has the blocks.
        count: of rows.
        shape: of a row; () is a single number.
        dtype: of its elements, of a fixed size. What NumPy has no type for, such as bfloat16, goes
            as one of the same size: uint16.
        first_block: the rows are in `blocks` blocks from this one on.

    Raises:
        TierdError: a row is larger than a block, or there are no rows.
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
        self.arena, self.count, self.shape, self.dtype = arena, count, shape, np.dtype(dtype)
        self.first_block = first_block
        self.elements = int(np.prod(shape, dtype=np.int64))
        if count < 1 or any(length < 1 for length in shape):
            raise TierdError(f"{count} rows of shape {shape}: nothing is to be kept")
        if self.dtype.hasobject or not self.dtype.itemsize:
            raise TierdError(
                f"rows of {self.dtype}: their elements have no fixed size",
                hint="use a dtype such as float32, or uint16 for bfloat16",
            )
        self.row_bytes = self.elements * self.dtype.itemsize
        self.per_block = arena.block_bytes // self.row_bytes
        if not self.per_block:
            raise TierdError(
                f"a row of {self.row_bytes} bytes in blocks of {arena.block_bytes}",
                hint=f"make the arena with block_bytes of {self.row_bytes} or more",
            )
        self.blocks = -(-count // self.per_block)
        if first_block < 0 or first_block + self.blocks > arena.blocks:
            raise NotFound(
                f"{self.blocks} blocks from {first_block} on, of an arena with {arena.blocks}",
                hint="make the arena larger, or the rows fewer",
            )

    @property
    def ids(self) -> Ids:
        """All of its blocks."""
        return np.arange(self.first_block, self.first_block + self.blocks)

    def shaped(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Shows blocks (n, block bytes), or one, as rows (n, per_block, *shape)."""
        used = memory[..., : self.per_block * self.row_bytes].view(self.dtype)
        return used.reshape(*memory.shape[:-1], self.per_block, *self.shape)

    def take(self, held: Held, which: Ids, within: Ids, into: NDArray[Any]) -> None:
        """Copies rows out of blocks that are held.

        Args:
            held: the blocks.
            which: for each row the number of its block in `held`.
            within: for each its number in the block.
            into: of shape (rows, *shape).
        """
        for memory, blocks, slots in held.by_memory():
            slot_of = np.full(len(held), -1, np.int64)
            slot_of[blocks] = slots
            found = slot_of[which]
            rows = np.flatnonzero(found >= 0)
            into[rows] = self.shaped(memory)[found[rows], within[rows]]

    def write_all(self, source: NDArray[Any], first: int = 0) -> None:
        """Writes rows from one on, that is the first of its block.

        Args:
            source: of shape (rows, *shape); the last ones may fill a block in part.
            first: the number of the first row.
        """
        if first % self.per_block or first + len(source) > self.count:
            raise TierdError(
                f"{len(source)} rows from {first} on: they are {self.count}, and each block has "
                f"{self.per_block}"
            )
        for at in range(0, len(source), self.per_block):
            rows = source[at : at + self.per_block]
            block = self.first_block + (first + at) // self.per_block
            with self.arena.acquire([block], write=True) as held:
                self.shaped(held[0])[: len(rows)] = rows


def chunks(ids: Ids, arena: Arena) -> Iterator[tuple[int, Ids]]:
    """Cuts ids into what may be held at once, also where only the fast tier has addresses."""
    most = max(1, min(_MOST_HELD, arena.shared.tiers[0].slots // 4))
    for first in range(0, len(ids), most):
        yield first, ids[first : first + most]


def numbers(given: ArrayLike, below: int, what: str) -> Ids:
    """Takes whole numbers from 0 on.

    Raises:
        TierdError: they are not whole, or not in one row.
        NotFound: one is out of range; it is named.
    """
    found = np.asarray(given)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TierdError(f"{what}s are whole numbers in a row, not {found.dtype} {found.shape}")
    wrong = (found < 0) | (found >= below)
    if wrong.any():
        raise NotFound(
            f"there is no {what} {found[wrong][0]}", hint=f"they are numbered from 0 to {below - 1}"
        )
    return found.astype(np.int64, copy=False)


def exactly(given: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> None:
    """Refuses an array of another shape or dtype.

    Raises:
        TierdError: naming both, and what is expected.
    """
    if given.shape != shape or given.dtype != dtype:
        raise TierdError(
            f"{what}: {given.dtype} {given.shape}, not {dtype} {shape}",
            hint="of the same size but another type, it can be passed as array.view(dtype)",
        )
