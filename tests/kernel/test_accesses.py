# SPDX-License-Identifier: Apache-2.0
"""Sampled accesses on the running kernel: page faults, which need no PMU."""

import ctypes
import errno
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernel.test_pages import as_nobody, grown_bytes
from tierd.bulk import map_nodes
from tierd.discover.topology import discover
from tierd.kernel import pages
from tierd.kernel.accesses import (
    PAGE_FAULTS,
    AccessRing,
    Event,
    are_stores,
    served_by_memory,
)
from tierd.model import Pid

OWN = Pid(os.getpid())
TYPE, CONFIG = PAGE_FAULTS
MINOR_FAULTS = 5  # PERF_COUNT_SW_PAGE_FAULTS_MIN
PAGES = 64


def faults(period: int = 1, samples: int = 4 * PAGES) -> AccessRing:
    return AccessRing(Event(type=TYPE, config=CONFIG, period=period), pid=OWN, samples=samples)


@contextmanager
def buffer(pages: int = PAGES) -> Iterator[tuple[int, mmap.mmap]]:
    """Untouched memory, in small pages, and its address."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        del view
        yield address, memory


def within(found: NDArray[np.void], address: int, length: int) -> NDArray[np.void]:
    """Those of a range; the test's own code faults too."""
    return found[(found["addr"] >= address) & (found["addr"] < address + length)]


def touch(memory: mmap.mmap) -> None:
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1


def test_each_access_comes_with_its_address() -> None:
    with buffer() as (address, memory), faults() as ring:
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        touch(memory)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        found = ring.read()
        assert (ring.lost, ring.corrupt, ring.throttled) == (0, 0, 0)
        assert not within(ring.read(), address, len(memory)).size, "each is told once"
    inside = within(found, address, PAGES * mmap.PAGESIZE)
    expected = address + np.arange(PAGES) * mmap.PAGESIZE
    assert (inside["addr"] // mmap.PAGESIZE).tolist() == (expected // mmap.PAGESIZE).tolist()
    assert set(inside["pid"].tolist()) == {OWN}
    assert (np.diff(inside["time_ns"].astype(np.int64)) > 0).all()
    assert before < inside["time_ns"][0] <= inside["time_ns"][-1] < after


def test_a_physical_address_tells_the_node() -> None:
    """Page faults are told before there is a page, minor ones when it is there."""
    minor = Event(type=TYPE, config=MINOR_FAULTS, period=1)
    with buffer() as (address, memory), AccessRing(minor, pid=OWN, samples=4 * PAGES) as ring:
        touch(memory)
        found = within(ring.read(), address, len(memory))
        folios, _ = pages.every_page(address, address + len(memory), PAGES)
        pages.query(OWN, folios)
    assert len(found) == PAGES
    assert map_nodes(discover()).at(found["phys_addr"]).tolist() == folios["node"].tolist()
    assert not served_by_memory(found).any()
    assert not are_stores(found).any(), "a fault may be for a load or a store"


def test_each_so_many_is_sampled() -> None:
    with buffer() as (_, memory), faults(period=8) as ring:
        touch(memory)
        assert PAGES // 8 <= len(ring.read()) <= PAGES // 8 + 4


def test_the_period_may_change() -> None:
    with buffer() as (_, memory), faults(period=1 << 40) as ring:
        ring.set_period(1)
        touch(memory)
        assert len(ring.read()) >= PAGES - 1


def test_what_found_no_room_is_counted() -> None:
    with buffer(512) as (_, memory), faults(samples=1) as ring:
        touch(memory)
        kept = len(ring.read())
        touch(memory)
        with buffer() as (_, more):
            touch(more)
            after = ring.read()
        assert ring.lost == after["lost"].sum() >= 512 - kept > 0


def test_all_of_a_cpu_are_sampled() -> None:
    event = Event(type=TYPE, config=CONFIG, period=1)
    (cpu, *_) = sorted(os.sched_getaffinity(0))
    with AccessRing(event, cpu=cpu, samples=1 << 14) as ring:
        child = subprocess.Popen(["taskset", "--cpu-list", f"{cpu}", "true"])
        child.wait()
        assert child.pid in ring.read()["pid"]


def test_an_event_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="perf_event_open") as caught:
        AccessRing(Event(type=2**31 - 1, config=0, period=1), pid=OWN, samples=1)
    assert caught.value.errno in (errno.EINVAL, errno.ENOENT)


def test_a_process_that_is_not_there_is_an_error() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        with pytest.raises(ProcessLookupError):
            AccessRing(Event(type=TYPE, config=CONFIG, period=1), pid=Pid(child.pid), samples=1)


def test_without_privileges_a_cpu_is_refused() -> None:
    event = Event(type=TYPE, config=CONFIG, period=1)
    assert isinstance(as_nobody(partial(AccessRing, event, cpu=0, samples=1)), PermissionError)


def test_a_closed_ring_stays_closed() -> None:
    ring = faults()
    ring.close()
    ring.close()
    assert ring.fileno() == -1
    for use in (ring.read, lambda: ring.set_period(2)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            use()


def test_a_leader_that_cannot_be_opened_leaves_nothing_open() -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="perf_event_open"):
        AccessRing(Event(type=TYPE, config=CONFIG, period=1, leader=10_000), pid=OWN, samples=1)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_an_event_that_is_not_spe_after_all_leaves_nothing_open() -> None:
    """Its ring is mapped by then; no PMU of a machine without SPE has an area."""
    before = sorted(Path("/proc/self/fd").iterdir())
    event = Event(type=TYPE, config=CONFIG, period=1, spe=True)
    with pytest.raises(OSError, match="perf_event_open") as caught:
        AccessRing(event, pid=OWN, samples=1)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_leader_is_closed_with_its_ring() -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    event = Event(type=TYPE, config=CONFIG, period=1, leader=MINOR_FAULTS)
    with buffer() as (_, memory), AccessRing(event, pid=OWN, samples=4 * PAGES) as ring:
        touch(memory)
        assert len(ring.read()) >= PAGES
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_opening_leaks_nothing() -> None:
    assert grown_bytes(lambda: faults().close(), calls=100) < 256 << 10


def test_reading_leaks_nothing() -> None:
    with faults() as ring:
        assert grown_bytes(ring.read) < 256 << 10
