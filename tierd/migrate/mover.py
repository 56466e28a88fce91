# SPDX-License-Identifier: Apache-2.0
"""The move_pages mover: walks a plan's ranges, and moves what lies in the source tier.

Each step takes a few thousand folios, of one range or of many small ones: list those present, ask
on which node each is, leave out what need not or must not move, then move the rest in batches.
Before every batch the destination's free memory is looked at: move_pages(2) allocates on that node
alone, and a full one ends in reclaim and then in the OOM killer, so it is never filled beyond the
zones' high watermarks and the configured headroom.
"""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierd.kernel import pages
from tierd.kernel.pages import Pagemap
from tierd.migrate.limits import Limits
from tierd.model import PAGE_BYTES, NodeId, Outcome, Pid, Plan, Rank, Report, Topology

STEP_BATCHES = 4
"""A step lists so many batches' worth of pages before it asks where they are."""

CANDIDATE = -1
"""Not an Outcome yet: in the source tier, and to be moved."""

Room = Callable[[NodeId], int]
"""Bytes that a node can take before it is at its headroom."""

_BY_ERRNO = {
    errno.ENOENT: Outcome.ABSENT,
    errno.EFAULT: Outcome.UNMOVABLE,
    errno.EBUSY: Outcome.BUSY,
    errno.EACCES: Outcome.SHARED,
    errno.ENOMEM: Outcome.NO_ROOM,
}
_BY_STOP = {
    errno.ESRCH: Outcome.GONE,
    errno.EPERM: Outcome.DENIED,
    errno.EACCES: Outcome.CPUSET,
    errno.ENOMEM: Outcome.NO_ROOM,
}
_ERRNO_TABLE = np.full(256, Outcome.FAILED, np.int16)
_ERRNO_TABLE[list(_BY_ERRNO)] = list(_BY_ERRNO.values())

_ENDS_TARGET = frozenset({Outcome.GONE, Outcome.DENIED, Outcome.CPUSET})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """Makes plans' moves with move_pages(2).

    Args:
        topology: tells which nodes are which tier.
        room: bytes a node can still take; asked before every batch.
        limits: what a process's own settings allow, None when it has gone.
        batch_pages: base pages a call.
    """

    topology: Topology
    room: Room
    limits: Callable[[Pid], Limits | None]
    batch_pages: int
    clock: Callable[[], float] = time.monotonic

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        """Makes the moves in order until the deadline; what is left then is LATER."""
        begin_ns = time.monotonic_ns()
        book = _Book(plan)
        for rows in _groups(plan.moves):
            group = _Group(self, book, rows, deadline_s)
            group.run()
        return Report(
            plan=plan,
            pages=book.pages,
            reached=book.reached,
            busy_ns=time.monotonic_ns() - begin_ns,
        )


