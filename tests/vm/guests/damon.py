# SPDX-License-Identifier: Apache-2.0
"""DAMON in a guest, as its sysfs tells it: what tierd must leave as it was, and others' kdamonds.

Follows Documentation/admin-guide/mm/damon/usage.rst. Somebody else's kdamond is made as there:

    echo 2     > kdamonds/nr_kdamonds
    echo 1     > kdamonds/0/contexts/nr_contexts
    echo vaddr > kdamonds/0/contexts/0/operations
    echo 1     > kdamonds/0/contexts/0/targets/nr_targets
    echo 388   > kdamonds/0/contexts/0/targets/0/pid_target
    echo on    > kdamonds/0/state
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from guests.guest import Guest
from guests.tiering import DAMON_STAT

KDAMONDS = "/sys/kernel/mm/damon/admin/kdamonds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A kdamond slot: its thread if it runs, and the process that it watches."""

    kdamond: int | None
    target: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """All that tierd changes on a machine while it runs."""

    slots: tuple[Slot, ...]
    damon_stat: str | None
    """None on a kernel without it."""
    kdamonds: int
    """Threads, those of in-kernel users included."""
    status: bool
    """Whether there is a status file."""


FOOTPRINT = f"""
cat {DAMON_STAT} 2>/dev/null || echo none
grep -c -h '^kdamond' /proc/[0-9]*/comm 2>/dev/null | grep -c 1
test -e /run/tierd-test/run/status.json && echo yes || echo no
for slot in $(seq 0 $(($(cat {KDAMONDS}/nr_kdamonds) - 1))); do
    target=$(cat {KDAMONDS}/$slot/contexts/0/targets/0/pid_target 2>/dev/null)
    kdamond=$(cat {KDAMONDS}/$slot/pid 2>/dev/null)
    echo ${{kdamond:--1}} ${{target:--1}}
done
"""


def footprint(guest: Guest) -> Footprint:
    """What tierd's presence would have changed."""
    stat, kdamonds, status, *slots = guest.run(["sh", "-c", FOOTPRINT]).stdout.splitlines()
    return Footprint(
        slots=tuple(_slot(*map(int, line.split())) for line in slots),
        damon_stat=None if stat == "none" else stat,
        kdamonds=int(kdamonds),
        status=status == "yes",
    )


def _slot(kdamond: int, target: int) -> Slot:
    return Slot(kdamond=_if_any(kdamond), target=_if_any(target))


def _if_any(pid: int) -> int | None:
    return pid if pid > 0 else None


FOREIGN = f"""
set -e
cd {KDAMONDS}
echo $1 > nr_kdamonds
echo 1 > 0/contexts/nr_contexts
echo vaddr > 0/contexts/0/operations
echo 1 > 0/contexts/0/targets/nr_targets
echo $2 > 0/contexts/0/targets/0/pid_target
echo on > 0/state
"""


@contextmanager
def foreign_kdamond(guest: Guest, *, slots: int) -> Iterator[Slot]:
    """Somebody else's kdamond in the first of so many slots; it must be there at the end, too."""
    with damon_stat(guest, "N"):
        watched = guest.start(["sleep", "infinity"])
        guest.run(["sh", "-c", FOREIGN, "foreign", str(slots), str(watched.pid)])
        foreign = footprint(guest).slots[0]
        try:
            yield foreign
        finally:
            guest.run(["sh", "-c", f"echo off > {KDAMONDS}/0/state"])
            guest.write(f"{KDAMONDS}/nr_kdamonds", b"0")
            watched.signal(signal.SIGKILL)
            watched.wait()


@contextmanager
def damon_stat(guest: Guest, value: str) -> Iterator[None]:
    """Turns the kernel's own DAMON user on or off, where the kernel has it."""
    before = footprint(guest).damon_stat
    if before not in (None, value):
        guest.write(DAMON_STAT, value.encode())
    try:
        yield
    finally:
        if before not in (None, value):
            guest.write(DAMON_STAT, before.encode())


def cpu_ticks(guest: Guest, pid: int) -> int:
    """The CPU time that a thread has taken."""
    fields = _stat(guest, pid)
    return int(fields[11]) + int(fields[12])


def niceness(guest: Guest, pid: int) -> int:
    """By how much a thread gives way to others."""
    return int(_stat(guest, pid)[16])


def _stat(guest: Guest, pid: int) -> list[str]:
    stat = guest.read(f"/proc/{pid}/stat").decode()
    return re.sub(r"^.*\) ", "", stat).split()
