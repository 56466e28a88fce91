# SPDX-License-Identifier: Apache-2.0
"""What memory the machine has: which node is backed by what, and which tier it is in.

docs/topology.md tells the rules to the operator. Nothing here writes to the machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tierd.config import TierConfig
from tierd.discover import advice, tiers
from tierd.discover.lost import regions_lost
from tierd.kernel import zoneinfo
from tierd.kernel.cxl import read_decoders, read_memdevs, read_regions
from tierd.kernel.cxl_speed import RegionSpeed, read_speed
from tierd.kernel.dax import read_dax_devices
from tierd.kernel.memory_tiers import read_memory_tiers
from tierd.kernel.nodes import NumaNode, read_nodes
from tierd.model import PAGE_BYTES, Backing, CxlRegion, DaxDevice, Node, NodeId, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """A node at this moment. `room_bytes` is what is free above the zones' high watermarks."""

    free_bytes: int
    room_bytes: int


def discover(
    declared: Sequence[TierConfig] = (),
    root: Path = Path("/"),
    *,
    strict: bool = True,
    kernel_tiers: Mapping[NodeId, int] | None = None,
) -> Topology:
    """Looks at the machine, and sorts its memory into tiers.

    Args:
        declared: the tiers as the configuration has them, the fastest first; where there are any,
            nothing is ranked.
        root: where /sys and /proc are.
        strict: refuse tiers that name nodes without memory; they are left out otherwise.
        kernel_tiers: the kernel's tiers of nodes, as they were told before. The kernel is asked
            only for a node's that is not among them: it is not safe while memory goes.

    Raises:
        ConfigError: a declared tier names a node that is not there or has no memory.
        UnexpectedContent: the kernel tells something in a format that is new to tierd.
    """
    regions, dax_devices = read_regions(root), read_dax_devices(root)
    found = read_nodes(root)
    known = kernel_tiers or {}
    if any(node.total_bytes and node.id not in known for node in found):
        known = {**known, **read_memory_tiers(root)}
    speeds = {region.name: read_speed(region, root) for region in regions}
    nodes = tuple(
        _compose(node, known.get(node.id), regions, dax_devices, speeds) for node in found
    )
    if strict:
        tiers.require(declared, nodes)
    lost = regions_lost(nodes, regions)
    usable = tuple(node for node in nodes if node.id not in lost)
    topology = Topology(
        nodes=nodes,
        tiers=tiers.declare(declared, usable) if declared else tiers.rank(usable),
        memdevs=read_memdevs(root),
        decoders=read_decoders(root),
        regions=regions,
        dax_devices=dax_devices,
    )
    return replace(topology, warnings=tuple(advice.advise(topology, declared)))


def read_use(root: Path = Path("/")) -> Mapping[NodeId, NodeUse]:
    """Reads how much of each node is free.

    Raises:
        UnexpectedContent: /proc/zoneinfo is not as documented.
    """
    zones = zoneinfo.read_zones(root)
    rooms = zoneinfo.room_bytes(zones)
    return {
        node: NodeUse(
            free_bytes=sum(zone.free_pages for zone in zones if zone.node == node) * PAGE_BYTES,
            room_bytes=room,
        )
        for node, room in rooms.items()
    }


def as_document(topology: Topology, use: Mapping[NodeId, NodeUse]) -> dict[str, Any]:
    """Returns the document that docs/topology.md describes."""
    document = asdict(topology)
    for node in document["nodes"]:
        used = use.get(node["id"])
        del node["blocks"]
        node["free_bytes"] = None if used is None else used.free_bytes
        node["room_bytes"] = None if used is None else used.room_bytes
    return document


def _compose(
    node: NumaNode,
    kernel_tier: int | None,
    regions: Iterable[CxlRegion],
    dax_devices: Iterable[DaxDevice],
    speeds: Mapping[str, RegionSpeed | None],
) -> Node:
    through = [dax for dax in dax_devices if dax.driver == "kmem" and dax.target_node == node.id]
    behind = [region for region in regions if _is_behind(region, node, through)]
    speed = _slowest(speeds[region.name] for region in behind) or node
    return Node(
        id=node.id,
        cpus=node.cpus,
        total_bytes=node.total_bytes,
        distances=node.distances,
        any_initiator=speed.any_initiator,
        cpu_initiator=speed.cpu_initiator,
        kernel_tier=kernel_tier,
        backing=_backing(node, through, behind),
        memdevs=tuple(dict.fromkeys(name for region in behind for name in region.memdevs)),
        dax_devices=tuple(dax.name for dax in through),
        blocks=node.blocks,
    )


def _slowest(speeds: Iterable[RegionSpeed | None]) -> RegionSpeed | None:
    """Returns the figures of a node of these regions, None where they don't tell."""

    def latency_ns(speed: RegionSpeed) -> int:
        told = speed.cpu_initiator or speed.any_initiator
        return 0 if told is None else told.read_latency_ns or 0

    return max(filter(None, speeds), key=latency_ns, default=None)


def _is_behind(region: CxlRegion, node: NumaNode, through: Iterable[DaxDevice]) -> bool:
    """Tells whether a node's memory is a CXL region's, also where the firmware set it up.

    Such memory may come as a dax device of hmem, or as plain RAM without any: then the physical
    addresses tell.
    """
    if any(dax.backing is Backing.CXL and dax.region == region.name for dax in through):
        return True
    if region.start is None or not region.committed:
        return False
    addresses = range(region.start, region.start + region.size_bytes)
    ours = [range(d.start, d.start + d.size_bytes) for d in through if d.start is not None]
    return any(_overlap(addresses, block) for block in (*ours, *node.blocks))


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _backing(node: NumaNode, through: Sequence[DaxDevice], behind: Sequence[CxlRegion]) -> Backing:
    if node.cpus:
        return Backing.DRAM
    if behind or any(dax.backing is Backing.CXL for dax in through):
        return Backing.CXL
    if any(dax.backing is Backing.PMEM for dax in through):
        return Backing.PMEM
    return Backing.UNKNOWN
