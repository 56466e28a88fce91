# SPDX-License-Identifier: Apache-2.0
"""Signals as something to wait for, so that none cuts a round short half-way.

SIGTERM and SIGINT ask for the end, SIGHUP for the configuration to be read again.

They are caught, not blocked. NumPy's BLAS starts threads while it is imported, before anybody could
block a signal, and one sent to the process goes to whichever thread doesn't block it
(complete_signal() in kernel/signal.c): it would end the process there and then. Python's handlers
run in the main thread whichever thread the signal came to.
"""

import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP = frozenset({signal.SIGTERM, signal.SIGINT})
RELOAD = signal.SIGHUP


class Signals:
    """What was asked for by signals so far."""

    def __init__(self, readable: socket.socket) -> None:
        self._readable = readable
        self._stop = False

    def stop_asked(self, wait_s: float, reload: Callable[[], None]) -> bool:
        """Waits for so long, or until the end is asked for; returns whether it is, now or before.

        Args:
            wait_s: seconds.
            reload: called each time that the configuration is to be read again.
        """
        end_s = time.monotonic() + wait_s
        while not self._stop:
            arrived = self._arrived(max(0.0, end_s - time.monotonic()))
            if not arrived:
                return False
            self._stop = bool(arrived & STOP)
            if RELOAD in arrived and not self._stop:
                reload()
        return True

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
            yield Signals(readable)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)


def _note(number: int, frame: FrameType | None) -> None:
    """Does nothing: the byte that the interpreter has written to the socket is the note."""
