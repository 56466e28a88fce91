# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and SIGINT as something to wait for, so that neither cuts a round short half-way.

They are caught, not blocked. NumPy's BLAS starts threads while it is imported, before anybody could
block a signal, and one sent to the process goes to whichever thread doesn't block it
(complete_signal() in kernel/signal.c): it would end the process there and then. Python's handlers
run in the main thread whichever thread the signal came to.
"""

import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class StopSignals:
    """Becomes readable with the first signal, and stays so."""

    _readable: socket.socket

    def asked(self, wait_s: float) -> bool:
        """Waits for a signal for so long; returns whether one has come, now or before."""
        ready, _, _ = select.select([self._readable], [], [], max(wait_s, 0.0))
        return bool(ready)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Catches the signals. To be used in the main thread, around all that has to be undone."""
    readable, written = socket.socketpair()
    with readable, written:
        written.setblocking(False)
        wakeup = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, _note) for number in SIGNALS}
        try:
            yield StopSignals(readable)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)


def _note(number: int, frame: FrameType | None) -> None:
    """Does nothing: the byte that the interpreter has written to the socket is the note."""
