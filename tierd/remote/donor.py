# SPDX-License-Identifier: Apache-2.0
"""A donor: memory of this host, lent to borrowers of other hosts (docs/remote.md).

All of it is taken at the start, so that the host never misses it later. Each borrower has one part,
for as long as its connection lasts, and finds it empty: what was another's is wiped.
"""

import logging
import socket
import ssl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import Damaged, NoRoom, TierdError
from tierd.kernel.nixl import Lent
from tierd.kernel.nodes import read_nodes
from tierd.kernel.placed import place
from tierd.model import PAGE_BYTES, NodeId
from tierd.remote.wire import (
    LEAVES,
    LENDS,
    SILENCE_S,
    Ask,
    Keys,
    Lease,
    Refusal,
    receive_ask,
    send,
)

log = logging.getLogger("tierd")

MOST_BORROWERS = 64
"""Connections, those that have not shown a certificate yet too."""

_LOOK_S = 0.5


@dataclass(slots=True)
class Extents:
    """Which parts of `size_bytes` are free."""

    size_bytes: int
    free: list[range] = field(init=False)

    def __post_init__(self) -> None:
        self.free = [range(self.size_bytes)]

    def take(self, unit_bytes: int, most: int) -> range | None:
        """Takes a part of as many units as there are together, at most so many; None of none."""
        wanted = _whole_pages(unit_bytes * most)
        large = [part for part in self.free if len(part) >= wanted]
        part = min(large, key=len) if large else max(self.free, key=len, default=range(0))
        units = min(len(part) // unit_bytes, most)
        if not units:
            return None
        size = min(_whole_pages(units * unit_bytes), len(part))
        self.free.remove(part)
        if size < len(part):
            self.free.append(part[size:])
        return part[:size]

    def give(self, part: range) -> None:
        """Takes a part back."""
        parts = sorted([*self.free, part], key=lambda each: each.start)
        self.free = parts[:1]
        for each in parts[1:]:
            if each.start == self.free[-1].stop:
                self.free[-1] = range(self.free[-1].start, each.stop)
            else:
                self.free.append(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrower:
    """Who has a part of the memory now, and since when, in seconds of the epoch."""

    name: str
    address: str
    part: range
    since_s: float = field(default_factory=time.time)


class Refused(StrEnum):
    """Why somebody who came was lent nothing."""

    STRANGER = "stranger"
    """Without a certificate that is believed, or not allowed."""
    BUSY = "busy"
    """There are MOST_BORROWERS."""
    FULL = "full"
    LEAVES = "leaves"
    FAILED = "failed"


class Ended(StrEnum):
    """How a lease has ended."""

    GIVEN_BACK = "given_back"
    """The borrower has closed the connection, or its kernel has when it died."""
    SILENT = "silent"
    LOST = "lost"
    STOPPED = "stopped"
    """By stop()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a donor lends, and what has become of all who came; sizes in bytes."""

    capacity_bytes: int
    free_bytes: int
    leaves: bool
    borrowers: Sequence[Borrower]
    leases: int
    refused: Counter[Refused]
    ended: Counter[Ended]

    @property
    def borrowed_bytes(self) -> int:
        """Also what is being given to a borrower, or wiped after one."""
        return self.capacity_bytes - self.free_bytes


class Donor:
    """Lends a memory to whoever shows a certificate.

    Args:
        memory: shape (bytes,), all that it lends.
        listener: TCP, listening.
        keys: of its own, and whose borrowers it believes.
        allowed: common names of borrowers; without any, all that the CA has signed.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        listener: socket.socket,
        keys: Keys,
        allowed: Sequence[str] = (),
    ) -> None:
        self.id = uuid.uuid4().hex
        self.leaves = False
        """Whether borrowers are told to move away."""
        self._memory, self._listener = memory, listener
        self._context = keys.context(is_donor=True)
        self._allowed = frozenset(allowed)
        self._lock = threading.Lock()
        self._extents = Extents(len(memory))
        self._borrowers: list[Borrower] = []
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._leases = 0
        self._refused: Counter[Refused] = Counter()
        self._ended: Counter[Ended] = Counter()

    @property
    def borrowers(self) -> list[Borrower]:
        with self._lock:
            return self._borrowers.copy()

    def account(self) -> Account:
        with self._lock:
            return Account(
                capacity_bytes=self._extents.size_bytes,
                free_bytes=sum(map(len, self._extents.free)),
                leaves=self.leaves,
                borrowers=self._borrowers.copy(),
                leases=self._leases,
                refused=self._refused.copy(),
                ended=self._ended.copy(),
            )

    def serve(self) -> None:
        """Accepts borrowers until stop(); returns when the last lease has ended."""
        self._listener.settimeout(_LOOK_S)
        while not self._stopping:
            try:
                channel, address = self._listener.accept()
                self._begin(channel, str(address[0]))
            except TimeoutError:
                pass
            except OSError as error:  # such as too many open files
                log.warning("a borrower is not accepted: %s", error)
                time.sleep(_LOOK_S)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Ends all leases, with the next byte of their borrowers, and serve()."""
        self._stopping = True

    def _begin(self, channel: socket.socket, address: str) -> None:
        if len(self._threads) >= MOST_BORROWERS:
            log.warning("%s is refused: there are %d borrowers", address, MOST_BORROWERS)
            self._refuse(Refused.BUSY)
            channel.close()
            return
        thread = threading.Thread(target=self._talk, args=(channel, address), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _talk(self, channel: socket.socket, address: str) -> None:
        """Is a thread: one borrower, from its certificate to its end."""
        channel.settimeout(SILENCE_S)
        why = Refused.STRANGER
        try:
            with self._context.wrap_socket(channel, server_side=True) as secure:
                name = _common_name(secure)
                if self._allowed and name not in self._allowed:
                    raise TierdError(f"{name} is not allowed to borrow")
                why = Refused.FAILED
                self._lend(secure, name, address)
        except (TierdError, OSError) as error:
            log.warning("borrower %s: %s", address, error)
            if isinstance(error, NoRoom):
                why = Refused.LEAVES if self.leaves else Refused.FULL
            self._refuse(why)
        finally:
            channel.close()

    def _lend(self, channel: ssl.SSLSocket, name: str, address: str) -> None:
        try:
            ask = receive_ask(channel)
            part = self._take(ask)
        except (NoRoom, Damaged) as error:
            send(channel, Refusal(why=str(error)))
            raise
        try:
            self._lend_part(channel, ask, part, Borrower(name=name, address=address, part=part))
        finally:
            with self._lock:
                self._extents.give(part)

    def _lend_part(self, channel: ssl.SSLSocket, ask: Ask, part: range, borrower: Borrower) -> None:
        memory = self._memory[part.start : part.stop]
        try:
            lent = Lent(memory)
        except TierdError as error:
            send(channel, Refusal(why=str(error)))
            raise
        slots = min(len(part) // ask.block_bytes, ask.slots)
        lease = Lease(donor=self.id, address=lent.address, slots=slots, ticket=lent.ticket)
        with self._lock:
            self._borrowers.append(borrower)
        try:
            send(channel, lease)
            with self._lock:
                self._leases += 1
            log.info("%s (%s) borrows %d MiB", borrower.name, borrower.address, len(part) >> 20)
            ended = self._beat(channel)
            with self._lock:
                self._ended[ended] += 1
        finally:
            lent.end()
            memory[:] = 0
            with self._lock:
                self._borrowers.remove(borrower)
            log.info("%s (%s) borrows nothing any more", borrower.name, borrower.address)

    def _take(self, ask: Ask) -> range:
        with self._lock:
            part = None if self.leaves else self._extents.take(ask.block_bytes, ask.slots)
        if part is None:
            raise NoRoom("nothing is lent any more" if self.leaves else "all of it is lent")
        return part

    def _refuse(self, why: Refused) -> None:
        with self._lock:
            self._refused[why] += 1

    def _beat(self, channel: ssl.SSLSocket) -> Ended:
        """Answers until the borrower is silent or gone."""
        while not self._stopping:
            try:
                if not channel.recv(1):
                    return Ended.GIVEN_BACK
                channel.sendall(LEAVES if self.leaves else LENDS)
            except OSError as error:
                log.warning("a borrower has gone: %s", error)
                return Ended.SILENT if isinstance(error, TimeoutError) else Ended.LOST
        return Ended.STOPPED


def take_memory(
    lend_bytes: int, reserve_bytes: int, nodes: Sequence[NodeId] = ()
) -> NDArray[np.uint8]:
    """Takes memory to be lent, locked and on these nodes, or on all that have some.

    Raises:
        NoRoom: the host would have less than its reserve, or there is no such node.
    """
    free = read_free(nodes)
    chosen, available = [*free], sum(free.values())
    if available - lend_bytes < reserve_bytes:
        raise NoRoom(
            f"{lend_bytes >> 20} MiB to be lent, {reserve_bytes >> 20} MiB to be kept: nodes "
            f"{chosen} have {available >> 20} MiB free",
            hint="lend less, or reserve less",
        )
    return place(_whole_pages(lend_bytes), chosen)


def read_free(nodes: Sequence[NodeId] = ()) -> dict[NodeId, int]:
    """Returns what these nodes have free, in bytes, or all that have memory.

    Raises:
        NoRoom: there is no such node.
    """
    free = {node.id: node.free_bytes for node in read_nodes() if node.total_bytes}
    unknown = [node for node in nodes if node not in free]
    if unknown:
        raise NoRoom(f"node {unknown[0]} has no memory", hint=f"there are: {sorted(free)}")
    return {node: free[node] for node in nodes or sorted(free)}


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _common_name(channel: ssl.SSLSocket) -> str:
    subject: Any = (channel.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for name, value in part if name == "commonName"]
    return "".join(c if c.isprintable() else "?" for c in names[0]) if names else "?"
