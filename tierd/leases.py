# SPDX-License-Identifier: Apache-2.0
"""The daemon's socket for arenas, and who is connected to it: docs/arena.md, "With the daemon".

A connection is a lease: with its end, or the program's, all that the daemon has of an arena goes.
A thread of its own accepts, checks and drops, so that nobody waits for a round; the loop copies
counts and places, and sends commands. Nothing here waits for a program: what it does not take at
once is dropped.
"""

import fcntl
import logging
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.arena.shared import Copies
from tierd.arena.wire import HELLO_BYTES, MOST_COMMANDS, WELCOME, unpack_hello
from tierd.errors import Damaged, NoRoom, TierdError
from tierd.kernel.process import read_cgroup, read_command
from tierd.model import Pid
from tierd.observe.events import event

log = logging.getLogger("tierd")

HELLO_S = 5.0
"""For so long a connection may be silent at first."""

MOST_WAITING = 64
"""Connections that have not said what they are. Beyond these the oldest is dropped."""

SEND_BYTES = 64 << 10
"""What a program may leave unread, as the kernel counts it, before commands are dropped."""

_PEER = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one user may have, root too, all arenas together."""

    arenas: int
    blocks: int


class Lease:
    """An arena that a program has connected.

    Args:
        channel: to the program.
        memory: the memfd, this lease's from now on.
        copies: reads it.
        name: as the program calls it.
        peer: pid and user id.
    """

    def __init__(
        self, channel: socket.socket, memory: int, copies: Copies, name: str, peer: tuple[int, int]
    ) -> None:
        self.name, self.copies = name, copies
        self.pid, self.user_id = Pid(peer[0]), peer[1]
        self.command = read_command(self.pid) or "?"
        self._channel, self._memory = channel, memory
        self._lock = threading.Lock()
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    def cgroup(self) -> str | None:
        """Returns the program's cgroup now; None where it has gone, or has none."""
        return read_cgroup(self.pid)

    def copy(self, counts: NDArray[np.uint32], places: NDArray[np.uint8]) -> bool:
        """Copies the arena's counts and places; returns False when it is over.

        Raises:
            Damaged: they cannot be read.
        """
        with self._lock:
            if self._is_over:
                return False
            self.copies.counts(self._memory, counts)
            self.copies.places(self._memory, places)
            return True

    def is_behind(self) -> bool:
        """Tells whether the program has not read all that it was sent."""
        with self._lock:
            if self._is_over:
                return False
            unread = fcntl.ioctl(self._channel, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(unread, "little") > 0

    def send(self, commands: NDArray[np.void]) -> int:
        """Sends commands (dtype COMMAND) as far as there is room; returns how many."""
        sent = 0
        with self._lock:
            while sent < len(commands) and not self._is_over:
                part = commands[sent : sent + MOST_COMMANDS]
                try:
                    self._channel.send(part.tobytes(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except OSError:
                    break  # it does not read, or has gone, which its thread hears too
                sent += len(part)
        return sent

    def end(self) -> None:
        """Gives all of it back; may be called again."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._channel.close()
                os.close(self._memory)


@dataclass(slots=True)
class _Peer:
    """A connection; `until_s` is when it is dropped, unless it has a lease by then."""

    channel: socket.socket
    pidfd: int
    pid: int
    user_id: int
    until_s: float
    lease: Lease | None = None


class Leases:
    """The arenas that are connected.

    Args:
        listener: a socket that listens, SOCK_SEQPACKET.
        limits: told anew for each arena.
    """

    def __init__(self, listener: socket.socket, limits: Callable[[], Limits]) -> None:
        self._listener, self._limits = listener, limits
        self._peers: dict[int, _Peer] = {}
        """By the numbers of their sockets and pidfds: each is there twice."""
        self._poll = select.epoll()
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._leases: tuple[Lease, ...] = ()
        self.refused = 0
        listener.setblocking(False)
        self._poll.register(listener, select.EPOLLIN)
        self._poll.register(self._stopped, select.EPOLLIN)

    def all(self) -> tuple[Lease, ...]:
        """Returns the leases of now."""
        return self._leases

    def run(self) -> None:
        """Is a thread, until stop()."""
        try:
            while self._go_on():
                pass
        finally:
            for peer in self._each():
                self._drop(peer)
            self._poll.close()
            os.close(self._stopped)

    def stop(self) -> None:
        """Has run() end, and all leases with it."""
        os.eventfd_write(self._stopped, 1)

    def _go_on(self) -> bool:
        deadlines = [peer.until_s for peer in self._each() if peer.lease is None]
        wait_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = {number for number, _ in self._poll.poll(wait_s)}
        if self._stopped in ready:
            return False
        for number in ready & self._peers.keys():
            if number in self._peers:
                self._hear(self._peers[number], number)
        # At last, since it may get the number of a socket that was closed above.
        if self._listener.fileno() in ready:
            self._accept()
        now_s = time.monotonic()
        for peer in self._each():
            if peer.lease is None and peer.until_s <= now_s:
                self._refuse(peer, Damaged(f"process {peer.pid} has not said hello"))
        return True

    def _each(self) -> list[_Peer]:
        return [peer for number, peer in self._peers.items() if number == peer.pidfd]

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except OSError as error:
            # What is beyond the limit of open files is tried again once one is free.
            log.debug("an arena was not let in: %s", error)
            return
        try:
            told = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            pid, user_id, _ = _PEER.unpack(told)
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            channel.close()  # it has ended, or is of a namespace that we cannot see into
            self.refused += 1
            return
        channel.setblocking(False)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        peer = _Peer(channel, pidfd, pid, user_id, time.monotonic() + HELLO_S)
        self._peers[channel.fileno()] = self._peers[pidfd] = peer
        self._poll.register(channel, select.EPOLLIN | select.EPOLLRDHUP)
        self._poll.register(pidfd, select.EPOLLIN)
        waiting = [peer for peer in self._each() if peer.lease is None]
        if len(waiting) > MOST_WAITING:
            self._drop(min(waiting, key=lambda peer: peer.until_s))

    def _hear(self, peer: _Peer, number: int) -> None:
        if number == peer.pidfd:
            self._drop(peer)  # it has ended, though a child may have the socket
        elif peer.lease is None:
            try:
                peer.lease = self._lease(peer)
            except (TierdError, OSError) as error:
                self._refuse(peer, error)
                return
            self._tell("arena.new", "steers", peer.lease)
            self._leases = (*self._leases, peer.lease)
        else:
            # It has hung up, or says what no arena says.
            self._drop(peer)

    def _lease(self, peer: _Peer) -> Lease:
        """Reads a hello and checks all that came with it."""
        with _received(peer.channel) as (message, fds):
            name = unpack_hello(message)
            if len(fds) != 1:
                raise Damaged(f"a hello has one file descriptor, and not {len(fds)}")
            copies = Copies(fds[0])
            self._require_room(peer.user_id, copies.blocks)
            peer.channel.send(WELCOME)
            return Lease(peer.channel, os.dup(fds[0]), copies, name, (peer.pid, peer.user_id))

    def _require_room(self, user_id: int, blocks: int) -> None:
        limits = self._limits()
        mine = [lease for lease in self._leases if lease.user_id == user_id]
        if len(mine) >= limits.arenas:
            raise NoRoom(f"user {user_id} has {limits.arenas} arenas: arena.max_arenas")
        if sum(lease.copies.blocks for lease in mine) + blocks > limits.blocks:
            raise NoRoom(f"arenas of user {user_id} have {limits.blocks} blocks: arena.max_blocks")

    def _refuse(self, peer: _Peer, error: Exception) -> None:
        self.refused += 1
        log.info(
            "an arena of process %d is refused: %s",
            peer.pid,
            error,
            extra=event("arena.refused", pid=peer.pid),
        )
        with suppress(OSError):
            peer.channel.send(f"refused: {error}".encode()[:512])
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        for number in (peer.channel.fileno(), peer.pidfd):
            self._poll.unregister(number)
            del self._peers[number]
        os.close(peer.pidfd)
        if peer.lease is None:
            peer.channel.close()
            return
        peer.lease.end()
        self._leases = tuple(lease for lease in self._leases if lease is not peer.lease)
        self._tell("arena.gone", "no longer steers", peer.lease)

    def _tell(self, kind: str, does: str, lease: Lease) -> None:
        who = {"pid": lease.pid, "command": lease.command, "arena": lease.name}
        said = "%s the arena %s of process %d (%s)"
        log.info(said, does, lease.name, lease.pid, lease.command, extra=event(kind, **who))


@contextmanager
def _received(channel: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """Receives a message; the file descriptors that came with it are closed behind the block.

    There is room for two, so that one too many is seen; the kernel drops others.
    """
    message, fds, flags, _ = socket.recv_fds(
        channel, HELLO_BYTES + 1, 2, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Damaged("a hello that is too long, or with too many file descriptors")
        yield message, fds
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def leasing(listener: socket.socket, limits: Callable[[], Limits]) -> Iterator[Leases]:
    """Lets arenas connect inside the block."""
    leases = Leases(listener, limits)
    thread = threading.Thread(target=leases.run, name="tierd-arenas", daemon=True)
    thread.start()
    try:
        yield leases
    finally:
        leases.stop()
        thread.join()
