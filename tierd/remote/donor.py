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
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """Who has a part of the memory now."""

    name: str
    address: str
    part: range


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

    @property
    def borrowers(self) -> list[Borrower]:
        with self._lock:
            return self._borrowers.copy()

    @property
    def lent_bytes(self) -> int:
        return len(self._memory)

    @property
    def free_bytes(self) -> int:
        """Of those, what no borrower has."""
        return self.lent_bytes - sum(len(borrower.part) for borrower in self.borrowers)

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
            channel.close()
            return
        thread = threading.Thread(target=self._talk, args=(channel, address), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _talk(self, channel: socket.socket, address: str) -> None:
        """Is a thread: one borrower, from its certificate to its end."""
        channel.settimeout(SILENCE_S)
        try:
            with self._context.wrap_socket(channel, server_side=True) as secure:
                name = _common_name(secure)
                if self._allowed and name not in self._allowed:
                    raise TierdError(f"{name} is not allowed to borrow")
                self._lend(secure, name, address)
        except (TierdError, OSError) as error:
            log.warning("borrower %s: %s", address, error)
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
            log.info("%s (%s) borrows %d MiB", borrower.name, borrower.address, len(part) >> 20)
            self._beat(channel)
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

    def _beat(self, channel: ssl.SSLSocket) -> None:
        """Answers until the borrower is silent or gone."""
        while not self._stopping:
            try:
                if not channel.recv(1):
                    return
                channel.sendall(LEAVES if self.leaves else LENDS)
            except OSError as error:
                log.warning("a borrower has gone: %s", error)
                return


def take_memory(
    lend_bytes: int, reserve_bytes: int, nodes: Sequence[NodeId] = ()
) -> NDArray[np.uint8]:
    """Takes memory to be lent, locked and on these nodes, or on all that have some.

    Raises:
        NoRoom: the host would have less than its reserve, or there is no such node.
    """
    free = {node.id: node.free_bytes for node in read_nodes() if node.total_bytes}
    unknown = [node for node in nodes if node not in free]
    if unknown:
        raise NoRoom(f"node {unknown[0]} has no memory", hint=f"there are: {sorted(free)}")
    chosen = [*nodes] or sorted(free)
    available = sum(free[node] for node in chosen)
    if available - lend_bytes < reserve_bytes:
        raise NoRoom(
            f"{lend_bytes >> 20} MiB to be lent, {reserve_bytes >> 20} MiB to be kept: nodes "
            f"{chosen} have {available >> 20} MiB free",
            hint="lend less, or reserve less",
        )
    return place(_whole_pages(lend_bytes), chosen)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _common_name(channel: ssl.SSLSocket) -> str:
    subject: Any = (channel.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for name, value in part if name == "commonName"]
    return "".join(c if c.isprintable() else "?" for c in names[0]) if names else "?"
