# SPDX-License-Identifier: Apache-2.0
"""How fast the CPU of a load computes: the host's doing, and not to be taken for a contender's.

An emulated CPU is as fast as its host lets it be, which changes by a half within minutes, and far
more than any contender costs. See cpu_speed.c.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from guests.guest import Guest
from guests.tiering import FOLDER, within
from guests.workloads import build

from benches._loads import LOAD, on_last_cpu

GROUP = f"{LOAD}/speed"
"""Among the load's, so that its steps count for no contender's CPU time."""

STEPS = f"{FOLDER}/cpu_speed"


@contextmanager
def measured(guest: Guest) -> Iterator[None]:
    """Has steps taken on the CPU of a load for as long as the context lasts."""
    command = [*on_last_cpu(guest), str(build("cpu_speed")), STEPS]
    process = guest.start(within(GROUP, command))
    try:
        yield
    finally:
        process.signal(signal.SIGTERM)
        process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Taken so far, and the CPU time that they took."""

    count: int
    cpu_ns: int

    @classmethod
    def of(cls, guest: Guest) -> Self:
        count, cpu_ns = map(int, guest.read(STEPS).split())
        return cls(count=count, cpu_ns=cpu_ns)

    def per_s(self, since: Self) -> float:
        """Returns how many were taken in a second of CPU time."""
        return (self.count - since.count) / (self.cpu_ns - since.cpu_ns) * 1e9
