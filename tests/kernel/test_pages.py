# SPDX-License-Identifier: Apache-2.0
"""Folios of real processes on the running kernel; smaps and numa_maps are the oracles."""

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.kernel.holder import GIGANTIC_BYTES, HUGE_BYTES, Holder, Kind, holding
from tierd.kernel import pages
from tierd.kernel.pages import FOLIO, RANGE, UNASKED, Pagemap
from tierd.model import PAGE_BYTES, NodeId, Pid

NOBODY = 65534
KTHREADD = Pid(2)
NODE = NodeId(int(Path("/sys/devices/system/node/has_memory").read_text().split("-")[0][0]))
NO_NODE = NodeId(1000)


def folios_of(holder: Holder, limit: int = 10000) -> NDArray[np.void]:
    with Pagemap(holder.pid) as pagemap:
        folios, following = pagemap.folios(holder.start, holder.end, limit)
        assert pagemap.scans
        assert following >= holder.end
    return folios


def smaps_kib(holder: Holder, field: str) -> int:
    """A field of the mapping that holds the holder's memory."""
    smaps = Path(f"/proc/{holder.pid}/smaps").read_text()
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        start, end = (int(word, 16) for word in mapping.split(" ")[0].split("-"))
        if start <= holder.start < end:
            return int(re.findall(rf"^{field}: +(\d+) kB$", mapping, re.MULTILINE)[0])
    raise LookupError(hex(holder.start))


def test_base_pages_are_listed_one_by_one_where_present() -> None:
    with holding(Kind.PLAIN) as holder:
        folios = folios_of(holder)
        assert smaps_kib(holder, "Rss") * 1024 == len(folios) * PAGE_BYTES
    due = np.arange(holder.start, holder.end, 2 * PAGE_BYTES, dtype=np.uint64)
    np.testing.assert_array_equal(folios["addr"], due)
    assert set(folios["pages"]) == {1}
    assert set(folios["node"]) == {UNASKED}


def test_a_transparent_huge_page_is_listed_once() -> None:
    with holding(Kind.THP) as holder:
        assert smaps_kib(holder, "AnonHugePages") == 8 << 10
        folios = folios_of(holder)
    assert folios["addr"].tolist() == list(range(holder.start, holder.end, HUGE_BYTES))
    assert set(folios["pages"]) == {512}


def test_a_huge_page_that_the_range_cuts_is_listed_whole() -> None:
    with holding(Kind.THP) as holder, Pagemap(holder.pid) as pagemap:
        inside = holder.start + HUGE_BYTES + 5 * PAGE_BYTES
        folios, following = pagemap.folios(inside, inside + PAGE_BYTES, 10)
    assert folios[["addr", "pages"]].tolist() == [(holder.start + HUGE_BYTES, 512)]
    assert following == holder.start + 2 * HUGE_BYTES


@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.THP])
@pytest.mark.parametrize("limit", [1, 3, 500])
def test_a_range_is_listed_in_parts_as_in_one_go(kind: Kind, limit: int) -> None:
    with holding(kind) as holder, Pagemap(holder.pid) as pagemap:
        parts, start = [], holder.start
        while start < holder.end:
            part, start = pagemap.folios(start, holder.end, limit)
            assert len(part) <= limit
            parts.append(part)
        np.testing.assert_array_equal(np.concatenate(parts), folios_of(holder))


def ranges_of(holder: Holder, edges: list[int]) -> NDArray[np.void]:
    """The ranges between two and two of these pages."""
    address = holder.start + np.array(edges, np.uint64) * PAGE_BYTES
    ranges = np.zeros(len(edges) // 2, RANGE)
    ranges["start"], ranges["end"] = address[::2], address[1::2]
    return ranges


@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.THP])
@pytest.mark.parametrize("limit", [1, 3, 500])
def test_ranges_are_listed_like_each_by_itself(kind: Kind, limit: int) -> None:
    edges = [0, 1, 1, 2, 5, 6, 512, 600, 700, 701, 900, 1024]
    with holding(kind) as holder, Pagemap(holder.pid) as pagemap:
        ranges = ranges_of(holder, edges)
        due = [pagemap.folios(int(one["start"]), int(one["end"]), 1000)[0] for one in ranges]
        found: list[list[NDArray[np.void]]] = [[] for _ in ranges]
        rows = np.arange(len(ranges))
        while len(rows):
            folios, come_to = pagemap.list_ranges(ranges, limit)
            assert 0 < come_to <= len(rows)
            assert len(folios) <= limit
            parts = np.split(folios, np.cumsum(ranges["folios"][:come_to].astype(int))[:-1])
            for row, part in zip(rows[:come_to], parts, strict=True):
                found[row].append(part)
            left = ranges["start"] < ranges["end"]
            assert left[come_to:].all(), "what was not come to is left"
            rows, ranges = rows[left], ranges[left]
    for parts, one in zip(found, due, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), one)


def test_no_range_is_begun_once_enough_base_pages_are_listed() -> None:
    with holding(Kind.THP) as holder, Pagemap(holder.pid) as pagemap:
        ranges = ranges_of(holder, [0, 512, 512, 1024, 1024, 1536])
        folios, come_to = pagemap.list_ranges(ranges, 513)
    assert (len(folios), come_to) == (2, 2)


