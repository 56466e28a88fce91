# SPDX-License-Identifier: Apache-2.0
"""A DAMON session over many processes: a kdamond each, beside those of others.

One kdamond per process, so that one that comes or goes disturbs no other's sampling. Everything
that is changed on the machine is in the journal first, and taken back by unwatch() and close().
"""

import logging
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from tierd.bulk import NO_LOADS, Accesses
from tierd.config import DamonConfig
from tierd.errors import TierdError, UnsupportedKernel
from tierd.journal import Journal
from tierd.kernel import process, tracepoint
from tierd.kernel.damon import Admin, Operations, Setup, SlotIndex
from tierd.kernel.ring import Snapshot
from tierd.kernel.tunable import Files
from tierd.model import COUNT_ALL, Pid, Scheme
from tierd.sample import tuning
from tierd.sample.governor import Governor, Started
from tierd.sample.kdamonds import Kdamonds, has_exited, no_process
from tierd.sample.reader import (
    TRIED_REGIONS_LEAST,
    TRIED_REGIONS_MOST,
    Reader,
    RingReader,
    TriedRegionsReader,
)
from tierd.sample.tuning import Tuning
from tierd.sample.zoom import Lens, Look

log = logging.getLogger("tierd")

POLLED_WITHIN_S, RING_MOST_AGGREGATIONS = 2.0, 16
"""A ring holds twice what comes in so long: a round that is late by seconds loses nothing."""

SPARE_LEAST = 0.1
"""Of the budget, for looks at single pages, where the targets' kdamonds leave less of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """One target."""

    pid: Pid
    pidfd: int
    started: Started
    reader: Reader
    governor: Governor

    def read(self) -> list[Accesses]:
        return [self._accesses(snapshot) for snapshot in self.reader.read()]

    def has_ended(self) -> bool:
        return has_exited(self.pidfd) or self.reader.has_ended()

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


class Schemes(Protocol):
    """What DAMON is to do in the slots of targets: tierd.migrate.schemes.KernelSchemes."""

    def require(self, slot: SlotIndex) -> None:
        """Tries in a slot whether DAMON can do it, or raises UnsupportedKernel."""
        ...

    def set_up(
        self,
        slot: SlotIndex,
        setup: Setup,
        *,
        kept: tuple[Scheme, ...],
        targets: int,
        now_s: float,
    ) -> None:
        """Writes the schemes of a target whose kdamond is about to begin, behind those kept."""
        ...

    def follow(self, setups: Mapping[SlotIndex, Setup], worker: Executor, now_s: float) -> None:
        """Has the targets' kdamonds go on as they are sampled now."""
        ...

    def leave(self, index: SlotIndex) -> None:
        """Lets go of a slot that is about to be emptied."""
        ...


