# SPDX-License-Identifier: Apache-2.0
"""A DAMON session over many processes: a kdamond each, beside those of others.

One kdamond per process, so that one that comes or goes disturbs no other's sampling. Everything
that is changed on the machine is in the journal first, and taken back by unwatch() and close().
"""

import errno
import logging
import math
import os
import secrets
import select
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tierd.config import DamonConfig
from tierd.errors import Conflict, TierdError
from tierd.journal import EntryId, Journal, Kdamond, Slots
from tierd.kernel import process, tracepoint
from tierd.kernel.damon import Admin, ExclusiveUse, Setup, Slot, SlotIndex
from tierd.kernel.ring import Snapshot
from tierd.kernel.tunable import Files
from tierd.model import Accesses, Pid
from tierd.sample import tuning
from tierd.sample.governor import Governor, Started
from tierd.sample.reader import (
    TRIED_REGIONS_LEAST,
    TRIED_REGIONS_MOST,
    Reader,
    RingReader,
    TriedRegionsReader,
)
from tierd.sample.tuning import Tuning

log = logging.getLogger("tierd")

SLOTS = 32
"""Kdamond slots that are made where nobody has made any: the most targets, and room for others."""

POLLED_WITHIN_S, RING_MOST_AGGREGATIONS = 2.0, 16
"""A ring holds twice what comes in so long: a round that is late by seconds loses nothing."""

