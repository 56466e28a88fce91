# SPDX-License-Identifier: Apache-2.0
"""How much of each node can be filled before the kernel starts to reclaim: /proc/zoneinfo.

Follows zoneinfo_show_print() in mm/vmstat.c and __zone_watermark_ok() in mm/page_alloc.c. A page
that is moved is allocated on its destination alone (__GFP_THISNODE) from ZONE_MOVABLE down, so a
zone takes pages for as long as its free pages exceed its watermark plus what it holds back from
movable allocations: its `protection` at the index of Movable. kswapd is woken at `low`; `high` is
where it would stop again, so that filling up to it leaves it asleep. A zone is printed as::

    Node 0, zone    DMA32
      per-node stats
          nr_inactive_file 91530
      pages free     765056
            boost    0
            min      10567
            low      13208
            high     15849
            promo    18490
            spanned  1044480
            present  782302
            managed  765918
            cma      0
            protection: (0, 0, 1792, 1792, 1792)
          nr_free_pages 765056
      pagesets
        cpu: 0
                  count:    2847
                  high:     3920

`count` is of free pages that a CPU keeps aside for what it allocates next, which `pages free`
leaves out: what a moved page leaves comes there first. They go back bit by bit, seconds after the
last use; on a node of 1 GiB with two CPUs they were 10 to 30 MiB while pages were moved. A node's
own figures stand in its first zone that has memory.

It is one file for all nodes; the nodes' own files in sysfs have no watermarks.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tierd.kernel import text
from tierd.model import PAGE_BYTES, NodeId

_LIMIT_BYTES = 64 << 20
# Whole lines: what begins with the end of the one before is looked for by that, "^" at each byte.
_HEADER = re.compile(rb"\nNode (\d+), zone +(\w+)(?=\n)")
_FIELDS = {
    name: re.compile(rb"\n +%s +(\d+)(?=\n)" % name.encode())
    for name in ("pages free", "high", "managed")
}
_ASIDE = re.compile(rb"\n +count: +(\d+)(?=\n)")
_CACHE = re.compile(rb"\n +nr_inactive_file +(\d+)(?=\n)")
_PROTECTION = re.compile(rb"\n +protection: \(([\d, ]*)\)(?=\n)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """One zone of one node, in pages.

    `reserve_pages` is held back from movable allocations, `aside_pages` are free, but for single
    CPUs alone. `cache_pages` are inactive page cache, all of the node's for one of its zones.
    """

    node: NodeId
    name: str
    free_pages: int
    aside_pages: int
    high_pages: int
    managed_pages: int
    reserve_pages: int
    cache_pages: int = 0

    @property
    def room_pages(self) -> int:
        """What it can take without a reclaim."""
        return max(0, self.free_pages - self.high_pages - self.reserve_pages)

    @property
    def room_soon_pages(self) -> int:
        """What it can take once the CPUs have given back what they keep aside."""
        return max(0, self.free_pages + self.aside_pages - self.high_pages - self.reserve_pages)

    @property
    def withheld_pages(self) -> int:
        """The most that it keeps free of movable pages."""
        return min(self.managed_pages, self.high_pages + self.reserve_pages)


def read_zones(root: Path = Path("/")) -> tuple[Zone, ...]:
    """Reads every zone, empty ones too, in the kernel's order.

    Raises:
        UnexpectedContent: no /proc/zoneinfo, or one that is not as documented.
    """
    path = root / "proc/zoneinfo"
    content = b"\n" + (text.read_bytes(path, _LIMIT_BYTES) or b"")
    headers = list(_HEADER.finditer(content))
    if not headers:
        raise text.UnexpectedContent(path, content[1:81].decode(errors="replace"), "memory zones")
    order = _order(headers)
    ends = [header.start() + 1 for header in headers[1:]] + [len(content)]
    return tuple(
        _parse_zone(path, content[header.end() : end], header, order)
        for header, end in zip(headers, ends, strict=True)
    )


def free_above_watermarks_bytes(root: Path = Path("/")) -> Mapping[NodeId, int]:
    """Returns for each node how many bytes can be moved there without a reclaim or a stall.

    One read of one file: 200 µs with two CPUs, and it grows with nodes times CPUs. See FreeMemory
    for a cheaper answer.
    """
    return room_bytes(read_zones(root))


def room_bytes(zones: Iterable[Zone]) -> Mapping[NodeId, int]:
    return _by_node((zone.node, zone.room_pages) for zone in zones)


def room_soon_bytes(zones: Iterable[Zone]) -> Mapping[NodeId, int]:
    return _by_node((zone.node, zone.room_soon_pages) for zone in zones)


def cache_bytes(zones: Iterable[Zone]) -> Mapping[NodeId, int]:
    return _by_node((zone.node, zone.cache_pages) for zone in zones)


def _by_node(pages: Iterable[tuple[NodeId, int]]) -> Mapping[NodeId, int]:
    rooms: defaultdict[NodeId, int] = defaultdict(int)
    for node, count in pages:
        rooms[node] += count * PAGE_BYTES
    return dict(rooms)


def _order(headers: Iterable[re.Match[bytes]]) -> list[bytes]:
    """Returns the zones' names by their index, which `protection` counts in."""
    return list(dict.fromkeys(header[2] for header in headers))


def _parse_zone(path: Path, block: bytes, header: re.Match[bytes], order: list[bytes]) -> Zone:
    numbers = {name: pattern.search(block) for name, pattern in _FIELDS.items()}
    free, high, managed = (0 if match is None else int(match[1]) for match in numbers.values())
    protection, cache = _PROTECTION.search(block), _CACHE.search(block)
    if protection is None or None in numbers.values() or b"Movable" not in order:
        shown = (header[0][1:] + block[:80]).decode(errors="replace")
        raise text.UnexpectedContent(path, shown, "a zone with its watermarks and protection")
    reserves = [int(pages) for pages in protection[1].split(b",") if pages.strip()]
    movable = order.index(b"Movable")
    return Zone(
        node=NodeId(int(header[1])),
        name=header[2].decode(),
        free_pages=free,
        aside_pages=sum(map(int, _ASIDE.findall(block))),
        high_pages=high,
        managed_pages=managed,
        reserve_pages=reserves[movable] if movable < len(reserves) else 0,
        cache_pages=0 if cache is None else int(cache[1]),
    )
