# SPDX-License-Identifier: Apache-2.0
"""The program's side of a daemon that steers an arena: a thread that does what it is told.

Each command is a wish like prefetch() or demote(): a wrong one costs bandwidth. Without a daemon,
or with one that has gone, the arena works as it does alone, and the thread tries again later.
"""

import os
import random
import select
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.arena.bandwidth import Bandwidth, Setter
from tierd.arena.shared import Shared
from tierd.arena.wire import (
    ANSWER_BYTES,
    GIVE_BACK,
    LIMIT,
    WELCOME,
    commands_in,
    pack_hello,
    unpack_limit,
)
from tierd.errors import TierFailed
from tierd.kernel.arena import Blocks

FIRST_WAIT_S, MOST_WAIT_S = 0.1, 30.0
"""Between two tries to reach the daemon; each wait is twice the last, less up to a half."""

ANSWER_S = 10.0
"""For so long a daemon may take for its answer."""

_GONE = select.POLLIN | select.POLLHUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """Whether a daemon steers the arena, and if not, why; and what it has asked for.

    `commands` were followed, `wrong` are of blocks or tiers that there are not.
    """

    by_daemon: bool
    why_not: str | None
    commands: int
    wrong: int


class Steering:
    """A daemon's hold of an arena, from run() until stop().

    Args:
        blocks: of the arena.
        shared: what the daemon reads.
        bandwidths: of the tiers; the daemon may limit them while it is there.
        give_back: leaves what is free on a tier to others.
        path: of the daemon's socket.
        name: what the daemon's operator sees.
    """

    def __init__(
        self,
        blocks: Blocks,
        shared: Shared,
        bandwidths: Sequence[Bandwidth],
        give_back: Callable[[int], object],
        path: Path,
        name: str,
    ) -> None:
        self._blocks, self._shared, self._give_back = blocks, shared, give_back
        self._bandwidths = bandwidths
        self._path, self._hello = path, pack_hello(name)
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not when the program ends: the arena's end, which comes after, stops the thread by it.
        weakref.finalize(self, os.close, self._stopped).atexit = False
        self._channel: socket.socket | None = None
        self._why_not: str | None = "not asked yet"
        self._commands = self._wrong = 0
        _all.add(self)

    @property
    def steered(self) -> Steered:
        why_not = self._why_not
        return Steered(
            by_daemon=why_not is None,
            why_not=why_not,
            commands=self._commands,
            wrong=self._wrong,
        )

    def stop(self) -> None:
        """Has run() return, whatever it does."""
        os.eventfd_write(self._stopped, 1)

    def run(self) -> None:
        """Is a thread of the program."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                welcome = self._be_steered()
            except OSError as error:
                welcome, self._why_not = False, f"{self._path}: {error.strerror or error}"
            wait_s = FIRST_WAIT_S if welcome else min(2 * wait_s, MOST_WAIT_S)
            # Many arenas that lost the same daemon don't all come back at once.
            if self._wait(None, wait_s * random.uniform(0.5, 1)):
                self._why_not = "the arena is closed"
                return

    def leave_to_parent(self) -> None:
        """Ends the hold that a fork has copied; the daemon would take it for the parent's."""
        if self._channel is not None:
            self._channel.close()
        self._why_not = "the arena is the parent's"

    def _be_steered(self) -> bool:
        """Follows a daemon until it goes; returns whether it was one that took the arena."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(ANSWER_S)
            self._channel = channel
            channel.connect(str(self._path))
            socket.send_fds(channel, [self._hello], [self._shared.fd])
            if self._wait(channel, ANSWER_S):
                return False
            answer = channel.recv(ANSWER_BYTES)
            if answer != WELCOME:
                self._why_not = answer.decode(errors="replace") or "the daemon has hung up"
                return False
            self._why_not = None
            try:
                while not self._wait(channel, None):
                    message = channel.recv(ANSWER_BYTES)
                    if not message:
                        break
                    self._follow(message)
            finally:
                self._why_not = "the daemon has gone"
                for bandwidth in self._bandwidths:
                    bandwidth.limit(Setter.DAEMON, None)
            return True

    def _wait(self, channel: socket.socket | None, timeout_s: float | None) -> bool:
        """Waits for the channel, or for so long; returns whether it is to stop.

        Raises:
            TimeoutError: the channel has said nothing.
        """
        poll = select.poll()
        poll.register(self._stopped, select.POLLIN)
        if channel is not None:
            poll.register(channel, _GONE)
        ready = dict(poll.poll(None if timeout_s is None else timeout_s * 1e3))
        if not ready and channel is not None:
            raise TimeoutError("the daemon does not answer")
        return self._stopped in ready

    def _follow(self, message: bytes) -> None:
        told = commands_in(message, len(self._shared.counts), len(self._shared.tiers))
        for ids, tier in in_order(told):
            if ids[0] == GIVE_BACK:
                with suppress(TierFailed):  # it is fenced, and what is there stays
                    self._give_back(tier)
            elif ids[0] == LIMIT:
                number, mbps = unpack_limit(tier)
                self._bandwidths[number].limit(Setter.DAEMON, mbps)
            else:
                self._blocks.want(ids, tier)
        self._commands += len(told)
        self._wrong += len(message) // told.itemsize - len(told)


def in_order(commands: NDArray[np.void]) -> list[tuple[NDArray[np.int64], int]]:
    """Returns the commands as runs that have the same tier, of blocks or of one other kind."""
    if not len(commands):
        return []
    kind = np.maximum(commands["block"].astype(np.int64), LIMIT - 1)
    is_cut = (np.diff(kind) != 0) | (np.diff(commands["tier"].astype(np.int64)) != 0)
    runs = np.split(commands, np.flatnonzero(is_cut) + 1)
    return [(run["block"].astype(np.int64), int(run["tier"][0])) for run in runs]


_all: "weakref.WeakSet[Steering]" = weakref.WeakSet()


def _after_fork() -> None:
    for steering in list(_all):
        steering.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
