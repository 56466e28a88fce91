# SPDX-License-Identifier: Apache-2.0
"""A donor: memory of this host, lent to borrowers of other hosts (docs/remote.md).

All of it is taken at the start, so that the host never misses it later. Each borrower has one part,
and finds it empty: what was another's is wiped. It has it until it hangs up, or until nothing was
heard of it for a while: from a network that fails it comes back to what it has stored.
"""

import logging
import secrets
import socket
import ssl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import NoRoom, TierdError
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

KEEP_S = 120
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
    """Nothing was heard of it for long."""
    FAILED = "failed"
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


@dataclass(slots=True, kw_only=True)
class _Hold:
    """A lease, as one connection has it."""

    lease: str
    borrower: Borrower
    ask: Ask
    lent: Lent
    channel: ssl.SSLSocket
    is_passed_on: threading.Event = field(default_factory=threading.Event)
    """Whether another connection of its borrower has it by now."""


class Donor:
    """Lends a memory to whoever shows a certificate.

    Args:
        memory: shape (bytes,), all that it lends.
        listener: TCP, listening.
        keys: of its own, and whose borrowers it believes.
        allowed: common names of borrowers; without any, all that the CA has signed.
        keep_s: so long a lease lasts when nothing is heard of its borrower.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        listener: socket.socket,
        keys: Keys,
        allowed: Sequence[str] = (),
        keep_s: int = KEEP_S,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.leaves = False
        """Whether borrowers are told to move away."""
        self._memory, self._listener = memory, listener
        self._context = keys.context(is_donor=True)
        self._allowed = frozenset(allowed)
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._extents = Extents(len(memory))
        self._holds: dict[str, _Hold] = {}
        """By their leases."""
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._leases = 0
        self._refused: Counter[Refused] = Counter()
        self._ended: Counter[Ended] = Counter()

    @property
    def borrowers(self) -> list[Borrower]:
        with self._lock:
            return [hold.borrower for hold in self._holds.values()]

    def account(self) -> Account:
        with self._lock:
            return Account(
                capacity_bytes=self._extents.size_bytes,
                free_bytes=sum(map(len, self._extents.free)),
                leaves=self.leaves,
                borrowers=[hold.borrower for hold in self._holds.values()],
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
                hold = self._answer(secure, name, address)
                how: Ended | None = Ended.FAILED
                try:
                    how = self._beat(hold)
                finally:
                    self._end(hold, how)
        except (TierdError, OSError) as error:
            log.warning("borrower %s: %s", address, error)
            if isinstance(error, NoRoom):
                why = Refused.LEAVES if self.leaves else Refused.FULL
            self._refuse(why)
        finally:
            channel.close()

    def _answer(self, channel: ssl.SSLSocket, name: str, address: str) -> _Hold:
        try:
            ask = receive_ask(channel)
            hold = self._go_on(channel, ask, name) if ask.lease else None
            hold = hold or self._lend(channel, ask, name, address)
        except TierdError as error:
            send(channel, Refusal(why=str(error)))
            raise
        lease = Lease(
            donor=self.id,
            lease=hold.lease,
            keep_s=self._keep_s,
            address=hold.lent.address,
            slots=min(len(hold.borrower.part) // ask.block_bytes, ask.slots),
            ticket=hold.lent.ticket,
        )
        try:
            send(channel, lease)
        except BaseException:
            self._end(hold, Ended.FAILED)
            raise
        return hold

    def _lend(self, channel: ssl.SSLSocket, ask: Ask, name: str, address: str) -> _Hold:
        part = self._take(ask)
        try:
            lent = Lent(self._memory[part.start : part.stop])
        except BaseException:
            with self._lock:
                self._extents.give(part)
            raise
        borrower = Borrower(name=name, address=address, part=part)
        hold = _Hold(
            lease=secrets.token_hex(16), borrower=borrower, ask=ask, lent=lent, channel=channel
        )
        with self._lock:
            self._holds[hold.lease] = hold
            self._leases += 1
        log.info("%s (%s) borrows %d MiB", name, address, len(part) >> 20)
        return hold

    def _take(self, ask: Ask) -> range:
        with self._lock:
            part = None if self.leaves else self._extents.take(ask.block_bytes, ask.slots)
        if part is None:
            raise NoRoom("nothing is lent any more" if self.leaves else "all of it is lent")
        return part

    def _go_on(self, channel: ssl.SSLSocket, ask: Ask, name: str) -> _Hold:
        """Passes a lease on to its borrower's new connection; what is under way by the old ends."""
        with self._lock:
            old = self._holds.get(ask.lease)
            if old is None or old.borrower.name != name or old.ask.block_bytes != ask.block_bytes:
                raise NoRoom("there is no such lease any more")
            hold = replace(old, channel=channel, is_passed_on=threading.Event())
            self._holds[ask.lease] = hold
            old.is_passed_on.set()
        old.lent.end()
        with suppress(OSError):
            old.channel.shutdown(socket.SHUT_RDWR)
        part = hold.borrower.part
        try:
            hold.lent = Lent(self._memory[part.start : part.stop])
        except BaseException:
            self._end(hold, Ended.FAILED)
            raise
        log.info("%s (%s) is back", name, hold.borrower.address)
        return hold

    def _refuse(self, why: Refused) -> None:
        with self._lock:
            self._refused[why] += 1

    def _beat(self, hold: _Hold) -> Ended | None:
        """Answers until the lease ends, and tells how; None where it was passed on."""
        heard_s, is_broken = time.monotonic(), False
        hold.channel.settimeout(_LOOK_S)
        while not self._stopping and time.monotonic() < heard_s + self._keep_s:
            if hold.is_passed_on.wait(_LOOK_S if is_broken else 0):
                return None
            try:
                if not is_broken and not hold.channel.recv(1):
                    return Ended.GIVEN_BACK
                if not is_broken:
                    hold.channel.sendall(LEAVES if self.leaves else LENDS)
                    heard_s = time.monotonic()
            except TimeoutError:
                pass
            except OSError as error:
                is_broken = True
                log.warning("%s is cut off: %s", hold.borrower.name, error)
        return Ended.STOPPED if self._stopping else Ended.SILENT

    def _end(self, hold: _Hold, how: Ended | None) -> None:
        """Ends a lease, unless it was passed on."""
        with self._lock:
            if hold.is_passed_on.is_set():
                return
            del self._holds[hold.lease]
        part = hold.borrower.part
        hold.lent.end()
        self._memory[part.start : part.stop] = 0
        with self._lock:
            self._extents.give(part)
            self._ended[how or Ended.GIVEN_BACK] += 1
        log.info("%s (%s) borrows nothing any more", hold.borrower.name, hold.borrower.address)


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
            hint="lend less, or reserve less; what the page cache has counts as used",
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
