# SPDX-License-Identifier: Apache-2.0
"""The page cache of a node, and having the kernel demote some of it.

Follows Documentation/ABI/stable/sysfs-devices-node: what is written to `reclaim` (since 6.17) is
how much of the node the kernel is to reclaim, and `swappiness=0` keeps it to files' pages. Where
numa/demotion_enabled is on and there is a lower memory tier, shrink_folio_list() in mm/vmscan.c
demotes instead, coldest first; what it finds no place for stays, as nobody needs it (`proactive`).
It answers EAGAIN where it found less than it was asked for. A node tells::

    meminfo   Node 0 Inactive(file):    61440 kB
    vmstat    pgdemote_proactive 4096
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from tierd.kernel import text
from tierd.kernel.numa_balancing import DEMOTES
from tierd.kernel.tunable import Files, KernelFiles
from tierd.model import PAGE_BYTES, Node, NodeId

_LIMIT_BYTES = 64 << 10
_INACTIVE = re.compile(r"^Node \d+ Inactive\(file\): +(\d+) kB$", re.MULTILINE)
_DEMOTED = re.compile(r"^pgdemote_proactive (\d+)$", re.MULTILINE)


def can_demote(node: NodeId, root: Path = Path("/")) -> bool:
    """Tells whether the kernel can be asked to demote page cache of a node."""
    return (_folder(node, root) / "reclaim").exists() and (root / DEMOTES).exists()


def may_demote(node: NodeId, root: Path = Path("/")) -> bool:
    """Tells whether this process may ask; a service may find /sys read-only."""
    return os.access(_folder(node, root) / "reclaim", os.W_OK)


def has_lower(node: Node, nodes: Iterable[Node]) -> bool:
    """Tells whether the kernel has a tier below a node's: else it drops what it reclaims."""
    tiers = [other.kernel_tier for other in nodes if other.total_bytes]
    own = node.kernel_tier
    return own is not None and any(tier is not None and tier > own for tier in tiers)


def read_inactive_bytes(node: NodeId, root: Path = Path("/")) -> int:
    """Returns the page cache of a node that was not used again of late; 0 where the node has gone.

    Raises:
        UnexpectedContent: meminfo is not as documented.
    """
    path = _folder(node, root) / "meminfo"
    content = text.read(path, _LIMIT_BYTES)
    if content is None:
        return 0
    found = _INACTIVE.search(content)
    if found is None:
        raise text.UnexpectedContent(path, content, "Inactive(file) in kB")
    return int(found[1]) << 10


def read_demoted_pages(node: NodeId, root: Path = Path("/")) -> int:
    """Returns how many of a node's pages were ever demoted because somebody asked for it."""
    content = text.read(_folder(node, root) / "vmstat", _LIMIT_BYTES)
    found = _DEMOTED.search(content or "")
    return int(found[1]) if found else 0


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
