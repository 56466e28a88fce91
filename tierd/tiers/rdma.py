# SPDX-License-Identifier: Apache-2.0
"""A tier of other hosts' memory: each block on several, so that one may die (docs/remote.md).

A donor that is late, stopped or cut off is away: what it has is read from the others, and copied
again within a budget. It comes back with what it had, unless its lease is over: then it is lost,
and comes back empty. What is read is checked against a sum of what was stored, so that no donor is
believed.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.errors import Busy, Lost, NoRoom, TierdError, TierFailed
from tierd.kernel.arena import sums_of
from tierd.model import TierKind
from tierd.remote.link import Link, Speed
from tierd.remote.wire import Keys
from tierd.tiers.plugin import Facts, Health

log = logging.getLogger("tierd")

MOST_REPLICAS = 4
HEAL_EVERY_S = 0.1
FIRST_WAIT_S, MOST_WAIT_S = 1.0, 60.0
"""Between two tries to reach a donor that is not there; each wait is twice the last, also where it
was there in between, but not for as long as the longest: one that is slow comes and goes.
"""

_NONE = -1


class Donor(Protocol):
    """A lease of one donor: remote.link.Link, or what plays one."""

    address: str
    donor: str
    slots: int
    failure: str | None
    speed: Speed

    @property
    def away(self) -> str | None: ...
    @property
    def leaves(self) -> bool: ...
    def resume(self) -> None: ...
    def write(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> None: ...
    def read(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> None: ...
    def end(self) -> None: ...


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


class _Free:
    """A donor's slots without blocks: a stack."""

    def __init__(self, slots: int) -> None:
        self._slots = np.arange(slots)[::-1].copy()
        self.count = slots

    def take(self, count: int) -> NDArray[np.int64]:
        self.count -= count
        return self._slots[self.count : self.count + count].copy()

    def give(self, slots: NDArray[np.int64]) -> None:
        self._slots[self.count : self.count + len(slots)] = slots
        self.count += len(slots)


@dataclass(slots=True)
class _Place:
    """A donor, as far as it is there."""

    address: str
    link: Donor | None = None
    free: _Free | None = None
    since_s: float | None = None
    """When it was reached; None while it is not there."""
    wait_s: float = FIRST_WAIT_S
    try_at_s: float = 0.0

    @property
    def is_here(self) -> bool:
        return self.link is not None and not (self.link.failure or self.link.away)

    @property
    def room(self) -> int:
        """How many blocks it can take."""
        if self.link is None or self.free is None or not self.is_here or self.link.leaves:
            return 0
        return self.free.count

    def has(self, link: Donor, now_s: float) -> None:
        """Takes note that the donor was reached; by the link that it has, or an empty one."""
        if link is not self.link:
            self.link, self.free = link, _Free(link.slots)
        self.since_s = now_s

    def has_not(self, now_s: float) -> None:
        """Takes note that the donor is not there any more, or could not be reached."""
        was_long = self.since_s is not None and now_s - self.since_s >= MOST_WAIT_S
        self.wait_s = FIRST_WAIT_S if was_long else min(2 * self.wait_s, MOST_WAIT_S)
        self.since_s, self.try_at_s = None, now_s + self.wait_s

    def loses(self) -> None:
        """Takes note that the lease is over."""
        self.link = self.free = None


