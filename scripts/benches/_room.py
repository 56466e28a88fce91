# SPDX-License-Identifier: Apache-2.0
"""What a load gets of fast memory in the shootout, by whomever it is placed.

What the guest has there of its own, page cache for the most part, would be room for who demotes
whatever is cold, and none for who moves what is a target's. So it leaves first, by the kernel's
reclaim of a node (Linux 6.17, Documentation/ABI/stable/sysfs-devices-node), while demotion is on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from guests.guest import Guest
from guests.tiering import ballast, node_kib

MOST_LEFT_KIB, FEW_KIB = 16 << 10, 2 << 10
"""Of page cache, by what is running: the most that may be left, and what is taken for nothing."""
PASSES = 5
"""Of the kernel's reclaim: one may do no more than tell what is old."""


@contextmanager
def leaving(guest: Guest, free_mib: int) -> Iterator[None]:
    """Leaves so much of the fast node to a load, and no page cache there that could make way."""
    clear(guest, guest.facts.fast[0])
    with ballast(guest, free_mib):
        yield


def clear(guest: Guest, node: int) -> None:
    """Has what is on a node leave it for a slower one, but for what is used right now."""
    size = f"{node_kib(guest, node, 'MemUsed')}K"
    # More than can leave is asked for, so that the kernel does what it can and says EIO.
    asked = f"echo {size} > /sys/devices/system/node/node{node}/reclaim"
    left_kib, passes = sys.maxsize, 0
    while left_kib > FEW_KIB and passes < PASSES:
        guest.run(["sh", "-c", asked], check=False)
        left_kib, passes = node_kib(guest, node, "FilePages"), passes + 1
    assert left_kib <= MOST_LEFT_KIB, f"{left_kib} KiB of page cache stay on node {node}"
