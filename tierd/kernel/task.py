# SPDX-License-Identifier: Apache-2.0
"""The CPU time of a task, kernel threads too.

Follows proc_pid_stat(5). The name may hold anything, so fields are counted from its closing
parenthesis; here utime and stime are 3 and 161:

    412 (kdamond.0) S 2 0 0 0 -1 2129984 0 0 0 0 3 161 0 0 20 0 1 0 8812 0 0 ...

Their sum is exact, not sampled at ticks: cputime_adjust() scales them to the time run.
"""

import errno
import os
from pathlib import Path

from tierd.model import Pid

_UTIME, _STIME = 11, 12  # counted from the state, the first field behind the name
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: Pid, root: Path = Path("/")) -> float:
    """Returns how long a task has run.

    Raises:
        ProcessLookupError: there is no such task.
    """
    try:
        text = (root / f"proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, f"no task {pid}") from error
    fields = text.rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
