# SPDX-License-Identifier: Apache-2.0
"""How fast an arena's movers may copy to and from a tier without addresses.

The program may set a limit, and the daemon another one; the lower one holds. What is copied is paid
for out of a bucket that fills at the limit's rate. Both directions pay, and what a program waits
for pays too: a network has one bandwidth for all.
"""

import threading
from collections.abc import Callable
from enum import StrEnum
from time import monotonic

from tierd.bucket import Bucket

MIB = 1 << 20

BURST_S = 0.1
"""After a rest so much of a second's bytes may go at once."""

_MOST_WAIT_S = 60.0
"""After which a mover looks again: a wait of centuries is no timeout that a lock takes."""


class Setter(StrEnum):
    """Whose limit it is."""

    PROGRAM = "program"
    DAEMON = "daemon"


class Bandwidth:
    """One tier's, shared by the movers.

    Args:
        now_s: a clock that does not go back.
    """

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._limits: dict[Setter, float] = {}
        self._bucket: Bucket | None = None
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        """Has one mover wait before the others, which else might have small batches pass by it."""
        self._is_over = False
        self.is_held_back = False
        """Whether a mover waits for the limit."""

    @property
    def mbps(self) -> float | None:
        """The limit that holds, in MiB a second; None for none."""
        return min(self._limits.values(), default=None)

    @property
    def burst_bytes(self) -> float:
        """What may go at once; inf without a limit."""
        bucket = self._bucket
        return float("inf") if bucket is None else bucket.burst

    def limit(self, setter: Setter, mbps: float | None) -> None:
        """Sets or ends a limit of so many MiB a second, for those that wait now too."""
        with self._changed:
            if mbps is None:
                self._limits.pop(setter, None)
            else:
                self._limits[setter] = mbps
            self._follow()
        self.wake()

    def wake(self) -> None:
        """Has those that wait look at the limit and the clock again."""
        with self._changed:
            self.is_held_back = False
            self._changed.notify_all()

    def _follow(self) -> None:
        if self.mbps is None:
            self._bucket = None
            return
        rate = self.mbps * MIB
        if self._bucket is None:
            self._bucket = Bucket(rate, rate * BURST_S, self._now_s())
        else:
            self._bucket.change(rate, rate * BURST_S, self._now_s())

    def wait(self, size_bytes: int) -> bool:
        """Waits until so much may be copied; returns False where stop() comes first."""
        with self._turn, self._changed:
            while not self._is_over:
                now_s = self._now_s()
                due_s = now_s if self._bucket is None else self._bucket.due_s(size_bytes)
                self.is_held_back = due_s > now_s
                if not self.is_held_back:
                    if self._bucket is not None:
                        self._bucket.take(size_bytes, now_s)
                    return True
                self._changed.wait(min(due_s - now_s, _MOST_WAIT_S))
        return False

    def stop(self) -> None:
        """Has each wait() end, now and from now on."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
