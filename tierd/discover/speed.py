# SPDX-License-Identifier: Apache-2.0
"""How fast each node's memory is: measured, from the CPUs nearest to it, for a bounded time.

A node is measured with a buffer on it that is several times as large as the CPUs' caches, and
small beside what the node has free; a node without room for that is refused.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tierd.config import TierConfig
from tierd.discover import tiers
from tierd.discover.topology import NodeUse
from tierd.errors import TierdError
from tierd.kernel.cgroup_room import read_room_bytes
from tierd.kernel.cpus import one_of_each_core, read_last_cache_bytes
from tierd.kernel.process import read_process
from tierd.kernel.speed import WINDOW_BYTES, Buffer
from tierd.model import Node, NodeId, Performance, Pid, Tier

CACHES = 8
"""So many times the last cache is what a buffer has; every second line of it is chased through."""

LEAST_CACHES = 3
"""With less than so many, caches would be measured."""

UNKNOWN_CACHE_BYTES = 64 << 20
"""What is supposed where the last cache's size isn't told."""

SHARE = 4
"""At most one part in so many of what is free is taken."""

PARTS = 3
"""Each figure is the best of so many: whatever else runs can only make it worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a node is to be measured: by a buffer of a size, from CPUs of the node `from_node`."""

    node: NodeId
    from_node: NodeId
    cpus: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What was measured of a node. Latencies are from the first of the CPUs, the rest from all.

    `huge_bytes` is how much of the buffer was huge pages. The latency under load is None where it
    was not asked for, or there is only one CPU.
    """

    method: Method
    huge_bytes: int
    read_latency_ns: float
    loaded_latency_ns: float | None
    read_bandwidth_mbps: float
    write_bandwidth_mbps: float

    @property
    def performance(self) -> Performance:
        """The figures as HMAT would tell them; loads are all that latency was measured of."""
        return Performance(
            read_latency_ns=max(1, round(self.read_latency_ns)),
            read_bandwidth_mbps=max(1, round(self.read_bandwidth_mbps)),
            write_bandwidth_mbps=max(1, round(self.write_bandwidth_mbps)),
        )


def methods(
    nodes: Sequence[Node],
    use: Mapping[NodeId, NodeUse],
    only: Sequence[NodeId] = (),
    size_bytes: int | None = None,
    root: Path = Path("/"),
) -> Iterator[Method | TierdError]:
    """Yields how each node with memory is to be measured, or why it cannot be.

    Args:
        nodes: of the machine.
        use: what is free of each now.
        only: measure these; all with memory where there are none.
        size_bytes: of the buffers; as large as caches ask for by default.
        root: where /sys and /proc are.
    """
    process = read_process(Pid(os.getpid()), root)
    allowed = None if process is None else process.allowed_nodes
    cgroup = None if process is None else process.cgroup
    limit = None if cgroup is None else read_room_bytes(cgroup, root)
    cpus = os.sched_getaffinity(0)
    known = {node.id: node for node in nodes if node.total_bytes}
    for node_id in only or known:
        try:
            if node_id not in known:
                there = ", ".join(map(str, known))
                raise TierdError(f"there is no node {node_id} with memory; there are {there}")
            if allowed is not None and node_id not in allowed:
                raise TierdError(
                    f"node {node_id} is not in this process's cpuset",
                    hint="run it in a cgroup whose cpuset.mems has the node",
                )
            room = use[node_id].room_bytes if node_id in use else 0
            near, near_cpus = _nearest(known[node_id], nodes, cpus)
            yield Method(
                node=node_id,
                from_node=near,
                cpus=one_of_each_core(near_cpus, root),
                size_bytes=_size(node_id, room, limit, near_cpus, size_bytes, root),
            )
        except TierdError as error:
            yield error


def _nearest(node: Node, nodes: Iterable[Node], cpus: set[int]) -> tuple[NodeId, tuple[int, ...]]:
    """Returns the nearest node that has some of these CPUs, and those."""
    found = [
        (node.distances.get(other.id, 0), other.id, ours)
        for other in nodes
        if (ours := tuple(cpu for cpu in other.cpus if cpu in cpus))
    ]
    if not found:
        raise TierdError("no node has a CPU that this process may run on")
    _, near, ours = min(found)
    return near, ours


