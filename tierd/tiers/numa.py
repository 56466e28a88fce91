# SPDX-License-Identifier: Apache-2.0
"""Tiers made of NUMA nodes: how much room each has at this moment."""

from collections.abc import Iterable, Mapping, Sequence

from tierd.model import NodeId, NodeRoom, Tier, TierRoom


def headroom_bytes(tier: Tier, percent: float) -> int:
    """Returns what is kept free of a tier for new allocations, beyond the kernel's watermarks."""
    return int(tier.capacity_bytes * percent / 100)


def rooms(
    tiers: Sequence[Tier], nodes: Mapping[NodeId, NodeRoom], headroom_percent: float
) -> list[TierRoom]:
    """Returns the tiers' rooms, by rank.

    Args:
        tiers: by rank.
        nodes: what each node can take.
        headroom_percent: share of each tier that is to stay free.
    """
    return [
        TierRoom(
            rank=tier.rank,
            capacity_bytes=tier.capacity_bytes,
            headroom_bytes=headroom_bytes(tier, headroom_percent),
            latency_ns=tier.latency_ns,
            **_together(nodes.get(node, NodeRoom()) for node in tier.nodes)._asdict(),
        )
        for tier in tiers
    ]


def _together(rooms: Iterable[NodeRoom]) -> NodeRoom:
    """Returns what nodes can take in all."""
    return NodeRoom(*map(sum, zip(NodeRoom(), *rooms, strict=True)))


def node_room_bytes(
    tier: Tier, node: NodeId, free_bytes: Mapping[NodeId, int], headroom_percent: float
) -> int:
    """Returns what one node may still take: its share of the tier's headroom stays free."""
    share = headroom_bytes(tier, headroom_percent) // len(tier.nodes)
    return max(0, free_bytes.get(node, 0) - share)
