# SPDX-License-Identifier: Apache-2.0
"""The perf ring on the running kernel.

No process can make the kernel emit damon_aggregated at will, so these tests listen to a tracepoint
whose fields they choose themselves: the entry of prctl(2), with an option that does not exist.
"""

import ctypes
import errno
import mmap
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kernel.test_pages import as_nobody, grown_bytes
from tierd.kernel._shim import ffi, lib  # noqa: TID251  # what no wrapper lets through
from tierd.kernel.ring import RECORD_BYTES, Assembler, Layout, Ring
from tierd.model import Pid

LIBC = ctypes.CDLL(None)
OWN = Pid(os.getpid())
LAYOUT = Layout(target_id=16, nr_regions=24, start=32, end=40, nr_accesses=48, age=52)
SMALLEST = mmap.PAGESIZE // RECORD_BYTES // 2
NO_OPTION = 1_000_000


@pytest.fixture(scope="module")
def event(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    tracefs = tmp_path_factory.mktemp("tracefs")
    subprocess.run(["mount", "-t", "tracefs", "tracefs", tracefs], check=True)
    try:
        yield int((tracefs / "events/syscalls/sys_enter_prctl/id").read_text())
    finally:
        subprocess.run(["umount", tracefs], check=True)


def emit(target: int, nr_regions: int, start: int, end: int, accesses: int, age: int) -> None:
    words = map(ctypes.c_ulong, (nr_regions, start, end, age << 32 | accesses))
    assert LIBC.prctl(NO_OPTION + target, *words) == -1


def emit_regions(count: int, nr_regions: int) -> None:
    for i in range(count):
        emit(0, nr_regions, i, i + 1, i % 20, i)


def ring_of(event: int, pid: Pid = OWN, regions: int = SMALLEST, wakeup: int = 1) -> Ring:
    return Ring(event=event, layout=LAYOUT, pid=pid, regions=regions, wakeup_records=wakeup)


def readable(ring: Ring) -> int:
    poll = select.poll()
    poll.register(ring, select.POLLIN)
    return dict(poll.poll(0)).get(ring.fileno(), 0)


def test_records_come_as_they_were_made(event: int) -> None:
    with ring_of(event) as ring:
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        emit(3, 2, 1 << 46, (1 << 46) + 4096, 20, 7)
        emit(3, 2, 1 << 47, (1 << 47) + 4096, 0, 2**32 - 1)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        records = ring.read()
        assert len(ring.read()) == 0
    fields = ["target_id", "nr_regions", "start", "end", "nr_accesses", "age", "lost"]
    assert records[fields].tolist() == [
        (NO_OPTION + 3, 2, 1 << 46, (1 << 46) + 4096, 20, 7, 0),
        (NO_OPTION + 3, 2, 1 << 47, (1 << 47) + 4096, 0, 2**32 - 1, 0),
    ]
    first, second = records["time_ns"].tolist()
    assert before < first < second < after


def test_the_ring_wraps_around(event: int) -> None:
    assembler = Assembler()
    with ring_of(event) as ring:
        for _ in range(100):
            emit_regions(count=23, nr_regions=23)
            (snapshot,) = assembler.add(ring.read())
            assert snapshot.regions["age"].tolist() == list(range(23))
        assert (ring.lost, ring.corrupt, assembler.torn) == (0, 0, 0)


def test_what_found_no_room_is_counted(event: int) -> None:
    assembler = Assembler()
    with ring_of(event) as ring:
        emit_regions(count=300, nr_regions=300)
        kept = ring.read()
        assert assembler.add(kept) == []
        emit_regions(count=10, nr_regions=10)
        after = ring.read()
        assert after["lost"].tolist() == [300 - len(kept)] + [0] * 9
        assert ring.lost == 300 - len(kept) > 0
    assert [len(snapshot.regions) for snapshot in assembler.add(after)] == [10]
    assert assembler.torn == 1


def test_two_aggregations_fit(event: int) -> None:
    with ring_of(event, regions=1000) as ring:
        emit_regions(count=2000, nr_regions=1000)
        assert len(ring.read()) == 2000
        assert ring.lost == 0


def test_it_polls_readable_from_the_watermark_on(event: int) -> None:
    with ring_of(event, wakeup=5) as ring:
        assert readable(ring) == 0
        emit_regions(count=4, nr_regions=5)
        assert readable(ring) == 0
        emit_regions(count=1, nr_regions=5)
        assert readable(ring) == select.POLLIN


def test_it_hangs_up_with_the_thread(event: int) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with child, ring_of(event, Pid(child.pid)) as ring:
        assert readable(ring) == 0
        child.communicate(b"")
        assert readable(ring) & select.POLLHUP


def test_only_that_thread_is_listened_to(event: int) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        with ring_of(event, Pid(child.pid)) as ring:
            emit_regions(count=3, nr_regions=3)
            assert len(ring.read()) == 0
        child.communicate(b"")


def test_a_thread_that_is_not_there_is_an_error(event: int) -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        with pytest.raises(ProcessLookupError, match="perf_event_open: No such process"):
            ring_of(event, Pid(child.pid))


def test_an_event_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="perf_event_open") as caught:
        ring_of(2**31)
    assert caught.value.errno in (errno.EINVAL, errno.ENOENT)


def test_without_privileges_it_is_refused(event: int) -> None:
    assert isinstance(as_nobody(ring_of, event), PermissionError)


def test_a_closed_ring_stays_closed(event: int) -> None:
    ring = ring_of(event)
    ring.close()
    ring.close()
    assert ring.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        ring.read()


def test_a_ring_that_cannot_be_mapped_leaves_nothing_open(event: int) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    ring = ffi.new("struct tierd_ring *")
    odd_pages = 3 * mmap.PAGESIZE
    assert lib.tierd_open_ring(event, OWN, odd_pages, 1, ring) == -errno.EINVAL
    assert ring.fd == 0
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_opening_leaks_nothing(event: int) -> None:
    assert grown_bytes(lambda: ring_of(event).close(), calls=100) < 256 << 10


def test_reading_leaks_nothing(event: int) -> None:
    with ring_of(event) as ring:

        def emit_and_read() -> None:
            emit(0, 1, 0, 1, 0, 0)
            assert len(ring.read()) == 1

        assert grown_bytes(emit_and_read) < 256 << 10


def test_putting_snapshots_together_leaks_nothing() -> None:
    part = np.zeros(10, Assembler()._part.dtype)
    part["nr_regions"] = 10
    part["start"], part["end"] = np.arange(10), np.arange(10) + 1
    assembler = Assembler()
    assert grown_bytes(lambda: assembler.add(part)) < 256 << 10
