# SPDX-License-Identifier: Apache-2.0
"""Everything on the machine that a tierd could leave changed, ours and others'.

As one mapping from what it is to what it holds, so that two of them can be compared:

    {"/proc/sys/kernel/numa_balancing": "1", "kdamonds": "1",
     "kdamonds/0/state": "on", "kdamonds/0/pid": "412", ...}
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

Machine = Mapping[str, str]

KDAMONDS = Path("/sys/kernel/mm/damon/admin/kdamonds")
NUMA_BALANCING = Path("/proc/sys/kernel/numa_balancing")
DAMON_STAT = Path("/sys/module/damon_stat/parameters/enabled")
TUNABLES = (
    NUMA_BALANCING,
    DAMON_STAT,
    Path("/sys/kernel/mm/numa/demotion_enabled"),
    Path("/sys/kernel/mm/lru_gen/enabled"),
    Path("/proc/sys/kernel/perf_event_paranoid"),
)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

OTHERS_HOLD_IT_S = 10.0
"""For how long the lock of DAMON's interface may be taken: a kdamond that ends takes it too."""


def look(*folders: Path) -> Machine:
    """Returns what there is now; the folders are tierd's, which others may use too."""
    return {
        **{str(path): _value(path) for path in TUNABLES if path.exists()},
        **dict(_damon()),
        **dict(_files(folders)),
        "kdamonds": str(_kernel_threads("kdamond")),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "sockets": "\n".join(_sockets()),
    }


def differences(before: Machine, after: Machine) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [
        f"{name}: {before.get(name)!r} became {after.get(name)!r}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _value(path: Path) -> str:
    end = time.monotonic() + OTHERS_HOLD_IT_S
    while True:
        try:
            return path.read_text().strip()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                return errno.errorcode[error.errno or 0]
        time.sleep(0.01)


def _damon() -> Iterator[tuple[str, str]]:
    """All files of all slots."""
    for folder, _, names in os.walk(KDAMONDS):
        for name in names:
            path = Path(folder, name)
            yield f"kdamonds/{path.relative_to(KDAMONDS)}", _value(path)


def _files(folders: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """The kinds of what lies in the folders, and the changes that the journal tells."""
    for folder in folders:
        for path in folder.rglob("*") if folder.exists() else ():
            yield str(path), stat.filemode(path.lstat().st_mode)
            if path.name == "journal.jsonl":
                yield f"recorded in {path}", "\n".join(_recorded(path))


def _recorded(journal: Path) -> Iterator[str]:
    """The lines of this boot that no later one of their id takes back."""
    boot, last = BOOT_ID.read_text().strip(), {}
    for line in journal.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            yield f"torn: {line}"
            continue
        entry = json.loads(line)
        if entry["boot"] == boot:
            last[entry["id"]] = line
    yield from (line for line in last.values() if json.loads(line)["kind"] != "undone")


def _kernel_threads(prefix: str) -> int:
    return sum(path.read_text().startswith(prefix) for path in Path("/proc").glob("[0-9]*/comm"))


def _sockets() -> list[str]:
    """The names of the sockets that somebody has bound, and the TCP ports that are listened on."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    bound = [line.split(maxsplit=7)[7] for line in lines if len(line.split()) == 8]
    for family in ("tcp", "tcp6"):
        rows = [row.split() for row in Path(f"/proc/net/{family}").read_text().splitlines()[1:]]
        bound += [f"{family} {row[1]}" for row in rows if row[3] == "0A"]
    return sorted(bound)


def cpu_ticks(thread: int) -> int:
    """The CPU time that a thread has taken."""
    fields = Path(f"/proc/{thread}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])