class Session:
    """A tierd.sample.sampler.Sampler over DAMON.

    Args:
        config: intervals, regions, CPU budget, and whether damon_stat may be stopped.
        journal: where changes are recorded.
        schemes: what DAMON is to do besides; None for nothing.
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
        schemes: Schemes | None = None,
        root: Path = Path("/"),
        files: Files | None = None,
    ) -> None:
        self._config = config
        self._schemes = schemes
        self._admin = Admin(root, files)
        self._admin.check()
        self._kdamonds = Kdamonds(self._admin, journal, take_over=config.take_over)
        self._tracepoint = tracepoint.find(root)
        self._watches: dict[Pid, Watch] = {}
        self._losses = 0
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="tierd-zoom")
        self._lens = Lens()
        self._look: Look | None = None
        self._sees_pages = True
        self.zoomed_pages = 0
        self.is_calm = False
        self.sampling = None
        self.loads = NO_LOADS
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

    def require_schemes(self) -> None:
        """Has the schemes tried, before there are targets.

        Raises:
            UnsupportedKernel: DAMON cannot do what they are for.
            Conflict: others hold all of DAMON's slots.
            TierdError: DAMON may not be set up by us.
        """
        if self._schemes is not None:
            self._kdamonds.try_out(self._schemes.require)

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
        if self._look is not None and self._look.frame.pid == pid:
            self._end_look(self._look)
        self._losses += watch.reader.lost
        watch.close()
        if self._schemes is not None:
            self._schemes.leave(watch.started.slot)
        self._kdamonds.stop(watch.started.entry)

    def poll(self) -> list[Accesses]:
        found = [accesses for watch in self._watches.values() for accesses in watch.read()]
        now_s = time.monotonic()
        for watch in self._watches.values():
            budget_percent = self._config.cpu_percent / len(self._watches)
            watch.governor.govern(now_s, budget_percent, is_calm=self.is_calm)
        if self._schemes is not None:
            setups = {w.started.slot: w.governor.setup for w in self._watches.values()}
            self._schemes.follow(setups, self._worker, now_s)
        if self._look is not None and self._look.is_over:
            found += self._end_look(self._look)
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
            last_first.callback(self._looker.shutdown)
            last_first.callback(self._kdamonds.close)
            for pid in self._watches:
                last_first.callback(self.unwatch, pid)

    @property
    def can_look(self) -> bool:
        return self._sees_pages and self._tracepoint is not None and self._look is None

    @property
    def can_zoom(self) -> bool:
        return self._config.zoom and self.can_look

    def zoom(self, pid: Pid, start: int, end: int, *, per_page_s: float) -> bool:
        watch, tracepoint = self._watches.get(pid), self._tracepoint
        if watch is None or tracepoint is None or not self.can_look:
            return False
        frame = self._lens.frame(
            pid,
            start,
            end,
            per_page_s=per_page_s,
            base_us=self._config.sample_us,
            percent=self._spare_percent,
        )
        try:
            claimed = self._kdamonds.claim(pid, Operations.FVADDR)
        except UnsupportedKernel as error:
            self._sees_pages = False
            log.info("single pages are not looked at: %s", error)
        except TierdError as error:
            log.debug("single pages are not looked at now: %s", error)
        else:
            self._look = Look(frame, claimed, self._admin, tracepoint, worker=self._looker)
        return self._look is not None

    def _end_look(self, look: Look) -> list[Accesses]:
        """Returns what was seen, if anything was."""
        self._look, found = None, look.close()
        self._kdamonds.stop(look.claimed.entry)
        if found is None:
            return []
        if not found.is_by_page:
            self._lens.kernel_cuts = False
            return []
        took_s = time.monotonic() - look.begun_s
        self._lens.note(look.frame, cpu_s=found.cpu_s, took_s=took_s)
        self.zoomed_pages += look.frame.pages
        return [found.accesses]

    @property
    def _spare_percent(self) -> float:
        """What the targets' kdamonds leave of the budget, and a little in any case."""
        share = self.cpu_percent / len(self._watches)
        used = [tuning.cpu_percent for tuning in self.tuning.values()]
        spare = self.cpu_percent - sum(share if percent is None else percent for percent in used)
        return max(spare, SPARE_LEAST * self.cpu_percent)

    def _open(self, pid: Pid, pidfd: int) -> Watch:
        """Watches by the ring, from the first refusal of perf on by tried_regions."""
        try:
            return self._open_once(pid, pidfd)
        except PermissionError:
            if self._tracepoint is None:
                raise
            self._tracepoint = None
        except ProcessLookupError:  # of the kdamond, which ends with its target
            raise no_process(pid) from None
        return self._open_once(pid, pidfd)

    def _open_once(self, pid: Pid, pidfd: int) -> Watch:
        started = self._kdamonds.start(pid, pidfd, lambda slot: self._set_up(slot, pid))
        with ExitStack() as stack:
            stack.callback(self._kdamonds.stop, started.entry)
            reader = self._reader(started)
            stack.callback(reader.close)
            now_s = time.monotonic()
            governor = Governor(
                self._limits, self._admin, pid, started, worker=self._worker, now_s=now_s
            )
            stack.pop_all()
        return Watch(pid=pid, pidfd=pidfd, started=started, reader=reader, governor=governor)

    def _set_up(self, slot: SlotIndex, pid: Pid) -> Setup:
        has_goal, mark_us = self._admin.has_goal(slot), self._kdamonds.mark_us
        setup = tuning.setup(
            self._limits,
            thrift=1.0,
            resident_bytes=process.read_resident_bytes(pid) or 0,
            has_goal=has_goal,
            mark_us=mark_us,
        )
        self._admin.set_up(slot, setup)
        self._admin.set_target(slot, pid)
        kept = (COUNT_ALL,) if self._tracepoint is None else ()
        if self._schemes is not None:
            targets, now_s = len(self._watches) + 1, time.monotonic()
            self._schemes.set_up(slot, setup, kept=kept, targets=targets, now_s=now_s)
        elif kept:
            self._admin.set_schemes(slot, kept)
        return setup

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


def _open_process(pid: Pid) -> int:
    """Returns a pidfd of a process with memory of its own."""
    found = process.read_process(pid)
    if found is None:
        raise no_process(pid)
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
    if has_exited(pidfd):
        os.close(pidfd)
        raise no_process(pid)
    return pidfd
