# SPDX-License-Identifier: Apache-2.0
"""DAMON's aggregations, from the tracepoint damon:damon_aggregated through a perf ring.

Follows kdamond_reset_aggregated() in mm/damon/core.c: once an aggregation is over, it writes one
record for each region, target by target, each target's regions by rising address. What perf shows
of one aggregation of a target with two regions:

    target_id=0 nr_regions=2 94281052549120-94281054097408: 0 21
    target_id=0 nr_regions=2 140320403394560-140320408031232: 20 3
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import REGION
from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib
from tierd.model import Pid

if TYPE_CHECKING:
    from tierd.kernel._shim import Cursor

RECORD = np.dtype(
    [
        ("time_ns", "u8"),  # CLOCK_MONOTONIC
        ("start", "u8"),
        ("end", "u8"),
        ("target_id", "u8"),  # index of the target in its context
        ("nr_regions", "u4"),  # of that target
        ("nr_accesses", "u4"),
        ("age", "u4"),
        ("lost", "u4"),  # records lost between the previous one and this
    ]
)
"""One region of one aggregation."""

RECORD_BYTES = 72
"""What a record takes in the ring, with perf's header, time and padding."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the raw record keeps its fields, in bytes, as the tracepoint's `format` file tells.

    target_id, start and end are 8 bytes wide, the others 4. The defaults are those of Linux 6.12
    and 7.2.
    """

    target_id: int = 8
    nr_regions: int = 16
    start: int = 24
    end: int = 32
    nr_accesses: int = 40
    age: int = 44

    @property
    def offsets(self) -> tuple[int, ...]:
        """In the order of struct tierd_layout."""
        place = (self.target_id, self.nr_regions, self.start, self.end)
        return (*place, self.nr_accesses, self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All regions of one target in one aggregation (dtype REGION), by rising address."""

    target_id: int
    at_s: float
    regions: NDArray[np.void]


class Assembler:
    """Puts records together to complete snapshots, over as many reads as that takes.

    `torn` counts the snapshots given up because the kernel lost some of their records, or had
    begun them before it was listened to.
    """

    def __init__(self) -> None:
        self.torn = 0
        self._part = np.empty(0, RECORD)

    def add(self, records: NDArray[np.void]) -> list[Snapshot]:
        """Returns the snapshots that these records (dtype RECORD) complete, oldest first."""
        groups = _split(np.concatenate([self._part, records]))
        self._part = np.empty(0, RECORD)
        if groups and len(groups[-1]) < groups[-1]["nr_regions"][0]:
            self._part = groups.pop().copy()
        complete = [group for group in groups if len(group) == group["nr_regions"][0]]
        self.torn += len(groups) - len(complete)
        return [_snapshot(group) for group in complete]


def _split(records: NDArray[np.void]) -> list[NDArray[np.void]]:
    """Splits records where another target or aggregation begins, or some were lost."""
    if not len(records):
        return []
    before, after = records[:-1], records[1:]
    cuts = (
        (before["target_id"] != after["target_id"])
        | (before["nr_regions"] != after["nr_regions"])
        | (before["end"] > after["start"])
        | (after["lost"] > 0)
    )
    return np.split(records, np.flatnonzero(cuts) + 1)


def _snapshot(group: NDArray[np.void]) -> Snapshot:
    regions = np.empty(len(group), REGION)
    for name in REGION.names or ():
        regions[name] = group[name]
    return Snapshot(
        target_id=int(group["target_id"][0]),
        at_s=int(group["time_ns"][-1]) / 1e9,
        regions=regions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a captured ring held: records (dtype RECORD), and how far they got."""

    records: NDArray[np.void]
    tail: int
    lost: int
    corrupt: int
    throttled: int


def decode(data: bytes, *, head: int, tail: int, layout: Layout, into: NDArray[np.void]) -> Decoded:
    """Decodes a ring that was captured.

    Args:
        data: the data area; its size is a power of two.
        head: bytes ever written, as perf counts them.
        tail: bytes consumed of these.
        layout: where the fields are.
        into: where the records go (dtype RECORD). What does not fit stays in the ring: the
            result's `tail` says where to go on.
    """
    cursor = ffi.new("struct tierd_cursor *", {"tail": tail})
    count = lib.tierd_decode_records(
        ffi.new("struct tierd_layout *", layout.offsets),
        ffi.from_buffer("uint8_t[]", data),
        len(data),
        head,
        len(into),
        cursor,
        ffi.from_buffer("struct tierd_record[]", into, require_writable=True),
    )
    return decoded(into[: check(count, "decode")], cursor)


def decoded(records: NDArray[np.void], cursor: "Cursor") -> Decoded:
    """Returns records with how far a ring was decoded, and what was amiss in it."""
    return Decoded(
        records=records,
        tail=cursor.tail,
        lost=cursor.lost,
        corrupt=cursor.corrupt,
        throttled=cursor.throttled,
    )


class PerfRing:
    """An open perf event with its ring. Poll fileno() for input."""

    def __init__(self) -> None:
        self._ring = ffi.new("struct tierd_ring *")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        lib.tierd_close_ring(self._ring)

    def fileno(self) -> int:
        return self._ring.fd

    @property
    def lost(self) -> int:
        """Records that the kernel could not write because the ring was full."""
        return self._ring.cursor.lost

    @property
    def corrupt(self) -> int:
        """Stretches of the ring that could not be parsed, and were skipped."""
        return self._ring.cursor.corrupt

    @property
    def throttled(self) -> int:
        """How often the kernel has held the event since it came too often."""
        return self._ring.cursor.throttled


def ring_bytes(records: int, record_bytes: int) -> int:
    """Returns the size of a data area for so many records."""
    return max(4096, 1 << (records * record_bytes - 1).bit_length())


class Ring(PerfRing):
    """Every hit of damon_aggregated in one kdamond, from the moment it is opened.

    It hangs up when the kdamond ends; a kdamond that is turned on again is another thread and needs
    another ring.

    Args:
        event: the tracepoint's id in tracefs.
        layout: where its fields are.
        pid: the kdamond's thread, from its `pid` file in sysfs.
        regions: the most regions that one aggregation may have, over all targets. The ring holds
            two aggregations.
        wakeup_records: unread records from which fileno() polls readable.

    Raises:
        ProcessLookupError: the thread doesn't exist.
        PermissionError: neither CAP_PERFMON nor perf_event_paranoid allows it; at 3, which only
            Debian's kernels know, it takes CAP_SYS_ADMIN.
    """

    def __init__(
        self, *, event: int, layout: Layout, pid: Pid, regions: int, wakeup_records: int = 1
    ) -> None:
        super().__init__()
        data_bytes = ring_bytes(2 * regions, RECORD_BYTES)
        self._layout = ffi.new("struct tierd_layout *", layout.offsets)
        self._records = np.empty(data_bytes // RECORD_BYTES, RECORD)
        self._array = ffi.from_buffer("struct tierd_record[]", self._records, require_writable=True)
        check(
            lib.tierd_open_ring(event, pid, data_bytes, wakeup_records * RECORD_BYTES, self._ring),
            "perf_event_open",
        )

    def read(self) -> NDArray[np.void]:
        """Returns the records (dtype RECORD) that have come since the last read."""
        count = lib.tierd_read_ring(self._ring, self._layout, len(self._records), self._array)
        return self._records[: check(count, "perf ring")].copy()
