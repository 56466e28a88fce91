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

What a load has on fast nodes is told of all its mappings by /proc/PID/numa_maps, in pages::

    7f12c8000000 default anon=24576 dirty=24576 active=0 N0=16384 N1=8192 kernelpagesize_kB=4
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from guests.guest import Guest

from benches._loads import LOAD, PLACED

BUSY = re.compile(r"^cpu\d+(?: \d+){6} (\d+)", re.MULTILINE)
MIGRATED = "/sys/kernel/tracing/events/migrate/mm_migrate_pages"
BY_REASON = re.compile(r"\{ reason: +(\d+) \} .* succeeded: +(\d+)")
COMPACTION = 0
"""Of enum migrate_reason (include/linux/migrate_mode.h)."""
ON_NODE = re.compile(r" N(\d+)=(\d+)")
USED = re.compile(r"^usage_usec (\d+)$", re.MULTILINE)


def count_moves(guest: Guest) -> None:
    """Has the guest count, from now on, which pages it moves for which reason."""
    guest.write(f"{MIGRATED}/trigger", b"hist:keys=reason:vals=succeeded")


def moved_pages(histogram: str) -> int:
    """Returns how many pages were moved, but by compaction."""
    each = ((int(reason), int(pages)) for reason, pages in BY_REASON.findall(histogram))
    return sum(pages for reason, pages in each if reason != COMPACTION)


def held_pages(guest: Guest) -> int:
    """Returns how many pages on fast nodes are mapped by what is to be placed.

    Of each program counts the process that has most: its waker has the same pages.
    """
    held = 0
    for group in PLACED:
        pids = guest.read(f"/sys/fs/cgroup/{group}/cgroup.procs").decode().split()
        maps = [guest.read(f"/proc/{pid}/numa_maps").decode() for pid in pids]
        held += max((pages_on(guest.facts.fast, each) for each in maps), default=0)
    return held


def pages_on(nodes: Collection[int], numa_maps: str) -> int:
    """Returns how many pages of a process are on these nodes."""
    return sum(int(pages) for node, pages in ON_NODE.findall(numa_maps) if int(node) in nodes)


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
            at_s=guest.uptime_s(),
            moved_pages=moved_pages(guest.read(f"{MIGRATED}/hist").decode()),
            cpu_s=busy_ns / 1e9 - int(used[1]) / 1e6,
        )

    def since(self, before: Self) -> tuple[int, float]:
        """Returns pages moved, and the share of one CPU in percent."""
        percent = (self.cpu_s - before.cpu_s) / (self.at_s - before.at_s) * 100
        return self.moved_pages - before.moved_pages, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What the CPU has run that a load is on, since the guest booted."""

    busy_ns: int
    instructions: float

    @classmethod
    def of(cls, guest: Guest) -> Self:
        """A real CPU is not counted, but taken for as fast at any time.

        The guest goes on while it is asked, which takes some hundredths of a second where its host
        has other work: it is taken to answer in the middle.
        """
        cpu, is_real = guest.topology.cpus - 1, guest.facts.kvm
        before = 0 if is_real else guest.counter.of_cpu(cpu)
        busy_ns = int(BUSY.findall(guest.read("/proc/schedstat").decode())[cpu])
        if is_real:
            return cls(busy_ns=busy_ns, instructions=busy_ns)
        return cls(busy_ns=busy_ns, instructions=(before + guest.counter.of_cpu(cpu)) / 2)

    def per_s(self, before: Self) -> float:
        """Returns how many instructions it ran in a second in which it had a task.

        One that has none, since a program waits for its pages, is not slower for that.
        """
        busy_ns = self.busy_ns - before.busy_ns
        return (self.instructions - before.instructions) / busy_ns * 1e9
