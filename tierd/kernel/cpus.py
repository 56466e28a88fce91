# SPDX-License-Identifier: Apache-2.0
"""CPUs: their caches, their cores, and whether a hypervisor is beneath.

Follows Documentation/ABI/testing/sysfs-devices-system-cpu and /proc/cpuinfo of x86::

    cpu0/cache/index3/{level,type,size}     3 Unified 32768K
    cpu0/topology/thread_siblings_list      0,64
    flags           : fpu vme ... hypervisor ...
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tierd.kernel import text

_CPUS = Path("sys/devices/system/cpu")
_CPUINFO_BYTES = 64 << 20
_SIZE = re.compile(r"(\d+)K")
_HYPERVISOR = re.compile(rb"^flags\s*:.* hypervisor( |$)", re.MULTILINE)


def read_last_cache_bytes(cpu: int, root: Path = Path("/")) -> int | None:
    """Returns the size of the largest cache that a CPU has, None where that isn't told.

    Raises:
        UnexpectedContent: a size is not as documented.
    """
    sizes = []
    for index in text.entries(root / _CPUS / f"cpu{cpu}/cache"):
        content = text.read(index / "size")
        if content is None:
            continue
        found = _SIZE.fullmatch(content)
        if found is None:
            raise text.UnexpectedContent(index / "size", content, "a size in K")
        sizes.append(int(found[1]) << 10)
    return max(sizes, default=None)


def one_of_each_core(cpus: Iterable[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Returns the first of these CPUs on each core.

    Raises:
        UnexpectedContent: a list of siblings is not as documented.
    """
    taken: set[int] = set()
    found = []
    for cpu in sorted(cpus):
        if cpu not in taken:
            found.append(cpu)
        siblings = root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list"
        taken.update(text.read_ids(siblings) or ())
    return tuple(found)


def is_virtual(root: Path = Path("/")) -> bool:
    """Tells whether x86 CPUs say that there is a hypervisor; one may keep it to itself."""
    content = text.read_bytes(root / "proc/cpuinfo", _CPUINFO_BYTES) or b""
    return _HYPERVISOR.search(content) is not None
