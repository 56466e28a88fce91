# SPDX-License-Identifier: Apache-2.0
"""The kernel's own counts of moved pages: /proc/vmstat, and a node's own.

The names are those of vmstat_text in mm/vmstat.c, and which of them exist depends on the kernel's
version and build::

    pgpromote_success 0
    pgpromote_candidate 0
    pgdemote_kswapd 0
    pgmigrate_success 16384
    pgmigrate_fail 12
    numa_hint_faults 0
"""

from dataclasses import dataclass, fields
from pathlib import Path

from tierd.kernel import text
from tierd.model import NodeId

_LIMIT_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Vmstat:
    """Counts of base pages since boot; None is a counter that this kernel does not have."""

    pgmigrate_success: int | None
    pgmigrate_fail: int | None
    pgpromote_success: int | None
    pgpromote_candidate: int | None
    pgpromote_candidate_nrl: int | None
    pgdemote_kswapd: int | None
    pgdemote_direct: int | None
    pgdemote_khugepaged: int | None
    pgdemote_proactive: int | None
    numa_hint_faults: int | None


_NAMES = tuple(field.name for field in fields(Vmstat))


def read_vmstat(root: Path = Path("/"), node: NodeId | None = None) -> Vmstat:
    """Reads the counters, of all nodes or one, which does not have all of them.

    Raises:
        UnexpectedContent: a line is not a name and a number.
    """
    path = root / ("proc/vmstat" if node is None else f"sys/devices/system/node/node{node}/vmstat")
    content = text.read(path, _LIMIT_BYTES) or ""
    try:
        counts = dict(line.split() for line in content.splitlines())
        return Vmstat(**{name: int(counts[name]) if name in counts else None for name in _NAMES})
    except ValueError:
        raise text.UnexpectedContent(path, content, "names and numbers") from None
