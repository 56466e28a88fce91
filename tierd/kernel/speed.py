# SPDX-License-Identifier: Apache-2.0
"""How fast a node's memory is, from given CPUs: a buffer that is on the node alone, and its use.

The shim loads and streams, in threads that are pinned to their CPUs, without the GIL.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib
from tierd.kernel.pages import Pagemap
from tierd.model import PAGE_BYTES, NodeId, Pid

if TYPE_CHECKING:
    from tierd.kernel._shim import Pace as ShimPace
    from tierd.kernel._shim import Pointer

WINDOW_BYTES = lib.TIERD_WINDOW_BYTES

_START_NS = 10_000_000
"""After which all threads are there; one that is late measures for less long."""

_FOLIOS = 65_536
"""So many are listed at once."""

_SEED = 0x9E3779B97F4A7C15

_MARGIN = 10
"""A loaded chase begins and ends by so small a part of the time within its load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a thread got done: loads or bytes, and the time that it took."""

    count: int
    ns: int


_Work: TypeAlias = Callable[[int, int], Pace]
"""From an instant to another, ns of CLOCK_MONOTONIC."""

_Stream: TypeAlias = "Callable[[Pointer, int, int, int, ShimPace], int]"


class Buffer:
    """A context: memory of one node, which no other node's can replace.

    Args:
        node: whose memory it is.
        size_bytes: at least a window; rounded down to whole windows.

    Raises:
        OSError: EINVAL where the node has no memory or is not ours, EIO where it was full before
            the buffer was there; or there is no memory at all.
    """

    def __init__(self, node: NodeId, size_bytes: int) -> None:
        self.size_bytes = size_bytes // WINDOW_BYTES * WINDOW_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, self.size_bytes, flags=flags)
        self.next_slot = 0
        self._start = ffi.from_buffer("uint8_t[]", self.memory, require_writable=True)
        try:
            placed = lib.tierd_place_buffer(self._start, self.size_bytes, node)
            check(placed, f"memory of node {node}")
            check(lib.tierd_link_slots(self._start, self.size_bytes, _SEED), "slots")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        ffi.release(self._start)
        self.memory.close()

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self._start))

    def huge_bytes(self) -> int:
        """Returns how much of it is huge pages."""
        at, end, huge_pages = self.address, self.address + self.size_bytes, 0
        with Pagemap(Pid(os.getpid())) as pagemap:
            while at < end:
                folios, at = pagemap.folios(at, end, _FOLIOS)
                huge_pages += int(folios["pages"][folios["pages"] > 1].sum())
        return huge_pages * PAGE_BYTES

    def latency_ns(self, cpu: int, seconds: float) -> float:
        """Returns what a load takes that waits for the one before it."""
        (pace,) = _together([(cpu, self._chase)], seconds)
        return pace.ns / pace.count

    def loaded_latency_ns(self, cpu: int, loading: Sequence[int], seconds: float) -> float:
        """As latency_ns(), while other CPUs read as much as they can."""
        margin_ns = int(seconds * 1e9) // _MARGIN

        def within(begin_ns: int, end_ns: int) -> Pace:
            return self._chase(begin_ns + margin_ns, end_ns - margin_ns)

        streams = self._streams(lib.tierd_stream_reads, loading)
        pace, *_ = _together([(cpu, within), *streams], seconds)
        return pace.ns / pace.count

    def read_mbps(self, cpus: Sequence[int], seconds: float) -> float:
        """Returns what these CPUs read together, in MiB a second."""
        return self._bandwidth(lib.tierd_stream_reads, cpus, seconds)

    def write_mbps(self, cpus: Sequence[int], seconds: float) -> float:
        """Returns what these CPUs write together; no latency can be asked for after it."""
        return self._bandwidth(lib.tierd_stream_writes, cpus, seconds)

    def _bandwidth(self, stream: _Stream, cpus: Sequence[int], seconds: float) -> float:
        paces = _together(self._streams(stream, cpus), seconds)
        return sum(pace.count / pace.ns for pace in paces) * 1e9 / (1 << 20)

    def _chase(self, begin_ns: int, end_ns: int) -> Pace:
        pace = ffi.new("struct tierd_pace *")
        lib.tierd_follow_slots(self._start, self.next_slot, begin_ns, end_ns, pace)
        self.next_slot = pace.next
        return Pace(count=pace.count, ns=pace.ns)

    def _streams(self, stream: _Stream, cpus: Sequence[int]) -> list[tuple[int, _Work]]:
        """Returns a part of the buffer's stream for each CPU, while there are windows for all."""
        cpus = cpus[: self.size_bytes // WINDOW_BYTES]
        part_bytes = self.size_bytes // WINDOW_BYTES // max(len(cpus), 1) * WINDOW_BYTES

        def part(number: int) -> _Work:
            def work(begin_ns: int, end_ns: int) -> Pace:
                pace, start = ffi.new("struct tierd_pace *"), self._start + number * part_bytes
                check(stream(start, part_bytes, begin_ns, end_ns, pace), "stream")
                return Pace(count=pace.count, ns=pace.ns)

            return work

        return [(cpu, part(number)) for number, cpu in enumerate(cpus)]


def _together(jobs: Sequence[tuple[int, _Work]], seconds: float) -> list[Pace]:
    """Does jobs at the same time, each on its CPU."""
    begin_ns = time.monotonic_ns() + _START_NS
    end_ns = begin_ns + int(seconds * 1e9)

    def pinned(cpu: int, work: _Work) -> Pace:
        os.sched_setaffinity(0, {cpu})
        return work(begin_ns, end_ns)

    with ThreadPoolExecutor(max_workers=len(jobs)) as threads:
        begun = [threads.submit(pinned, *job) for job in jobs]
        return [job.result() for job in begun]
