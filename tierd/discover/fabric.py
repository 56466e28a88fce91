# SPDX-License-Identifier: Apache-2.0
"""What CXL memory the machine has, from the devices to the blocks of memory that come of them.

docs/cxl.md tells the document to the operator. Nothing here writes to the machine.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tierd.config import TierConfig
from tierd.discover.topology import discover
from tierd.kernel.blocks import read_blocks
from tierd.kernel.cxl import MemdevHealth, read_health
from tierd.model import Backing, CxlRegion, DaxDevice, MemoryBlock, Node, NodeId, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Memory blocks `first` to `last` of a region, that are alike."""

    region: str
    first: int
    last: int
    size_bytes: int
    state: str
    zones: tuple[str, ...]
    node: NodeId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The CXL memory of a machine."""

    topology: Topology
    health: Mapping[str, MemdevHealth]
    blocks: tuple[Blocks, ...]

    def dax_devices(self, region: CxlRegion) -> tuple[DaxDevice, ...]:
        """Returns the dax devices of a region."""
        return tuple(
            dax
            for dax in self.topology.dax_devices
            if dax.backing is Backing.CXL and dax.region == region.name
        )

    def nodes(self) -> tuple[Node, ...]:
        """Returns the nodes that have memory of CXL devices."""
        return tuple(node for node in self.topology.nodes if node.memdevs)

    def tier(self, node: NodeId) -> str | None:
        """Returns the name of the tier that a node is in."""
        names = (tier.name for tier in self.topology.tiers if node in tier.nodes)
        return next(names, None)


def read_fabric(declared: Sequence[TierConfig] = (), root: Path = Path("/")) -> Fabric:
    """Looks at the machine's CXL memory.

    Args:
        declared: the tiers as the configuration has them, the fastest first. Nodes that are not
            there are left out.
        root: where /sys and /proc are.

    Raises:
        UnexpectedContent: the kernel tells something in a format that is new to tierd.
    """
    topology = discover(declared, root, strict=False)
    return Fabric(
        topology=topology,
        health=read_health(root),
        blocks=tuple(
            blocks
            for region in topology.regions
            if region.start is not None and region.size_bytes
            for blocks in _runs(region, read_blocks([addresses(region)], root))
        ),
    )


def addresses(region: CxlRegion) -> range:
    """Returns the physical addresses of a region; none while it has no size."""
    return (
        range(0) if region.start is None else range(region.start, region.start + region.size_bytes)
    )


def as_document(fabric: Fabric) -> dict[str, Any]:
    """Returns the document that docs/cxl.md describes."""
    found = fabric.topology
    memdevs = [
        asdict(memdev) | {"health": asdict(fabric.health[memdev.name])}
        for memdev in found.memdevs
        if memdev.name in fabric.health
    ]
    dax_devices = [dax for region in found.regions for dax in fabric.dax_devices(region)]
    nodes = [
        {"id": node.id, "total_bytes": node.total_bytes, "tier": fabric.tier(node.id)}
        for node in fabric.nodes()
    ]
    return {
        "memdevs": memdevs,
        "decoders": [asdict(decoder) for decoder in found.decoders],
        "regions": [asdict(region) for region in found.regions],
        "dax_devices": [asdict(dax) for dax in dax_devices],
        "blocks": [asdict(blocks) for blocks in fabric.blocks],
        "nodes": nodes,
    }


def _runs(region: CxlRegion, blocks: Iterable[MemoryBlock]) -> Iterator[Blocks]:
    """Joins adjoining blocks that are alike."""
    numbered = enumerate(blocks)
    for _, alike in groupby(numbered, lambda pair: (pair[1].number - pair[0], *_kind(pair[1]))):
        run = [block for _, block in alike]
        yield Blocks(
            region=region.name,
            first=run[0].number,
            last=run[-1].number,
            size_bytes=sum(block.size_bytes for block in run),
            state=run[0].state,
            zones=run[0].zones,
            node=run[0].node,
        )


def _kind(block: MemoryBlock) -> tuple[str, tuple[str, ...], NodeId | None]:
    return block.state, block.zones, block.node
