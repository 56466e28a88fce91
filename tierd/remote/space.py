# SPDX-License-Identifier: Apache-2.0
"""Blocks on donors: each on several, so that one may die (docs/remote.md).

A donor that is late, stopped or cut off is away: what it has is read from the others, and copied
again within a budget. It comes back with what it had, unless its lease is over: then it is lost,
and comes back empty. What is read is checked against a sum of what was stored, so that no donor is
believed.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierd.bucket import Bucket
from tierd.errors import Busy, Lost, TierFailed
from tierd.kernel.arena import sums_of
from tierd.remote.gaps import Aside, Gaps
from tierd.remote.link import STEP_BYTES
from tierd.remote.places import LOOK_EVERY_S, Donor, Places

log = logging.getLogger("tierd")

_NICE = 5
"""What is copied again gives way to the program where CPUs are short."""

_WAITING_PART = 0.5
"""Of the time that the budget has for a piece, for gaps in which the program does not copy."""

_NONE = -1
_SCAN_PART = 0.02
"""Of a CPU, for finding what is to be copied again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How the blocks that are stored are: on as many donors as wanted, on fewer, or on none.

    `away` are those that only donors have which are away.
    """

    whole: int
    thin: int
    away: int
    lost: int
    copied_again: int
    """Copies that were made since a donor was not there, or asked to be left."""
    disbelieved: int
    """Copies that were not what was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """Blocks that are being copied again: from which copies of theirs, and where to.

    Arrays have a row for each block; `version` and `sums` are as they were at the beginning.
    """

    slots: NDArray[np.int64]
    columns: NDArray[np.int64]
    """Of the copies that are replaced."""
    version: NDArray[np.uint32]
    sums: NDArray[np.uint64]
    donors: NDArray[np.int16]
    at: NDArray[np.int64]
    source: NDArray[np.int64]
    """The column that is copied."""
    number: int
    link: Donor
    to: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """Blocks that were copied from donors: `data` in this order, the rest as they were asked for.

    `wrong` came, and are not what was stored; what is neither right nor wrong did not come.
    """

    order: NDArray[np.intp]
    data: NDArray[np.uint8]
    right: NDArray[np.bool_]
    wrong: NDArray[np.bool_]

    def those_right(self) -> tuple[NDArray[np.intp], NDArray[np.uint8]]:
        """Returns which are right, and these."""
        if self.right.all():
            return self.order, self.data
        is_right = self.right[self.order]
        return self.order[is_right], self.data[is_right]


class _Kept:
    """Memory for blocks, used again and again: new pages take longer than what is copied there."""

    def __init__(self, block_bytes: int) -> None:
        self._blocks = np.empty((0, block_bytes), np.uint8)

    def blocks(self, count: int) -> NDArray[np.uint8]:
        """Returns so many; what was returned before is to be used no more."""
        if len(self._blocks) < count:
            self._blocks = np.empty((count, self._blocks.shape[1]), np.uint8)
        return self._blocks[:count]


