# SPDX-License-Identifier: Apache-2.0
"""What the operator should know of the machine's memory, each with the next step."""

from collections.abc import Iterator, Sequence

from tierd.config import TierConfig
from tierd.discover import tiers
from tierd.discover.lost import regions_lost
from tierd.model import Backing, CxlRegion, Memdev, Topology

_DECLARE = "say how fast they are with [[tier]] tables in /etc/tierd/tierd.toml"


def advise(topology: Topology, declared: Sequence[TierConfig]) -> Iterator[str]:
    """Yields the warnings of a topology whose own are still empty.

    Args:
        topology: what was found, with its tiers.
        declared: the tiers as the configuration has them, if it has any.
    """
    yield from lost_memory(topology)
    yield from _tiers(topology, declared)
    yield from _missing(topology, declared)
    yield from _nodes(topology)
    for memdev in topology.memdevs:
        yield from _idle(memdev, topology)


def lost_memory(topology: Topology) -> Iterator[str]:
    """Yields what is to be said of nodes whose memory has lost its device."""
    for node, region in regions_lost(topology.nodes, topology.regions).items():
        yield (
            f"node {node} has memory of {region}, of which a CXL device has gone: what lies there "
            "is lost, and nothing is moved there; boot this machine again, and before a device is "
            "taken out take its memory away"
        )


def _tiers(topology: Topology, declared: Sequence[TierConfig]) -> Iterator[str]:
    with_memory = [node for node in topology.nodes if node.total_bytes]
    if len(with_memory) < 2:
        yield (
            "this machine has no second memory node, so nothing can be moved; bring CXL or other "
            "memory online first (daxctl list, cxl list -M)"
        )
    elif len(topology.tiers) < 2 and declared:
        yield "fewer than two of the tiers in [[tier]] have memory, so nothing is moved"
    elif len(topology.tiers) < 2:
        ids = ", ".join(str(node.id) for node in with_memory)
        yield f"nodes {ids} are all in one tier, so nothing is moved; {_DECLARE}"
    elif not declared and tiers.is_guess(with_memory):
        yield (
            "neither the firmware nor the kernel tells which node is slower: nodes without CPUs "
            f"are taken for slower; if they are not, {_DECLARE}"
        )


def _missing(topology: Topology, declared: Sequence[TierConfig]) -> Iterator[str]:
    placed = {node for tier in topology.tiers for node in tier.nodes}
    for tier in declared:
        for node in tier.nodes:
            if node not in placed:
                yield (
                    f"node {node} of tier {tier.name} has no memory now, and is left out; bring it "
                    "online (daxctl list, cxl list -M), or take it out of [[tier]]"
                )


def _nodes(topology: Topology) -> Iterator[str]:
    placed = {node for tier in topology.tiers for node in tier.nodes}
    told = placed | regions_lost(topology.nodes, topology.regions).keys()
    for node in topology.nodes:
        if node.total_bytes and node.id not in told:
            yield f"node {node.id} is in no tier: its memory is left alone; {_DECLARE}"
        if node.cpus and node.dax_devices:
            yield (
                f"node {node.id} mixes its own memory with that of {', '.join(node.dax_devices)}, "
                "and pages cannot be told apart by node; give the device a node of its own "
                "(the firmware's SRAT or CEDT) or take it offline with daxctl offline-memory"
            )


def _idle(memdev: Memdev, topology: Topology) -> Iterator[str]:
    if not memdev.ram_bytes:
        return
    name, size = memdev.name, f"{memdev.ram_bytes >> 20} MiB"
    regions = [region for region in topology.regions if name in region.memdevs]
    if not regions:
        yield (
            f"{name}: its {size} are in no CXL region, so nothing uses them; make one with "
            f"tierctl cxl create --memdev {name}"
        )
    lost = regions_lost(topology.nodes, topology.regions).values()
    for region in (region for region in regions if region.name not in lost):
        for message in _idle_region(region, topology):
            yield f"{name}: {message}"


def _idle_region(region: CxlRegion, topology: Topology) -> Iterator[str]:
    if not region.committed:
        yield f"{region.name} is not committed; finish it with cxl enable-region {region.name}"
        return
    online = (set(node.memdevs) for node in topology.nodes if node.total_bytes)
    if any(memdevs >= set(region.memdevs) for memdevs in online):
        return
    devices = [
        dax
        for dax in topology.dax_devices
        if dax.backing is Backing.CXL and dax.region == region.name
    ]
    if not devices:
        yield f"{region.name} has no dax device; load it with modprobe dax_cxl"
    for dax in devices:
        step = (
            f"daxctl online-memory {dax.name}"
            if dax.driver == "kmem"
            else f"daxctl reconfigure-device -m system-ram {dax.name}"
        )
        yield f"the memory of {region.name} is not online; bring it with {step}"
