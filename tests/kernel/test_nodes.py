# SPDX-License-Identifier: Apache-2.0
"""The node readers on the running kernel; numactl and sysfs are the oracles."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierd.discover.topology import discover, read_use
from tierd.kernel import nodes, text, zoneinfo
from tierd.kernel.free import FreeMemory
from tierd.model import PAGE_BYTES


def test_nodes_are_as_numactl_tells() -> None:
    told = subprocess.run(["numactl", "--hardware"], capture_output=True, text=True, check=True)
    cpus = {int(n): c.split() for n, c in re.findall(r"^node (\d+) cpus:(.*)$", told.stdout, re.M)}
    sizes = dict(re.findall(r"^node (\d+) size: (\d+) MB$", told.stdout, re.M))
    read = {node.id: node for node in nodes.read_nodes()}
    assert read.keys() == cpus.keys()
    for node_id, node in read.items():
        assert list(map(str, node.cpus)) == cpus[node_id]
        assert node.total_bytes >> 20 == int(sizes[str(node_id)])
        assert node.distances[node_id] == 10


def test_every_memory_block_is_in_a_range() -> None:
    size = int(Path("/sys/devices/system/memory/block_size_bytes").read_text(), 16)
    for node in nodes.read_nodes():
        folder = Path(f"/sys/devices/system/node/node{node.id}")
        blocks = [int(path.name.removeprefix("memory")) for path in folder.glob("memory[0-9]*")]
        assert sum(map(len, node.blocks)) == len(blocks) * size
        assert all(any(block * size in r for r in node.blocks) for block in blocks)


def test_zones_add_up_to_the_nodes() -> None:
    managed = dict.fromkeys((node.id for node in nodes.read_nodes()), 0)
    for zone in zoneinfo.read_zones():
        managed[zone.node] += zone.managed_pages * PAGE_BYTES
    assert managed == {node.id: node.total_bytes for node in nodes.read_nodes()}


def test_room_is_below_what_is_free() -> None:
    free = sum(zone.free_pages for zone in zoneinfo.read_zones()) * PAGE_BYTES
    assert 0 <= sum(zoneinfo.free_above_watermarks_bytes().values()) < free
    assert free <= os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


def test_cheap_room_is_that_of_zoneinfo() -> None:
    """Within what other processes take and give back between the two reads."""
    with FreeMemory() as free:
        for node, exact in zoneinfo.free_above_watermarks_bytes().items():
            assert free.room_bytes(node) == pytest.approx(exact, abs=256 << 20)


@contextmanager
def nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_topology_is_told_to_everybody() -> None:
    whole = discover()
    with nobody():
        told, use = discover(), read_use()
    assert (told.nodes, told.tiers) == (whole.nodes, whole.tiers)
    assert use.keys() == {node.id for node in told.nodes}


def test_address_that_is_told_to_root_alone_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "resource"
    path.write_text("0x690000000\n")
    path.chmod(0o400)
    assert text.read_address(path) == 0x690000000
    with nobody():
        assert text.read_address(path) is None
