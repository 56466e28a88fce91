# SPDX-License-Identifier: Apache-2.0
"""The donors of a space, as far as each is there: its lease, and which of its slots are free."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.errors import TierdError, TierFailed
from tierd.remote.gaps import Aside
from tierd.remote.link import Speed

log = logging.getLogger("tierd")

MOST_DONORS = 32
"""Of a space: each has a thread, and memory for what is copied."""

LOOK_EVERY_S = 0.1
LIST_EVERY_S = 1.0
SLOW_EVERY_S = 5.0
"""A slow donor, which nobody reads, is looked at again so often."""

FIRST_WAIT_S, MOST_WAIT_S = 1.0, 60.0
"""Between two tries to reach a donor that is not there; each wait is twice the last, also where it
was there in between, but not for as long as the longest: one that is slow comes and goes.
"""

SLOW_TIMES = 4.0
"""So much slower than the fastest one, a donor is asked where the others cannot be."""


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
    def adopt(self, buffer: NDArray[np.uint8]) -> None: ...
    def resume(self) -> None: ...
    def write(
        self, slots: NDArray[np.int64], data: NDArray[np.uint8], *, aside: Aside | None = None
    ) -> None: ...
    def read(
        self, slots: NDArray[np.int64], into: NDArray[np.uint8], *, aside: Aside | None = None
    ) -> None: ...
    def look(self) -> None: ...
    def end(self) -> None: ...


class Free:
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
class Place:
    """A donor, as far as it is there."""

    address: str
    is_wanted: bool = True
    """Whether it is looked for: False of one that is not listed any more."""
    link: Donor | None = None
    free: Free | None = None
    since_s: float | None = None
    """When it was reached; None while it is not there."""
    wait_s: float = FIRST_WAIT_S
    try_at_s: float = 0.0

    @property
    def is_here(self) -> bool:
        link = self.link
        return link is not None and not (link.failure or link.away)

    @property
    def leaves(self) -> bool:
        """Whether it asks to be left."""
        return self.link is not None and self.link.leaves

    @property
    def room(self) -> int:
        """How many blocks it can take."""
        if self.free is None or not self.is_here or self.leaves:
            return 0
        return self.free.count

    @property
    def is_looked_for(self) -> bool:
        return self.since_s is None and (self.is_wanted or self.link is not None)

    @property
    def why_not(self) -> str | None:
        """Why it is not there, if so."""
        link = self.link
        return "not reached" if link is None else link.failure or link.away

    def begin(self, address: str) -> None:
        """Is another donor's from now on, of which nothing is known."""
        self.address, self.is_wanted = address, True
        self.wait_s, self.try_at_s = FIRST_WAIT_S, 0.0

    def has(self, link: Donor, now_s: float) -> None:
        """Takes note that the donor was reached; by the link that it has, or an empty one."""
        if link is not self.link:
            self.link, self.free = link, Free(link.slots)
        self.since_s = now_s

    def has_not(self, now_s: float) -> None:
        """Takes note that the donor is not there any more, or could not be reached."""
        was_long = self.since_s is not None and now_s - self.since_s >= MOST_WAIT_S
        self.wait_s = FIRST_WAIT_S if was_long else min(2 * self.wait_s, MOST_WAIT_S)
        self.since_s, self.try_at_s = None, now_s + self.wait_s

    def loses(self) -> None:
        """Takes note that the lease is over."""
        self.link = self.free = None


