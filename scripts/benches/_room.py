# SPDX-License-Identifier: Apache-2.0
"""What a load gets of fast memory in the shootout, by whomever it is placed.

What the guest has there of its own, page cache and what its programs leave idle, would be room for
who demotes whatever is cold, and none for who moves what is a target's. So it leaves first: what is
mapped for the slow node (migratepages(8)), and page cache for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from guests.guest import Guest
from guests.tiering import ballast, node_kib

MOST_LEFT_KIB = 4 << 10
"""By what is running right now."""

TRIES = 5
"""Who is at work may bring back what was just running: 9 and 20 MiB by damo, in new guests."""

UDEV_RESTS = "udevadm settle && while pgrep udev-worker > /dev/null; do sleep 0.5; done"
"""Its workers end 3 s later: in a new guest they left a fifth more room than had been measured."""
LEAVES = """
for process in /proc/[0-9]*; do migratepages ${{process#/proc/}} {fast} {slow} 2> /dev/null; done
echo 1 > /proc/sys/vm/drop_caches
"""
"""The kernel's threads have nothing to move, which is an error."""


@contextmanager
def leaving(guest: Guest, free_mib: int) -> Iterator[None]:
    """Leaves so much of the fast node to a load, and nothing there that could make way for it."""
    guest.run(["sh", "-c", UDEV_RESTS])
    clear(guest)
    with ballast(guest, free_mib):
        yield


def clear(guest: Guest) -> None:
    """Has what programs and files have on the fast node leave it."""
    stays = all(_left_kib(guest) > MOST_LEFT_KIB for _ in range(TRIES))
    assert not stays, f"over {MOST_LEFT_KIB} KiB of programs and files stay on the fast node"


def _left_kib(guest: Guest) -> int:
    """Has them leave, and returns what is there nevertheless."""
    (fast,), (slow,) = guest.facts.fast, guest.facts.slow
    guest.run(["sh", "-c", LEAVES.format(fast=fast, slow=slow)])
    return sum(node_kib(guest, fast, what) for what in ("AnonPages", "FilePages"))
