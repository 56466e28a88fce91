# SPDX-License-Identifier: Apache-2.0
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import trees
from tierd.kernel import zoneinfo
from tierd.kernel.free import REFRESH_S, FreeMemory
from tierd.kernel.text import UnexpectedContent
from tierd.kernel.zoneinfo import Zone
from tierd.model import PAGE_BYTES, NodeId, NodeRoom

ZERO, ONE = NodeId(0), NodeId(1)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return trees.unpack("cxl-7.2", tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def free(root: Path, clock: Clock) -> Iterator[FreeMemory]:
    before = psutil.Process().num_fds()
    with FreeMemory(root, clock) as opened:
        yield opened
    assert psutil.Process().num_fds() == before


def meminfo(root: Path, node: NodeId, free_bytes: int) -> None:
    path = root / f"sys/devices/system/node/node{node}/meminfo"
    path.write_text(f"Node {node} MemTotal: 9 kB\nNode {node} MemFree:  {free_bytes >> 10} kB\n")


def settle(root: Path) -> dict[NodeId, int]:
    """Makes meminfo tell what zoneinfo does: the tree was captured file by file."""
    zones = zoneinfo.read_zones(root)
    for node in (ZERO, ONE):
        meminfo(root, node, sum(z.free_pages for z in zones if z.node == node) * PAGE_BYTES)
    return dict(zoneinfo.room_bytes(zones))


def test_room_is_zoneinfos(root: Path, free: FreeMemory) -> None:
    rooms = settle(root)
    assert {node: free.room_bytes(node) for node in rooms} == rooms


def test_what_cpus_keep_aside_is_told_apart(root: Path, free: FreeMemory) -> None:
    path = root / "proc/zoneinfo"
    before, strict = free.rooms()[ONE], settle(root)[ONE]
    first, mine, rest = path.read_text().partition("Node 1, zone  Movable")
    path.write_text(first + mine + re.sub(r"count: +\d+", "count:    700", rest, count=2))
    assert free.rooms()[ONE] == NodeRoom(strict, before.aside_bytes + 2 * 700 * PAGE_BYTES)
    assert free.room_bytes(ONE) == strict
    free.closed.add(ONE)
    assert free.rooms()[ONE] == NodeRoom()


def test_inactive_page_cache_is_told_of_each_node(root: Path, free: FreeMemory) -> None:
    """In the first of its zones that has memory; the counts of zones are of other names."""
    told = {node: room.cache_bytes for node, room in free.rooms().items()}
    vmstat = {
        node: (root / f"sys/devices/system/node/node{node}/vmstat").read_text() for node in told
    }
    pages = {
        node: found[1]
        for node, text in vmstat.items()
        if (found := re.search(r"^nr_inactive_file (\d+)$", text, re.MULTILINE))
    }
    assert told == {node: int(count) * PAGE_BYTES for node, count in pages.items()}
    assert told[ZERO] > 0


def test_what_leaves_may_be_replaced_while_the_kernel_has_enough(
    root: Path, free: FreeMemory
) -> None:
    settle(root)
    withheld = free.withheld_bytes(ONE)
    for share, may in (1.0, True), (0.9, True), (0.8, False):
        meminfo(root, ONE, int(share * withheld))
        assert free.room_bytes(ONE) == 0
        assert free.may_replace(ONE) is may
    meminfo(root, ONE, withheld)
    free.closed.add(ONE)
    assert not free.may_replace(ONE)
    assert not free.may_replace(NodeId(9))


def test_what_is_free_is_read_each_time(root: Path, free: FreeMemory) -> None:
    room = settle(root)[ONE]
    full = sum(z.free_pages for z in zoneinfo.read_zones(root) if z.node == ONE) * PAGE_BYTES
    assert free.room_bytes(ONE) == room
    meminfo(root, ONE, full - (1 << 20))
    assert free.room_bytes(ONE) == room - (1 << 20)
    meminfo(root, ONE, 4096)
    assert free.room_bytes(ONE) == 0


def test_watermarks_are_read_again_after_a_while(
    root: Path, free: FreeMemory, clock: Clock
) -> None:
    room = settle(root)[ONE]
    assert free.room_bytes(ONE) == room
    path = root / "proc/zoneinfo"
    high = next(z.high_pages for z in zoneinfo.read_zones(root) if z.node == ONE and z.room_pages)
    path.write_text(path.read_text().replace(f"high     {high}\n", f"high     {high + 10}\n"))
    clock.now_s = REFRESH_S / 2
    assert free.room_bytes(ONE) == room
    clock.now_s = REFRESH_S
    assert free.room_bytes(ONE) == room - 10 * PAGE_BYTES


def test_what_is_withheld_is_what_room_lacks(root: Path, free: FreeMemory) -> None:
    room = settle(root)[ONE]
    zones = [zone for zone in zoneinfo.read_zones(root) if zone.node == ONE]
    free_bytes = sum(zone.free_pages for zone in zones) * PAGE_BYTES
    assert free.withheld_bytes(ONE) == free_bytes - room > 0
    assert free.withheld_bytes(NodeId(7)) == 0


def test_node_that_is_not_there(root: Path, free: FreeMemory) -> None:
    settle(root)
    assert free.room_bytes(NodeId(7)) == 0
    (root / "sys/devices/system/node/node1/meminfo").unlink()
    assert free.room_bytes(ONE) == 0
    assert free.room_bytes(ZERO) > 0


def test_node_that_goes_offline(
    root: Path, free: FreeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = settle(root)[ONE]
    assert free.room_bytes(ONE) == room

    def gone(*_: int) -> bytes:
        raise OSError(errno.ENODEV, "No such device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", gone)
        assert free.room_bytes(ONE) == 0
    assert free.room_bytes(ONE) == room


def test_node_that_is_back_before_it_was_missed(
    root: Path, free: FreeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = settle(root)[ONE]
    assert free.room_bytes(ONE) == room
    pread, answers = os.pread, iter([OSError(errno.ENODEV, "No such device")])

    def stale(file: int, count: int, offset: int) -> bytes:
        for answer in answers:
            raise answer
        return pread(file, count, offset)

    monkeypatch.setattr(os, "pread", stale)
    assert free.room_bytes(ONE) == room


def test_garbled_meminfo(root: Path, free: FreeMemory) -> None:
    (root / "sys/devices/system/node/node1/meminfo").write_text("Node 1 MemTotal: 1 kB\n")
    with pytest.raises(UnexpectedContent, match="not MemFree in kB"):
        free.room_bytes(ONE)


PAGES = st.integers(0, 1 << 20)
ZONES = st.lists(
    st.builds(
        Zone,
        node=st.just(ZERO),
        name=st.just("Normal"),
        free_pages=PAGES,
        aside_pages=PAGES,
        high_pages=PAGES,
        managed_pages=PAGES,
        reserve_pages=PAGES,
    ).filter(lambda zone: zone.free_pages <= zone.managed_pages),
    max_size=5,
)


@given(ZONES)
def test_what_is_free_less_what_is_withheld_is_never_too_much(zones: list[Zone]) -> None:
    cheap = sum(zone.free_pages - zone.withheld_pages for zone in zones)
    exact = sum(zone.room_pages for zone in zones)
    assert cheap <= exact
    if all(zone.free_pages >= zone.withheld_pages for zone in zones):
        assert cheap == exact
