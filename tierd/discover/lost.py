# SPDX-License-Identifier: Apache-2.0
"""Memory whose CXL device was taken out while it was online.

The kernel lets a device go all the same, and keeps the region and the blocks without it
(dev_dax_kmem_remove() in drivers/dax/kmem.c)::

    removing memory fails, because memory [0x0000000690000000-0x0000000697ffffff] is onlined
    kmem dax0.0: mapping0: 0x690000000-0x6afffffff cannot be hotremoved until the next reboot

Addresses that nothing decodes read as all ones, or as a machine check.
"""

from collections.abc import Iterable, Mapping

from tierd.kernel.nodes import NumaNode
from tierd.model import CxlRegion, Node, NodeId


def regions_lost(
    nodes: Iterable[NumaNode | Node], regions: Iterable[CxlRegion]
) -> Mapping[NodeId, str]:
    """Returns the nodes that have memory of a region which the hardware doesn't decode.

    One that is being made, or taken apart, has no blocks by then.
    """
    cut_off = {
        region.name: range(region.start, region.start + region.size_bytes)
        for region in regions
        if not region.committed and region.start is not None
    }
    return {
        node.id: name
        for node in nodes
        for name, addresses in cut_off.items()
        if node.total_bytes and any(_overlap(addresses, block) for block in node.blocks)
    }


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
