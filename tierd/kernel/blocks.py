# SPDX-License-Identifier: Apache-2.0
"""Blocks of memory that can be taken online and offline: /sys/devices/system/memory.

Follows Documentation/ABI/testing/sysfs-devices-memory and admin-guide/mm/memory-hotplug.rst. The
first block of CXL memory at 0x690000000 shows::

    block_size_bytes             8000000          (hexadecimal, without 0x)
    auto_online_blocks           online_movable   what becomes of blocks that are added
    memory210/state              online
    memory210/valid_zones        Movable          the zone it is in; offline, those it may be in
    memory210/node1              (link)
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tierd.kernel import text
from tierd.model import MemoryBlock, NodeId

MEMORY = Path("sys/devices/system/memory")
AUTO_ONLINE = MEMORY / "auto_online_blocks"


def read_blocks(within: Iterable[range], root: Path = Path("/")) -> tuple[MemoryBlock, ...]:
    """Reads the blocks that have some of these physical addresses, in ascending order.

    Raises:
        UnexpectedContent: block_size_bytes is not as documented.
    """
    block_bytes = read_block_bytes(root)
    if block_bytes is None:
        return ()
    asked = list(within)
    found = ((number_of(path), path) for path in text.entries(root / MEMORY))
    return tuple(
        _read_block(path, number, block_bytes)
        for number, path in sorted((n, path) for n, path in found if n is not None)
        if any(_overlap(addresses, number * block_bytes, block_bytes) for addresses in asked)
    )


def read_block_bytes(root: Path = Path("/")) -> int | None:
    """Returns the size of a block; None where memory cannot be taken offline.

    Raises:
        UnexpectedContent: it is not as documented.
    """
    path = root / MEMORY / "block_size_bytes"
    size = text.read(path)
    if not size:
        return None
    if not re.fullmatch(r"[0-9a-f]{1,16}", size) or not int(size, 16):
        raise text.UnexpectedContent(path, size, "a hexadecimal size")
    return int(size, 16)


def read_state(number: int, root: Path = Path("/")) -> str | None:
    """Returns whether a block is online or offline; None where there is none of that number."""
    return text.read(root / MEMORY / f"memory{number}" / "state")


def number_of(path: Path) -> int | None:
    """Returns the number of the block that a folder or link is of, None for anything else."""
    name = re.fullmatch(r"memory(\d+)", path.name)
    return None if name is None else int(name[1])


def _overlap(addresses: range, start: int, size_bytes: int) -> bool:
    return addresses.start < start + size_bytes and start < addresses.stop


def _read_block(path: Path, number: int, block_bytes: int) -> MemoryBlock:
    links = (re.fullmatch(r"node(\d+)", entry.name) for entry in text.entries(path))
    nodes = [NodeId(int(link[1])) for link in links if link is not None]
    return MemoryBlock(
        number=number,
        start=number * block_bytes,
        size_bytes=block_bytes,
        state=text.read(path / "state") or "unknown",
        zones=tuple((text.read(path / "valid_zones") or "").split()),
        node=nodes[0] if len(nodes) == 1 else None,
    )
