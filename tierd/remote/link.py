# SPDX-License-Identifier: Apache-2.0
"""A borrower's hold of one donor: the lease, and the copies that go by it.

A donor that is late or not heard of is away: nothing is copied until it was reached again, and has
shown that it is fast enough. What it has is there still, as long as the lease lasts. When that is
over, it comes back as a new link, and empty.
"""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierd.errors import Damaged, NoRoom, TierdError, TierFailed
from tierd.kernel.nixl import Reached, Way, load_nixl
from tierd.remote.gaps import Aside
from tierd.remote.wire import (
    BEAT_S,
    LEAVES,
    SILENCE_S,
    Ask,
    Keys,
    Lease,
    Refusal,
    receive_lease,
    send,
)

log = logging.getLogger("tierd")

STAGED_BYTES = 4 << 20
"""Are copied at once, at most, unless a single block is larger."""

STEP_BYTES = 256 << 10
"""Likewise of what gives way to others, of which a larger block is several parts."""

PORT = 7430

_PROBES = 5
_LATEST = 5
"""Reads that tell how much slower or faster a donor has become."""


def split_address(address: str, default: int = PORT) -> tuple[str, int]:
    """Splits host:port, [host]:port, or a host alone. To listen, port 0 is any that is free.

    Raises:
        TierdError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(default)
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise TierdError(f"{address!r} is no host:port", hint=f"such as host-a:{default}")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Spells what split_address() splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """As reads have shown it: of one block, and of a batch, in bytes a microsecond."""

    latency_ns: int
    bandwidth_mbps: int

    def seconds(self, size_bytes: int) -> float:
        """Returns what a read of that size takes, of a block or more."""
        return max(self.latency_ns / 1e9, size_bytes / (self.bandwidth_mbps * 1e6))

    def times(self, slower: float) -> Self:
        """Returns one that is so many times slower."""
        bandwidth_mbps = max(1, round(self.bandwidth_mbps / slower))
        return replace(
            self, latency_ns=round(self.latency_ns * slower), bandwidth_mbps=bandwidth_mbps
        )


class _Line:
    """A connection to a donor, with a thread that says that the lease is in use."""

    def __init__(self, channel: ssl.SSLSocket, lease: Lease, address: str) -> None:
        self.lease = lease
        self.heard_s = time.monotonic()
        self.leaves = False
        self.failure: str | None = None
        self._channel = channel
        self._is_over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name=f"donor {address}")
        self._beating.start()

    def close(self) -> None:
        self._is_over.set()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._beating.join()
        self._channel.close()

    def _beat(self) -> None:
        """Is a thread: says that the lease is in use, and hears whether it still is one."""
        try:
            while not self._is_over.is_set():
                self._channel.sendall(b".")
                answer = self._channel.recv(1)
                if not answer:
                    raise ConnectionResetError("it has hung up")
                self.leaves, self.heard_s = answer == LEAVES, time.monotonic()
                self._is_over.wait(BEAT_S)
        except (OSError, ValueError) as error:
            self.failure = str(error) or type(error).__name__


class Link:
    """Slots that a donor lends.

    Args:
        address: of the donor, host:port. Its certificate has to be of that host.
        keys: one's own, and whose donors are believed.
        block_bytes: of a slot.
        slots: how many are wanted; it may have fewer.
        deadline_s: for each batch of blocks.

    Raises:
        TierFailed: it cannot be reached, is too slow, or does not keep to what is agreed. So does
            each call.
        NoRoom: it lends nothing.
        TierdError: the address or a key is not one, or there is no NIXL.
    """

    def __init__(
        self, address: str, keys: Keys, block_bytes: int, slots: int, deadline_s: float
    ) -> None:
        self.address = address
        self.failure: str | None = None
        """Why the lease has ended, if so."""
        self._keys, self._block_bytes, self._deadline_s = keys, block_bytes, deadline_s
        self._parts = _parts_of(block_bytes)
        self._turn, self._turn_aside = threading.Lock(), threading.Lock()
        self._aside: Reached | None = None
        self._adopted: list[NDArray[np.uint8]] = []
        self._latest: tuple[float, ...] = ()
        """What the latest reads took, of what they took when it was reached."""
        self._trouble: str | None = None
        self._has_ended = False
        load_nixl()  # it takes longer than a donor may wait, on a slow host
        self._line = self._begin(Ask(block_bytes=block_bytes, slots=slots))
        self._lease = self._line.lease
        self.donor, self.slots = self._lease.donor, self._lease.slots
        try:
            self._reached, self._first_speed = self._reach(self._lease)
            self.speed = self._first_speed
            """How fast it is now: as most of the latest reads were."""
        except TierdError:
            self._line.close()
            raise

    @property
    def away(self) -> str | None:
        """Why nothing can be copied now, if so."""
        return self._trouble or self._line.failure

    @property
    def leaves(self) -> bool:
        """Whether the donor asks to be left."""
        return self._line.leaves

    def adopt(self, buffer: NDArray[np.uint8]) -> None:
        """Is told of memory that write() gets parts of; it stays until end()."""
        with self._turn:
            self._adopted.append(buffer)
            self._adopt(self._reached, buffer)

    def write(
        self, slots: NDArray[np.int64], data: NDArray[np.uint8], *, aside: Aside | None = None
    ) -> None:
        """Copies to slots; with `aside` in steps of its, beside who else copies."""
        if aside is not None:
            self._copy_aside(aside, Way.WRITE, slots, data)
            return
        with self._turn:
            self._try(self._reached.write, slots, data, self._deadline_s)

    def read(
        self, slots: NDArray[np.int64], into: NDArray[np.uint8], *, aside: Aside | None = None
    ) -> None:
        """Copies from slots; likewise."""
        if aside is not None:
            self._copy_aside(aside, Way.READ, slots, into)
            return
        with self._turn:
            begin_s = time.monotonic()
            self._try(self._reached.read, slots, into, self._deadline_s)
            took_s = time.monotonic() - begin_s
            self._latest = (*self._latest, took_s / self._first_speed.seconds(into.nbytes))
            self._latest = self._latest[-_LATEST:]
            self.speed = self._first_speed.times(median(self._latest))

    def look(self) -> None:
        """Reads to see how fast it is now, so often that this is most of the latest reads."""
        into = np.empty((1, self._block_bytes), np.uint8)
        for _ in range(_LATEST // 2 + 1):
            self.read(np.zeros(1, np.int64), into)

    def resume(self) -> None:
        """Reaches a donor anew that is away, and that no other thread resumes.

        Raises:
            TierFailed: it still is away, or the lease has ended: then `failure` says why.
        """
        self._trouble = self.away  # until it can be reached by a new line
        self._go_on()
        with self._turn, self._turn_aside:
            self._let_go()
            self._reached, self._first_speed = self._reach(self._line.lease)
            self.speed, self._latest = self._first_speed, ()
            self._trouble = None

    def end(self) -> None:
        """Gives the slots back."""
        self.failure, self._has_ended = self.failure or "given back", True
        with self._turn, self._turn_aside:
            self._line.close()
            self._let_go()

    def _adopt(self, reached: Reached, buffer: NDArray[np.uint8]) -> None:
        try:
            reached.adopt(buffer)
        except TierFailed as error:  # it is copied once more, then
            log.debug("donor %s: %s", self.address, error)

    def _let_go(self) -> None:
        self._reached.end()
        if self._aside is not None:
            self._aside.end()
            self._aside = None

    def _copy_aside(
        self, aside: Aside, way: Way, slots: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> None:
        """Copies parts of blocks by a connection of its own, so that nobody waits for all."""
        parts, at_once = self._parts, self._at_once(STEP_BYTES, self._parts)
        slots = (slots[:, None] * parts + np.arange(parts)).ravel()
        data = data.reshape(len(slots), -1)
        with self._turn_aside:
            for first in range(0, len(slots), at_once):
                some = slice(first, first + at_once)
                with aside():
                    self._try(self._copy_part, way, slots[some], data[some])

    def _copy_part(self, way: Way, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        if self._aside is None:
            self._aside = self._reached_by(self._line.lease, STEP_BYTES, self._parts)
        call = self._aside.read if way is Way.READ else self._aside.write
        call(slots, data, self._deadline_s)

    def _try(self, call: Callable[..., None], *arguments: object) -> None:
        if why := self.failure or self.away:
            raise TierFailed(f"donor {self.address}: {why}")
        try:
            call(*arguments)
        except TierFailed as error:
            self._trouble = str(error)
            raise TierFailed(f"donor {self.address}: {error}") from error

    def _begin(self, ask: Ask) -> _Line:
        """Asks for a lease, or to go on with one."""
        channel = _connect(self.address, self._keys)
        try:
            send(channel, ask)
            lease = receive_lease(channel, ask)
        except (OSError, Damaged) as error:
            channel.close()
            raise TierFailed(f"donor {self.address}: {error}") from error
        if isinstance(lease, Refusal):
            channel.close()
            raise NoRoom(f"donor {self.address}: {lease.why}")
        return _Line(channel, lease, self.address)

    def _go_on(self) -> None:
        """Goes on with the lease by a new line."""
        name = self._lease.lease
        try:
            line = self._begin(Ask(block_bytes=self._block_bytes, slots=self.slots, lease=name))
        except TierdError as error:
            silent_s = time.monotonic() - self._line.heard_s
            if isinstance(error, NoRoom):
                self.failure = self.failure or str(error)
            elif silent_s > self._lease.keep_s:
                self.failure = self.failure or f"not heard of for {silent_s:.0f} s"
            raise TierFailed(str(error)) from error
        with self._turn:
            if not self._has_ended:
                self._line, line = line, self._line
            line.close()
        if (self._line.lease.donor, self._line.lease.slots) != (self.donor, self.slots):
            self.failure = self.failure or "it is another one now"
        if self.failure is not None:
            raise TierFailed(f"donor {self.address}: {self.failure}")

    def _at_once(self, most_bytes: int, parts: int) -> int:
        """Returns how many parts of blocks are copied together; a single one may be larger."""
        return max(1, most_bytes * parts // self._block_bytes)

    def _reached_by(self, lease: Lease, staged_bytes: int, parts: int = 1) -> Reached:
        """Has the donor be reached, by parts of slots."""
        slots, staged = lease.slots * parts, self._at_once(staged_bytes, parts)
        size_bytes = self._block_bytes // parts
        try:
            return Reached(lease.ticket, lease.address, slots, size_bytes, min(slots, staged))
        except (TierdError, OSError) as error:  # no memory, or no network: NIXL does not start
            raise TierFailed(f"donor {self.address}: {error}") from error

    def _reach(self, lease: Lease) -> tuple[Reached, Speed]:
        """Has the donor be reached, and reads as it will be read, before anybody waits for it."""
        reached = self._reached_by(lease, STAGED_BYTES)
        into = np.empty((reached.staged, self._block_bytes), np.uint8)

        def timed(count: int) -> int:
            begin_ns = time.monotonic_ns()
            reached.read(np.arange(count), into[:count], self._deadline_s)
            return time.monotonic_ns() - begin_ns

        for buffer in self._adopted:
            self._adopt(reached, buffer)
        try:
            timed(1)  # UCX connects by it
            latency_ns = int(median(timed(1) for _ in range(_PROBES)))
            bandwidth_mbps = max(1, into.nbytes * 1000 // timed(len(into)))
        except TierFailed as error:
            reached.end()
            raise TierFailed(f"donor {self.address}: {error}") from error
        return reached, Speed(latency_ns=latency_ns, bandwidth_mbps=bandwidth_mbps)


def _parts_of(block_bytes: int) -> int:
    """Returns of how many equal parts a block is, each of STEP_BYTES at most where that can be."""
    least = -(-block_bytes // STEP_BYTES)
    return next((parts for parts in range(least, 2 * least) if not block_bytes % parts), 1)


def _connect(address: str, keys: Keys) -> ssl.SSLSocket:
    host, port = split_address(address)
    context = keys.context(is_donor=False)
    try:
        plain = socket.create_connection((host, port), SILENCE_S)
    except OSError as error:
        raise TierFailed(f"donor {address}: {error}") from error
    try:
        plain.settimeout(SILENCE_S)
        return context.wrap_socket(plain, server_hostname=host)
    except OSError as error:
        plain.close()
        raise TierFailed(f"donor {address}: {error}") from error
