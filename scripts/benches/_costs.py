# SPDX-License-Identifier: Apache-2.0
"""What a guest has spent on placing memory, from the kernel's own counters.

Pages moved are those of `migrate_pages()`, but for what compaction moves within a node. In
/proc/vmstat there is only the sum of both, so they are counted by reason, in a histogram of the
kernel's trace event (Documentation/trace/histogram.rst)::

    { reason:          3 } hitcount:         12  succeeded:        512

CPU time is what all CPUs were busy less what the load's cgroup took: tierd or damo, the kernel's
threads, and what measures. What is done in the load's own faults shows in its throughput alone.
Threads come and go, so theirs is not added up. In /proc/schedstat a CPU's line is (7.2)::

    cpu0 0 0 0 0 0 0 95716826 3131237 12345

with the nanoseconds that tasks ran in its eighth column (Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from guests.guest import Guest

from benches._loads import LOAD

BUSY = re.compile(r"^cpu\d+(?: \d+){6} (\d+)", re.MULTILINE)
MIGRATED = "/sys/kernel/tracing/events/migrate/mm_migrate_pages"
BY_REASON = re.compile(r"\{ reason: +(\d+) \} .* succeeded: +(\d+)")
COMPACTION = 0
"""Of enum migrate_reason (include/linux/migrate_mode.h)."""
USED = re.compile(r"^usage_usec (\d+)$", re.MULTILINE)


def count_moves(guest: Guest) -> None:
    """Has the guest count, from now on, which pages it moves for which reason."""
    guest.write(f"{MIGRATED}/trigger", b"hist:keys=reason:vals=succeeded")


def moved_pages(histogram: str) -> int:
    """Returns how many pages were moved, but by compaction."""
    each = ((int(reason), int(pages)) for reason, pages in BY_REASON.findall(histogram))
    return sum(pages for reason, pages in each if reason != COMPACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Since the guest booted."""

    at_s: float
    moved_pages: int
    cpu_s: float

    @classmethod
    def of(cls, guest: Guest) -> Self:
        busy_ns = sum(map(int, BUSY.findall(guest.read("/proc/schedstat").decode())))
        used = USED.search(guest.read(f"/sys/fs/cgroup/{LOAD}/cpu.stat").decode())
        assert used
        return cls(
            at_s=float(guest.read("/proc/uptime").split()[0]),
            moved_pages=moved_pages(guest.read(f"{MIGRATED}/hist").decode()),
            cpu_s=busy_ns / 1e9 - int(used[1]) / 1e6,
        )

    def since(self, before: Self) -> tuple[int, float]:
        """Returns pages moved, and the share of one CPU in percent."""
        percent = (self.cpu_s - before.cpu_s) / (self.at_s - before.at_s) * 100
        return self.moved_pages - before.moved_pages, percent