MARK_FIRST_US, MARKS = 1_000_001, 99_999
"""A session's mark is the interval at which DAMON follows mappings: 1 s and some odd us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """One target."""

    pid: Pid
    pidfd: int
    entry: EntryId
    reader: Reader
    governor: Governor

    def read(self) -> list[Accesses]:
        return [self._accesses(snapshot) for snapshot in self.reader.read()]

    def has_ended(self) -> bool:
        return _has_exited(self.pidfd) or self.reader.has_ended()

    def close(self) -> None:
        self.governor.close()
        self.reader.close()
        os.close(self.pidfd)

    def _accesses(self, snapshot: Snapshot) -> Accesses:
        self.governor.note_snapshot(snapshot.at_s)
        setup = self.governor.setup
        return Accesses(
            pid=self.pid,
            at_s=snapshot.at_s,
            sample_s=setup.sample_us / 1e6,
            aggregation_s=setup.aggregation_us / 1e6,
            regions=snapshot.regions,
        )


class Session:
    """A tierd.sample.sampler.Sampler over DAMON.

    Args:
        config: intervals, regions, CPU budget, and whether damon_stat may be stopped.
        journal: where changes are recorded.
        root: where `/proc` and `/sys` hang, `/` outside of tests.
        files: how DAMON's files are reached.

    Raises:
        UnsupportedKernel: DAMON's interface is missing.
    """

    def __init__(
        self,
        config: DamonConfig,
        journal: Journal,
        *,
        root: Path = Path("/"),
        files: Files | None = None,
    ) -> None:
        self._config = config
        self._journal = journal
        self._admin = Admin(root, files)
        self._admin.check()
        self._tracepoint = tracepoint.find(root)
        self._mark_us = MARK_FIRST_US + secrets.randbelow(MARKS)
        self._watches: dict[Pid, Watch] = {}
        self._entries: list[EntryId] = []
        self._left: list[EntryId] = []
        self._losses = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tierd-damon")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def way(self) -> str:
        """`tracepoint`, or `tried_regions` where tracefs or perf is out of reach."""
        return "tried_regions" if self._tracepoint is None else "tracepoint"

    @property
    def cpu_percent(self) -> float:
        """What all kdamonds together may use of a core; it may be changed at any time."""
        return self._config.cpu_percent

    @cpu_percent.setter
    def cpu_percent(self, percent: float) -> None:
        self._config = replace(self._config, cpu_percent=percent)

    @property
    def losses(self) -> int:
        return self._losses + sum(watch.reader.lost for watch in self._watches.values())

    @property
    def tuning(self) -> Mapping[Pid, Tuning]:
        return {pid: watch.governor.tuning for pid, watch in self._watches.items()}

    def watch(self, pid: Pid) -> None:
        """Begins to watch a process; one that is watched already goes on.

        Raises:
            ProcessLookupError: there is no such process (any more).
            Conflict: others hold DAMON, or all its slots; the message says who.
            UnsupportedKernel: DAMON cannot watch virtual addresses.
            TierdError: it is a kernel thread, or DAMON may not be set up by us.
        """
        if pid in self._watches:
            return
        with ExitStack() as stack:
            pidfd = _open_process(pid)
            stack.callback(os.close, pidfd)
            self._watches[pid] = self._open(pid, pidfd)
            stack.pop_all()

    def unwatch(self, pid: Pid) -> None:
        """Stops the process's kdamond and empties its slot, with the next if DAMON is busy now."""
        watch = self._watches.pop(pid, None)
        if watch is None:
            return
        self._losses += watch.reader.lost
        watch.close()
        self._left.append(watch.entry)
        self._stop_left()

    def poll(self) -> list[Accesses]:
        found = [accesses for watch in self._watches.values() for accesses in watch.read()]
        now_s = time.monotonic()
        for watch in self._watches.values():
            watch.governor.govern(now_s, self._config.cpu_percent / len(self._watches))
        return sorted(found, key=lambda accesses: accesses.at_s)

    def gone(self) -> list[Pid]:
        """Lets go of targets that have exited, or whose kdamond somebody else has stopped."""
        gone = [pid for pid, watch in self._watches.items() if watch.has_ended()]
        for pid in gone:
            self.unwatch(pid)
        return gone

    def filenos(self) -> list[int]:
        """Returns a descriptor a target that tells its end, and one for its snapshots.

        By tried_regions nothing tells of snapshots: poll() has to be called in time.
        """
        watches = self._watches.values()
        return [fd for watch in watches for fd in (watch.pidfd, *watch.reader.filenos())]

    def close(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(self._worker.shutdown)
            for entry in self._entries:
                last_first.callback(self._journal.revert, entry)
            for pid in self._watches:
                last_first.callback(self.unwatch, pid)

    def _stop_left(self) -> None:
        """What stays left is in the journal, and so stopped at the end at the latest."""
        while self._left:
            try:
                self._journal.revert(self._left[0])
            except TierdError as error:
                log.warning("a kdamond that is needed no more goes on for now: %s", error)
                return
            del self._left[0]

    def _open(self, pid: Pid, pidfd: int) -> Watch:
        """Watches by the ring, from the first refusal of perf on by tried_regions."""
        try:
            return self._open_once(pid, pidfd)
        except PermissionError:
            if self._tracepoint is None:
                raise
            self._tracepoint = None
        except ProcessLookupError:  # of the kdamond, which ends with its target
            raise _no_process(pid) from None
        return self._open_once(pid, pidfd)

    def _open_once(self, pid: Pid, pidfd: int) -> Watch:
        started = self._start(pid, pidfd)
        with ExitStack() as stack:
            stack.callback(self._journal.revert, started.entry)
            reader = self._reader(started)
            stack.callback(reader.close)
            now_s = time.monotonic()
            governor = Governor(
                self._limits, self._admin, started, worker=self._worker, now_s=now_s
            )
            stack.pop_all()
        return Watch(pid=pid, pidfd=pidfd, entry=started.entry, reader=reader, governor=governor)

    def _start(self, pid: Pid, pidfd: int) -> Started:
        """Starts a kdamond, stopping damon_stat for it where that is configured."""
        try:
            return self._start_once(pid, pidfd)
        except ExclusiveUse as use:
            if use.module != "damon_stat" or not self._config.take_over:
                raise
            entry = self._journal.write(use.switch, "N")
        if entry is not None:
            self._entries.append(entry)
        return self._start_once(pid, pidfd)

    def _start_once(self, pid: Pid, pidfd: int) -> Started:
        slot = self._free_slot()
        change = Kdamond(slot=slot, mark_us=self._mark_us, target=pid)
        entry = self._journal.record(change)
        with ExitStack() as stack:
            stack.callback(self._journal.revert, entry)
            setup = self._set_up(slot, pid)
            kdamond = self._turn_on(slot, pid, pidfd)
            self._journal.amend(entry, replace(change, pid=kdamond))
            stack.pop_all()
        return Started(slot=slot, pid=kdamond, entry=entry, setup=setup)

    def _set_up(self, slot: SlotIndex, pid: Pid) -> Setup:
        self._admin.claim(slot, self._mark_us)
        has_goal = self._admin.has_goal(slot)
        setup = tuning.setup(self._limits, thrift=1.0, has_goal=has_goal, mark_us=self._mark_us)
        self._admin.set_up(slot, setup)
        self._admin.set_target(slot, pid)
        if self._tracepoint is None:
            self._admin.add_scheme(slot)
        return setup

    def _turn_on(self, slot: SlotIndex, pid: Pid, pidfd: int) -> Pid:
        try:
            kdamond = self._admin.turn_on(slot)
        except OSError as error:
            if error.errno != errno.EINVAL or not _has_exited(pidfd):
                raise
            kdamond = None
        if kdamond is None or _has_exited(pidfd):  # its number might be another's by now
            raise _no_process(pid)
        return kdamond

    def _reader(self, started: Started) -> Reader:
        if self._tracepoint is None:
            return TriedRegionsReader(self._admin, started.slot, self._worker)
        aggregations = math.ceil(POLLED_WITHIN_S * 1e6 / self._config.aggregation_us)
        regions = self._config.max_regions * min(aggregations, RING_MOST_AGGREGATIONS)
        return RingReader(self._tracepoint, started.pid, regions=regions)

    @property
    def _limits(self) -> DamonConfig:
        """What is configured, and affordable by the way that regions are read."""
        if self._tracepoint is not None:
            return self._config
        return replace(
            self._config,
            min_regions=min(self._config.min_regions, TRIED_REGIONS_LEAST),
            max_regions=min(self._config.max_regions, TRIED_REGIONS_MOST),
        )

    def _free_slot(self) -> SlotIndex:
        """Returns a slot that nobody uses, the last one: others count from the first."""
        slots = self._admin.slots()
        if len(slots) < SLOTS and all(slot.is_free for slot in slots):
            self._entries.append(self._journal.record(Slots(before=len(slots), after=SLOTS)))
            self._admin.resize(SLOTS)
            slots = self._admin.slots()
        free = [slot.index for slot in slots if slot.is_free]
        if not free:
            raise self._no_slot(slots)
        return free[-1]

    def _no_slot(self, slots: tuple[Slot, ...]) -> Conflict:
        changes = self._journal.changes.values()
        ours = {change.slot for change in changes if isinstance(change, Kdamond)}
        others = [str(slot) for slot in slots if slot.index not in ours]
        if not others:
            return Conflict(
                f"tierd watches {len(slots)} processes already, the most it can",
                hint="name fewer targets",
            )
        return Conflict(
            f"DAMON has no free slot of {len(slots)}; others hold {'; '.join(others)}",
            hint="stop one (echo off > its state file) or wait for its end; slots are added by "
            "/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds, which empties all of them",
        )


def _open_process(pid: Pid) -> int:
    """Returns a pidfd of a process with memory of its own."""
    found = process.read_process(pid)
    if found is None:
        raise _no_process(pid)
    if found.is_kernel_thread:
        raise TierdError(
            f"{pid} ({found.command}) is a kernel thread, which has no memory to place",
            hint="name a process of a program",
        )
    if found.leader != pid:
        raise TierdError(
            f"{pid} is a thread of process {found.leader} ({found.command})",
            hint=f"name that: {found.leader}",
        )
    pidfd = os.pidfd_open(pid)
    if _has_exited(pidfd):
        os.close(pidfd)
        raise _no_process(pid)
    return pidfd


def _has_exited(pidfd: int) -> bool:
    """Says whether a process has ended, also when nobody has waited for it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _no_process(pid: Pid) -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"no process {pid}")