class RemoteSpace:
    """Blocks on donors.

    Args:
        block_bytes: of each.
        slots: how many.
        replicas: of each block, on different donors.
        links: at least as many.
        connect: makes a link to a donor that was lost, or has come.
        heal_mbps: MiB a second that are copied again, at most.
        listed: tells which donors there are now; by default always those of `links`.
    """

    memory: None = None

    def __init__(
        self,
        block_bytes: int,
        slots: int,
        replicas: int,
        links: Sequence[Donor],
        connect: Callable[[str], Donor],
        heal_mbps: float,
        listed: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self.slots = slots
        self.is_over = False
        self._block_bytes = block_bytes
        bytes_per_s = heal_mbps * (1 << 20)
        self._piece = max(1, min(STEP_BYTES, int(bytes_per_s * LOOK_EVERY_S)) // block_bytes)
        """Blocks that are copied again together."""
        self._patience_s = _WAITING_PART * self._piece * block_bytes / bytes_per_s
        burst = max(bytes_per_s * LOOK_EVERY_S, self._piece * block_bytes)
        self._budget = Bucket(bytes_per_s, burst, time.monotonic())
        self._budget.take(burst, time.monotonic())  # nothing was saved yet
        self._donor = np.full((slots, replicas), _NONE, np.int16)
        """The place of each copy."""
        self._at = np.zeros((slots, replicas), np.int64)
        self._sums = np.zeros(slots, np.uint64)
        """0 of what was never stored."""
        self._version = np.zeros(slots, np.uint32)
        """Is another one whenever a block is stored."""
        self._thin = np.zeros(0, np.int64)
        """What may have to be copied again, and has not been looked at since the last scan."""
        self._scanned: object = None
        self._scan_at_s = 0.0
        self._copied_again = self._disbelieved = 0
        self._kept, self._kept_aside = _Kept(block_bytes), _Kept(block_bytes)
        self._lock, self._gaps = threading.Lock(), Gaps()
        self._places = Places(links, connect, listed, block_bytes, self._lock)
        self._stop = threading.Event()
        self._healer = threading.Thread(target=self._heal, daemon=True, name="remote copies")
        self._healer.start()

    @property
    def copies(self) -> Copies:
        """Tells how well the blocks are kept now."""
        with self._lock:
            self._see_who_is_lost()
            stored = np.flatnonzero(self._sums)
            have = np.count_nonzero(self._can_be_read(stored), axis=1)
            is_nowhere = (self._donor[stored] == _NONE).all(axis=1)
        return Copies(
            whole=int(np.count_nonzero(have == self._donor.shape[1])),
            thin=int(np.count_nonzero((have > 0) & (have < self._donor.shape[1]))),
            away=int(np.count_nonzero((have == 0) & ~is_nowhere)),
            lost=int(np.count_nonzero(is_nowhere)),
            copied_again=self._copied_again,
            disbelieved=self._disbelieved,
        )

    @property
    def donors(self) -> tuple[str, ...]:
        """The addresses of those that are there."""
        return self._places.here

    @property
    def holders(self) -> tuple[str, ...]:
        """The addresses of donors that have copies, those with the most first."""
        with self._lock:
            numbers, counts = np.unique(self._donor[self._donor != _NONE], return_counts=True)
            most_first = numbers[np.argsort(-counts, kind="stable")]
            return tuple(self._places.all[number].address for number in most_first)

    @property
    def failures(self) -> dict[str, str]:
        """Why donors are not there, by their addresses; of those that are listed, or were left."""
        return self._places.failures

    @property
    def slow(self) -> tuple[str, ...]:
        """The addresses of donors that are there, and so slow that others are read before them."""
        with self._lock:
            is_slow = self._places.are_slow()
            places = self._places.all
        return tuple(place.address for place, slow in zip(places, is_slow, strict=False) if slow)

    def adopt(self, buffer: NDArray[np.uint8]) -> None:
        """Is told of blocks that store() gets parts of: these are copied from where they lie."""
        with self._lock:
            self._places.adopt(buffer)

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        """Stores on as many donors as have room; on fewer than wanted where others are lost.

        Raises:
            Busy: none has any now.
        """
        with self._lock, self._gaps.copy():
            self._see_who_is_lost()
            self._forget(slots)
            done = 0
            while done < len(slots):
                chosen = self._places.emptiest()[: self._donor.shape[1]]
                if not chosen:
                    if not self._thin_out(len(slots) - done):
                        raise Busy(f"no donor has room: {self._why()}")
                    continue
                most = min(self._places.all[number].room for number in chosen)
                part = slots[done : done + most]
                stored = [
                    self._put(number, part, replica, data[done : done + most])
                    for replica, number in enumerate(chosen)
                ]
                if sum(stored) < self._donor.shape[1]:
                    self._scanned = None
                done += len(part) if any(stored) else 0
            self._sums[slots] = sums_of(data)
        return len(slots)

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        """Loads each block from one of its donors, and from the next where that is not right.

        Raises:
            Lost: of some every copy is.
            Busy: some are on donors alone that are away.
        """
        with self._lock, self._gaps.copy():
            self._see_who_is_lost()
            order, rows = self._reading_order(slots), np.arange(len(slots))
            for turn in range(order.shape[1]):
                column = order[rows, turn]
                donors, at = self._donor[slots[rows], column], self._at[slots[rows], column]
                found = self._fetch(donors, at, self._sums[slots[rows]], self._kept)
                which, data = found.those_right()
                into[rows[which]] = data
                self._disbelieve(slots[rows[found.wrong]], column[found.wrong])
                rows = rows[~found.right]
                if not len(rows):
                    break
            else:
                self._see_who_is_lost()
            missed = slots[rows]
            is_away = (self._donor[missed] != _NONE).any(axis=1)
        if is_away.any():
            raise Busy(f"donors of slots {missed[is_away][:8].tolist()} are away: {self._why()}")
        if len(missed):
            raise Lost(
                f"no donor has slots {missed[:8].tolist()} any more: {self._why()}",
                missed,
                hint="use more replicas, or donors that do not die together",
            )
        return len(slots)

    def free(self) -> None:
        """Gives every donor its memory back."""
        self.is_over = True
        self._stop.set()
        self._places.stop()
        self._healer.join()
        with self._lock:
            self._places.end()

    def _can_be_read(self, slots: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
        """Returns which copies of blocks are on donors that are there."""
        found: NDArray[np.bool_] = self._places.are_here()[self._donor[slots]]
        return found

    def _is_to_stay(self, slots: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
        """Returns which copies of blocks are on donors that are there and do not leave."""
        found: NDArray[np.bool_] = self._places.stay()[self._donor[slots]]
        return found

    def _why(self) -> str:
        return "; ".join(f"{donor}: {why}" for donor, why in self.failures.items()) or "all is full"

    def _reading_order(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns in which order the copies of blocks are read; of slow donors last.

        Of neighbours one each comes first, so that all donors are asked.
        """
        replicas = self._donor.shape[1]
        turns: NDArray[np.int64] = (slots[:, None] + np.arange(replicas)) % replicas
        is_slow = self._places.are_slow()
        if not is_slow.any():
            return turns
        comes_last = is_slow[np.take_along_axis(self._donor[slots], turns, 1)]
        return np.take_along_axis(turns, np.argsort(comes_last, axis=1, kind="stable"), 1)

    def _put(
        self,
        number: int,
        slots: NDArray[np.int64],
        column: int,
        data: NDArray[np.uint8],
    ) -> bool:
        """Copies blocks to a donor with room; returns whether it has them."""
        place = self._places.all[number]
        assert place.link is not None
        assert place.free is not None
        at = place.free.take(len(slots))
        try:
            place.link.write(at, data)
        except TierFailed:
            place.free.give(at)
            self._see_who_is_lost()
            return False
        self._donor[slots, column], self._at[slots, column] = number, at
        return True

    def _fetch(
        self,
        donors: NDArray[np.int16],
        at: NDArray[np.int64],
        sums: NDArray[np.uint64],
        kept: "_Kept",
        aside: Aside | None = None,
    ) -> "_Fetched":
        """Copies blocks from donors, those of each together, into memory that is kept."""
        order = np.argsort(donors, kind="stable")
        data = kept.blocks(len(at))
        right, wrong = np.zeros(len(at), np.bool_), np.zeros(len(at), np.bool_)
        for number in np.unique(donors[donors != _NONE]):
            link = self._places.all[number].link
            if link is None:
                continue  # lost just now, as another one was
            first, end = np.searchsorted(donors[order], [number, number + 1])
            these, copied = order[first:end], data[first:end]
            try:
                link.read(at[these], copied, aside=aside)
            except TierFailed:
                continue
            with nullcontext() if aside is None else aside():
                is_good = sums_of(copied) == sums[these]
            right[these], wrong[these] = is_good, ~is_good
        return _Fetched(order=order, data=data, right=right, wrong=wrong)

    def _disbelieve(self, slots: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Has copies be none that were read and are not what was stored."""
        for number in np.unique(self._donor[slots, columns]):
            count = np.count_nonzero(self._donor[slots, columns] == number)
            address = self._places.all[number].address
            log.warning("donor %s: %d blocks are not what was stored", address, count)
        if len(slots):
            self._disbelieved += len(slots)
            self._donor[slots, columns] = _NONE  # and nothing is stored at that place again
            self._scanned = None

    def _forget(self, slots: NDArray[np.int64]) -> None:
        """Frees what these slots have on donors."""
        self._give_back(self._donor[slots], self._at[slots])
        self._donor[slots], self._sums[slots] = _NONE, 0
        self._version[slots] += np.uint32(1)

    def _give_back(self, donors: NDArray[np.int16], at: NDArray[np.int64]) -> None:
        """Has the places of copies be free, of donors that are there."""
        for number, place in enumerate(self._places.all):
            if place.free is not None:
                place.free.give(at[donors == number])

    def _thin_out(self, count: int) -> bool:
        """Frees a copy of so many blocks that have another one; returns whether there was any."""
        every = slice(None)
        can_go, can_be_read = self._is_to_stay(every), self._can_be_read(every)
        spare = np.flatnonzero(can_go.any(axis=1) & (np.count_nonzero(can_be_read, axis=1) > 1))
        spare = spare[:count]
        columns = can_go[spare].argmax(axis=1)
        self._give_back(self._donor[spare, columns], self._at[spare, columns])
        self._donor[spare, columns] = _NONE
        self._scanned = None
        return len(spare) > 0

    def _see_who_is_lost(self) -> None:
        for number, place in enumerate(self._places.all):
            link = place.link
            if link is None or place.is_here:
                continue
            if place.since_s is not None:
                place.has_not(time.monotonic())
                log.warning("donor %s is away: %s", place.address, link.away or link.failure)
            if link.failure is not None:
                its = self._donor == number
                count = np.count_nonzero(its)
                log.warning(
                    "donor %s is lost, with %d copies: %s", place.address, count, link.failure
                )
                self._donor[its] = _NONE
                link.end()
                place.loses()

    def _heal(self) -> None:
        """Is a thread: copies again what donors have lost, and follows the list of donors."""
        with suppress(OSError):  # a sandbox may not let it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread
        rest_s = LOOK_EVERY_S
        while not self._stop.wait(rest_s):
            now_s = time.monotonic()
            self._places.follow(now_s)
            with self._lock:
                self._see_who_is_lost()
            rest_s = min(self._copy_again(now_s), LOOK_EVERY_S)

    def _copy_again(self, now_s: float) -> float:
        """Copies a piece of what has fewer replicas than wanted; returns when the next is due.

        Nobody waits for it: what is stored meanwhile makes it void. Its steps are made in gaps
        between what the program copies, for as long as the budget can wait.
        """
        if rest_s := self._rest_s(now_s):
            return rest_s
        aside = partial(self._gaps.step, now_s + self._patience_s)
        with aside(), self._lock:
            again = self._choose()
        if again is None:
            return LOOK_EVERY_S
        found = self._fetch(again.donors, again.at, again.sums, self._kept_aside, aside)
        which, data = found.those_right()
        if len(which):
            try:
                again.link.write(again.to[which], data, aside=aside)
            except TierFailed:
                found.right[:] = False
        with aside(), self._lock:
            copied = self._settle(again, found.right, found.wrong)
        self._budget.take(copied * self._block_bytes, time.monotonic())
        return self._rest_s(time.monotonic())

    def _rest_s(self, now_s: float) -> float:
        """Returns for how long the budget has nothing for a piece."""
        return max(0.0, self._budget.due_s(self._piece * self._block_bytes) - now_s)

    def _choose(self) -> _Again | None:
        """Chooses what is copied again next; where nothing is, donors that leave are let go."""
        self._scan()
        again = self._next()
        if again is None:
            for number, place in enumerate(self._places.all):
                if place.leaves:
                    self._let_go(number)
        return again

    def _settle(self, again: _Again, right: NDArray[np.bool_], wrong: NDArray[np.bool_]) -> int:
        """Takes note of what was copied again, of blocks that are as they were."""
        slots, columns = again.slots, again.columns
        is_same = self._version[slots] == again.version
        is_same &= self._donor[slots, again.source] == again.donors
        self._disbelieve(slots[wrong & is_same], again.source[wrong & is_same])
        place = self._places.all[again.number]
        if place.link is not again.link or place.free is None:
            self._scanned = None
            return 0
        done = right & is_same
        place.free.give(again.to[~done])
        self._give_back(self._donor[slots, columns][done], self._at[slots, columns][done])
        self._donor[slots[done], columns[done]] = again.number
        self._at[slots[done], columns[done]] = again.to[done]
        if not done.all():
            self._scanned = None
        count = int(np.count_nonzero(done))
        self._copied_again += count
        return count

    def _scan(self) -> None:
        """Finds what has fewer replicas than wanted, or is on who leaves or is away.

        It looks at every block, so it is done where something has changed, and not too often.
        """
        state = [(p.address, id(p.link), p.is_here, p.leaves) for p in self._places.all]
        begin_s = time.monotonic()
        if state == self._scanned or begin_s < self._scan_at_s:
            return
        every = slice(None)
        is_thin = (self._sums != 0) & ~self._is_to_stay(every).all(axis=1)
        self._thin = np.flatnonzero(is_thin & self._can_be_read(every).any(axis=1))
        self._scanned = state
        end_s = time.monotonic()
        self._scan_at_s = end_s + (end_s - begin_s) / _SCAN_PART

    def _next(self) -> _Again | None:
        """Chooses a piece of what is thin, and takes room for it; None where there is none."""
        while len(self._thin):
            slots, rest = self._thin[: self._piece], self._thin[self._piece :]
            can_be_read, stays = self._can_be_read(slots), self._is_to_stay(slots)
            is_thin = (self._sums[slots] != 0) & ~stays.all(axis=1) & can_be_read.any(axis=1)
            if not is_thin.any():
                self._thin = rest
                continue
            slots, can_be_read, stays = slots[is_thin], can_be_read[is_thin], stays[is_thin]
            for number in self._places.emptiest():
                place = self._places.all[number]
                can_go = np.flatnonzero(~(self._donor[slots] == number).any(axis=1))[: place.room]
                if not len(can_go) or place.free is None or place.link is None:
                    continue
                left = np.delete(slots, can_go)
                self._thin = np.concatenate((left, rest)) if len(left) else rest
                slots, columns = slots[can_go], (~stays[can_go]).argmax(axis=1)
                source = self._source(slots, can_be_read[can_go])
                return _Again(
                    slots=slots,
                    columns=columns,
                    version=self._version[slots],
                    sums=self._sums[slots],
                    donors=self._donor[slots, source],
                    at=self._at[slots, source],
                    source=source,
                    number=number,
                    link=place.link,
                    to=place.free.take(len(slots)),
                )
            self._thin = np.concatenate((rest, slots))
            return None
        return None

    def _source(
        self, slots: NDArray[np.int64], can_be_read: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Returns the column of each block that is read first of those that can be."""
        order = self._reading_order(slots)
        first = np.take_along_axis(can_be_read, order, 1).argmax(axis=1)
        found: NDArray[np.int64] = order[np.arange(len(slots)), first]
        return found

    def _let_go(self, number: int) -> None:
        """Gives a donor that asked to be left its memory back, once nothing is there."""
        place = self._places.all[number]
        if place.link is not None and not (self._donor == number).any():
            log.info("donor %s is left, as it asked", place.address)
            place.link.end()
            place.loses()
            place.has_not(time.monotonic())
