# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import trees
from tierd import config
from tierd.bulk import NodeMap, map_nodes, rank_nodes
from tierd.config import TierConfig
from tierd.discover import tiers
from tierd.discover.hotplug import differences
from tierd.discover.topology import discover, read_use
from tierd.errors import ConfigError
from tierd.kernel import cxl, dax
from tierd.kernel.text import UnexpectedContent
from tierd.model import Backing, Node, NodeId, Performance, Topology

MIB, GIB = 1 << 20, 1 << 30
CXL_TREES = [name for name in trees.NAMES if name.startswith("cxl")]


def put(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def real(root: Path, name: str) -> Path:
    """Returns the folder of a device of the CXL or dax bus."""
    bus = "dax" if name.startswith("dax") else "cxl"
    return (root / "sys/bus" / bus / "devices" / name).resolve()


def layout(root: Path, declared: tuple[TierConfig, ...] = ()) -> list[tuple[str, str, list[int]]]:
    found = discover(declared, root)
    assert [tier.rank for tier in found.tiers] == list(range(len(found.tiers)))
    return [(tier.name, tier.kind, list(tier.nodes)) for tier in found.tiers]


def warnings(root: Path) -> list[str]:
    return list(discover((), root).warnings)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cxl-6.12", [("dram", "dram", [0]), ("cxl", "cxl", [1])]),
        ("cxl-7.2", [("dram", "dram", [0]), ("cxl", "cxl", [1])]),
        ("cxl-interleaved", [("dram", "dram", [0]), ("cxl", "cxl", [1])]),
        ("cxl-two-regions", [("dram", "dram", [0]), ("cxl", "cxl", [1, 2])]),
        ("cxl-two-tiers-6.12", [("dram", "dram", [0]), ("cxl", "cxl", [2]), ("cxl1", "cxl", [3])]),
        ("cxl-two-tiers-7.2", [("dram", "dram", [0]), ("cxl", "cxl", [2]), ("cxl1", "cxl", [3])]),
        ("flat", [("dram", "dram", [0])]),
        ("hmat", [("dram", "dram", [0]), ("dram1", "dram", [1])]),
        ("numa", [("dram", "dram", [0]), ("dram1", "dram", [1])]),
        ("slow-node-6.12", [("dram", "dram", [0]), ("pmem", "dram", [1])]),
        ("slow-node-7.2", [("dram", "dram", [0]), ("pmem", "dram", [1])]),
    ],
)
def test_tiers_of_each_guest(
    tmp_path: Path, name: str, expected: list[tuple[str, str, list[int]]]
) -> None:
    assert layout(trees.unpack(name, tmp_path)) == expected


def test_every_captured_tree_is_tested() -> None:
    """A new tree wants its line above."""
    marker = test_tiers_of_each_guest.pytestmark[0]  # type: ignore[attr-defined]
    assert [name for name, _ in marker.args[1]] == trees.NAMES


def test_node_behind_one_cxl_device(tmp_path: Path) -> None:
    found = discover((), trees.unpack("cxl-7.2", tmp_path))
    near, far = found.nodes
    assert (near.backing, near.cpus, near.memdevs, near.dax_devices) == (
        Backing.DRAM,
        (0, 1),
        (),
        (),
    )
    assert (far.backing, far.cpus, far.memdevs) == (Backing.CXL, (), ("mem0",))
    assert (far.dax_devices, far.total_bytes, far.kernel_tier) == (("dax0.0",), 512 * MIB, 22)
    assert found.tiers[1].capacity_bytes == 512 * MIB
    assert found.tiers[1].latency_ns is None
    assert found.warnings == ()


