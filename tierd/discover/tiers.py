# SPDX-License-Identifier: Apache-2.0
"""Which nodes make up which tier: pure functions of what was found.

The nodes are ranked by the first of these that tells them apart: the read latency of HMAT or CDAT
where it is known of every node, the kernel's memory tiers, and then whether a node has CPUs and how
far it is from the nearest that has. Near-equals share a tier; CXL is a tier of its own even so,
for an operator prices it apart.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from tierd.config import TierConfig
from tierd.errors import ConfigError
from tierd.model import MAX_TIERS, Backing, Node, NodeId, Performance, Rank, Tier, TierKind

NEAR = 1.25
"""Latencies and distances up to so many times the smallest of a tier belong to it."""

Figure: TypeAlias = tuple[int, float]
"""What a node is ranked by: a class, and within it a value of which near-equals are alike."""

_LOCAL_DISTANCE = 10  # of a node to itself, as ACPI's SLIT has it
_REMOTE_DISTANCE = 20


def rank(nodes: Iterable[Node]) -> tuple[Tier, ...]:
    """Sorts the nodes that have memory into tiers, the fastest first."""
    with_memory = [node for node in nodes if node.total_bytes]
    groups = _split_kinds(_group(with_memory))
    tail = [node for group in groups[MAX_TIERS - 1 :] for node in group]
    groups = [*groups[: MAX_TIERS - 1], *([tail] if tail else [])]
    names = _names(groups)
    return tuple(
        _tier(Rank(position), name, _kind(group[0]), group)
        for position, (name, group) in enumerate(zip(names, groups, strict=True))
    )


def declare(declared: Sequence[TierConfig], nodes: Iterable[Node]) -> tuple[Tier, ...]:
    """Makes the tiers that the configuration names, the fastest first.

    Nodes that are not there or have no memory are left out, and so is a tier without any other.
    """
    known = {node.id: node for node in nodes if node.total_bytes}
    found = ((tier, [known[node] for node in tier.nodes if node in known]) for tier in declared)
    there = ((tier, members) for tier, members in found if members)
    return tuple(
        _declared(Rank(position), tier, members) for position, (tier, members) in enumerate(there)
    )


def require(declared: Iterable[TierConfig], nodes: Iterable[Node]) -> None:
    """Refuses tiers that name what is not there.

    Raises:
        ConfigError: every node of them that is not there or has no memory.
    """
    known = {node.id: node for node in nodes if node.total_bytes}
    problems = [
        tier.place.problem(f"there is no node {node} with memory; there are {_list(known)}")
        for tier in declared
        for node in tier.nodes
        if node not in known
    ]
    if problems:
        raise ConfigError(problems)


def is_guess(nodes: Iterable[Node]) -> bool:
    """Tells whether only CPUs and distances tell these nodes apart."""
    with_memory = [node for node in nodes if node.total_bytes]
    return _figures_of_latency(with_memory) is None and _figures_of_kernel(with_memory) is None


def _group(nodes: Sequence[Node]) -> list[list[Node]]:
    figures = _figures_of_latency(nodes) or _figures_of_kernel(nodes) or _figures_of_distance(nodes)
    groups: list[list[Node]] = []
    for node in sorted(nodes, key=lambda node: (figures[node.id], node.id)):
        if groups and _is_near(figures[groups[-1][0].id], figures[node.id]):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _is_near(first: Figure, other: Figure) -> bool:
    return first[0] == other[0] and other[1] <= first[1] * NEAR


def _figures_of_latency(nodes: Iterable[Node]) -> Mapping[NodeId, Figure] | None:
    latencies = {node.id: node.latency_ns for node in nodes}
    known = {node: (0, latency) for node, latency in latencies.items() if latency is not None}
    return known if len(known) == len(latencies) else None


def _figures_of_kernel(nodes: Iterable[Node]) -> Mapping[NodeId, Figure] | None:
    kernel_tiers = {node.id: node.kernel_tier for node in nodes}
    known = {node: (tier, 0) for node, tier in kernel_tiers.items() if tier is not None}
    tells = len(known) == len(kernel_tiers) and len(set(known.values())) > 1
    return known if tells else None


def _figures_of_distance(nodes: Sequence[Node]) -> Mapping[NodeId, Figure]:
    processors = [node.id for node in nodes if node.cpus]
    return {
        node.id: (0, _LOCAL_DISTANCE) if node.cpus else (1, _nearest(node, processors))
        for node in nodes
    }


def _nearest(node: Node, processors: Iterable[NodeId]) -> int:
    distances = (node.distances.get(other, _REMOTE_DISTANCE) for other in processors)
    return min(distances, default=_REMOTE_DISTANCE)


def _split_kinds(groups: Iterable[list[Node]]) -> list[list[Node]]:
    """Splits each group into what is CXL and what is not, and puts the latter first."""
    return [
        list(nodes)
        for group in groups
        for _, nodes in groupby(sorted(group, key=_is_cxl), key=_is_cxl)
    ]


def _is_cxl(node: Node) -> bool:
    return node.backing is Backing.CXL


def _kind(node: Node) -> TierKind:
    return TierKind.CXL if _is_cxl(node) else TierKind.DRAM


def _names(groups: Iterable[Sequence[Node]]) -> list[str]:
    """Names tiers by what they are: dram, cxl, cxl1. Memory of unknown make counts as dram."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    for group in groups:
        backing = group[0].backing
        stem = backing.value if backing in (Backing.CXL, Backing.PMEM) else Backing.DRAM.value
        names.append(f"{stem}{seen[stem] or ''}")
        seen[stem] += 1
    return names


def _tier(rank: Rank, name: str, kind: TierKind, nodes: Sequence[Node]) -> Tier:
    latencies = [node.latency_ns for node in nodes]
    bandwidths = [_bandwidth_mbps(node) for node in nodes]
    return Tier(
        rank=rank,
        name=name,
        kind=kind,
        nodes=tuple(node.id for node in nodes),
        capacity_bytes=sum(node.total_bytes for node in nodes),
        latency_ns=None if None in latencies else max(filter(None, latencies)),
        bandwidth_mbps=None if None in bandwidths else sum(filter(None, bandwidths)),
    )


def _declared(rank: Rank, declared: TierConfig, nodes: Sequence[Node]) -> Tier:
    found = _tier(rank, declared.name, declared.kind, nodes)
    return replace(
        found,
        latency_ns=declared.latency_ns or found.latency_ns,
        bandwidth_mbps=declared.bandwidth_mbps or found.bandwidth_mbps,
    )


def _bandwidth_mbps(node: Node) -> int | None:
    performance: Performance | None
    for performance in (node.cpu_initiator, node.any_initiator):
        if performance is not None and performance.read_bandwidth_mbps is not None:
            return performance.read_bandwidth_mbps
    return None


def _list(nodes: Iterable[NodeId]) -> str:
    return ", ".join(map(str, sorted(nodes)))