def test_without_a_scan_every_page_of_ranges_is_listed() -> None:
    with holding(Kind.PLAIN) as holder:
        ranges = ranges_of(holder, [0, 1, 4, 7, 9, 20])
    folios, come_to = pages.every_page_of(ranges, 5)
    page = (folios["addr"] - holder.start) // PAGE_BYTES
    assert page.tolist() == [0, 4, 5, 6, 9]
    assert ranges["folios"].tolist() == [1, 3, 1]
    assert come_to == 3
    rest, come_to = pages.every_page_of(ranges[2:], 100)
    assert ((rest["addr"] - holder.start) // PAGE_BYTES).tolist() == list(range(10, 20))
    assert (come_to, set(rest["node"]), set(rest["pages"])) == (1, {UNASKED}, {1})


def test_ranges_of_a_process_that_has_exited_are_done() -> None:
    with holding(Kind.PLAIN) as holder:
        pagemap, ranges = Pagemap(holder.pid), ranges_of(holder, [0, 1, 4, 7])
    with pagemap:
        folios, come_to = pagemap.list_ranges(ranges, 5)
    assert (len(folios), come_to) == (0, 2)
    assert (ranges["start"] >= ranges["end"]).all()


def test_a_terabyte_of_nothing_costs_nothing() -> None:
    with holding(Kind.SPARSE) as holder:
        folios = folios_of(holder)
    due = [holder.start, (holder.start + holder.end) // 2, holder.end - PAGE_BYTES]
    assert folios["addr"].tolist() == due


def test_the_zero_page_is_left_out() -> None:
    with holding(Kind.ZERO) as holder:
        assert len(folios_of(holder)) == 0


@contextmanager
def reserved_hugetlb(page_bytes: int) -> Iterator[None]:
    """Adds a page to hugetlbfs' pool, and takes it away."""
    pool = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB/nr_hugepages")
    before = int(pool.read_text())
    pool.write_text(f"{before + 1}\n")
    try:
        if int(pool.read_text()) != before + 1:
            pytest.skip(f"no {page_bytes >> 20} MiB of contiguous memory for hugetlbfs")
        yield
    finally:
        pool.write_text(f"{before}\n")


@pytest.mark.parametrize(
    ("kind", "page_bytes"), [(Kind.HUGETLB, HUGE_BYTES), (Kind.GIGANTIC, GIGANTIC_BYTES)]
)
def test_a_page_of_hugetlbfs_is_listed_once(kind: Kind, page_bytes: int) -> None:
    with reserved_hugetlb(page_bytes), holding(kind) as holder:
        folios = folios_of(holder)
    assert folios[["addr", "pages"]].tolist() == [(holder.start, page_bytes // PAGE_BYTES)]


def test_query_agrees_with_numa_maps() -> None:
    with holding(Kind.PLAIN) as holder:
        folios = folios_of(holder)
        pages.query(holder.pid, folios)
        maps = Path(f"/proc/{holder.pid}/numa_maps").read_text()
        line = next(line for line in maps.splitlines() if line.startswith(f"{holder.start:x} "))
    counted = {int(node): int(n) for node, n in re.findall(r" N(\d+)=(\d+)", line)}
    nodes, counts = np.unique(folios["node"], return_counts=True)
    assert dict(zip(nodes.tolist(), counts.tolist(), strict=True)) == counted


def test_query_tells_what_is_not_there() -> None:
    with holding(Kind.PLAIN) as holder:
        folios, _ = pages.every_page(holder.start, holder.start + 2 * PAGE_BYTES, 10)
        pages.query(holder.pid, folios)
    assert folios["node"].tolist() == [NODE, -errno.ENOENT]


def test_residents_stay() -> None:
    with holding(Kind.PLAIN) as holder:
        folios = folios_of(holder)
        tally = pages.move(holder.pid, folios, NODE)
    assert (tally.resident, tally.moved, tally.stopped) == (1024, 0, 0)
    assert set(folios["node"]) == {NODE}


def test_a_node_that_is_not_there_stops_the_move() -> None:
    with holding(Kind.PLAIN) as holder:
        tally = pages.move(holder.pid, folios_of(holder), NO_NODE)
    assert (tally.left, tally.moved, tally.stopped) == (1024, 0, errno.ENODEV)


@pytest.mark.parametrize("arguments", [{"batch_pages": 0}, {"node": -1}, {"pid": 0}])
def test_an_impossible_argument_is_refused(arguments: dict[str, int]) -> None:
    folios = np.zeros(1, FOLIO)
    call = {"pid": os.getpid(), "node": 0, "batch_pages": 1, **arguments}
    with pytest.raises(OSError, match="move_pages: Invalid argument"):
        pages.move(Pid(call["pid"]), folios, NodeId(call["node"]), batch_pages=call["batch_pages"])


# Processes that are gone, out of reach, or none


def one_folio() -> NDArray[np.void]:
    folios, _ = pages.every_page(0x10000, 0x11000, 1)
    return folios


@contextmanager
def zombie() -> Iterator[Pid]:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield Pid(process.pid)


@contextmanager
def nobody_there() -> Iterator[Pid]:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        yield Pid(process.pid)


@contextmanager
def kernel_thread() -> Iterator[Pid]:
    yield KTHREADD


@pytest.mark.parametrize("absentee", [zombie, nobody_there, kernel_thread])
def test_a_process_without_memory_is_one_that_is_not_there(
    absentee: Callable[[], AbstractContextManager[Pid]],
) -> None:
    with absentee() as pid:
        with pytest.raises(ProcessLookupError, match=r"(?i)no (such process|memory): .*/proc/"):
            Pagemap(pid)
        with pytest.raises(ProcessLookupError, match="move_pages: No such process"):
            pages.query(pid, one_folio())
        tally = pages.move(pid, one_folio(), NODE)
    assert (tally.left, tally.stopped) == (1, errno.ESRCH)


def test_a_process_that_exits_under_our_hands_has_no_folios_left() -> None:
    with holding(Kind.PLAIN) as holder, Pagemap(holder.pid) as pagemap:
        holder.process.kill()
        holder.process.wait()
        folios, following = pagemap.folios(holder.start, holder.end, 10)
    assert len(folios) == 0
    assert following == holder.end


def test_a_query_ends_with_the_process() -> None:
    with holding(Kind.PLAIN) as holder:
        folios = folios_of(holder)
        holder.process.kill()
        with pytest.raises(ProcessLookupError):
            query_forever(holder.pid, folios)


def query_forever(pid: Pid, folios: NDArray[np.void]) -> None:
    while True:
        pages.query(pid, folios)


def become_nobody(_attempt: Callable[..., object]) -> None:
    """By now the attempt has been imported, from where nobody may not be able to read."""
    os.setuid(NOBODY)


def as_nobody(attempt: Callable[..., object], *arguments: object) -> object:
    """Calls a function in a process without privileges; returns its result or its error.

    It is started anew: a fork of this process could inherit a lock that some thread holds.
    """
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=become_nobody, initargs=(attempt,)
    ) as pool:
        done = pool.submit(attempt, *arguments)
        return done.exception() or done.result()


def test_others_processes_are_out_of_reach() -> None:
    own = Pid(os.getpid())
    assert isinstance(as_nobody(Pagemap, own), PermissionError)
    refused = as_nobody(pages.query, own, one_folio())
    assert isinstance(refused, PermissionError)
    assert "move_pages" in str(refused)
    tally = as_nobody(pages.move, own, one_folio(), NODE)
    assert isinstance(tally, pages.Tally)
    assert (tally.left, tally.stopped) == (1, errno.EPERM)


def test_a_range_outside_user_space_is_an_error() -> None:
    with Pagemap(Pid(os.getpid())) as pagemap, pytest.raises(OSError, match="PAGEMAP_SCAN"):
        pagemap.folios(1 << 62, (1 << 62) + PAGE_BYTES, 1)


def test_a_closed_pagemap_stays_closed() -> None:
    pagemap = Pagemap(Pid(os.getpid()))
    pagemap.close()
    pagemap.close()
    with pytest.raises(ValueError, match="closed"):
        pagemap.folios(0x10000, 0x11000, 1)


# Leaks


def grown_bytes(call: Callable[[], object], calls: int = 5000) -> int:
    """How much memory, mapped or touched, so many calls leave; a file counts as a mebibyte.

    The least of several times: what leaks does so each time, and Python grows now and then by
    itself.
    """
    for _ in range(calls // 10):
        call()
    return min(_grown_bytes(call, calls) for _ in range(3))


def _grown_bytes(call: Callable[[], object], calls: int) -> int:
    own = psutil.Process()
    memory, files = own.memory_info(), own.num_fds()
    for _ in range(calls):
        call()
    now = own.memory_info()
    return max(now.rss - memory.rss, now.vms - memory.vms) + (own.num_fds() - files << 20)


def test_listing_leaks_nothing() -> None:
    with holding(Kind.PLAIN) as holder, Pagemap(holder.pid) as pagemap:
        assert grown_bytes(lambda: pagemap.folios(holder.start, holder.end, 100)) < 256 << 10


def test_opening_leaks_nothing() -> None:
    with holding(Kind.PLAIN) as holder:
        assert grown_bytes(lambda: Pagemap(holder.pid).close()) < 256 << 10


def test_a_refused_opening_leaks_nothing() -> None:
    def refused() -> None:
        with pytest.raises(ProcessLookupError):
            Pagemap(KTHREADD)

    assert grown_bytes(refused) < 256 << 10


def test_asking_leaks_nothing() -> None:
    folios = one_folio()
    assert grown_bytes(lambda: pages.query(Pid(os.getpid()), folios)) < 256 << 10


@pytest.mark.parametrize("node", [NODE, NO_NODE])
def test_moving_leaks_nothing(node: NodeId) -> None:
    own = Pid(os.getpid())
    assert grown_bytes(lambda: pages.move(own, one_folio(), node)) < 256 << 10
