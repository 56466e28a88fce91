# SPDX-License-Identifier: Apache-2.0
"""What the daemon asks of the machine it runs on, besides samples and moves.

A recording answers the same questions when it is replayed; see tierd/replay.py.
"""

import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.kernel import process
from tierd.kernel.pressure import Pressure, read_pressure
from tierd.kernel.process import Process
from tierd.kernel.task import CpuTimes, cpu_times, promoted_pages
from tierd.kernel.vmstat import read_vmstat
from tierd.model import KernelMoves, NodeId, NodeRoom, Pid
from tierd.sample import residence


class Machine(Protocol):
    """A machine, or what plays one."""

    def monotonic(self) -> float:
        """Returns the instant, in seconds of CLOCK_MONOTONIC."""
        ...

    def find(self) -> Iterable[Process]:
        """Lists the processes that are to be targets now."""
        ...

    def mapped(self, pid: Pid) -> NDArray[np.void] | None:
        """Returns what a process has mapped (dtype RANGE), None when it has gone."""
        ...

    def named(self, pid: Pid, names: Container[str]) -> list[tuple[int, int, str]]:
        """Lists a process's mappings of these names: start, end and name, in ascending order."""
        ...

    def locate(
        self,
        pid: Pid,
        pieces: NDArray[np.void],
        rank_of_node: NDArray[np.int8],
        *,
        budget_pages: int,
        now_s: float,
    ) -> None:
        """Sets where the pieces most in need lie, as residence.probe() does.

        Raises:
            ProcessLookupError: the process has exited.
        """
        ...

    def rooms(self) -> Mapping[NodeId, NodeRoom]:
        """Returns what each node can take before the kernel reclaims."""
        ...

    def pressure(self) -> Pressure | None:
        """Returns how much tasks wait for memory, None where the kernel doesn't tell."""
        ...

    def kernel_moves(self) -> KernelMoves:
        """Returns what the kernel has done by itself since boot."""
        ...

    def cpu_times(self, pids: Iterable[Pid]) -> Mapping[Pid, CpuTimes]:
        """Returns how long each process has run that has not exited."""
        ...

    def promoted_pages(self, pids: Iterable[Pid]) -> Mapping[Pid, int]:
        """Returns how many pages the kernel has moved at faults of each process."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMachine:
    """The machine that we run on.

    Args:
        finder: lists the processes that are to be targets now.
        free: reads what each node can take.
    """

    finder: Callable[[], Iterable[Process]]
    free: Callable[[], Mapping[NodeId, NodeRoom]]
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def monotonic(self) -> float:
        return time.monotonic()

    def find(self) -> Iterable[Process]:
        return self.finder()

    def mapped(self, pid: Pid) -> NDArray[np.void] | None:
        return process.read_mapped(pid)

    def named(self, pid: Pid, names: Container[str]) -> list[tuple[int, int, str]]:
        return process.read_named(pid, names)

    def locate(
        self,
        pid: Pid,
        pieces: NDArray[np.void],
        rank_of_node: NDArray[np.int8],
        *,
        budget_pages: int,
        now_s: float,
    ) -> None:
        residence.probe(
            pid, pieces, rank_of_node, budget_pages=budget_pages, now_s=now_s, rng=self.rng
        )

    def rooms(self) -> Mapping[NodeId, NodeRoom]:
        return self.free()

    def pressure(self) -> Pressure | None:
        return read_pressure()

    def kernel_moves(self) -> KernelMoves:
        found = read_vmstat()
        return KernelMoves(
            faults=found.numa_hint_faults or 0,
            candidates=(found.pgpromote_candidate or 0) + (found.pgpromote_candidate_nrl or 0),
            promoted=found.pgpromote_success or 0,
            demoted=(found.pgdemote_kswapd or 0) + (found.pgdemote_direct or 0),
        )

    def cpu_times(self, pids: Iterable[Pid]) -> Mapping[Pid, CpuTimes]:
        found = dict[Pid, CpuTimes]()
        for pid in pids:
            with suppress(ProcessLookupError):
                found[pid] = cpu_times(pid)
        return found

    def promoted_pages(self, pids: Iterable[Pid]) -> Mapping[Pid, int]:
        return {pid: promoted_pages(pid) for pid in pids}
