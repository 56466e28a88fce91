# SPDX-License-Identifier: Apache-2.0
"""Looks at single pages: a kdamond of its own, over one range of a target at a time, for seconds.

DAMON joins no regions beyond the range's size over `nr_regions/min`, so with as many regions as
pages none are joined. It cuts each in two or three after every aggregation; some short ones first,
and there is a region for each page. Then intervals that tell hot pages from cold ones, and one
aggregation of these is all that is wanted.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass

from tierd.errors import TierdError
from tierd.kernel.damon import Admin, Setup
from tierd.model import PAGE_BYTES, Accesses, Pid
from tierd.sample.governor import Started
from tierd.sample.reader import Reader

PAGES_LEAST, PAGES_FIRST, PAGES_MOST = 64, 512, 8192
STEP = 2.0
"""The next range has at most so many times the pages of the one before, or so few."""
TICK_S = 0.01
"""/proc counts CPU time by it."""

SAMPLES = 10
STRETCH = 5
"""The sampling interval is at most so many times the configured one."""

SPLIT_US, SPLIT_S = 5000, 0.3
"""In so long, by such intervals, pages have got regions of their own."""
POLL_S, GIVEN_UP_S = 0.05, 30.0

PARTED = 0.98
"""Share of the pages that have to have regions of their own."""
LOOKS_MOST = 6
"""So often is waited for that, an aggregation each: they go on being cut meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is looked at, SAMPLES times."""

    pid: Pid
    start: int
    end: int
    sample_us: int

    @property
    def pages(self) -> int:
        return (self.end - self.start) // PAGE_BYTES

    @property
    def aggregation_us(self) -> int:
        return SAMPLES * self.sample_us

    def setup(self, mark_us: int, *, splits: bool) -> Setup:
        """Returns what the kdamond is to do; first to split, then to look."""
        return Setup(
            sample_us=SPLIT_US if splits else self.sample_us,
            aggregation_us=SPLIT_US if splits else self.aggregation_us,
            update_us=mark_us,
            min_regions=self.pages,
            max_regions=3 * self.pages,  # DAMON cuts nothing while it has more than half of that
        )


class Lens:
    """How much is looked at: as many pages as the budget allows, by what the last look has cost."""

    def __init__(self) -> None:
        self._pages = PAGES_FIRST
        self._percent = 100.0

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
        return Frame(pid=pid, start=start, end=end, sample_us=sample_us)

    def note(self, frame: Frame, *, cpu_s: float, took_s: float) -> None:
        """Takes in what a look has cost, and how long it took until the next one may begin.

        One that its range made short allows no longer ones.
        """
        allowed_s = took_s * self._percent / 100
        times = min(max(allowed_s / max(cpu_s, TICK_S), 1 / STEP), STEP)
        if times < 1 or frame.pages >= self._pages:
            self._pages = min(max(round(frame.pages * times), PAGES_LEAST), PAGES_MOST)


class Look:
    """One look, from when its kdamond has been started; it goes on in a thread.

    Args:
        frame: what it is at.
        started: the kdamond, which splits.
        admin: DAMON.
        open_reader: opens the ring of its aggregations.
        worker: gives the thread.
    """

    def __init__(
        self,
        frame: Frame,
        started: Started,
        admin: Admin,
        *,
        open_reader: Callable[[], Reader],
        worker: Executor,
    ) -> None:
        self.frame, self.started = frame, started
        self.begun_s = time.monotonic()
        self._admin, self._open_reader = admin, open_reader
        self._is_cancelled = threading.Event()
        self._found = worker.submit(self._look)

    @property
    def is_over(self) -> bool:
        return self._found.done()

    def close(self) -> Accesses | None:
        """Ends it where it is not over; returns what was seen, None if nothing was."""
        self._is_cancelled.set()
        failed = isinstance(self._found.exception(), OSError | TierdError)
        return None if failed else self._found.result()

    def _look(self) -> Accesses | None:
        slot, mark_us = self.started.slot, self.started.setup.update_us
        if self._is_cancelled.wait(SPLIT_S):
            return None
        self._admin.set_up(slot, self.frame.setup(mark_us, splits=False))
        if not self._admin.command(slot, "commit"):
            return None
        since_s = time.monotonic()
        with closing(self._open_reader()) as reader:
            return self._read(reader, since_s)

    def _read(self, reader: Reader, since_s: float) -> Accesses | None:
        """Waits for an aggregation by the new intervals in which pages have regions of their own.

        The one that was under way at first counts for nothing.
        """
        aggregation_s = self.frame.aggregation_us / 1e6
        looks = 0
        while not self._is_cancelled.wait(POLL_S):
            for snapshot in reader.read():
                if snapshot.at_s <= since_s + aggregation_s / 2:
                    continue
                looks += 1
                if len(snapshot.regions) < PARTED * self.frame.pages and looks < LOOKS_MOST:
                    continue
                return Accesses(
                    pid=self.frame.pid,
                    at_s=snapshot.at_s,
                    sample_s=self.frame.sample_us / 1e6,
                    aggregation_s=aggregation_s,
                    regions=snapshot.regions,
                    zoomed=True,
                )
            if reader.has_ended() or time.monotonic() - since_s > GIVEN_UP_S:
                break
        return None
