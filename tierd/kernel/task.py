# SPDX-License-Identifier: Apache-2.0
"""What /proc/PID/stat tells of a task: whether it is the kernel's own, and its CPU time.

Follows proc_pid_stat(5). The name may hold anything, so fields are counted from its closing
parenthesis; here flags, utime and stime, of a kdamond:

    412 (kdamond.0) S 2 0 0 0 -1 2129984 0 0 0 0 3 161 0 0 20 0 1 0 8812 0 0 ...

utime + stime is exact, not sampled at ticks: cputime_adjust() scales them to the time run.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from tierd.model import Pid

PF_KTHREAD = 0x00200000
_FLAGS, _UTIME, _STIME = 6, 11, 12  # counted from the state, the first field behind the name
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    is_kernel_thread: bool
    cpu_s: float


def read(pid: Pid, root: Path = Path("/")) -> Task:
    """Reads a task's state.

    Raises:
        ProcessLookupError: there is no such task.
    """
    try:
        text = (root / f"proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from error
    return parse(text)


def parse(text: str) -> Task:
    before, _, after = text.rpartition(")")
    fields = after.split()
    return Task(
        name=before.partition("(")[2],
        is_kernel_thread=bool(int(fields[_FLAGS]) & PF_KTHREAD),
        cpu_s=(int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S,
    )
