# SPDX-License-Identifier: Apache-2.0
"""Takes the pages of all processes off a node, as far as they may be moved.

It walks one process after another, each by a plan of all that it has mapped, to the fastest tier
that has room; the mover keeps to the process's limits as ever. A pass over all processes in which
nothing was moved any more ends it. What others allocate goes to the node all the same: only taking
its memory blocks offline keeps them from it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tierd.migrate.mover import Mover
from tierd.model import MOVE, PAGE_BYTES, NodeId, Outcome, Pid, Plan, Rank, Report, Tier, Topology

LEAST_ROOM_BYTES = 512 * PAGE_BYTES
"""A tier with less room is passed over for the next."""

_NOT_THERE = frozenset({Outcome.MOVED, Outcome.RESIDENT, Outcome.ABSENT, Outcome.GONE})
"""Outcomes that leave nothing on the node."""


@dataclass(slots=True, kw_only=True)
class Drain:
    """The work on one node, a slice of time at a time.

    Args:
        node: to be emptied.
        mover: of apart(topology, node).
        room: bytes that a node can take.
        find: lists all processes.
        read_mapped: returns what a process has mapped (fields start and end), None once it is gone.
        learn: is given each report, for what a move costs.
    """

    node: NodeId
    mover: Mover
    room: Callable[[NodeId], int]
    find: Callable[[], Iterable[Pid]]
    read_mapped: Callable[[Pid], NDArray[np.void] | None]
    learn: Callable[[Report], None]
    clock: Callable[[], float] = time.monotonic

    moved_pages: int = 0
    left: Mapping[Outcome, int] = field(default_factory=dict)
    """Pages that the last whole pass found on the node and could not move."""

    passes: int = 0
    is_done: bool = False
    processes: int = 0
    _waiting: deque[Pid] = field(default_factory=deque)
    _cursor: int = 0
    _moved_in_pass: int = 0
    _left_in_pass: Counter[Outcome] = field(default_factory=Counter)

    @property
    def processes_left(self) -> int:
        """How many the present pass has still to walk, of `processes`."""
        return len(self._waiting)

    def run(self, deadline_s: float) -> None:
        """Goes on until the deadline, or until there is nothing more to do."""
        while not self.is_done and self.clock() < deadline_s and not self.mover.interrupted():
            if not self._waiting:
                self._begin_pass()
            if self._waiting:
                self._walk(self._waiting[0], deadline_s)
            if not self._waiting:
                self._end_pass()

    def _begin_pass(self) -> None:
        self._waiting.extend(self.find())
        self.processes = len(self._waiting)
        self._cursor = self._moved_in_pass = 0
        self._left_in_pass = Counter()

    def _end_pass(self) -> None:
        self.passes += 1
        self.left = self._left_in_pass
        self.is_done = self._moved_in_pass == 0

    def _walk(self, pid: Pid, deadline_s: float) -> None:
        mapped = self.read_mapped(pid)
        ranges = None if mapped is None else mapped[mapped["end"] > self._cursor]
        if ranges is not None and len(ranges):
            report = self.mover.run(self._plan(pid, ranges), deadline_s=deadline_s)
            self._count(report)
            put_off = np.flatnonzero(report.pages[:, Outcome.LATER])
            if len(put_off):
                self._cursor = int(report.reached[put_off[0]])
                return
        self._waiting.popleft()
        self._cursor = 0

    def _plan(self, pid: Pid, ranges: NDArray[np.void]) -> Plan:
        moves = np.zeros(len(ranges), MOVE)
        moves["start"] = np.maximum(ranges["start"], self._cursor)
        moves["end"] = ranges["end"]
        moves["bytes"] = moves["end"] - moves["start"]
        moves["source"] = self.mover.topology.tiers[-1].rank
        moves["destination"] = self._destination()
        return Plan(pids=(pid,), moves=moves)

    def _destination(self) -> Rank:
        """Returns the fastest tier with room, the fastest of all where none has any."""
        others = self.mover.topology.tiers[:-1]
        roomy = (t for t in others if sum(map(self.room, t.nodes)) >= LEAST_ROOM_BYTES)
        return next(roomy, others[0]).rank

    def _count(self, report: Report) -> None:
        self.learn(report)
        pages = report.pages.sum(axis=0)
        self.moved_pages += int(pages[Outcome.MOVED])
        self._moved_in_pass += int(pages[Outcome.MOVED])
        for outcome in Outcome:
            if outcome not in _NOT_THERE and outcome is not Outcome.LATER and pages[outcome]:
                self._left_in_pass[outcome] += int(pages[outcome])


def apart(topology: Topology, node: NodeId) -> Topology:
    """Returns the topology with the node in a tier of its own, the last."""
    rest = [
        replace(tier, nodes=tuple(other for other in tier.nodes if other != node))
        for tier in topology.tiers
    ]
    emptied = next(tier for tier in topology.tiers if node in tier.nodes)
    last = Tier(
        rank=Rank(0), name=f"node{node}", kind=emptied.kind, nodes=(node,), capacity_bytes=0
    )
    tiers = [*(tier for tier in rest if tier.nodes), last]
    return replace(
        topology, tiers=tuple(replace(t, rank=Rank(rank)) for rank, t in enumerate(tiers))
    )
