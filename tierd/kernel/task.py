# SPDX-License-Identifier: Apache-2.0
"""The CPU time of a task, kernel threads too, and how it gives way to others.

Follows proc_pid_stat(5). The name may hold anything, so fields are counted from its closing
parenthesis; here utime and stime are 3 and 161:

    412 (kdamond.0) S 2 0 0 0 -1 2129984 0 0 0 0 3 161 0 0 20 0 1 0 8812 0 0 ...

Their sum is exact, not sampled at ticks: cputime_adjust() scales them to the time run.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tierd.kernel import text
from tierd.kernel.process import read_command
from tierd.model import Pid

_UTIME, _STIME = 11, 12  # counted from the state, the first field behind the name
_SCHED_BYTES = 1 << 20  # with a line for each NUMA node
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuTimes(NamedTuple):
    """How long a task has run: in its own code, and in the kernel's."""

    user_s: float
    kernel_s: float


def cpu_s(pid: Pid, root: Path = Path("/")) -> float:
    """Returns how long a task has run.

    Raises:
        ProcessLookupError: there is no such task.
    """
    return sum(cpu_times(pid, root))


def cpu_times(pid: Pid, root: Path = Path("/")) -> CpuTimes:
    """Returns how long a task has run in what, of a process all of its threads together.

    Raises:
        ProcessLookupError: there is no such task.
    """
    try:
        content = (root / f"proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, f"no task {pid}") from error
    fields = content.rpartition(")")[2].split()
    return CpuTimes(int(fields[_UTIME]) / _TICKS_PER_S, int(fields[_STIME]) / _TICKS_PER_S)


def promoted_pages(pid: Pid, root: Path = Path("/")) -> int:
    """Returns how many pages the kernel has moved at faults of a task, or a process' first thread.

    As /proc/PID/sched has it (kernel/sched/debug.c); 0 where it does not tell, or there is no task.
    """
    lines = text.lines(root / f"proc/{pid}/sched", _SCHED_BYTES)
    told = (line.rpartition(b":")[2] for line in lines if line.startswith(b"numa_pages_migrated "))
    return int(next(told, b"0"))


def give_way(nice: int) -> None:
    """Has this process give way to others by so much, and threads that it starts from now on.

    By more, where it does already.

    Args:
        nice: 0 to 19, as setpriority(2) has it.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def give_way_likewise(kdamond: Pid) -> None:
    """Has a kdamond give way to others by as much as this task does, if it is still there.

    Without CAP_SYS_NICE it stays as it is, unless we have all capabilities that it has
    (security/commoncap.c: cap_safe_nice): so does that of a service that is confined.
    """
    if (read_command(kdamond) or "").startswith("kdamond"):
        with suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PROCESS, kdamond, os.getpriority(os.PRIO_PROCESS, 0))


def held_up_s(before: CpuTimes, after: CpuTimes, passed_s: float) -> float:
    """Returns for how much of the time between the two the kernel had a task, and not its own code.

    Of the threads of a process each is held up by its own faults alone.
    """
    user_s, kernel_s = after.user_s - before.user_s, after.kernel_s - before.kernel_s
    return min(kernel_s, passed_s * kernel_s / (user_s + kernel_s)) if kernel_s > 0 else 0.0
