# SPDX-License-Identifier: Apache-2.0
"""What a process's own settings allow: its cpuset, its mempolicies, its locked memory.

move_pages(2) itself checks the cpuset alone. Where a program said mbind(2) or mlock(2), its pages
stay within what it said.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.kernel import process
from tierd.kernel.process import RANGE, BoundRange
from tierd.model import NodeId, Pid

POLICIES_COST = 50
"""Mempolicies are read again after so many times what reading them took: it walks page tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a process's memory may go.

    `nodes` is None where the kernel has no cpusets. `locked` (dtype RANGE) is what must stay where
    it is, `bound` what may go to some nodes only.
    """

    nodes: Collection[NodeId] | None
    locked: NDArray[np.void]
    bound: Sequence[BoundRange]

    def among(self, nodes: Sequence[NodeId]) -> list[NodeId]:
        """Returns those of the nodes that the cpuset allows."""
        return [node for node in nodes if self.nodes is None or node in self.nodes]

    def is_locked(self, addresses: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return _inside(self.locked, addresses)

    def is_bound_elsewhere(self, addresses: NDArray[np.uint64], node: NodeId) -> NDArray[np.bool_]:
        """Tells the addresses whose mempolicy leaves out the node."""
        barred = np.array([(b.start, b.end) for b in self.bound if node not in b.nodes], RANGE)
        return _inside(barred, addresses)


def _inside(ranges: NDArray[np.void], addresses: NDArray[np.uint64]) -> NDArray[np.bool_]:
    if not len(ranges):
        return np.zeros(len(addresses), np.bool_)
    at = np.searchsorted(ranges["start"], addresses, "right") - 1
    return np.asarray((at >= 0) & (addresses < ranges["end"][at]), np.bool_)


@dataclass(slots=True)
class _Policies:
    bound: Sequence[BoundRange]
    start_ticks: int
    good_until_s: float


@dataclass(slots=True, kw_only=True)
class LimitsReader:
    """Reads limits when a move is to be made; mempolicies are kept for a while.

    Args:
        move_locked: leave out the locked ranges, so that they are moved like others.
    """

    move_locked: bool
    root: Path = Path("/")
    _policies: dict[Pid, _Policies] = field(default_factory=dict)

    def __call__(self, pid: Pid) -> Limits | None:
        """Returns the limits, None when the process has gone."""
        found = process.read_process(pid, self.root)
        if found is None:
            self._policies.pop(pid, None)
            return None
        bound = self._bound(pid, found.start_ticks)
        locked = np.empty(0, RANGE) if self.move_locked else process.read_locked(found, self.root)
        if bound is None or locked is None:
            return None
        return Limits(nodes=found.allowed_nodes, locked=locked, bound=bound)

    def _bound(self, pid: Pid, start_ticks: int) -> Sequence[BoundRange] | None:
        begin_s = time.monotonic()
        known = self._policies.get(pid)
        if known and known.start_ticks == start_ticks and begin_s < known.good_until_s:
            return known.bound
        bound = process.read_policies(pid, self.root)
        if bound is None:
            return None
        end_s = time.monotonic()
        good_until_s = end_s + POLICIES_COST * (end_s - begin_s)
        self._policies[pid] = _Policies(bound, start_ticks, good_until_s)
        return bound
