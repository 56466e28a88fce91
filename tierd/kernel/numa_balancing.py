# SPDX-License-Identifier: Apache-2.0
"""The kernel's own placement of pages: /proc/sys/kernel/numa_balancing, and what demotes.

Follows Documentation/admin-guide/sysctl/kernel.rst: 0 is off, bit 0 moves pages to the CPUs that
use them, bit 1 promotes pages of lower memory tiers. None is a kernel without it. What makes way
for these is demoted, and not swapped out, where numa/demotion_enabled is on
(Documentation/ABI/testing/sysfs-kernel-mm-numa). LIMIT is what all promotions together keep to, in
MiB a second.

How often the kernel looks at a program's memory it decides by itself: once in so much of its CPU
time, from the shortest period to the longest (kernel/sched/fair.c), in milliseconds. What is
accessed within so many after a look is hot, until promotions have been on for the longest period.
From then on the kernel adapts that once in each: an eighth more of it, up to twice as much, where
it promotes less than the limit, and less where it would promote more. In a period it looks at so
many MiB. With debugfs all four can be set.
"""

from pathlib import Path

from tierd.kernel import text

PATH = "proc/sys/kernel/numa_balancing"
LIMIT = "proc/sys/kernel/numa_balancing_promote_rate_limit_MBps"
MOST_MBPS = 65_536
"""What the kernel has for no limit."""
DEMOTES = "sys/kernel/mm/numa/demotion_enabled"
SHORTEST_LOOK, LONGEST_LOOK = (
    f"sys/kernel/debug/sched/numa_balancing/scan_period_{which}_ms" for which in ("min", "max")
)
HOT_WITHIN = "sys/kernel/debug/sched/numa_balancing/hot_threshold_ms"
AT_A_TIME = "sys/kernel/debug/sched/numa_balancing/scan_size_mb"
DEFAULT_MIB, MOST_MIB_A_SECOND = 256, 2560
"""What it looks at in a period by default, and the most in a second of CPU time (fair.c:
MAX_SCAN_WINDOW), by which task_scan_min() has a shortest period."""
LOOKS = SHORTEST_LOOK, LONGEST_LOOK, HOT_WITHIN, AT_A_TIME
OFF = "0"
YES = "true"
PROMOTES = 2
TURN_OFF = (
    'set numa_balancing = "take_over" in [conflicts], or sysctl kernel.numa_balancing=0, in '
    "/etc/sysctl.d to keep it"
)
"""The operator's next step where it is on."""


def least_ms(at_a_time_mib: int) -> int:
    """Returns the shortest period that the kernel takes where it looks at so much in each."""
    return 1000 // max(MOST_MIB_A_SECOND // at_a_time_mib, 1)


def read_mode(root: Path = Path("/")) -> int | None:
    """Returns the mode.

    Raises:
        UnexpectedContent: it is not a number.
    """
    return text.read_int(root / PATH)


def describe(mode: int) -> str:
    """Says what the kernel does in a mode other than 0."""
    return "promotes pages itself" if mode & PROMOTES else "moves pages to the CPUs that use them"