def test_cxl_device_on_a_node(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (memdev,) = cxl.read_memdevs(root)
    assert (memdev.name, memdev.serial, memdev.ram_bytes) == ("mem0", 0, 512 * MIB)
    assert (memdev.node, memdev.firmware) == (None, "BWFW VERSION 00")
    (real(root, "mem0") / "numa_node").write_text("0\n")
    (real(root, "mem0") / "firmware_version").write_text("\n")
    (memdev,) = cxl.read_memdevs(root)
    assert (memdev.node, memdev.firmware) == (0, None)


def test_interleaved_region_names_its_devices(tmp_path: Path) -> None:
    found = discover((), trees.unpack("cxl-interleaved", tmp_path))
    assert found.nodes[1].memdevs == ("mem0", "mem1")
    (region,) = found.regions
    assert (region.interleave_ways, region.memdevs, region.size_bytes) == (
        2,
        ("mem0", "mem1"),
        512 * MIB,
    )
    assert region.committed
    assert {d.kind for d in found.decoders} == {"root", "switch", "endpoint"}
    members = [d.name for d in found.decoders if d.kind == "endpoint" and d.region == "region0"]
    assert len(members) == 2


def test_two_regions_are_told_apart(tmp_path: Path) -> None:
    found = discover((), trees.unpack("cxl-two-regions", tmp_path))
    assert [(node.id, node.memdevs) for node in found.nodes[1:]] == [(1, ("mem0",)), (2, ("mem1",))]
    assert found.tiers[1].capacity_bytes == 768 * MIB


@pytest.mark.parametrize("kernel", ["6.12", "7.2"])
def test_cxl_latencies_are_told_by_regions_and_without_the_kernels_error(
    tmp_path: Path, kernel: str
) -> None:
    """HMAT's 100 and 500 ns, 150 of the devices and 17 of the links, which are 17,000 there."""
    found = discover((), trees.unpack(f"cxl-two-tiers-{kernel}", tmp_path))
    assert [tier.latency_ns for tier in found.tiers] == [90, 267, 667]
    assert [tier.bandwidth_mbps for tier in found.tiers] == [40960, 10240, 10240]
    assert found.nodes[1].cpu_initiator == Performance(
        read_latency_ns=267,
        write_latency_ns=367,
        read_bandwidth_mbps=10240,
        write_bandwidth_mbps=10240,
    )


def test_cxl_latencies_without_the_error_stay(tmp_path: Path) -> None:
    root = trees.unpack("cxl-two-tiers-7.2", tmp_path)
    for latency_ns in (267, 16_999):
        for access in ("access0", "access1"):
            (real(root, "region0") / access / "read_latency").write_text(f"{latency_ns}\n")
        assert discover((), root).nodes[1].latency_ns == latency_ns


def test_a_link_in_flit_mode_has_a_larger_error(tmp_path: Path) -> None:
    root = trees.unpack("cxl-two-tiers-7.2", tmp_path)
    (memdev,) = discover((), root).nodes[1].memdevs
    port = real(root, memdev).parent.parent
    (port / "current_link_speed").write_text("64.0 GT/s PCIe\n")
    for access in ("access0", "access1"):
        (real(root, "region0") / access / "read_latency").write_text(f"{250 + 32_000}\n")
    assert discover((), root).nodes[1].latency_ns == 250 + 32


def test_nvdimm_is_not_cxl(tmp_path: Path) -> None:
    found = discover((), trees.unpack("slow-node-7.2", tmp_path))
    assert (found.nodes[1].backing, found.nodes[1].dax_devices) == (Backing.PMEM, ("dax0.0",))
    assert found.dax_devices[0].region == "region0"
    assert found.memdevs == ()


def test_cxl_memory_that_the_firmware_set_up_is_told_by_its_addresses(tmp_path: Path) -> None:
    """It is plain RAM to the kernel then: no dax device, and the tier of DRAM."""
    root = trees.unpack("cxl-7.2", tmp_path)
    (root / "sys/bus/dax/devices/dax0.0").unlink()
    put(root, "sys/devices/virtual/memory_tiering/memory_tier4/nodelist", "0-1\n")
    put(root, "sys/devices/virtual/memory_tiering/memory_tier22/nodelist", "\n")
    found = discover((), root)
    assert (found.nodes[1].backing, found.nodes[1].memdevs) == (Backing.CXL, ("mem0",))
    assert layout(root) == [("dram", "dram", [0]), ("cxl", "cxl", [1])]
    (warning,) = found.warnings
    assert "nodes without CPUs are taken for slower" in warning


def latency(root: Path, node: int, latency_ns: int, bandwidth_mbps: int) -> None:
    folder = f"sys/devices/system/node/node{node}/access1/initiators"
    put(root, f"{folder}/read_latency", f"{latency_ns}\n")
    put(root, f"{folder}/read_bandwidth", f"{bandwidth_mbps}\n")


def test_hmat_of_a_real_guest(tmp_path: Path) -> None:
    found = discover((), trees.unpack("hmat", tmp_path))
    assert [(tier.latency_ns, tier.bandwidth_mbps) for tier in found.tiers] == [
        (90, 40960),
        (250, 10240),
    ]
    told = Performance(
        read_latency_ns=250,
        write_latency_ns=250,
        read_bandwidth_mbps=10240,
        write_bandwidth_mbps=10240,
    )
    assert (found.nodes[1].any_initiator, found.nodes[1].cpu_initiator) == (told, told)
    assert found.warnings == ()


def test_hmat_comes_before_the_kernels_tiers(tmp_path: Path) -> None:
    root = trees.unpack("slow-node-7.2", tmp_path)
    latency(root, 0, 300, 1000)
    latency(root, 1, 100, 90000)
    found = discover((), root)
    assert layout(root) == [("pmem", "dram", [1]), ("dram", "dram", [0])]
    assert [(tier.latency_ns, tier.bandwidth_mbps) for tier in found.tiers] == [
        (100, 90000),
        (300, 1000),
    ]


def test_hmat_of_some_nodes_alone_ranks_nothing(tmp_path: Path) -> None:
    root = trees.unpack("slow-node-7.2", tmp_path)
    latency(root, 1, 10, 90000)
    assert layout(root) == [("dram", "dram", [0]), ("pmem", "dram", [1])]


def test_cxl_as_fast_as_dram_is_a_tier_of_its_own(tmp_path: Path) -> None:
    root = trees.unpack("cxl-two-regions", tmp_path)
    for node, latency_ns in ((0, 100), (1, 90), (2, 110)):
        latency(root, node, latency_ns, 1000)
    assert layout(root) == [("dram", "dram", [0]), ("cxl", "cxl", [1, 2])]
    assert discover((), root).tiers[1].latency_ns == 110
    assert discover((), root).tiers[1].bandwidth_mbps == 2000


def test_cxl_of_two_speeds_is_two_tiers(tmp_path: Path) -> None:
    root = trees.unpack("cxl-two-regions", tmp_path)
    for node, latency_ns in ((0, 100), (1, 400), (2, 250)):
        latency(root, node, latency_ns, 1000)
    assert layout(root) == [("dram", "dram", [0]), ("cxl", "cxl", [2]), ("cxl1", "cxl", [1])]


def test_one_node_is_warned_of(tmp_path: Path) -> None:
    (warning,) = warnings(trees.unpack("flat", tmp_path))
    assert "no second memory node" in warning
    assert "daxctl list" in warning


def test_nodes_that_are_alike_are_warned_of(tmp_path: Path) -> None:
    root = trees.unpack("numa", tmp_path)
    put(root, "sys/devices/system/node/node1/cpulist", "1\n")
    assert layout(root) == [("dram", "dram", [0, 1])]
    (warning,) = warnings(root)
    assert warning.startswith("nodes 0, 1 are all in one tier")
    assert "[[tier]]" in warning


def test_device_in_no_region(tmp_path: Path) -> None:
    root = trees.unpack("cxl-two-regions", tmp_path)
    (root / "sys/bus/cxl/devices/region1").unlink()
    (root / "sys/bus/dax/devices/dax1.0").unlink()
    (warning,) = warnings(root)
    assert warning == (
        "mem1: its 512 MiB are in no CXL region, so nothing uses them; make one with "
        "tierctl cxl create --memdev mem1"
    )


def leave_two_nodes(root: Path) -> None:
    put(root, "sys/devices/system/node/online", "0-1\n")
    for node, distances in ((0, "10 20\n"), (1, "20 10\n")):
        put(root, f"sys/devices/system/node/node{node}/distance", distances)


def take_out(root: Path, device: str, region: str, dax: str) -> None:
    """Takes a device out as device_del does whose memory is online: it stays, and its region."""
    (real(root, region) / "commit").write_text("0\n")
    (root / "sys/bus/dax/devices" / dax).unlink()
    (root / "sys/bus/cxl/devices" / device).unlink()


def test_memory_whose_device_was_taken_out_is_left_alone_and_told(tmp_path: Path) -> None:
    root = trees.unpack("cxl-two-regions", tmp_path)
    before = discover((), root)
    take_out(root, "mem1", "region1", "dax1.0")
    assert layout(root) == [("dram", "dram", [0]), ("cxl", "cxl", [1])]
    (warning,) = warnings(root)
    assert warning.startswith("node 2 has memory of region1, of which a CXL device has gone: ")
    told = list(differences(before, discover((), root)))
    assert told == [
        "CXL device mem1 has gone",
        "dax device dax1.0 has gone",
        warning,
        "tier 1: cxl, nodes 1",
    ]
    assert warning not in list(differences(discover((), root), discover((), root)))


def test_region_that_is_not_committed(tmp_path: Path) -> None:
    root = trees.unpack("cxl-two-regions", tmp_path)
    (real(root, "region1") / "commit").write_text("0\n")
    (root / "sys/bus/dax/devices/dax1.0").unlink()
    leave_two_nodes(root)
    (warning,) = warnings(root)
    assert warning == "mem1: region1 is not committed; finish it with cxl enable-region region1"


@pytest.mark.parametrize(
    ("driver", "step"),
    [
        ("kmem", "daxctl online-memory dax1.0"),
        ("device_dax", "daxctl reconfigure-device -m system-ram dax1.0"),
    ],
)
def test_region_whose_memory_is_not_online(tmp_path: Path, driver: str, step: str) -> None:
    root = trees.unpack("cxl-two-regions", tmp_path)
    leave_two_nodes(root)
    link = real(root, "dax1.0") / "driver"
    link.unlink()
    link.symlink_to(f"../drivers/{driver}")
    (warning,) = warnings(root)
    assert warning == f"mem1: the memory of region1 is not online; bring it with {step}"


def test_region_without_a_dax_device(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (root / "sys/bus/dax/devices/dax0.0").unlink()
    put(root, "sys/devices/system/node/online", "0\n")
    put(root, "sys/devices/system/node/node0/distance", "10\n")
    one_node, idle = warnings(root)
    assert "no second memory node" in one_node
    assert idle == "mem0: region0 has no dax device; load it with modprobe dax_cxl"


def test_node_that_mixes_its_own_memory_with_a_devices(tmp_path: Path) -> None:
    root = trees.unpack("slow-node-7.2", tmp_path)
    (real(root, "dax0.0") / "target_node").write_text("0\n")
    assert discover((), root).nodes[0].backing is Backing.DRAM
    assert [w for w in warnings(root) if w.startswith("node 0 mixes its own memory with that of")]


def declare(content: str) -> tuple[TierConfig, ...]:
    return config.parse(content, "f").tiers


def test_configuration_overrules_what_was_found(tmp_path: Path) -> None:
    root = trees.unpack("cxl-two-regions", tmp_path)
    declared = declare(
        "[[tier]]\nname = 'far'\nkind = 'cxl'\nnodes = [2]\nlatency_ns = 80\n"
        "[[tier]]\nname = 'near'\nkind = 'dram'\nnodes = [0]\nbandwidth_mbps = 7\n"
    )
    assert layout(root, declared) == [("far", "cxl", [2]), ("near", "dram", [0])]
    found = discover(declared, root)
    assert [(t.latency_ns, t.bandwidth_mbps) for t in found.tiers] == [(80, None), (None, 7)]
    (warning,) = found.warnings
    assert warning.startswith("node 1 is in no tier: its memory is left alone")
    assert rank_nodes(found).tolist() == [1, -1, 0]


def test_declared_nodes_that_are_not_there(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    declared = declare("[[tier]]\nname = 'a'\nkind = 'dram'\nnodes = [0, 7, 8]\n")
    with pytest.raises(ConfigError) as caught:
        discover(declared, root)
    assert str(caught.value).splitlines() == [
        "f:4: tier[1].nodes: there is no node 7 with memory; there are 0, 1",
        "f:4: tier[1].nodes: there is no node 8 with memory; there are 0, 1",
    ]


def test_machine_without_numa_cxl_or_dax(tmp_path: Path) -> None:
    found = discover((), tmp_path)
    assert (found.nodes, found.tiers, found.memdevs, found.dax_devices) == ((), (), (), ())
    assert "no second memory node" in found.warnings[0]


def test_use_is_zoneinfos(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    use = read_use(root)
    assert use.keys() == {0, 1}
    assert 0 < use[NodeId(1)].room_bytes < use[NodeId(1)].free_bytes == 512 * MIB


@pytest.mark.parametrize(
    ("device", "attribute", "content"),
    [
        ("mem0", "ram/size", "large"),
        ("mem0", "serial", "none"),
        ("region0", "interleave_ways", "17"),
        ("region0", "interleave_ways", "two"),
        ("region0", "size", "0x"),
        ("decoder2.0", "start", "here"),
        ("dax0.0", "target_node", "first"),
    ],
)
def test_garbled_device(tmp_path: Path, device: str, attribute: str, content: str) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (real(root, device) / attribute).write_text(content)
    with pytest.raises(UnexpectedContent, match=f"{attribute} holds '{content}', not"):
        discover((), root)


@pytest.mark.parametrize("name", CXL_TREES)
def test_devices_that_go_away_while_they_are_read(tmp_path: Path, name: str) -> None:
    """Their links are listed still, and each attribute is absent."""
    root = trees.unpack(name, tmp_path)
    before = discover((), root)
    for bus in ("cxl", "dax"):
        for device in (root / f"sys/bus/{bus}/devices").iterdir():
            for attribute in [path for path in device.resolve().rglob("*") if not path.is_dir()]:
                attribute.unlink()
    assert [memdev.name for memdev in cxl.read_memdevs(root)] == [m.name for m in before.memdevs]
    assert all(memdev.ram_bytes == 0 for memdev in cxl.read_memdevs(root))
    assert [region.memdevs for region in cxl.read_regions(root)] == [()] * len(before.regions)
    assert all(decoder.start is None for decoder in cxl.read_decoders(root))
    assert dax.read_dax_devices(root) == ()


def test_region_that_is_being_set_up(tmp_path: Path) -> None:
    root = trees.unpack("cxl-interleaved", tmp_path)
    region = real(root, "region0")
    for attribute, content in (
        ("target1", "\n"),
        ("resource", "0xffffffffffffffff\n"),
        ("commit", "0\n"),
        ("size", "0x0\n"),
    ):
        (region / attribute).write_text(content)
    (found,) = cxl.read_regions(root)
    assert (found.memdevs, found.start, found.committed) == (("mem0",), None, False)


def performance(latency_ns: int | None) -> Performance | None:
    if latency_ns is None:
        return None
    return Performance(
        read_latency_ns=latency_ns,
        write_latency_ns=None,
        read_bandwidth_mbps=None,
        write_bandwidth_mbps=None,
    )


NODES = st.lists(
    st.builds(
        Node,
        id=st.just(NodeId(0)),
        cpus=st.sampled_from([(), (0,)]),
        total_bytes=st.sampled_from([0, 1, 2]),
        distances=st.dictionaries(st.integers(0, 12).map(NodeId), st.integers(10, 254)),
        any_initiator=st.builds(performance, st.none() | st.integers(1, 1000)),
        cpu_initiator=st.just(None),
        kernel_tier=st.none() | st.integers(0, 40),
        backing=st.sampled_from(Backing),
    ),
    max_size=12,
).map(lambda nodes: [replace(node, id=NodeId(number)) for number, node in enumerate(nodes)])


@given(NODES, st.randoms())
def test_each_node_with_memory_is_in_one_tier_whatever_their_order(
    nodes: list[Node],
    random: Random,
) -> None:
    ranked = tiers.rank(nodes)
    placed = [node for tier in ranked for node in tier.nodes]
    assert sorted(placed) == [node.id for node in nodes if node.total_bytes]
    assert [tier.rank for tier in ranked] == list(range(len(ranked)))
    assert len({tier.name for tier in ranked}) == len(ranked) <= 8
    shuffled = random.sample(nodes, len(nodes))
    assert tiers.rank(shuffled) == ranked


@given(NODES)
def test_a_tier_is_never_faster_than_the_one_above(nodes: list[Node]) -> None:
    known = {node.id: node.latency_ns for node in nodes if node.total_bytes}
    if None in known.values():
        return
    ranked = tiers.rank(nodes)
    fastest = [min(known[n] or 0 for n in tier.nodes) for tier in ranked]
    slowest = [max(known[n] or 0 for n in tier.nodes) for tier in ranked]
    for above, below in zip(slowest, fastest[1:], strict=False):
        assert above <= below * tiers.NEAR


# Where physical memory is


def node(id: int, *blocks: range) -> Node:
    return Node(
        id=NodeId(id),
        cpus=(),
        total_bytes=sum(map(len, blocks)),
        distances={},
        any_initiator=None,
        cpu_initiator=None,
        kernel_tier=None,
        backing=Backing.DRAM,
        blocks=blocks,
    )


def node_map(*nodes: Node) -> NodeMap:
    return map_nodes(Topology(nodes=nodes, tiers=()))


def at(found: NodeMap, *addresses: int) -> list[int]:
    nodes: list[int] = found.at(np.array(addresses, np.uint64)).tolist()
    return nodes


def test_a_guests_blocks_tell_the_node(tmp_path: Path) -> None:
    topology = discover((), trees.unpack("cxl-7.2", tmp_path))
    near, far = (node.blocks for node in topology.nodes)
    ends = [address for block in (*near, *far) for address in (block.start, block.stop - 1)]
    expected = [id for id, blocks in enumerate((near, far)) for _ in blocks for _ in range(2)]
    assert near
    assert far
    assert at(map_nodes(topology), *ends) == expected
    assert at(map_nodes(topology), far[-1].stop, 2**64 - 1) == [-1, -1]


def test_a_block_of_two_nodes_is_of_neither() -> None:
    found = node_map(node(0, range(2 * GIB)), node(1, range(GIB, 3 * GIB)))
    assert at(found, GIB - 1, GIB, 2 * GIB - 1, 2 * GIB) == [0, -1, -1, 1]


def test_without_blocks_no_node_is_known() -> None:
    assert at(node_map(), 0, GIB) == [-1, -1]


@given(
    blocks=st.sets(st.integers(0, 30), max_size=20),
    owners=st.lists(st.integers(0, 4), min_size=31, max_size=31),
    address=st.integers(0, 32 * 128 * MIB),
)
def test_any_blocks_are_found_again(blocks: set[int], owners: list[int], address: int) -> None:
    size = 128 * MIB
    mine = {id: [b for b in sorted(blocks) if owners[b] == id] for id in range(5)}
    nodes = [
        node(id, *(range(b * size, (b + 1) * size) for b in own)) for id, own in mine.items() if own
    ]
    expected = owners[address // size] if address // size in blocks else -1
    assert at(node_map(*nodes), address) == [expected]