class _Book:
    """The report in the making."""

    def __init__(self, plan: Plan) -> None:
        moves = plan.moves
        self.plan = plan
        self.pages = np.zeros((len(moves), len(Outcome)), np.int64)
        self.reached = moves["start"].copy()
        self.left = -(-moves["bytes"].astype(np.int64) // PAGE_BYTES)

    def close(self, rows: NDArray[np.intp], outcome: Outcome) -> None:
        """Gives what is left of the rows one outcome; a lasting one counts as walked."""
        self.pages[rows, outcome] += np.maximum(self.left[rows], 0)
        self.left[rows] = 0
        if outcome in _ENDS_TARGET:
            self.reached[rows] = self.plan.moves["end"][rows]


def _groups(moves: NDArray[np.void]) -> Iterator[NDArray[np.intp]]:
    """Yields runs of rows with one target, source and destination, in the plan's order."""
    if not len(moves):
        return
    kind = moves[["target", "source", "destination"]]
    yield from np.split(np.arange(len(moves)), np.flatnonzero(kind[1:] != kind[:-1]) + 1)


@dataclass(slots=True)
class _Step:
    """Folios listed so far, and how far each row has been listed."""

    folios: list[NDArray[np.void]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    cursors: list[int] = field(default_factory=list)
    pages: int = 0

    def add(self, row: int, folios: NDArray[np.void], cursor: int) -> None:
        self.folios.append(folios)
        self.rows.append(row)
        self.cursors.append(cursor)
        self.pages += int(folios["pages"].sum())


class _Group:
    """Rows of one target, source and destination."""

    def __init__(
        self, mover: Mover, book: _Book, rows: NDArray[np.intp], deadline_s: float
    ) -> None:
        first = book.plan.moves[rows[0]]
        tiers = mover.topology.tiers
        self.mover, self.book, self.rows, self.deadline_s = mover, book, rows, deadline_s
        self.pid = book.plan.pids[first["target"]]
        self.source = Rank(int(first["source"]))
        self.destination = tiers[first["destination"]].nodes
        self.rank_of_node = mover.topology.rank_of_node()

    def run(self) -> None:
        """Moves until the rows are done, put off, or the target turns out to be out of bounds."""
        ended = self._move_all()
        self.book.close(self.rows, Outcome.LATER if ended is None else ended)

    def _move_all(self) -> Outcome | None:
        limits = self.mover.limits(self.pid)
        if limits is None:
            return Outcome.GONE
        nodes = limits.among(self.destination)
        if not nodes:
            return Outcome.CPUSET
        try:
            with Pagemap(self.pid) as pagemap:
                for step in self._steps(pagemap):
                    ended = self._move_step(step, nodes, limits)
                    if ended is not None:
                        return ended
        except ProcessLookupError:
            return Outcome.GONE
        except PermissionError:
            return Outcome.DENIED
        self.book.left[self.rows] = 0
        return None

    def _steps(self, pagemap: Pagemap) -> Iterator[_Step]:
        most = self.mover.batch_pages * STEP_BATCHES
        moves, step = self.book.plan.moves, _Step()
        for row in map(int, self.rows):
            cursor, end = int(moves["start"][row]), int(moves["end"][row])
            while cursor < end and self.book.left[row] > 0:
                most_here = min(most, (end - cursor) // PAGE_BYTES)
                folios, cursor = pagemap.folios(cursor, end, most_here)
                step.add(row, folios, min(cursor, end))
                if step.pages >= most:
                    yield step
                    step = _Step()
        if step.rows:
            yield step

    def _move_step(self, step: _Step, nodes: Sequence[NodeId], limits: Limits) -> Outcome | None:
        """Returns why the group cannot go on, None where it can."""
        folios = np.concatenate(step.folios)
        row = np.repeat(step.rows, [len(f) for f in step.folios])
        if not len(folios):
            self.book.reached[step.rows] = step.cursors
            return None
        pages.query(self.pid, folios)
        outcome = self._classify(folios["node"])
        self._respect(limits, nodes, folios["addr"], outcome)
        self._ration(row, folios, outcome)
        tried = outcome == CANDIDATE
        ended = self._move_candidates(nodes, folios, outcome)
        self._count(row, folios["pages"], outcome, tried)
        self._note_reached(step, row, folios, outcome)
        return ended

    def _classify(self, node: NDArray[np.int32]) -> NDArray[np.int16]:
        """Returns an Outcome for what need not or cannot move, CANDIDATE for the rest."""
        known = np.clip(node, 0, len(self.rank_of_node) - 1)
        here = self.rank_of_node[known] == self.source
        refused = _ERRNO_TABLE[np.clip(-node, 0, len(_ERRNO_TABLE) - 1)]
        outcome = np.where(node < 0, refused, np.where(here, CANDIDATE, Outcome.RESIDENT))
        return np.asarray(outcome, np.int16)

    def _respect(
        self,
        limits: Limits,
        nodes: Sequence[NodeId],
        addresses: NDArray[np.uint64],
        outcome: NDArray[np.int16],
    ) -> None:
        candidate = outcome == CANDIDATE
        outcome[candidate & limits.is_locked(addresses)] = Outcome.LOCKED
        for node in nodes:
            elsewhere = limits.is_bound_elsewhere(addresses, node)
            outcome[candidate & elsewhere] = Outcome.MEMPOLICY

    def _ration(
        self, row: NDArray[np.intp], folios: NDArray[np.void], outcome: NDArray[np.int16]
    ) -> None:
        """Puts off what exceeds a row's bytes."""
        wanted = np.where(outcome == CANDIDATE, folios["pages"], 0).astype(np.int64)
        before = np.cumsum(wanted) - wanted
        first = np.searchsorted(row, row, "left")
        outcome[(wanted > 0) & (before - before[first] >= self.book.left[row])] = Outcome.LATER

    def _move_candidates(
        self, nodes: Sequence[NodeId], folios: NDArray[np.void], outcome: NDArray[np.int16]
    ) -> Outcome | None:
        queue = np.flatnonzero(outcome == CANDIDATE)
        while len(queue):
            node, batch = self._next_batch(nodes, folios["pages"][queue])
            if not batch:
                outcome[queue] = Outcome.NO_ROOM
                return Outcome.NO_ROOM
            if self.mover.clock() >= self.deadline_s:
                outcome[queue] = Outcome.LATER
                return Outcome.LATER
            now, queue = queue[:batch], queue[batch:]
            moving = folios[now]
            tally = pages.move(self.pid, moving, node, batch_pages=self.mover.batch_pages)
            outcome[now] = _after_move(moving["node"], node)
            if tally.stopped:
                ended = _BY_STOP.get(tally.stopped, Outcome.FAILED)
                unmoved = now[outcome[now] != Outcome.MOVED]
                outcome[unmoved] = outcome[queue] = ended
                return ended
        return None

    def _next_batch(self, nodes: Sequence[NodeId], sizes: NDArray[np.uint32]) -> tuple[NodeId, int]:
        """Returns the roomiest node and how many of the folios to send there, 0 if none fits."""
        room = {node: self.mover.room(node) // PAGE_BYTES for node in nodes}
        node = max(nodes, key=lambda n: room[n])
        reached = np.cumsum(sizes)
        fits = int(np.searchsorted(reached, room[node], "right"))
        batch = max(1, int(np.searchsorted(reached, self.mover.batch_pages, "right")))
        return node, min(fits, batch)

    def _count(
        self,
        row: NDArray[np.intp],
        sizes: NDArray[np.uint32],
        outcome: NDArray[np.int16],
        tried: NDArray[np.bool_],
    ) -> None:
        first, last = row[0], row[-1] + 1
        cells = (row - first) * len(Outcome) + outcome
        counts = np.bincount(cells, sizes, (last - first) * len(Outcome)).astype(np.int64)
        self.book.pages[first:last] += counts.reshape(-1, len(Outcome))
        spent = np.bincount(row - first, sizes * tried, last - first).astype(np.int64)
        self.book.left[first:last] -= spent

    def _note_reached(
        self,
        step: _Step,
        row: NDArray[np.intp],
        folios: NDArray[np.void],
        outcome: NDArray[np.int16],
    ) -> None:
        """Sets how far each row was walked: up to its first folio that was put off."""
        self.book.reached[step.rows] = step.cursors
        put_off = np.flatnonzero((outcome == Outcome.LATER) | (outcome == Outcome.NO_ROOM))
        rows, first = np.unique(row[put_off], return_index=True)
        self.book.reached[rows] = folios["addr"][put_off[first]]


def _after_move(node: NDArray[np.int32], destination: NodeId) -> NDArray[np.int16]:
    """Returns the outcomes of folios that were handed to the kernel."""
    refused = _ERRNO_TABLE[np.clip(-node, 0, len(_ERRNO_TABLE) - 1)]
    elsewhere = np.where(node == destination, Outcome.MOVED, Outcome.BUSY)
    return np.asarray(np.where(node < 0, refused, elsewhere), np.int16)
