# SPDX-License-Identifier: Apache-2.0
"""An embedding table in an arena: rows under Zipf's law, of which the hot ones are to be fast.

Several rows share a block, and blocks are what moves. Rows that are known to be hot can be put next
to each other (`hottest`), so that the fast tier has nothing but them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from tierd.arena import Arena
from tierd.errors import TierdError
from tierd.uses.hot import KeepHot
from tierd.uses.rows import Ids, Rows, chunks, exactly, numbers

HALVE_AFTER = 256
"""Lookups a block, by default: more make a finer order, and a change is seen later."""

STEP_AFTER = 1
"""Lookups a block between two looks at what is hot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """How many rows were looked up, and of how many the block was in the fastest tier then."""

    rows: int = 0
    fast: int = 0

    @property
    def hit_ratio(self) -> float | None:
        return self.fast / self.rows if self.rows else None


class EmbeddingTable:
    """Rows of numbers, looked up in batches, by one thread at a time.

    Args:
        arena: has the blocks. It is for tiers of memory: what has no addresses is fetched whole for
            each lookup, and pushes others out.
        rows: how many.
        width: numbers in each.
        dtype: of them; bfloat16 goes as uint16.
        first_block: as of Rows.
        hottest: row numbers, the hottest first: they share the first blocks. Others follow.
        keep_hot: have the blocks that are looked up most in the fastest tier.
        halve_after: lookups after which earlier ones weigh half.

    Raises:
        TierdError: rows don't fit into blocks, or there are none; `hottest` has one twice.
        NotFound: the arena is too small, or a row in `hottest` is out of range.
    """

    def __init__(
        self,
        arena: Arena,
        rows: int,
        width: int,
        dtype: DTypeLike = np.float32,
        *,
        first_block: int = 0,
        hottest: ArrayLike | None = None,
        keep_hot: bool = True,
        halve_after: float | None = None,
    ) -> None:
        self.rows, self.width = rows, width
        self._arena = arena
        self._rows = Rows(arena, rows, (width,), dtype, first_block)
        self._at = None if hottest is None else _positions(hottest, rows)
        self._hot = None
        if keep_hot:
            span = halve_after or HALVE_AFTER * self._rows.blocks
            self._hot = KeepHot(arena, self._rows.ids, halve_after=span)
        self._since_step = self._looked_up = self._fast = 0

    @property
    def ids(self) -> Ids:
        """The arena's blocks that it has."""
        return self._rows.ids

    @property
    def lookups(self) -> Lookups:
        return Lookups(rows=self._looked_up, fast=self._fast)

    def blocks_of(self, rows: ArrayLike) -> Ids:
        """Tells the block of each row."""
        at = self._positions_of(rows)
        return self._rows.first_block + at // self._rows.per_block

    def write(self, values: NDArray[Any]) -> None:
        """Replaces the whole table: (rows, width), of its dtype.

        Raises:
            TierdError: of another shape or dtype.
            NoRoom: the arena's tiers are too small.
        """
        exactly(values, (self.rows, self.width), self._rows.dtype, "the table")
        if self._at is None:
            self._rows.write_all(values)
            return
        order = np.argsort(self._at)
        per_block = self._rows.per_block
        for first in range(0, self.rows, per_block):
            self._rows.write_all(values[order[first : first + per_block]], first)

    def lookup(self, rows: ArrayLike, into: NDArray[Any] | None = None) -> NDArray[Any]:
        """Gathers rows, each as often as it is named, and counts them.

        Args:
            rows: their numbers, in one row.
            into: where to, (len(rows), width); a new array by default.

        Raises:
            NotFound: a row is out of range, or the table was not written yet.
            TierdError: `into` or `rows` is of another shape or dtype.
        """
        at = self._positions_of(rows)
        if into is None:
            into = np.empty((len(at), self.width), self._rows.dtype)
        exactly(into, (len(at), self.width), self._rows.dtype, "into")
        ids, which, times = np.unique(
            at // self._rows.per_block, return_inverse=True, return_counts=True
        )
        ids += self._rows.first_block
        within = at % self._rows.per_block
        fast = int(times[self._arena.places(ids) == 0].sum())
        for first, part in chunks(ids, self._arena):
            if len(part) == len(ids):
                self._take(part, which, within, into)
                break
            mine = np.flatnonzero((which >= first) & (which < first + len(part)))
            found = np.empty((len(mine), self.width), self._rows.dtype)
            self._take(part, which[mine] - first, within[mine], found)
            into[mine] = found
        self._arena.touch(np.repeat(ids, times - 1))  # once each was counted already
        self._note(len(at), fast)
        return into

    def _take(self, ids: Ids, which: Ids, within: Ids, into: NDArray[Any]) -> None:
        with self._arena.acquire(ids) as held:
            self._rows.take(held, which, within, into)

    def _note(self, rows: int, fast: int) -> None:
        self._looked_up += rows
        self._fast += fast
        self._since_step += rows
        if self._hot is not None and self._since_step >= STEP_AFTER * self._rows.blocks:
            self._since_step = 0
            self._hot.step()

    def _positions_of(self, rows: ArrayLike) -> Ids:
        found = numbers(rows, self.rows, "row")
        return found if self._at is None else self._at[found]


def by_frequency(rows: ArrayLike, count: int) -> Ids:
    """Orders the rows that were looked up by how often, for `hottest`.

    Args:
        rows: lookups that are typical.
        count: of the table's rows.
    """
    times = np.bincount(numbers(rows, count, "row"), minlength=count)
    order = np.argsort(-times, kind="stable")
    return order[: np.count_nonzero(times)].astype(np.int64)


def _positions(hottest: ArrayLike, rows: int) -> Ids:
    first = numbers(hottest, rows, "row")
    at = np.full(rows, -1, np.int64)
    at[first] = np.arange(len(first))
    if len(np.unique(first)) < len(first):
        raise TierdError("hottest has a row twice", hint="pass each once, as by_frequency() does")
    others = np.flatnonzero(at < 0)
    at[others] = np.arange(len(first), rows)
    return at
