# SPDX-License-Identifier: Apache-2.0
"""The kernel's memory tiers: /sys/devices/virtual/memory_tiering.

Follows Documentation/ABI/testing/sysfs-kernel-mm-memory-tiers and mm/memory-tiers.c: the number
is the tier's abstract distance in steps, so the lowest is the fastest, and a tier exists while it
has nodes. A machine with DRAM and CXL shows::

    memory_tier4/nodelist     0
    memory_tier22/nodelist    1

Reading a nodelist while the last memory of its tier goes offline can lock up both for ever, as of
Linux 6.12 and 7.2: the kernel removes the file under the lock that the reader waits for
(docs/decisions/0012). So it must not be read when memory may be going.
"""

from collections.abc import Mapping
from pathlib import Path

from tierd.kernel import text
from tierd.model import NodeId

_PREFIX = "memory_tier"


def read_memory_tiers(root: Path = Path("/")) -> Mapping[NodeId, int]:
    """Returns the tier of each node that is in one; nothing where the kernel has no tiers.

    Raises:
        UnexpectedContent: a nodelist is not as documented.
    """
    folder = root / "sys/devices/virtual/memory_tiering"
    return {
        NodeId(node): int(number)
        for path in text.entries(folder)
        if (number := path.name.removeprefix(_PREFIX)).isdecimal()
        for node in text.read_ids(path / "nodelist") or ()
    }
