# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tierd.kernel import nodes, zoneinfo
from tierd.kernel.text import UnexpectedContent
from tierd.model import PAGE_BYTES, Performance


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


SYS = "sys/devices/system"
TWO_NODES = {
    f"{SYS}/memory/block_size_bytes": "8000000\n",
    f"{SYS}/node/online": "0,2\n",
    f"{SYS}/node/node0/cpulist": "0-1\n",
    f"{SYS}/node/node0/distance": "10 20\n",
    f"{SYS}/node/node0/meminfo": "Node 0 MemTotal:  2048 kB\nNode 0 MemFree:   1024 kB\n",
    f"{SYS}/node/node0/memory0/state": "online\n",
    f"{SYS}/node/node0/memory1/state": "online\n",
    f"{SYS}/node/node0/memory32/state": "online\n",
    f"{SYS}/node/node0/access0/initiators/read_latency": "10\n",
    f"{SYS}/node/node0/access0/initiators/read_bandwidth": "0\n",
    f"{SYS}/node/node2/cpulist": "\n",
    f"{SYS}/node/node2/distance": "20 10\n",
    f"{SYS}/node/node2/meminfo": "Node 2 MemTotal:  4096 kB\nNode 2 MemFree:   4096 kB\n",
    f"{SYS}/node/node2/access1/initiators/read_latency": "300\n",
    f"{SYS}/node/node2/access1/initiators/write_latency": "400\n",
    f"{SYS}/node/node2/access1/initiators/read_bandwidth": "20000\n",
    f"{SYS}/node/node2/access1/initiators/write_bandwidth": "10000\n",
}


def test_two_nodes(tmp_path: Path) -> None:
    write(tmp_path, TWO_NODES)
    near, far = nodes.read_nodes(tmp_path)
    assert (near.id, near.cpus, near.total_bytes, near.free_bytes) == (0, (0, 1), 2 << 20, 1 << 20)
    assert near.distances == {0: 10, 2: 20}
    assert near.any_initiator == Performance(
        read_latency_ns=10,
        write_latency_ns=None,
        read_bandwidth_mbps=None,
        write_bandwidth_mbps=None,
    )
    assert near.cpu_initiator is None
    assert near.blocks == (range(2 << 27), range(32 << 27, 33 << 27))
    assert (far.id, far.cpus, far.any_initiator, far.blocks) == (2, (), None, ())
    assert far.distances == {0: 20, 2: 10}
    assert far.cpu_initiator == Performance(
        read_latency_ns=300,
        write_latency_ns=400,
        read_bandwidth_mbps=20000,
        write_bandwidth_mbps=10000,
    )


def test_kernel_without_numa(tmp_path: Path) -> None:
    assert nodes.read_nodes(tmp_path) == ()


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("node/online", "0-", "a list such as"),
        ("node/online", "0-1024", "node ids"),
        ("node/node0/cpulist", "two", "a list such as"),
        ("node/node0/distance", "10", "2 distances"),
        ("node/node0/distance", "10 near", "2 distances"),
        ("node/node0/meminfo", "Node 0 MemTotal: 1 GB", "MemTotal and MemFree"),
        ("node/node0/access0/initiators/read_latency", "fast", "a number"),
        ("memory/block_size_bytes", "large", "a hexadecimal size"),
    ],
)
def test_garbled_attribute(tmp_path: Path, name: str, content: str, wanted: str) -> None:
    write(tmp_path, TWO_NODES | {f"{SYS}/{name}": content})
    with pytest.raises(UnexpectedContent, match=f"{name} holds .* not .*{wanted}"):
        nodes.read_nodes(tmp_path)


ZONE = """\
Node {node}, zone {name:>8}
  per-node stats
      nr_inactive_anon 1501
  pages free     {free}
        boost    0
        min      10567
        low      13208
        high     {high}
        promo    18490
        spanned  1044480
        present  782302
        managed  {managed}
        cma      0
        protection: {protection}
      nr_free_pages {free}
      nr_zone_inactive_anon 0
  pagesets
    cpu: 0
              count:    2847
              high:     3920
              batch:    63
  node_unreclaimable:  0
  start_pfn:           4096
"""


def zone(node: int, name: str, free: int, high: int, protection: str = "(0, 0, 0, 0, 0)") -> str:
    return ZONE.format(
        node=node, name=name, free=free, high=high, managed=free + 1, protection=protection
    )


TWO_NODES_ZONES = "".join(
    [
        zone(0, "DMA", 3840, 78, "(0, 3019, 4811, 4811, 4811)"),
        zone(0, "DMA32", 765056, 15849, "(0, 0, 1792, 1792, 1792)"),
        zone(0, "Normal", 9000, 9409),
        zone(0, "Movable", 0, 32),
        zone(0, "Device", 0, 0),
        zone(1, "DMA", 0, 0),
        zone(1, "DMA32", 0, 0),
        zone(1, "Normal", 100, 32, "(0, 0, 0, 10, 10)"),
        zone(1, "Movable", 131072, 1000),
        zone(1, "Device", 0, 0),
    ]
)


def test_room_is_what_lies_above_the_high_watermark_and_the_reserve(tmp_path: Path) -> None:
    write(tmp_path, {"proc/zoneinfo": TWO_NODES_ZONES})
    assert zoneinfo.free_above_watermarks_bytes(tmp_path) == {
        0: (765056 - 15849 - 1792) * PAGE_BYTES,
        1: (100 - 32 - 10 + 131072 - 1000) * PAGE_BYTES,
    }
    dma, dma32, *_ = zoneinfo.read_zones(tmp_path)
    assert (dma.name, dma.node, dma.managed_pages, dma.reserve_pages) == ("DMA", 0, 3841, 4811)
    assert dma.room_pages == 0
    assert dma32.room_pages == 765056 - 15849 - 1792


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no zones here",
        "Node 0, zone Movable\n",
        TWO_NODES_ZONES.replace("high ", "low "),
        TWO_NODES_ZONES.replace("protection: (", "protection: ["),
        TWO_NODES_ZONES.replace("Movable", "Fixed"),
        TWO_NODES_ZONES.replace("pages free", "pages many"),
        TWO_NODES_ZONES[:-900],
    ],
)
def test_garbled_zoneinfo(tmp_path: Path, content: str) -> None:
    write(tmp_path, {"proc/zoneinfo": content})
    with pytest.raises(UnexpectedContent, match=r"proc/zoneinfo holds .*, not "):
        zoneinfo.read_zones(tmp_path)


def test_no_zoneinfo(tmp_path: Path) -> None:
    with pytest.raises(UnexpectedContent):
        zoneinfo.read_zones(tmp_path)
