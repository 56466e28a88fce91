# SPDX-License-Identifier: Apache-2.0
"""The move_pages mover: walks a plan's ranges, and moves what lies in the source tier.

Each step takes some thousand folios, of one range or of many small ones: list those present, ask
on which node each is, leave out what need not or must not move, then move the rest in batches. A
huge page, which moves whole, makes way with ranges that have most of it alone. The next step is
listed and asked for while this one moves; the first step, for which nothing moves meanwhile, is
small, and the others grow.
Before every batch the destination's free memory is looked at: move_pages(2) allocates on that node
alone, and a full one ends in reclaim and then in the OOM killer, so it is never filled beyond the
zones' high watermarks and what of the configured headroom is to stay free. As much as has left it
in the same run may come in its place all the same.
"""

import errno
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Plan, Report
from tierd.kernel import pages
from tierd.kernel.pages import RANGE, Pagemap
from tierd.migrate.limits import Limits
from tierd.model import PAGE_BYTES, NodeId, Outcome, Pid, Topology

ROOM_SHARE, LEAST_BATCH_PAGES = 4, 512
"""A batch takes a quarter of the room at most: others allocate too before it is asked for again."""

FIRST_SHARE, GROWTH = 16, 4
"""The first step is a sixteenth of a batch; each next one grows fourfold, up to a batch."""

CANDIDATE = -1
"""Not an Outcome yet: in the source tier, and to be moved."""

Room = Callable[[NodeId], int]
"""Bytes that a node can take until no more is left than is to stay free."""

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
    errno.ENODEV: Outcome.OFFLINE,
}
_NODES, _ERRNOS = 1024, 4096
"""More than the kernel has: MAX_NUMNODES in Kconfig, MAX_ERRNO in include/linux/err.h."""

_PUT_OFF = (Outcome.LATER, Outcome.NO_ROOM, Outcome.OFFLINE)
_ENDS_TARGET = frozenset({Outcome.GONE, Outcome.DENIED, Outcome.CPUSET})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """Makes plans' moves with move_pages(2).

    Args:
        topology: tells which nodes are which tier.
        room: bytes a node can still take; asked before every batch.
        may_replace: whether a node may take as much as a run has moved away from it, whatever there
            is room for; asked likewise.
        limits: what a process's own settings allow, None when it has gone.
        batch_pages: base pages a call.
        interrupted: asked before every batch; what is left once it says so is LATER.
    """

    topology: Topology
    room: Room
    limits: Callable[[Pid], Limits | None]
    batch_pages: int
    may_replace: Callable[[NodeId], bool] = lambda node: False
    interrupted: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        """Makes the moves in order until the deadline; what is left then is LATER.

        Rows that the deadline leaves are not looked at.
        """
        book = _Book(plan)
        with ThreadPoolExecutor(1, "tierd-ahead") as pool:
            for rows in _groups(plan.moves):
                _Group(self, book, rows, deadline_s).run(pool)
        return Report(
            plan=plan,
            pages=book.pages,
            reached=book.reached,
            busy_ns=book.busy_ns,
        )