class RemoteSpace:
    """Blocks on donors.

    Args:
        block_bytes: of each.
        slots: how many.
        replicas: of each block, on different donors.
        links: at least as many.
        connect: makes a link to a donor that was lost.
        heal_mbps: MiB a second that are copied again, at most.
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
    ) -> None:
        self.slots = slots
        self.is_over = False
        self._block_bytes = block_bytes
        self._connect = connect
        self._batch = max(1, int(heal_mbps * HEAL_EVERY_S * (1 << 20)) // block_bytes)
        """What is copied again at once; of large blocks one, and less often."""
        self._rest_s = max(HEAL_EVERY_S, self._batch * block_bytes / (heal_mbps * (1 << 20)))
        self._places = [_Place(link.address) for link in links]
        for place, link in zip(self._places, links, strict=True):
            place.has(link, time.monotonic())
        self._donor = np.full((slots, replicas), _NONE, np.int16)
        """The place of each copy."""
        self._at = np.zeros((slots, replicas), np.int64)
        self._sums = np.zeros(slots, np.uint64)
        """0 of what was never stored."""
        self._copied_again = self._disbelieved = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._healer = threading.Thread(target=self._heal, daemon=True, name="remote copies")
        self._healer.start()
        for place in self._places:
            self._look_after(place)

    @property
    def copies(self) -> Copies:
        """Tells how well the blocks are kept now."""
        with self._lock:
            self._see_who_is_lost()
            is_stored = self._sums != 0
            have = np.count_nonzero(self._can_be_read()[is_stored], axis=1)
            is_nowhere = (self._donor[is_stored] == _NONE).all(axis=1)
        return Copies(
            whole=int(np.count_nonzero(have == self._donor.shape[1])),
            thin=int(np.count_nonzero((have > 0) & (have < self._donor.shape[1]))),
            away=int(np.count_nonzero((have == 0) & ~is_nowhere)),
            lost=int(np.count_nonzero(is_nowhere)),
            copied_again=self._copied_again,
            disbelieved=self._disbelieved,
        )

    @property
    def failures(self) -> dict[str, str]:
        """Why donors are not there, by their addresses."""
        found = {}
        for place in self._places:
            link = place.link
            if why := "not reached" if link is None else link.failure or link.away:
                found[place.address] = why
        return found

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        """Stores on as many donors as have room; on fewer than wanted where others are lost.

        Raises:
            Busy: none has any now.
        """
        with self._lock:
            self._see_who_is_lost()
            self._forget(slots)
            done = 0
            while done < len(slots):
                chosen = self._emptiest()[: self._donor.shape[1]]
                if not chosen:
                    if not self._thin_out(len(slots) - done):
                        raise Busy(f"no donor has room: {self._why()}")
                    continue
                most = min(self._places[number].room for number in chosen)
                part = slots[done : done + most]
                stored = [
                    self._put(number, part, np.full(len(part), replica), data[done : done + most])
                    for replica, number in enumerate(chosen)
                ]
                done += len(part) if any(stored) else 0
            self._sums[slots] = sums_of(data)
        return len(slots)

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        """Loads each block from one of its donors, and from the next where that is not right.

        Raises:
            Lost: of some every copy is.
            Busy: some are on donors alone that are away.
        """
        with self._lock:
            self._see_who_is_lost()
            left = np.arange(len(slots))
            for turn in range(self._donor.shape[1]):
                # Of neighbours one each, so that all donors are asked.
                column = (slots[left] + turn) % self._donor.shape[1]
                left = left[~self._get(slots[left], column, into, left)]
                if not len(left):
                    break
            missed = slots[left]
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
        self._healer.join()
        with self._lock:
            for place in self._places:
                if place.link is not None:
                    place.link.end()
                    place.loses()

    def _can_be_read(self) -> NDArray[np.bool_]:
        """Returns which copies are on donors that are there; of the shape of _donor."""
        here = [number for number, place in enumerate(self._places) if place.is_here]
        return np.isin(self._donor, here)

    def _why(self) -> str:
        return "; ".join(f"{donor}: {why}" for donor, why in self.failures.items()) or "all is full"

    def _emptiest(self) -> list[int]:
        """Returns the places with room, that with the most first."""
        rooms = np.array([place.room for place in self._places])
        return [int(number) for number in np.argsort(-rooms, kind="stable") if rooms[number]]

    def _put(
        self,
        number: int,
        slots: NDArray[np.int64],
        columns: NDArray[np.int64],
        data: NDArray[np.uint8],
    ) -> bool:
        """Copies blocks to a donor with room; returns whether it has them."""
        place = self._places[number]
        assert place.link is not None
        assert place.free is not None
        at = place.free.take(len(slots))
        try:
            place.link.write(at, data)
        except TierFailed:
            place.free.give(at)
            self._see_who_is_lost()
            return False
        self._donor[slots, columns], self._at[slots, columns] = number, at
        return True

    def _get(
        self,
        slots: NDArray[np.int64],
        columns: NDArray[np.int64],
        into: NDArray[np.uint8],
        rows: NDArray[np.intp],
    ) -> NDArray[np.bool_]:
        """Copies one replica of each block into rows; returns of which that was right."""
        right = np.zeros(len(slots), np.bool_)
        numbers = self._donor[slots, columns]
        for number in np.unique(numbers[numbers != _NONE]):
            link, these = self._places[number].link, np.flatnonzero(numbers == number)
            if link is None:
                continue  # lost just now, as another one was
            copied = np.empty((len(these), self._block_bytes), np.uint8)
            try:
                link.read(self._at[slots[these], columns[these]], copied)
            except TierFailed:
                self._see_who_is_lost()
                continue
            good = sums_of(copied) == self._sums[slots[these]]
            into[rows[these[good]]] = copied[good]
            right[these[good]] = True
            self._disbelieve(slots[these[~good]], columns[these[~good]], link)
        return right

    def _disbelieve(
        self, slots: NDArray[np.int64], columns: NDArray[np.int64], link: Donor
    ) -> None:
        """Has copies be none that were read and are not what was stored."""
        if len(slots):
            log.warning("donor %s: %d blocks are not what was stored", link.address, len(slots))
            self._disbelieved += len(slots)
            self._donor[slots, columns] = _NONE  # and nothing is stored at that place again

    def _forget(self, slots: NDArray[np.int64]) -> None:
        """Frees what these slots have on donors."""
        self._give_back(self._donor[slots], self._at[slots])
        self._donor[slots], self._sums[slots] = _NONE, 0

    def _give_back(self, donors: NDArray[np.int16], at: NDArray[np.int64]) -> None:
        """Has the places of copies be free, of donors that are there."""
        for number, place in enumerate(self._places):
            if place.free is not None:
                place.free.give(at[donors == number])

    def _thin_out(self, count: int) -> bool:
        """Frees a copy of so many blocks that have another one; returns whether there was any."""
        can_be_read = self._can_be_read()
        is_free = can_be_read & ~np.isin(self._donor, self._leaving())
        spare = np.flatnonzero(is_free.any(axis=1) & (np.count_nonzero(can_be_read, axis=1) > 1))
        spare = spare[:count]
        columns = is_free[spare].argmax(axis=1)
        self._give_back(self._donor[spare, columns], self._at[spare, columns])
        self._donor[spare, columns] = _NONE
        return len(spare) > 0

    def _see_who_is_lost(self) -> None:
        for number, place in enumerate(self._places):
            link = place.link
            if link is None or place.is_here:
                continue
            its = self._donor == number
            count = np.count_nonzero(its)
            if place.since_s is not None:
                place.has_not(time.monotonic())
                why = link.away or link.failure
                log.warning("donor %s is away, with %d copies: %s", place.address, count, why)
            if link.failure is not None:
                log.warning(
                    "donor %s is lost, with %d copies: %s", place.address, count, link.failure
                )
                self._donor[its] = _NONE
                link.end()
                place.loses()

    def _heal(self) -> None:
        """Is a thread: copies again what donors have lost."""
        while not self._stop.wait(self._rest_s):
            with self._lock:
                self._see_who_is_lost()
                self._copy_again()

    def _look_after(self, place: _Place) -> None:
        """Begins a thread of the donor's own: one that is stopped keeps it waiting."""
        name = f"to {place.address}"
        threading.Thread(target=self._find, args=(place,), daemon=True, name=name).start()

    def _find(self, place: _Place) -> None:
        """Is a thread: looks for a donor that is not there."""
        while not self._stop.wait(HEAL_EVERY_S):
            is_over = place.link is not None and place.link.failure is not None
            if place.since_s is None and not is_over and place.try_at_s <= time.monotonic():
                self._reach(place)

    def _reach(self, place: _Place) -> None:
        link = place.link
        try:
            if link is None:
                link = self._connect(place.address)
            else:
                link.resume()
        except TierdError as error:
            place.has_not(time.monotonic())
            if link is not None and link.failure is not None:
                place.try_at_s = 0.0  # it is there, or was not for long: a new lease is next
            log.debug("donor %s is not back: %s", place.address, error)
            return
        with self._lock:
            if self._stop.is_set():
                link.end()
                return
            is_empty = link is not place.link
            place.has(link, time.monotonic())
        log.info("donor %s is back%s", place.address, ", and empty" if is_empty else "")

    def _copy_again(self) -> None:
        """Copies a batch of blocks with fewer replicas than wanted, or on who leaves or is away."""
        leaving, can_be_read = self._leaving(), self._can_be_read()
        is_missing = ~can_be_read | np.isin(self._donor, leaving)
        thin = np.flatnonzero((self._sums != 0) & is_missing.any(axis=1) & can_be_read.any(axis=1))
        for number in self._emptiest():
            has_it = (self._donor[thin] == number).any(axis=1)
            slots = thin[~has_it][: min(self._batch, self._places[number].room)]
            if len(slots):
                self._copy_to(number, slots, is_missing[slots].argmax(axis=1))
                return
        for number in leaving:
            self._let_go(number)

    def _leaving(self) -> list[int]:
        return [n for n, place in enumerate(self._places) if place.link and place.link.leaves]

    def _let_go(self, number: int) -> None:
        """Gives a donor that asked to be left its memory back, once nothing is there."""
        place = self._places[number]
        if place.link is not None and not (self._donor == number).any():
            log.info("donor %s is left, as it asked", place.address)
            place.link.end()
            place.loses()
            place.has_not(time.monotonic())

    def _copy_to(self, number: int, slots: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        data = np.empty((len(slots), self._block_bytes), np.uint8)
        have = self._can_be_read()[slots].argmax(axis=1)
        rows = np.arange(len(slots))
        right = self._get(slots, have, data, rows)
        slots, columns, data = slots[right], columns[right], data[right]
        if not len(slots) or not self._places[number].room:
            return
        old_donor, old_at = self._donor[slots, columns], self._at[slots, columns]
        if self._put(number, slots, columns, data):
            self._copied_again += len(slots)
            self._give_back(old_donor, old_at)


class RemoteTier:
    """Memory of donors, as one tier.

    Args:
        facts: of it; the capacity is what blocks can have, however many replicas.
        donors: their addresses.
        replicas: of each block.
        keys: as of a link.
        deadline_s: likewise.
        heal_mbps: as of a space.
    """

    def __init__(
        self,
        facts: Facts,
        donors: Sequence[str],
        replicas: int,
        keys: Keys,
        deadline_s: float,
        heal_mbps: float,
    ) -> None:
        self.facts = facts
        self._donors, self._replicas, self._keys = donors, replicas, keys
        self._deadline_s, self._heal_mbps = deadline_s, heal_mbps
        self._spaces: list[RemoteSpace] = []

    @property
    def spaces(self) -> tuple[RemoteSpace, ...]:
        """Those that were reserved and not freed yet."""
        self._spaces = [space for space in self._spaces if not space.is_over]
        return tuple(self._spaces)

    def health(self) -> Health:
        """Is always good: a space without donors says so itself, as they may come back."""
        return Health.GOOD

    def reserve(self, block_bytes: int, slots: int) -> RemoteSpace:
        """Leases memory of every donor: enough for all to find room again when one is lost.

        Raises:
            NoRoom: fewer donors than replicas lend anything.
            TierdError: a key or an address is wrong, two addresses are of one donor, or there is no
                NIXL.
        """
        sharing = len(self._donors) - (len(self._donors) > self._replicas)
        each = min(slots, -(-slots * self._replicas // sharing))

        def connect(address: str) -> Donor:
            return Link(address, self._keys, block_bytes, each, self._deadline_s)

        links, failures = self._leases(connect)
        if len(links) < self._replicas:
            for link in links:
                link.end()
            raise NoRoom(
                f"{self._replicas} replicas need as many donors, and {len(links)} lend: "
                + "; ".join(failures)
            )
        room = usable([link.slots for link in links], self._replicas)
        space = RemoteSpace(
            block_bytes, min(slots, room), self._replicas, links, connect, self._heal_mbps
        )
        self._spaces.append(space)
        speeds = [link.speed for link in links]
        self.facts = replace(
            self.facts,
            latency_ns=int(median(speed.latency_ns for speed in speeds)),
            bandwidth_mbps=int(median(speed.bandwidth_mbps for speed in speeds)),
        )
        return space

    def _leases(self, connect: Callable[[str], Donor]) -> tuple[list[Donor], list[str]]:
        """Returns the donors that lend, and why others do not."""
        links: list[Donor] = []
        failures = []
        try:
            for address in self._donors:
                try:
                    link = connect(address)
                except (TierFailed, NoRoom) as error:
                    failures.append(str(error))
                    continue
                links.append(link)
                twins = [other.address for other in links[:-1] if other.donor == link.donor]
                if twins:
                    raise TierdError(
                        f"donors {twins[0]} and {address} are the same one",
                        hint="replicas have to be on different hosts",
                    )
        except BaseException:
            for link in links:
                link.end()
            raise
        return links, failures


def usable(rooms: Sequence[int], replicas: int) -> int:
    """Returns how many blocks find room on so many different donors each."""
    blocks = sum(rooms) // replicas
    while (fit := sum(min(room, blocks) for room in rooms) // replicas) < blocks:
        blocks = fit
    return blocks


def rdma(
    donors: Sequence[str],
    capacity_bytes: int,
    *,
    ca: str | Path,
    cert: str | Path,
    key: str | Path,
    replicas: int = 2,
    deadline_s: float = 2.0,
    heal_mbps: float = 64.0,
    name: str = "rdma",
) -> RemoteTier:
    """Returns a tier of other hosts' memory.

    Args:
        donors: host:port of each, of different hosts.
        capacity_bytes: of all replicas of a block that of one counts.
        ca: whose donors are believed; a PEM file, as the next two.
        cert: one's own certificate.
        key: of it.
        replicas: 1 to MOST_REPLICAS; with 1, who dies takes its blocks along.
        deadline_s: a donor that takes longer for a batch is away.
        heal_mbps: MiB a second that are copied again when one is away or lost.
        name: of the tier.

    Raises:
        TierdError: this cannot be.
    """
    if not 1 <= replicas <= MOST_REPLICAS:
        raise TierdError(f"{replicas} replicas: from 1 to {MOST_REPLICAS}")
    if len(set(donors)) != len(donors) or len(donors) < replicas:
        raise TierdError(f"{len(set(donors))} donors for {replicas} replicas of each block")
    if heal_mbps <= 0 or deadline_s <= 0:
        raise TierdError("heal_mbps and deadline_s have to be more than 0")
    facts = Facts(name=name, kind=TierKind.RDMA, capacity_bytes=capacity_bytes)
    keys = Keys(ca=Path(ca), cert=Path(cert), key=Path(key))
    return RemoteTier(facts, tuple(donors), replicas, keys, deadline_s, heal_mbps)
