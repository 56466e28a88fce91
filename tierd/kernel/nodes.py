# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes: /sys/devices/system/node.

Follows Documentation/ABI/stable/sysfs-devices-node and Documentation/admin-guide/mm/numaperf.rst.
A machine with 512 MiB of CXL memory shows::

    online                                      0-1
    node1/cpulist                               (empty: memory alone)
    node1/distance                              20 10
    node1/meminfo                               Node 1 MemTotal:  524288 kB
                                                Node 1 MemFree:   523264 kB
    node1/access0/initiators/read_latency       150
    node1/access0/initiators/read_bandwidth     10000
    node1/access0/initiators/node0              (link)
    node1/memory48                              (link to a block, see tierd.kernel.blocks)

access0 is the best initiator of any kind, access1 the best one with CPUs; both come from HMAT or
CDAT, in ns and MB/s, and are absent where the firmware says nothing. A figure of 0 is unknown.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierd.kernel import blocks, text
from tierd.model import NodeId, Performance

_NODES = Path("sys/devices/system/node")
_MEMINFO_BYTES = 64 << 10
_MEMINFO = re.compile(r"^Node \d+ (\S+): +(\d+) kB$", re.MULTILINE)
_MAX_NODES = 1024  # MAX_NUMNODES with NODES_SHIFT=10, the most that a kernel can be built for


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """What sysfs tells of one online node. `blocks` are its memory blocks' physical ranges."""

    id: NodeId
    cpus: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    distances: Mapping[NodeId, int]
    any_initiator: Performance | None
    cpu_initiator: Performance | None
    blocks: tuple[range, ...] = ()


def read_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Reads every online node, in ascending order.

    Returns nothing where the kernel has no NUMA support.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    online = text.read_ids(root / _NODES / "online") or ()
    if online and online[-1] >= _MAX_NODES:
        raise text.UnexpectedContent(root / _NODES / "online", str(online[-1]), "node ids")
    return tuple(_read_node(root, NodeId(node), online) for node in online)


def read_sizes(root: Path = Path("/")) -> Mapping[NodeId, int]:
    """Returns the memory of every online node: a look that is much cheaper than read_nodes().

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    folder = root / _NODES
    return {
        NodeId(node): _read_meminfo(root, NodeId(node), "MemTotal")[0]
        for node in text.read_ids(folder / "online") or ()
    }


def read_in_use(node: NodeId, root: Path = Path("/")) -> int:
    """Returns the bytes that a node's programs have: what would have to go elsewhere.

    Anonymous and shared memory. Cached files are not counted, since the kernel can drop them; 0
    where the node is gone.

    Raises:
        UnexpectedContent: meminfo is not as documented.
    """
    return sum(_read_meminfo(root, node, "AnonPages", "Shmem"))


def read_inactive_cache(node: NodeId, root: Path = Path("/")) -> int:
    """Returns the bytes of a node's page cache not used again of late; 0 where the node is gone.

    Raises:
        UnexpectedContent: meminfo is not as documented.
    """
    return _read_meminfo(root, node, "Inactive(file)")[0]


def _read_node(root: Path, node: NodeId, online: tuple[int, ...]) -> NumaNode:
    folder = root / _NODES / f"node{node}"
    total_bytes, free_bytes = _read_meminfo(root, node, "MemTotal", "MemFree")
    return NumaNode(
        id=node,
        cpus=text.read_ids(folder / "cpulist") or (),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        distances=_read_distances(folder / "distance", online),
        any_initiator=read_performance(folder / "access0/initiators"),
        cpu_initiator=read_performance(folder / "access1/initiators"),
        blocks=_read_blocks(root, folder),
    )


def _read_meminfo(root: Path, node: NodeId, *names: str) -> list[int]:
    """Returns these sizes in bytes, each 0 where the node is gone."""
    path = root / _NODES / f"node{node}/meminfo"
    content = text.read(path, _MEMINFO_BYTES)
    if content is None:
        return [0] * len(names)
    sizes = dict(_MEMINFO.findall(content))
    if not sizes.keys() >= {*names}:
        raise text.UnexpectedContent(path, content, f"{' and '.join(names)} in kB")
    return [int(sizes[name]) << 10 for name in names]


def _read_distances(path: Path, online: tuple[int, ...]) -> dict[NodeId, int]:
    """One number for each online node, in their order (node_read_distance(), drivers/base)."""
    content = text.read(path)
    if not content:
        return {}
    words = content.split()
    if len(words) != len(online) or not all(word.isdecimal() for word in words):
        raise text.UnexpectedContent(path, content, f"{len(online)} distances")
    return {NodeId(node): int(word) for node, word in zip(online, words, strict=True)}


def read_performance(folder: Path) -> Performance | None:
    """Reads the figures in a folder, None where there are none.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    performance = Performance(
        read_latency_ns=text.read_int(folder / "read_latency") or None,
        write_latency_ns=text.read_int(folder / "write_latency") or None,
        read_bandwidth_mbps=text.read_int(folder / "read_bandwidth") or None,
        write_bandwidth_mbps=text.read_int(folder / "write_bandwidth") or None,
    )
    return None if performance == Performance() else performance


def _read_blocks(root: Path, folder: Path) -> tuple[range, ...]:
    """Returns the blocks as physical ranges."""
    block_bytes = blocks.read_block_bytes(root)
    if block_bytes is None:
        return ()
    numbers = (blocks.number_of(entry) for entry in text.entries(folder))
    starts = sorted(number * block_bytes for number in numbers if number is not None)
    return _join(starts, block_bytes)


def _join(starts: list[int], block_bytes: int) -> tuple[range, ...]:
    ranges: list[range] = []
    for start in starts:
        first = ranges.pop().start if ranges and ranges[-1].stop == start else start
        ranges.append(range(first, start + block_bytes))
    return tuple(ranges)