class _Book:
    """The report in the making."""

    def __init__(self, plan: Plan) -> None:
        moves = plan.moves
        self.plan = plan
        self.pages = np.zeros((len(moves), len(Outcome)), np.int64)
        self.reached = moves["start"].copy()
        self.left = -(-moves["bytes"].astype(np.int64) // PAGE_BYTES)
        self.gone = np.zeros(_NODES, np.int64)
        """Pages that each node has less than at the start, by this run."""
        self.busy_ns = 0

    def note_moved(self, sources: NDArray[np.int32], sizes: NDArray[np.uint32], to: NodeId) -> None:
        """Notes folios that have gone from these nodes to another one."""
        self.gone += np.bincount(sources, sizes, _NODES).astype(np.int64)
        self.gone[to] -= sizes.sum()

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


@dataclass(frozen=True, slots=True)
class _Step:
    """What was listed: how far of which rows; each folio's row and Outcome, or CANDIDATE."""

    rows: NDArray[np.intp]
    cursors: NDArray[np.uint64]
    folios: NDArray[np.void]
    row: NDArray[np.intp]
    outcome: NDArray[np.int16]


def _ahead(steps: Iterator[_Step], pool: Executor) -> Generator[_Step]:
    """Yields the steps, each next one being made by the pool meanwhile."""
    step = next(steps, None)
    while step is not None:
        following = pool.submit(next, steps, None)
        try:
            yield step
        finally:
            wait([following])
        step = following.result()


class _Group:
    """Rows of one target, source and destination."""

    def __init__(
        self, mover: Mover, book: _Book, rows: NDArray[np.intp], deadline_s: float
    ) -> None:
        first = book.plan.moves[rows[0]]
        tiers = mover.topology.tiers
        self.mover, self.book, self.rows, self.deadline_s = mover, book, rows, deadline_s
        self.pid = book.plan.pids[first["target"]]
        self.destination = tiers[first["destination"]].nodes
        self.source = tiers[first["source"]].nodes
        self.sinks = bool(first["destination"] > first["source"])

    def run(self, pool: Executor) -> None:
        """Moves until the rows are done, put off, or the target turns out to be out of bounds."""
        ended = Outcome.LATER if self._is_over() else self._move_all(pool)
        self.book.close(self.rows, Outcome.LATER if ended is None else ended)

    def _move_all(self, pool: Executor) -> Outcome | None:
        limits = self.mover.limits(self.pid)
        if limits is None:
            return Outcome.GONE
        nodes = limits.among(self.destination)
        if not nodes:
            return Outcome.CPUSET
        try:
            with (
                Pagemap(self.pid) as pagemap,
                closing(_ahead(self._steps(pagemap, nodes, limits), pool)) as steps,
            ):
                for step in steps:
                    ended = self._move_step(step, nodes)
                    if ended is not None:
                        return ended
        except ProcessLookupError:
            return Outcome.GONE
        except PermissionError:
            return Outcome.DENIED
        self.book.left[self.rows] = 0
        return None

    def _steps(self, pagemap: Pagemap, nodes: Sequence[NodeId], limits: Limits) -> Iterator[_Step]:
        """Yields some folios at a time, in the rows' order."""
        for rows, ranges, folios in self._list(pagemap):
            pages.query(self.pid, folios)
            outcome = _outcome_of_node(self.source, CANDIDATE, Outcome.RESIDENT)[folios["node"]]
            if self.sinks:
                self._leave_cut(folios, outcome)
            self._respect(limits, nodes, folios["addr"], outcome)
            row = np.repeat(rows, ranges["folios"].astype(np.intp))
            cursors = np.minimum(ranges["start"], self.book.plan.moves["end"][rows])
            yield _Step(rows, cursors, folios, row, outcome)

    def _list(
        self, pagemap: Pagemap
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.void], NDArray[np.void]]]:
        """Yields rows, what was listed of each, and the folios.

        A row that has just had its bytes may be listed once more.
        """
        most = max(1, self.mover.batch_pages // FIRST_SHARE)
        moves, rows = self.book.plan.moves[self.rows], self.rows
        ranges = np.zeros(len(rows), RANGE)
        ranges["start"] = moves["start"] // PAGE_BYTES * PAGE_BYTES
        ranges["end"] = (moves["end"] + (PAGE_BYTES - 1)) // PAGE_BYTES * PAGE_BYTES
        while True:
            left = (ranges["start"] < ranges["end"]) & (self.book.left[rows] > 0)
            rows, ranges = rows[left], ranges[left]
            if not len(rows):
                return
            folios, come_to = pagemap.list_ranges(ranges, most)
            yield rows[:come_to], ranges[:come_to], folios
            most = min(most * GROWTH, self.mover.batch_pages)

    def _move_step(self, step: _Step, nodes: Sequence[NodeId]) -> Outcome | None:
        """Returns why the group cannot go on, None where it can."""
        step = self._less_done(step)
        row, folios, outcome = step.row, step.folios, step.outcome
        if not len(folios):
            self.book.reached[step.rows] = step.cursors
            return None
        self._ration(row, folios["pages"], outcome)
        tried = outcome == CANDIDATE
        ended = self._move_candidates(nodes, folios, outcome)
        self._count(row, folios["pages"], outcome, tried)
        self._note_reached(step)
        return ended

    def _less_done(self, step: _Step) -> _Step:
        """Returns the step without the rows that have had their bytes since they were listed."""
        left = self.book.left
        wanted = left[step.rows] > 0
        if wanted.all():
            return step
        kept = left[step.row] > 0
        return _Step(
            rows=step.rows[wanted],
            cursors=step.cursors[wanted],
            folios=step.folios[kept],
            row=step.row[kept],
            outcome=step.outcome[kept],
        )

    def _leave_cut(self, folios: NDArray[np.void], outcome: NDArray[np.int16]) -> None:
        """Leaves huge pages most of which is in no row; of them only what is counts as listed."""
        huge = np.flatnonzero((outcome == CANDIDATE) & (folios["pages"] > 1))
        if not len(huge):
            return
        moves = self.book.plan.moves[self.rows]
        inside = pages_within(folios[huge], moves["start"], moves["end"])
        cut = np.flatnonzero(2 * inside < folios["pages"][huge])
        outcome[huge[cut]], folios["pages"][huge[cut]] = Outcome.CUT, inside[cut]

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
        self, row: NDArray[np.intp], sizes: NDArray[np.uint32], outcome: NDArray[np.int16]
    ) -> None:
        """Puts off what exceeds a row's bytes."""
        if sizes.sum() <= self.book.left[row[0] : row[-1] + 1].min():
            return
        wanted = np.where(outcome == CANDIDATE, sizes, 0)
        before = np.cumsum(wanted, dtype=np.int64) - wanted
        first = np.searchsorted(row, row, "left")
        outcome[(wanted > 0) & (before - before[first] >= self.book.left[row])] = Outcome.LATER

    def _move_candidates(
        self, nodes: Sequence[NodeId], folios: NDArray[np.void], outcome: NDArray[np.int16]
    ) -> Outcome | None:
        """Moves them batch by batch. Returns why the group cannot go on, None where it can."""
        queue = np.flatnonzero(outcome == CANDIDATE)
        moving = folios if len(queue) == len(folios) else folios[queue]
        ends = np.cumsum(moving["pages"], dtype=np.int64)
        done = 0
        while done < len(queue):
            node, until = self._next_batch(nodes, ends, done)
            if until == done or self._is_over():
                ended = Outcome.NO_ROOM if until == done else Outcome.LATER
                outcome[queue[done:]] = ended
                return ended
            now, batch = queue[done:until], moving[done:until]
            sources, begin_ns = batch["node"].copy(), time.monotonic_ns()
            tally = pages.move(self.pid, batch, node, batch_pages=self.mover.batch_pages)
            self.book.busy_ns += time.monotonic_ns() - begin_ns
            outcome[now] = _outcome_of_node((node,), Outcome.MOVED, Outcome.BUSY)[batch["node"]]
            moved = outcome[now] == Outcome.MOVED
            self.book.note_moved(sources[moved], batch["pages"][moved], node)
            if tally.stopped:
                ended = _BY_STOP.get(tally.stopped, Outcome.FAILED)
                outcome[now[outcome[now] != Outcome.MOVED]] = outcome[queue[until:]] = ended
                return ended
            done = until
        return None

    def _is_over(self) -> bool:
        return self.mover.clock() >= self.deadline_s or self.mover.interrupted()

    def _next_batch(
        self, nodes: Sequence[NodeId], ends: NDArray[np.int64], done: int
    ) -> tuple[NodeId, int]:
        """Chooses the roomiest node, and how many of the folios to have sent after a batch to it.

        Args:
            nodes: where they may go.
            ends: base pages of all folios up to and with each.
            done: folios that were sent before; the answer is the same if none fits.
        """
        room = {node: self._room_pages(node) for node in nodes}
        node = max(nodes, key=lambda n: room[n])
        sent = int(ends[done - 1]) if done else 0
        share = max(LEAST_BATCH_PAGES, room[node] // ROOM_SHARE)
        most = min(self.mover.batch_pages, share)
        fits, batch = np.searchsorted(ends, [sent + room[node], sent + most], "right")
        return node, min(int(fits), max(done + 1, int(batch)))

    def _room_pages(self, node: NodeId) -> int:
        """Returns what a node may take: what is free, or what has left it.

        What has left it single CPUs may keep aside, for those to take that come in its place; it is
        free for others seconds later, and then something else may have taken it.
        """
        room_pages, gone_pages = self.mover.room(node) // PAGE_BYTES, int(self.book.gone[node])
        if room_pages < gone_pages and self.mover.may_replace(node):
            return gone_pages
        return room_pages

    def _count(
        self,
        row: NDArray[np.intp],
        sizes: NDArray[np.uint32],
        outcome: NDArray[np.int16],
        tried: NDArray[np.bool_],
    ) -> None:
        first, last = row[0], row[-1] + 1
        cells = outcome + len(Outcome) * (tried + 2 * (row - first))
        counts = np.bincount(cells, sizes, 2 * len(Outcome) * (last - first)).astype(np.int64)
        by_row = counts.reshape(-1, 2, len(Outcome))
        self.book.pages[first:last] += by_row.sum(axis=1)
        self.book.left[first:last] -= by_row[:, 1].sum(axis=1)

    def _note_reached(self, step: _Step) -> None:
        """Sets how far each row was walked: up to its first folio that was put off."""
        self.book.reached[step.rows] = step.cursors
        put_off = np.flatnonzero(np.isin(step.outcome, _PUT_OFF))
        if not len(put_off):
            return
        rows, first = np.unique(step.row[put_off], return_index=True)
        self.book.reached[rows] = step.folios["addr"][put_off[first]]


def pages_within(
    folios: NDArray[np.void], start: NDArray[np.uint64], end: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Returns how many base pages of each folio (dtype FOLIO) are in disjoint ranges, in part too.

    Args:
        folios: in any order.
        start: of each range, in any order.
        end: of each range.
    """
    order = np.argsort(start)
    first = start[order].astype(np.int64) // PAGE_BYTES
    behind = -(-end[order].astype(np.int64) // PAGE_BYTES)
    before = np.concatenate([[0], np.cumsum(behind - first)])

    def below(page: NDArray[np.int64]) -> NDArray[np.int64]:
        at = np.searchsorted(first, page, "right")
        beyond = np.maximum(behind[at - 1] - page, 0) * (at > 0)
        return np.asarray(before[at] - beyond, np.int64)

    begins = folios["addr"].astype(np.int64) // PAGE_BYTES
    return below(begins + folios["pages"]) - below(begins)


@lru_cache(maxsize=64)
def _outcome_of_node(
    nodes: tuple[NodeId, ...], there: int, elsewhere: Outcome
) -> NDArray[np.int16]:
    """Returns a table from a node to `there` or `elsewhere`; from a negative errno to its outcome.

    An errno finds its place from the end, as negative indices do.
    """
    table = np.full(_NODES + _ERRNOS, elsewhere, np.int16)
    table[list(nodes)] = there
    table[_NODES:] = Outcome.FAILED
    table[[-number for number in _BY_ERRNO]] = list(_BY_ERRNO.values())
    table.flags.writeable = False
    return table
