# SPDX-License-Identifier: Apache-2.0
"""How much a node can take at this moment, cheap enough to be asked before every batch of moves.

/proc/zoneinfo has all that counts, but grows with nodes times CPUs, and reading it costs as much as
moving a hundred pages. So it is read each round, or every few seconds, for what the zones withhold;
what is free is read each time from the node's meminfo, which stays open (Documentation/ABI/stable/
sysfs-devices-node; sysfs makes the text anew for each pread at offset 0)::

    Node 1 MemTotal:         524288 kB
    Node 1 MemFree:          523264 kB

The two are of the same counters. Where a zone holds less than it withholds, meminfo cannot tell,
and the answer is lower than zoneinfo's, never higher.
"""

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

from tierd.kernel import text, zoneinfo
from tierd.kernel.zoneinfo import Zone
from tierd.model import PAGE_BYTES, NodeId, NodeRoom

REFRESH_S = 5.0
"""Watermarks change with sysctls, hotplug and, for seconds, when memory gets fragmented."""

LOW_SHARE = 0.84
"""A zone's low watermark is 5/6 of the high one at most (__setup_per_zone_wmarks)."""

_MEMORY_FREE = re.compile(rb" MemFree: +(\d+) kB\n")


class FreeMemory:
    """A context that holds the nodes' meminfo files open.

    Args:
        root: where /proc and /sys are.
        clock: CLOCK_MONOTONIC in seconds.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self.closed: set[NodeId] = set()
        """Nodes that are to take nothing, whatever they have."""
        self._root, self._clock = root, clock
        self._files: dict[NodeId, int] = {}
        self._withheld: Mapping[NodeId, int] = {}
        self._good_until_s = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def rooms(self) -> Mapping[NodeId, NodeRoom]:
        """Returns for each node what can be moved there without a reclaim, from zoneinfo.

        Raises:
            UnexpectedContent: zoneinfo is not as documented.
        """
        zones = zoneinfo.read_zones(self._root)
        self._withheld = _withheld_bytes(zones)
        self._good_until_s = self._clock() + REFRESH_S
        now, soon = zoneinfo.room_bytes(zones), zoneinfo.room_soon_bytes(zones)
        cache = zoneinfo.cache_bytes(zones)
        rooms = {node: NodeRoom(now[node], soon[node] - now[node], cache[node]) for node in now}
        return rooms | dict.fromkeys(self.closed & now.keys(), NodeRoom())

    def room_bytes(self, node: NodeId) -> int:
        """Returns what can be moved to the node without a reclaim; 0 where it has gone.

        Raises:
            UnexpectedContent: meminfo or zoneinfo are not as documented.
        """
        return int(max(0.0, self._free_beyond(node, 1.0)))

    def may_replace(self, node: NodeId) -> bool:
        """Returns whether what has left a node may be replaced, though it has no room.

        Not where less is free than LOW_SHARE of what the kernel withholds: from there on
        allocations may have to reclaim.

        Raises:
            UnexpectedContent: meminfo or zoneinfo are not as documented.
        """
        return self._free_beyond(node, LOW_SHARE) >= 0

    def withheld_bytes(self, node: NodeId) -> int:
        """Returns what the kernel keeps free of a node; 0 where it has gone.

        Raises:
            UnexpectedContent: zoneinfo is not as documented.
        """
        if self._clock() >= self._good_until_s:
            self.rooms()
        return self._withheld.get(node, 0)

    def _free_beyond(self, node: NodeId, share: float) -> float:
        """Returns what is free beyond a share of what is withheld, -inf where nothing is to go."""
        withheld = self.withheld_bytes(node)
        if node not in self._withheld or node in self.closed:
            return -math.inf
        return self._free_bytes(node) - share * withheld

    def _free_bytes(self, node: NodeId) -> int:
        path = self._root / f"sys/devices/system/node/node{node}/meminfo"
        is_held = node in self._files
        content = self._read(node, path)
        if content is None and is_held:
            content = self._read(node, path)  # a held file doesn't tell that the node is back
        if content is None:
            return 0
        found = _MEMORY_FREE.search(content)
        if found is None:
            raise text.UnexpectedContent(path, content.decode(errors="replace"), "MemFree in kB")
        return int(found[1]) << 10

    def _read(self, node: NodeId, path: Path) -> bytes | None:
        """Returns a node's meminfo, and closes it and returns None where the node has gone."""
        try:
            if node not in self._files:
                self._files[node] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._files[node], text.ATTRIBUTE_BYTES, 0)
        except OSError as error:
            if error.errno not in text.GONE:
                raise
            if node in self._files:
                os.close(self._files.pop(node))
            return None


def _withheld_bytes(zones: Iterable[Zone]) -> Mapping[NodeId, int]:
    withheld: defaultdict[NodeId, int] = defaultdict(int)
    for zone in zones:
        withheld[zone.node] += zone.withheld_pages * PAGE_BYTES
    return dict(withheld)
