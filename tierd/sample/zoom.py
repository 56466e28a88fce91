# SPDX-License-Identifier: Apache-2.0
"""Looks at single pages: a kdamond of its own, over one range of a target at a time, for a moment.

It begins with a region for each page, and keeps them: DAMON joins no regions beyond the range's
size over `nr_regions/min`, and cuts none while it has more than half of `nr_regions/max`. So one
aggregation is all that is wanted. Later kernels begin with a range cut so (7.2 does, 6.12 does not;
mm/damon/core.c: damon_apply_min_nr_regions). To others a region for each page is to be given, which
costs more than all the rest of a look.
"""

import threading
import time
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass

from tierd.bulk import Accesses
from tierd.errors import TierdError
from tierd.kernel import task
from tierd.kernel.damon import Admin, Setup
from tierd.kernel.tracepoint import Tracepoint
from tierd.model import PAGE_BYTES, Pid
from tierd.sample.kdamonds import Claimed
from tierd.sample.reader import Reader, RingReader

PAGES_LEAST, PAGES_FIRST, PAGES_MOST = 64, 2048, 8192
STEP = 4.0
"""The next range has at most so many times the pages of the one before, or so few."""
TICK_S = 0.01
"""/proc counts CPU time by it."""

SAMPLES = 10
STRETCH = 5
"""The sampling interval is at most so many times the configured one."""

POLL_S, GIVEN_UP_S = 0.02, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is looked at, SAMPLES times; the kernel is given it in so many `regions`."""

    pid: Pid
    start: int
    end: int
    sample_us: int
    regions: int

    @property
    def pages(self) -> int:
        return (self.end - self.start) // PAGE_BYTES

    @property
    def aggregation_us(self) -> int:
        return SAMPLES * self.sample_us

    def setup(self, mark_us: int) -> Setup:
        """Returns what the kdamond is to do."""
        return Setup(
            sample_us=self.sample_us,
            aggregation_us=self.aggregation_us,
            update_us=mark_us,
            min_regions=self.pages,
            max_regions=self.pages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a look has seen, and the CPU time that it has cost."""

    accesses: Accesses
    cpu_s: float

    @property
    def is_by_page(self) -> bool:
        """Whether it was at each page by itself."""
        regions = self.accesses.regions
        return bool((regions["end"] - regions["start"] <= PAGE_BYTES).all())


class Lens:
    """How much is looked at: as many pages as the budget allows, by what the last look has cost."""

    def __init__(self) -> None:
        self._pages = PAGES_FIRST
        self._percent = 100.0
        self.kernel_cuts = True
        """Whether the kernel cuts a range into pages, as far as known."""

    def frame(
        self, pid: Pid, start: int, end: int, *, per_page_s: float, base_us: int, percent: float
    ) -> Frame:
        """Chooses how much of a range to look at, from its start.

        Args:
            pid: whose it is.
            start: an address, likewise `end`.
            end: where it ends.
            per_page_s: its pages' mean accesses a second: rarely accessed ones are looked at
                for longer.
            base_us: the shortest sampling interval.
            percent: of a core that may be used.
        """
        sample_us = round(min(max(1e6 / max(per_page_s, 1e-6), base_us), STRETCH * base_us))
        self._percent = percent
        end = min(end, start + self._pages * PAGE_BYTES)
        regions = 1 if self.kernel_cuts else (end - start) // PAGE_BYTES
        return Frame(pid=pid, start=start, end=end, sample_us=sample_us, regions=regions)

    def note(self, frame: Frame, *, cpu_s: float, took_s: float) -> None:
        """Takes in what a look has cost, and how long it took until the next one may begin.

        One that its range made short allows no longer ones.
        """
        allowed_s = took_s * self._percent / 100
        times = min(max(allowed_s / max(cpu_s, TICK_S), 1 / STEP), STEP)
        if times < 1 or frame.pages >= self._pages:
            self._pages = min(max(round(frame.pages * times), PAGES_LEAST), PAGES_MOST)


class Look:
    """One look, in a thread, from when its kdamond's slot has been claimed until it is stopped.

    Args:
        frame: what it is at.
        claimed: the slot, with FVADDR operations.
        admin: DAMON.
        tracepoint: of its aggregations.
        worker: gives the thread.
    """

    def __init__(
        self,
        frame: Frame,
        claimed: Claimed,
        admin: Admin,
        tracepoint: Tracepoint,
        *,
        worker: Executor,
    ) -> None:
        self.frame, self.claimed = frame, claimed
        self.begun_s = time.monotonic()
        self._admin, self._tracepoint = admin, tracepoint
        self._is_cancelled = threading.Event()
        self._found = worker.submit(self._look)

    @property
    def is_over(self) -> bool:
        return self._found.done()

    def close(self) -> Found | None:
        """Ends it where it is not over; returns what was seen, None if nothing was.

        The slot stays claimed.
        """
        self._is_cancelled.set()
        failed = isinstance(self._found.exception(), OSError | TierdError)
        return None if failed else self._found.result()

    def _look(self) -> Found | None:
        begun_s = time.thread_time()
        admin, slot = self._admin, self.claimed.slot
        admin.set_up(slot, self.frame.setup(self.claimed.change.mark_us))
        admin.set_target(slot, self.frame.pid)
        admin.set_range(slot, self.frame.start, self.frame.end, self.frame.regions)
        kdamond = None if self._is_cancelled.is_set() else admin.turn_on(slot)
        if kdamond is None:
            return None
        with closing(RingReader(self._tracepoint, kdamond, regions=2 * self.frame.pages)) as reader:
            accesses = self._read(reader)
        if accesses is None:
            return None
        cpu_s = task.cpu_s(kdamond)
        admin.command(slot, "off")
        admin.set_range(slot, 0, 0, 0)  # here, since it takes as long as to make them
        return Found(accesses=accesses, cpu_s=cpu_s + time.thread_time() - begun_s)

    def _read(self, reader: Reader) -> Accesses | None:
        """Waits for an aggregation, of which the ring tells once it is over."""
        since_s = time.monotonic()
        self._is_cancelled.wait(self.frame.aggregation_us / 1e6)
        while not self._is_cancelled.wait(POLL_S):
            for snapshot in reader.read():
                return Accesses(
                    pid=self.frame.pid,
                    at_s=snapshot.at_s,
                    sample_s=self.frame.sample_us / 1e6,
                    aggregation_s=self.frame.aggregation_us / 1e6,
                    regions=snapshot.regions,
                    zoomed=True,
                )
            if reader.has_ended() or time.monotonic() - since_s > GIVEN_UP_S:
                break
        return None
