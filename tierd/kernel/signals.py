# SPDX-License-Identifier: Apache-2.0
"""Signals as something to wait for, so that none cuts a round short half-way.

SIGTERM and SIGINT ask for the end, SIGHUP for the configuration to be read again. Another thread
can end the wait too.

They are caught, not blocked. NumPy's BLAS starts threads while it is imported, before anybody could
block a signal, and one sent to the process goes to whichever thread doesn't block it
(complete_signal() in kernel/signal.c): it would end the process there and then. Python's handlers
run in the main thread whichever thread the signal came to.
"""

import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

STOP = frozenset({signal.SIGTERM, signal.SIGINT})
RELOAD = signal.SIGHUP
RING_AGAIN_S = 1.0
CALL = 0
"""What call() sends: no signal has this number."""


class Signals:
    """What was asked for by signals so far."""

    def __init__(self, readable: socket.socket, written: socket.socket) -> None:
        self._readable, self._written = readable, written
        self._stop = False

    def stop_asked(self, wait_s: float, answers: Mapping[int, Callable[[], None]]) -> bool:
        """Waits for so long, or until the end is asked for; returns whether it is, now or before.

        Args:
            wait_s: seconds.
            answers: what to do meanwhile on RELOAD and on CALL.
        """
        end_s = time.monotonic() + wait_s
        while not self._stop:
            arrived = self._arrived(max(0.0, end_s - time.monotonic()))
            if not arrived:
                return False
            self._stop = bool(arrived & STOP)
            if not self._stop:
                for number in arrived & answers.keys():
                    answers[number]()
        return True

    def are_waiting(self) -> bool:
        """Tells whether something has arrived that stop_asked() has not yet seen."""
        return bool(select.select([self._readable], [], [], 0)[0])

    def call(self) -> None:
        """Makes stop_asked() give the answer to CALL; from any thread."""
        with suppress(BlockingIOError):  # it has so much to read that it will look in any case
            self._written.send(bytes([CALL]))

    def _arrived(self, wait_s: float) -> set[int]:
        """Waits for signals for so long. The interpreter writes a byte for each, its number."""
        ready, _, _ = select.select([self._readable], [], [], wait_s)
        return set(self._readable.recv(4096)) if ready else set()


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Catches the signals. To be used in the main thread, around all that has to be undone."""
    readable, written = socket.socketpair()
    with readable, written:
        written.setblocking(False)
        wakeup = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, _note) for number in (*STOP, RELOAD)}
        try:
            yield Signals(readable, written)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)


def _note(number: int, frame: FrameType | None) -> None:
    """Does nothing: the byte that the interpreter has written to the socket is the note."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends what takes longer with TimeoutError, a system call too. In the main thread alone.

    It rings again and again: a signal that came right before the system call was entered would not
    cut it short.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, RING_AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