class Places:
    """The donors of a space, each looked after by a thread: one that is stopped keeps it waiting.

    What is here alone is to be called with `lock` held, but for `failures` and `here`.

    Args:
        links: the donors of now.
        connect: makes a link to one that was lost, or has come.
        listed: tells which there are, from time to time; None for always the same.
        block_bytes: by which speeds are compared.
        lock: of whoever has them.
    """

    def __init__(
        self,
        links: Sequence[Donor],
        connect: Callable[[str], Donor],
        listed: Callable[[], Sequence[str]] | None,
        block_bytes: int,
        lock: threading.Lock,
    ) -> None:
        self.all = [Place(link.address) for link in links]
        self._connect, self._listed, self._block_bytes = connect, listed, block_bytes
        self._lock = lock
        self._list_at_s = 0.0
        self._adopted: list[NDArray[np.uint8]] = []
        self._stop = threading.Event()
        for place, link in zip(self.all, links, strict=True):
            place.has(link, time.monotonic())
            self._look_after(place)

    @property
    def here(self) -> tuple[str, ...]:
        """The addresses of those that are there."""
        return tuple(place.address for place in self.all if place.is_here)

    @property
    def failures(self) -> dict[str, str]:
        """Why others are not, by their addresses, as far as they are looked for."""
        found = {}
        for place in self.all:
            if (place.is_wanted or place.link) and (why := place.why_not):
                found[place.address] = why
        return found

    def are_here(self) -> NDArray[np.bool_]:
        """Returns which are there; of one place more, that of no donor, which is the last."""
        return np.array([*(place.is_here for place in self.all), False])

    def stay(self) -> NDArray[np.bool_]:
        """Returns which are there and do not ask to be left; likewise."""
        return np.array([*(place.is_here and not place.leaves for place in self.all), False])

    def are_slow(self) -> NDArray[np.bool_]:
        """Returns which are there, and slower than the fastest by SLOW_TIMES; likewise."""
        speeds = [place.link.speed if place.link and place.is_here else None for place in self.all]
        seconds = np.array([s.seconds(self._block_bytes) if s else np.nan for s in (*speeds, None)])
        fastest = np.fmin.reduce(seconds)
        found: NDArray[np.bool_] = seconds > SLOW_TIMES * fastest
        return found

    def emptiest(self) -> list[int]:
        """Returns the numbers of those with room, that with the most first, and slow ones last."""
        rooms = np.array([*(place.room for place in self.all), 0])
        return [int(n) for n in np.lexsort((-rooms, self.are_slow())) if rooms[n]]

    def adopt(self, buffer: NDArray[np.uint8]) -> None:
        """Has all donors be told of a buffer, as Donor.adopt() is; those that come later too."""
        self._adopted.append(buffer)
        for place in self.all:
            if place.link is not None:
                place.link.adopt(buffer)

    def follow(self, now_s: float) -> None:
        """Looks for donors that have come, and no more for such as were lost and are gone.

        Takes the lock itself.
        """
        if self._listed is None or now_s < self._list_at_s:
            return
        self._list_at_s = now_s + LIST_EVERY_S
        listed = self._listed()
        with self._lock:
            for place in self.all:
                place.is_wanted = place.address in listed
            known = {place.address for place in self.all if place.is_wanted or place.link}
            for address in listed:
                if address not in known:
                    self._begin(address)

    def stop(self) -> None:
        """Has threads end; those that reach a donor just now hang up."""
        self._stop.set()

    def end(self) -> None:
        """Gives every donor its memory back."""
        for place in self.all:
            if place.link is not None:
                place.link.end()
                place.loses()

    def _begin(self, address: str) -> None:
        unused = [place for place in self.all if not place.is_wanted and place.link is None]
        if unused:
            unused[0].begin(address)
        elif len(self.all) < MOST_DONORS:
            self.all.append(Place(address))
            self._look_after(self.all[-1])

    def _look_after(self, place: Place) -> None:
        threading.Thread(target=self._find, args=(place,), daemon=True, name="to a donor").start()

    def _find(self, place: Place) -> None:
        """Is a thread: looks for a donor that is not there, and sees whether one is slow still."""
        look_at_s = 0.0
        while not self._stop.wait(LOOK_EVERY_S):
            now_s, link = time.monotonic(), place.link
            is_over = link is not None and link.failure is not None
            if place.is_looked_for and not is_over and place.try_at_s <= now_s:
                self._reach(place)
            elif link is not None and place.is_here and look_at_s <= now_s:
                look_at_s = now_s + SLOW_EVERY_S
                self._look_at(place, link)

    def _look_at(self, place: Place, link: Donor) -> None:
        with self._lock:
            is_slow = self.are_slow()[self.all.index(place)]
        if is_slow:
            try:
                link.look()
            except TierFailed as error:
                log.debug("donor %s: %s", place.address, error)

    def _reach(self, place: Place) -> None:
        link, address = place.link, place.address
        try:
            if link is None:
                link = self._connect(address)
            else:
                link.resume()
        except TierdError as error:
            place.has_not(time.monotonic())
            if link is not None and link.failure is not None:
                place.try_at_s = 0.0  # it is there, or was not for long: a new lease is next
            log.debug("donor %s is not there: %s", address, error)
            return
        if link is not place.link:
            for buffer in self._adopted:
                link.adopt(buffer)
        with self._lock:
            if not self._takes(place, link, address):
                link.end()
                place.has_not(time.monotonic())
                return
            is_empty = link is not place.link
            place.has(link, time.monotonic())
        log.info("donor %s is there%s", address, ", and empty" if is_empty else " again")

    def _takes(self, place: Place, link: Donor, address: str) -> bool:
        """Whether a donor that was reached is still wanted, and none that there is already."""
        for other in self.all:
            if other.link is not None and other is not place and other.link.donor == link.donor:
                log.warning("donors %s and %s are the same one", other.address, address)
                return False
        return not self._stop.is_set() and place.address == address
