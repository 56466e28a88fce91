# SPDX-License-Identifier: Apache-2.0
"""What comes next, and how far ahead it is worth asking for: pure, over arrays of ids.

An order is a row of ids, each at a position from 0. A step is what is acquired at once.
"""

import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierd.errors import TierdError
from tierd.kernel.arena import Ids

ALIKE = 2
"""So many strides of the same length are a stream."""

_CAUTION = 4.0
_OF_MEAN, _OF_DEVIATION = 1 / 8, 1 / 4
"""The gains of RFC 6298, which foresees a network's answers from earlier ones."""


class Order(Protocol):
    def ids(self, first: int, end: int) -> Ids:
        """Those from a position to before another one; fewer where the order ends."""
        ...

    def find(self, ids: Ids, position: int) -> int | None:
        """Where these come next, from a position on; None where they don't."""
        ...

    def fits(self, blocks: int) -> bool:
        """Whether all that it names is no more than so many blocks."""
        ...


class Declared:
    """An order that the program tells of, done once or again and again."""

    def __init__(self, steps: Iterable[ArrayLike], *, repeats: bool) -> None:
        self.steps = [_ids(step) for step in steps]
        self._ids = np.concatenate([np.empty(0, np.int64), *self.steps])
        self._distinct = len(np.unique(self._ids))
        self.repeats = repeats
        if not len(self._ids):
            raise TierdError("an order of no ids")

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, first: int, end: int) -> Ids:
        length = len(self._ids)
        if not self.repeats:
            return self._ids[min(first, length) : min(end, length)]
        lap = first // length * length
        if end - lap <= length:
            return self._ids[first - lap : end - lap]
        return self._ids.take(np.arange(first, end), mode="wrap")

    def find(self, ids: Ids, position: int) -> int | None:
        found = np.flatnonzero(self._ids == ids[0])
        if self.repeats:
            found = found + position // len(self._ids) * len(self._ids)
            found = np.append(found, found + len(self._ids))
        found = found[found >= position][:1]
        if not len(found) or not is_same(self.ids(found[0], found[0] + len(ids)), ids):
            return None
        return int(found[0])

    def fits(self, blocks: int) -> bool:
        return self._distinct <= blocks


class Strided:
    """A step again and again, each further by a stride, as far as there are blocks."""

    def __init__(self, step: Ids, stride: int, blocks: int) -> None:
        self._step, self._stride, self._blocks = step.copy(), stride, blocks

    def ids(self, first: int, end: int) -> Ids:
        at = np.arange(first, max(first, end))
        ids: Ids = self._step[at % len(self._step)] + at // len(self._step) * self._stride
        beyond = np.flatnonzero((ids < 0) | (ids >= self._blocks))
        return ids[: beyond[0]] if len(beyond) else ids

    def find(self, ids: Ids, position: int) -> int | None:
        """None: what goes on elsewhere is another stream."""
        return None

    def fits(self, blocks: int) -> bool:
        """No: it goes on."""
        return False


class Strides:
    """Looks for steps of one size that are the same distance apart."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._last: Ids | None = None
        self._stride, self._alike = 0, 0

    def seen(self, step: Ids) -> Strided | None:
        """Takes note of a step; returns the order that begins with it, once there is one."""
        last, self._last = self._last, step.copy()
        stride = _distance(last, step)
        self._alike = self._alike + 1 if stride and stride == self._stride else int(stride != 0)
        self._stride = stride
        return Strided(step, stride, self._blocks) if self._alike >= ALIKE else None


class Pace:
    """How many steps ahead: a move's time over the time between steps, and one.

    Args:
        most: steps, however slow moves are.
        allowed: steps, until it is seen whether guesses are right.
        move_s: what a move takes at least, where that is known before the first one.
    """

    def __init__(self, most: int, allowed: int, move_s: float | None = None) -> None:
        self._most = most
        self._allowed = min(most, allowed)
        self._move_s: float | None = None
        self._deviation_s = 0.0
        if move_s is not None:
            self.moved(move_s)
        self._step_s: float | None = None

    @property
    def steps(self) -> int:
        if self._move_s is None or self._step_s is None:
            return min(2, self._allowed)
        late_s = self._move_s + _CAUTION * self._deviation_s
        if late_s >= self._allowed * self._step_s:
            return self._allowed
        return min(math.ceil(late_s / self._step_s) + 1, self._allowed)

    def moved(self, seconds: float) -> None:
        """Takes note of what passed from asking for blocks until they were there."""
        if self._move_s is None:
            self._move_s, self._deviation_s = seconds, seconds / 2
            return
        off = seconds - self._move_s
        self._deviation_s += _OF_DEVIATION * (abs(off) - self._deviation_s)
        self._move_s += _OF_MEAN * off

    def used(self, seconds: float) -> None:
        """Takes note of what the program took for a step, without what it waited."""
        if self._step_s is None:
            self._step_s = seconds
        self._step_s += _OF_MEAN * (seconds - self._step_s)

    def right(self) -> None:
        self._allowed = min(self._most, self._allowed + 1 + self._allowed // 4)

    def wrong(self) -> None:
        """Halves what is allowed. It grows again where three guesses of four are right."""
        self._allowed //= 2


def is_same(some: Ids, others: Ids) -> bool:
    """Whether they are the same ids; NumPy's array_equal takes twice as long."""
    return len(some) == len(others) and bool((some == others).all())


def last(behind: Ids, may_go: NDArray[np.bool_], count: int) -> Ids:
    """Chooses who makes way: what was used last is needed last in a sweep (Belady).

    Args:
        behind: what was used, in that order.
        may_go: which of it may.
        count: how many, at most.
    """
    return behind[may_go][::-1][:count]


def _ids(step: ArrayLike) -> Ids:
    found = np.asarray(step)
    if found.size and found.dtype.kind not in "iu":
        raise TierdError(f"ids are whole numbers, not {found.dtype}")
    return np.ascontiguousarray(found.reshape(-1), np.int64)


def _distance(last: Ids | None, step: Ids) -> int:
    """How far each id is from the one before, 0 where not all are alike."""
    if last is None or not len(step) or len(last) != len(step):
        return 0
    stride = int(step[0] - last[0])
    return stride if (step - last == stride).all() else 0
