# SPDX-License-Identifier: Apache-2.0
"""The kernel's own placement of pages: /proc/sys/kernel/numa_balancing.

Follows Documentation/admin-guide/sysctl/kernel.rst: 0 is off, bit 0 moves pages to the CPUs that
use them, bit 1 promotes pages of lower memory tiers. None is a kernel without it.
"""

from pathlib import Path

from tierd.kernel import text

PATH = "proc/sys/kernel/numa_balancing"
OFF = "0"
PROMOTES = 2
TURN_OFF = (
    'set numa_balancing = "take_over" in [conflicts], or sysctl kernel.numa_balancing=0, in '
    "/etc/sysctl.d to keep it"
)
"""The operator's next step where it is on."""


def read_mode(root: Path = Path("/")) -> int | None:
    """Returns the mode.

    Raises:
        UnexpectedContent: it is not a number.
    """
    return text.read_int(root / PATH)


def describe(mode: int) -> str:
    """Says what the kernel does in a mode other than 0."""
    return "promotes pages itself" if mode & PROMOTES else "moves pages to the CPUs that use them"
