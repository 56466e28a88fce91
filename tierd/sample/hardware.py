# SPDX-License-Identifier: Apache-2.0
"""Addresses that the CPUs sample, of all that runs, kept to a share of one core by the period.

A ring a CPU, read once a round. What a sample costs is the interrupt's matter and cannot be seen
from here, so it is taken for SAMPLE_S, which is on the safe side for PEBS and IBS; the kernel's own
limit (perf_cpu_time_max_percent) stands behind that, and where it throttles, the period grows too.
SPE interrupts once a page of samples, and tells the thread of each: whose it is /proc tells.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import HIT, LOAD, NO_LOADS
from tierd.kernel.accesses import ACCESS, AccessRing, are_stores, served_by_memory
from tierd.kernel.pmu import Source
from tierd.kernel.process import has_other_numbers, read_leader
from tierd.model import PAGE_BYTES, Pid

SAMPLE_S = 5e-6
"""CPU time of a sample, from its interrupt to its place in an array."""
ADJUST_S = 1.0
STEP = 4.0
"""The period changes at most so many times at once."""
FIRST_TIMES = 64
"""The first period, in the least that makes sense: a burst at the start is not to be throttled."""
MOST_PERIOD = 1 << 40
HELD_S = 2.0
SHARERS = 8
"""Each ring holds what so many CPUs may sample in so long, were they all; where more, its part."""
SAMPLES_LEAST = 256
OWNERS_S = 10.0
"""Whose a thread is is asked again after so long: its number may be another's by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How it goes, for status; `unowned` were samples of no process that is known."""

    source: str
    period: int
    samples: int
    unowned: int
    lost: int
    throttled: int


class Hardware:
    """Samples on some CPUs.

    Args:
        source: what is sampled.
        cpus: those that are online; one that comes later is not sampled.
        cpu_percent: of a core that samples may cost, all CPUs together.
        write_weight: for how many reads a store counts; it may be set to another.
        root: where /proc is.

    Raises:
        PermissionError: neither CAP_PERFMON nor perf_event_paranoid allows it.
        OSError: the CPUs have no such event after all.
    """

    def __init__(
        self,
        source: Source,
        cpus: Collection[int],
        *,
        cpu_percent: float,
        write_weight: float = 1.0,
        root: Path = Path("/"),
    ) -> None:
        self._owners = Owners(root)
        self._source, self.write_weight = source, write_weight
        self.most_per_s = cpu_percent / 100 / SAMPLE_S
        self._period = min(source.least_period * FIRST_TIMES, MOST_PERIOD)
        self._samples, self._unowned, self._throttled = 0, 0, 0
        self._counted, self._adjusted_s = 0, time.monotonic()
        self._held = held = _held(self.most_per_s, len(cpus))
        self._overflows = False
        self.loads = NO_LOADS
        """Loads that memory served, of the last read()."""
        event = source.event.every(self._period)
        with ExitStack() as stack:
            self._rings = [
                stack.enter_context(AccessRing(event, cpu=cpu, samples=held, wakeup_samples=held))
                for cpu in cpus
            ]
            self._open = stack.pop_all()

    def close(self) -> None:
        self._open.close()

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            source=self._source.name,
            period=self._period,
            samples=self._samples,
            unowned=self._unowned,
            lost=sum(ring.lost for ring in self._rings),
            throttled=sum(ring.throttled for ring in self._rings),
        )

    def read(self, pids: Iterable[Pid]) -> dict[Pid, NDArray[np.void]]:
        """Returns the sampled accesses (dtype HIT) of these processes since the last read."""
        parts = [ring.read() for ring in self._rings]
        found = np.concatenate(parts) if parts else np.zeros(0, ACCESS)
        self.loads = _loads(found[served_by_memory(found)])
        self._samples += len(found)
        self._owners.fill_in(found, time.monotonic())
        self._unowned += int((found["pid"] == 0).sum())
        # The kernel tells what was lost with the next sample only.
        self._overflows |= any(len(part) >= self._held for part in parts)
        self._adjust(time.monotonic())
        found = found[found["addr"] != 0]
        hits = np.zeros(len(found), HIT)
        hits["page"] = found["addr"] & ~np.uint64(PAGE_BYTES - 1)
        hits["weight"] = np.where(are_stores(found), self.write_weight, 1.0)
        return {pid: hits[found["pid"] == pid] for pid in pids}

    def _adjust(self, now_s: float) -> None:
        """Sets the period by which samples come as often as the budget allows."""
        passed_s = now_s - self._adjusted_s
        if passed_s < ADJUST_S:
            return
        told = self.sampling
        seen = told.samples + told.lost
        too_many = (seen - self._counted) / passed_s / self.most_per_s
        if self._overflows or told.throttled > self._throttled:
            too_many = STEP
        self._overflows = False
        self._counted, self._throttled, self._adjusted_s = seen, told.throttled, now_s
        times = min(max(too_many, 1 / STEP), STEP)
        period = min(max(round(self._period * times), self._source.least_period), MOST_PERIOD)
        if period != self._period:
            self._period = period
            for ring in self._rings:
                ring.set_period(period)


class Owners:
    """Which processes threads are of, where samples don't tell; none from within a pid namespace.

    Args:
        root: where /proc is.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._is_foreign = root, has_other_numbers(root)
        self._known: dict[int, int] = {}
        self._since_s = -OWNERS_S

    def fill_in(self, found: NDArray[np.void], now_s: float) -> None:
        """Sets the pid of samples (dtype ACCESS) that have a tid alone, unless that has gone."""
        if now_s - self._since_s >= OWNERS_S:
            self._known, self._since_s = {}, now_s
        (rows,) = np.nonzero((found["pid"] == 0) & (found["tid"] != 0))
        threads, which = np.unique(found["tid"][rows], return_inverse=True)
        owners = np.array([self._owner(thread) for thread in threads.tolist()], "u4")
        found["pid"][rows] = owners[which]

    def _owner(self, thread: int) -> int:
        if thread not in self._known:
            leader = None if self._is_foreign else read_leader(thread, self._root)
            self._known[thread] = leader or 0
        return self._known[thread]


def _loads(served: NDArray[np.void]) -> NDArray[np.void]:
    """Returns samples of loads (dtype ACCESS) as dtype LOAD, those whose place is known."""
    served = served[served["phys_addr"] != 0]
    loads = np.zeros(len(served), LOAD)
    loads["address"], loads["cycles"] = served["phys_addr"], served["weight"]
    return loads


def _held(per_s: float, cpus: int) -> int:
    """Returns how many samples a ring has to hold."""
    part = min(1.0, SHARERS / max(cpus, 1))
    return max(round(per_s * HELD_S * part), SAMPLES_LEAST)
