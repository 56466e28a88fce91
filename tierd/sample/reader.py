# SPDX-License-Identifier: Apache-2.0
"""The two ways by which a kdamond's aggregations get here.

The tracepoint's ring takes every aggregation at under a microsecond a region. tried_regions, for
where tracefs or perf is out of reach, asks for a single one and reads four files a region, so it
is taken about once a second, in another thread, of a kdamond with few regions.
"""

import select
import time
from concurrent.futures import Executor, Future
from typing import Protocol

from tierd.errors import TierdError
from tierd.kernel.damon import Admin, SlotIndex
from tierd.kernel.ring import Assembler, Ring, Snapshot
from tierd.kernel.tracepoint import Tracepoint
from tierd.model import Pid

TRIED_REGIONS_LEAST, TRIED_REGIONS_MOST = 10, 100
"""Regions of a kdamond that is read by tried_regions: at most 50 ms of reading."""
TRIED_PERIOD_S = 1.0


class Reader(Protocol):
    """Takes in the aggregations of one kdamond with one target."""

    @property
    def lost(self) -> int: ...

    def read(self) -> list[Snapshot]:
        """Returns the complete snapshots that have come since the last read, oldest first."""
        ...

    def has_ended(self) -> bool:
        """Says whether the kdamond was found to have stopped."""
        ...

    def filenos(self) -> list[int]:
        """Returns what polls readable when there is something to read; may be nothing at all."""
        ...

    def close(self) -> None: ...


class RingReader:
    """Reads every aggregation from the tracepoint's perf ring.

    Raises:
        ProcessLookupError: the kdamond has stopped.
        PermissionError: perf is out of reach.
    """

    def __init__(self, tracepoint: Tracepoint, kdamond: Pid, *, regions: int) -> None:
        self._assembler = Assembler()
        self._ring = Ring(
            event=tracepoint.id, layout=tracepoint.layout, pid=kdamond, regions=regions
        )
        self._poll = select.poll()
        self._poll.register(self._ring.fileno(), 0)

    @property
    def lost(self) -> int:
        return self._ring.lost + self._ring.corrupt

    def read(self) -> list[Snapshot]:
        return self._assembler.add(self._ring.read())

    def has_ended(self) -> bool:
        return bool(self._poll.poll(0))  # POLLHUP, which needs no asking for

    def filenos(self) -> list[int]:
        return [self._ring.fileno()]

    def close(self) -> None:
        self._ring.close()


class TriedRegionsReader:
    """Asks for one aggregation at a time, in a thread: the kernel answers at the end of the next.

    Args:
        admin: DAMON.
        slot: a running kdamond's, with the scheme that add_scheme() makes.
        worker: where to wait.
    """

    def __init__(self, admin: Admin, slot: SlotIndex, worker: Executor) -> None:
        self._admin = admin
        self._slot = slot
        self._worker = worker
        self._pending: Future[Snapshot | None] | None = None
        self._due_s = 0.0
        self._has_ended = False

    @property
    def lost(self) -> int:
        return 0

    def read(self) -> list[Snapshot]:
        found = self._collect()
        now_s = time.monotonic()
        if self._pending is None and not self._has_ended and now_s >= self._due_s:
            self._due_s = now_s + TRIED_PERIOD_S
            self._pending = self._worker.submit(self._fetch)
        return [] if found is None else [found]

    def has_ended(self) -> bool:
        return self._has_ended

    def filenos(self) -> list[int]:
        return []

    def close(self) -> None:
        if self._pending is not None:
            self._pending.exception()  # waits: the slot is about to be emptied

    def _collect(self) -> Snapshot | None:
        if self._pending is None or not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        if isinstance(pending.exception(), OSError | TierdError):
            return None  # somebody held the interface for long; the next time will do
        return pending.result()

    def _fetch(self) -> Snapshot | None:
        if not self._admin.command(self._slot, "update_schemes_tried_regions"):
            self._has_ended = True
            return None
        at_s = time.monotonic()
        regions = self._admin.tried_regions(self._slot, most=4 * TRIED_REGIONS_MOST)
        return None if regions is None else Snapshot(target_id=0, at_s=at_s, regions=regions)
