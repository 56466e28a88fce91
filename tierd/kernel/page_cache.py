# SPDX-License-Identifier: Apache-2.0
"""Having the kernel demote page cache of a node.

Follows Documentation/ABI/stable/sysfs-devices-node: what is written to `reclaim` (since 6.17) is
how much of the node the kernel is to reclaim, and `swappiness=0` keeps it to files' pages. Where
numa/demotion_enabled is on and there is a lower memory tier, shrink_folio_list() in mm/vmscan.c
demotes instead, coldest first; what it finds no place for stays, as nobody needs it (`proactive`).
It answers EAGAIN where it found less than it was asked for, and does not look where a node has less
than LEAST of it (__node_reclaim()).
"""

import os
from collections.abc import Iterable
from pathlib import Path

from tierd.kernel import text
from tierd.kernel.numa_balancing import DEMOTES
from tierd.kernel.tunable import Files, KernelFiles
from tierd.model import PAGE_BYTES, Node, NodeId

LEAST = "proc/sys/vm/min_unmapped_ratio"
"""In percent of the node's memory."""
NODES_RECLAIM = "proc/sys/vm/zone_reclaim_mode"
"""What LEAST is there for: whether nodes reclaim before others are asked for memory."""


def can_demote(node: NodeId, root: Path = Path("/")) -> bool:
    """Tells whether the kernel can be asked to demote page cache of a node."""
    return (_folder(node, root) / "reclaim").exists() and (root / DEMOTES).exists()


def may_demote(node: NodeId, root: Path = Path("/")) -> bool:
    """Tells whether this process may ask; a service may find /sys read-only."""
    return os.access(_folder(node, root) / "reclaim", os.W_OK)


def may_demote_all(root: Path = Path("/")) -> bool:
    """Tells whether LEAST may be set, and means nothing else on this machine."""
    return text.read(root / NODES_RECLAIM) == "0" and os.access(root / LEAST, os.W_OK)


def has_lower(node: Node, nodes: Iterable[Node]) -> bool:
    """Tells whether the kernel has a tier below a node's: else it drops what it reclaims."""
    tiers = [other.kernel_tier for other in nodes if other.total_bytes]
    own = node.kernel_tier
    return own is not None and any(tier is not None and tier > own for tier in tiers)


def demote(
    node: NodeId, size_bytes: int, root: Path = Path("/"), files: Files | None = None
) -> None:
    """Has the kernel demote so much of a node's page cache, and waits for it.

    Raises:
        BlockingIOError: it found less.
        OSError: it is asked by somebody else meanwhile, or may not be.
    """
    pages = size_bytes // PAGE_BYTES
    value = f"{pages * PAGE_BYTES >> 10}K swappiness=0"
    (files or KernelFiles()).write(_folder(node, root) / "reclaim", value)


def _folder(node: NodeId, root: Path) -> Path:
    return root / f"sys/devices/system/node/node{node}"
