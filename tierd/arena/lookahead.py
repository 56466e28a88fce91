# SPDX-License-Identifier: Apache-2.0
"""Has an arena's blocks be in its fastest tier before they are used: docs/arena.md#look-ahead.

What comes next is told by the program, or seen in what it acquires. What was used makes way for it,
the last used first: in a sweep that is what is needed last. All of it are wishes that the arena's
movers see to, so that a wrong guess costs bandwidth, and nothing else.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierd.arena.arena import TIMEOUT_S, Arena
from tierd.arena.held import Held
from tierd.arena.order import Declared, Order, Pace, Strides, is_same, last
from tierd.errors import TierdError
from tierd.kernel.arena import NOWHERE, Ids

_NONE = np.empty(0, np.int64)

_FIRST_STEPS = 2
"""Ahead of a stream that was just found; it has more when it goes on, as in Linux' readahead."""

_SLACK_STEPS = 2
"""Kept free in the fastest tier, so that what comes need not wait for what goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """What came of looking ahead, in blocks.

    Of those used as foreseen, `ready` were in the fastest tier, `late` not yet; `strayed` were not
    foreseen. Of those `asked` for, `wasted` were passed over.
    """

    ready: int = 0
    late: int = 0
    strayed: int = 0
    asked: int = 0
    wasted: int = 0


class Lookahead:
    """Acquires an arena's blocks for one thread, and has the next ones fetched meanwhile.

    Iterating acquires each step of the order in turn, and releases it. With acquire() the program
    does so itself, in that order, or in any other. Where only a device reaches the fastest tier,
    blocks are held there.

    Args:
        arena: whose blocks.
        order: the steps that are to come, each an id or several; by default strides are looked for.
        repeats: after the last step comes the first.

    Raises:
        TierdError: the order is of no ids.
        NotFound: one of them is out of range.
    """

    def __init__(
        self, arena: Arena, order: Iterable[ArrayLike] | None = None, *, repeats: bool = False
    ) -> None:
        self._arena = arena
        tiers = arena.shared.tiers
        self._slots = tiers[0].slots
        self._room_below = [(i, tier.slots) for i, tier in enumerate(tiers) if i > 0]
        told_ns = [tier.latency_ns for tier in tiers[1:] if tier.latency_ns is not None]
        self._latency_s = max(told_ns) / 1e9 if told_ns else None
        """What a move from the slowest tier takes at least, as far as that is known."""
        self._places = arena.shared.places
        self._on = arena.tiers[0] if arena.tiers[0] in arena.on_devices else None
        self._declared = None if order is None else Declared(order, repeats=repeats)
        self._strides = Strides(arena.blocks)
        self._is_kept = np.zeros(arena.blocks, np.bool_)
        self._counts = dict.fromkeys(Foresight.__slots__, 0)
        self._left_s: float | None = None
        self._follow(self._declared, 0, self._slots)
        if self._declared is not None:
            arena.places(self._declared.ids(0, len(self._declared)))
            self._reach(len(self._declared.steps[0]))

    def __iter__(self) -> Iterator[Held]:
        """Holds each step in turn, once; an order that repeats goes on with the next iteration."""
        if self._declared is None:
            raise TierdError("no order was declared", hint="give one, or use acquire()")
        if self._position and not self._declared.repeats:
            self._follow(self._declared, 0, self._slots)
        for step in self._declared.steps:
            with self.acquire(step) as held:
                yield held

    @property
    def foresight(self) -> Foresight:
        return Foresight(**self._counts)

    @property
    def window(self) -> int:
        """How many steps ahead it looks now."""
        return self._pace.steps

    def acquire(self, ids: ArrayLike, *, write: bool = False, timeout_s: float = TIMEOUT_S) -> Held:
        """Is Arena.acquire(), and has what comes next be fetched."""
        step = np.asarray(ids).reshape(-1)
        if self._left_s is not None:
            self._pace.used(time.perf_counter() - self._left_s)
        if len(step):
            self._advance(step)
        held = self._arena.acquire(step, write=write, on=self._on, timeout_s=timeout_s)
        if self._order is not None and len(step):
            self._time_moves()
            self._reach(len(step))
        self._left_s = time.perf_counter()
        return held

    def _follow(self, order: Order | None, position: int, allowed: int) -> None:
        """Begins with an order at a position."""
        self._order = order
        self._start = self._position = self._frontier = position
        self._pace = Pace(self._slots, allowed, self._latency_s)
        self._asked = _NONE
        """Positions of what was asked for and is still to be used."""
        self._under_way: deque[tuple[int, np.int64, float]] = deque()
        """Of each wish the last position, its id, and when it was."""
        self._leaving = _NONE

    def _advance(self, step: Ids) -> None:
        """Follows the order to behind this step, wherever it is in it."""
        if self._order is None:
            self._look_for_strides(step)
            return
        end = self._position + len(step)
        if is_same(self._order.ids(self._position, end), step):
            ready = int(np.count_nonzero(self._places[step] == 0))
            self._count(ready=ready, late=len(step) - ready)
            self._pace.right()
            self._go_to(end)
            return
        self._pace.wrong()
        found = self._order.find(step, self._position)
        if found is not None:
            self._give_up(before=found if found < self._frontier else None)
            self._start = found
            self._go_to(found + len(step))
            self._count(strayed=len(step))
        elif self._declared is None:
            self._give_up()
            self._order = None
            self._look_for_strides(step)
        else:
            self._count(strayed=len(step))

    def _look_for_strides(self, step: Ids) -> None:
        self._count(strayed=len(step))
        found = self._strides.seen(step)
        if found is not None:
            self._follow(found, len(step), _FIRST_STEPS)

    def _go_to(self, position: int) -> None:
        self._position = position
        self._frontier = max(self._frontier, position)
        if len(self._asked) and self._asked[0] < position:
            self._asked = self._asked[self._asked >= position]

    def _give_up(self, before: int | None = None) -> None:
        """Takes what was asked for as a wrong guess: all, or that before a position."""
        is_given_up = self._asked < (self._frontier if before is None else before)
        self._count(wasted=int(np.count_nonzero(is_given_up)))
        self._asked = self._asked[~is_given_up]
        self._under_way.clear()

    def _time_moves(self) -> None:
        """Tells the pace of wishes that came true, or that are not worth waiting for any more."""
        now_s = time.perf_counter()
        while self._under_way:
            position, block, since_s = self._under_way[0]
            if position >= self._position and self._places[block] != 0:
                break
            self._pace.moved(now_s - since_s)
            self._under_way.popleft()

    def _reach(self, step: int) -> None:
        """Asks for what is not in the fastest tier yet, as far ahead as the pace and the room say.

        Args:
            step: blocks that are held now.
        """
        assert self._order is not None
        room = max(0, min(self._slots // 2, self._slots - (1 + _SLACK_STEPS) * step))
        end = max(self._frontier, self._position + min(self._pace.steps * step, room))
        fresh = self._order.ids(self._frontier, end)
        wanted = np.flatnonzero(self._is_below(fresh))
        if len(wanted) or len(self._leaving):
            most = self._make_way(step, self._frontier + len(fresh), len(wanted))
            if most < len(wanted):  # the next step asks for the others
                fresh, wanted = fresh[: wanted[most]], wanted[:most]
        if len(wanted):
            at, ids = self._frontier + wanted, fresh[wanted]
            self._asked = np.concatenate((self._asked, at))
            self._under_way.append((int(at[-1]), ids[-1], time.perf_counter()))
            self._count(asked=self._arena.prefetch(ids))
        self._frontier += len(fresh)

    def _make_way(self, step: int, end: int, wanted: int) -> int:
        """Has so much of what was used go that all to come up to a position finds room.

        Returns how much of what is wanted to ask for: what has room by now, and what gets none from
        those that go. For more a clock would choose who makes way, and maybe what is foreseen.
        """
        assert self._order is not None
        stays = self._order.ids(self._position - step, end)
        leaving = self._leaving
        self._is_kept[stays] = True
        if len(leaving):
            leaving = leaving[(self._places[leaving] == 0) & ~self._is_kept[leaving]]
        self._is_kept[leaving] = True
        moves = self._arena.moves()
        free = self._slots - moves.used[0]
        coming = int(np.count_nonzero(self._is_below(stays)))
        missing = coming + _SLACK_STEPS * step - free - len(leaving)
        going = _NONE
        if missing > 0 and not self._order.fits(self._slots):
            going = self._used_last(missing, self._position - step)
        self._is_kept[stays] = self._is_kept[leaving] = False
        self._leaving = np.concatenate((leaving, going))
        queued = min(moves.queued, coming - wanted)  # asked for before, and may have no slot yet
        return max(0, max(free, coming - self._send_down(len(going), moves.used)) - queued)

    def _send_down(self, new: int, used: Sequence[int]) -> int:
        """Has what leaves go; returns how much will: not what was to go before, and was held.

        Args:
            new: how much of it is to go for the first time.
            used: slots, of each tier.
        """
        below = next((i for i, slots in self._room_below if used[i] < slots), None)
        if not len(self._leaving) or below is None:
            return 0
        begun = self._arena.demote(self._leaving, self._arena.tiers[below])
        return len(self._leaving) - max(0, begun - new)

    def _used_last(self, count: int, end: int) -> Ids:
        """Finds blocks that were used before a position and need not stay, the last ones first."""
        assert self._order is not None
        span = count
        while True:
            first = max(self._start, end - span)
            behind = self._order.ids(first, end)
            found = last(behind, (self._places[behind] == 0) & ~self._is_kept[behind], count)
            if len(found) == count or first == self._start or span >= self._slots:
                return found
            span *= 4

    def _is_below(self, ids: Ids) -> NDArray[np.bool_]:
        """Which are in a tier that is not the fastest."""
        places = self._places[ids]
        below: NDArray[np.bool_] = (places != 0) & (places != NOWHERE)
        return below

    def _count(self, **more: int) -> None:
        for name, blocks in more.items():
            self._counts[name] += blocks