def _size(
    node: NodeId,
    room: int,
    limit: int | None,
    cpus: Sequence[int],
    wanted: int | None,
    root: Path,
) -> int:
    cache = read_last_cache_bytes(cpus[0], root) or UNKNOWN_CACHE_BYTES
    least = max(LEAST_CACHES * cache, WINDOW_BYTES)
    most = (room if limit is None else min(room, limit)) // SHARE
    size = min(CACHES * cache, most) if wanted is None else wanted
    size = size // WINDOW_BYTES * WINDOW_BYTES
    if most < max(size, least):
        raise TierdError(
            f"node {node} lacks room: a buffer of {max(size, least) >> 20} MiB has to be a"
            f" {SHARE}th or less of what is free above the watermarks and below the cgroup's"
            f" limits, {most * SHARE >> 20} MiB"
        )
    if size < least:
        raise TierdError(
            f"{size >> 20} MiB are too few: the last cache has {cache >> 20} MiB",
            hint=f"take {LEAST_CACHES} times that or more",
        )
    return size


def measure(method: Method, seconds: float, *, loaded: bool = False) -> Speed:
    """Measures a node.

    Args:
        method: how.
        seconds: how long to measure, beside what it takes to fill the buffer.
        loaded: whether latency is to be measured under load too.

    Raises:
        OSError: the node was filled up meanwhile, or has gone.
    """
    cpus, other = method.cpus, method.cpus[1:]
    under_load = loaded and bool(other)
    part_s = seconds / (PARTS * (4 if under_load else 3))
    with Buffer(method.node, method.size_bytes) as buffer:
        return Speed(
            method=replace(method, size_bytes=buffer.size_bytes),
            huge_bytes=buffer.huge_bytes(),
            read_latency_ns=min(buffer.latency_ns(cpus[0], part_s) for _ in range(PARTS)),
            loaded_latency_ns=(
                min(buffer.loaded_latency_ns(cpus[0], other, part_s) for _ in range(PARTS))
                if under_load
                else None
            ),
            read_bandwidth_mbps=max(buffer.read_mbps(cpus, part_s) for _ in range(PARTS)),
            write_bandwidth_mbps=max(buffer.write_mbps(cpus, part_s) for _ in range(PARTS)),
        )


def rank(nodes: Iterable[Node], speeds: Iterable[Speed]) -> tuple[Tier, ...]:
    """Sorts nodes into tiers as discovery does, by what was measured where that is known."""
    return tiers.rank(_with_speeds(nodes, speeds))


def declare(
    declared: Iterable[TierConfig], nodes: Iterable[Node], speeds: Iterable[Speed]
) -> tuple[Tier, ...]:
    """Makes the tiers that the configuration names, with the figures that were measured."""
    bare = [replace(tier, latency_ns=None, bandwidth_mbps=None) for tier in declared]
    return tiers.declare(bare, _with_speeds(nodes, speeds))


def _with_speeds(nodes: Iterable[Node], speeds: Iterable[Speed]) -> list[Node]:
    measured = {speed.method.node: speed.performance for speed in speeds}
    return [
        replace(node, cpu_initiator=measured.get(node.id, node.cpu_initiator)) for node in nodes
    ]


def as_document(
    speeds: Iterable[Speed],
    nodes: Iterable[Node],
    refused: Iterable[TierdError],
    *,
    virtual: bool,
) -> dict[str, Any]:
    """Returns the document that docs/measure.md describes."""
    told = {node.id: node.cpu_initiator or node.any_initiator for node in nodes}
    return {
        "nodes": [_node_document(speed, told.get(speed.method.node)) for speed in speeds],
        "not_measured": [str(error) for error in refused],
        "virtual": virtual,
    }


def _node_document(speed: Speed, told: Performance | None) -> dict[str, Any]:
    method, measured = speed.method, asdict(speed)
    del measured["method"]
    return {
        "id": method.node,
        "from_node": method.from_node,
        "cpus": list(method.cpus),
        "size_bytes": method.size_bytes,
        **{key: _rounded(value) for key, value in measured.items()},
        "firmware": None if told is None else asdict(told),
    }


def _rounded(value: float | None) -> float | None:
    return round(value, 1) if isinstance(value, float) else value
