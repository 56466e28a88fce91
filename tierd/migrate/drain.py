# SPDX-License-Identifier: Apache-2.0
"""Takes the pages of all processes off a node, or out of a part of it, as far as they may be moved.

What is known to be hot goes first. Then it walks one process after another, each by a plan of all
that it has mapped, to the fastest tier that has room; the mover keeps to the process's limits as
ever. A pass over all processes in which nothing was moved any more ends it. What others allocate
goes to the node all the same: only taking its memory blocks offline keeps them from it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import MOVE, Plan, Report
from tierd.kernel import process
from tierd.migrate.mover import Mover
from tierd.model import PAGE_BYTES, NodeId, Outcome, Pid, Rank, Tier, Topology

LEAST_ROOM_BYTES = 512 * PAGE_BYTES
"""A tier with less room is passed over for the next."""

_Turn = tuple[Pid, NDArray[np.void] | None]
"""A process, and the ranges of it that are hot; None for all of it."""

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
        find_in: returns what a process has that is to be looked at from an address on (fields start
            and end, in ascending order), and from which address the next call goes on, None after
            the last one.
        learn: is given each report, for what a move costs.
        hottest: returns processes with ranges of theirs (fields start and end, by rising address),
            which go first, in this order.
    """

    node: NodeId
    mover: Mover
    room: Callable[[NodeId], int]
    find: Callable[[], Iterable[Pid]]
    find_in: Callable[[Pid, int], tuple[NDArray[np.void], int | None]]
    learn: Callable[[Report], None]
    hottest: Callable[[], Iterable[tuple[Pid, NDArray[np.void]]]] = tuple
    clock: Callable[[], float] = time.monotonic

    moved_pages: int = 0
    left: Mapping[Outcome, int] = field(default_factory=dict)
    """Pages that the last whole pass found on the node and could not move."""

    passes: int = 0
    is_done: bool = False
    processes: int = 0
    _waiting: deque[_Turn] = field(default_factory=deque)
    _cursor: int = 0
    _moved_in_pass: int = 0
    _left_in_pass: Counter[Outcome] = field(default_factory=Counter)

    @property
    def processes_left(self) -> int:
        """How many the present pass has still to walk, of `processes`."""
        return sum(ranges is None for _, ranges in self._waiting)

    def run(self, deadline_s: float) -> None:
        """Goes on until the deadline, or until there is nothing more to do."""
        while not self.is_done and self.clock() < deadline_s and not self.mover.interrupted():
            if not self._waiting:
                self._begin_pass()
            if self._waiting:
                self._walk(*self._waiting[0], deadline_s)
            if not self._waiting:
                self._end_pass()

    def again(self) -> None:
        """Begins a pass anew, also where it was done."""
        self.is_done = False
        self._waiting.clear()

    def _begin_pass(self) -> None:
        found = [(pid, None) for pid in self.find()]
        self._waiting.extend(() if self.passes else self.hottest())
        self._waiting.extend(found)
        self.processes = len(found)
        self._cursor = self._moved_in_pass = 0
        self._left_in_pass = Counter()

    def _end_pass(self) -> None:
        self.passes += 1
        self.left = self._left_in_pass
        self.is_done = self._moved_in_pass == 0

    def _walk(self, pid: Pid, hot: NDArray[np.void] | None, deadline_s: float) -> None:
        """Goes on with the hot ranges of a process, or with what else it has."""
        if hot is None:
            ranges, following = self.find_in(pid, self._cursor)
        else:
            ranges, following = hot[hot["end"] > self._cursor], None
        if len(ranges):
            report = self.mover.run(self._plan(pid, ranges), deadline_s=deadline_s)
            self._count(report)
            put_off = np.flatnonzero(report.pages[:, Outcome.LATER])
            if len(put_off):
                self._cursor = int(report.reached[put_off[0]])
                return
        self._cursor = following or 0
        if following is None:
            self._waiting.popleft()

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


def find_mapped(pid: Pid, cursor: int) -> tuple[NDArray[np.void], int | None]:
    """Returns all that a process has mapped from an address on, for a drain to look at.

    There is nothing of one that has gone, nor of what we may not look into, as kernel threads.
    """
    try:
        mapped = process.read_mapped(pid)
    except PermissionError:
        mapped = None
    if mapped is None:
        return np.empty(0, process.RANGE), None
    return mapped[mapped["end"] > cursor], None
