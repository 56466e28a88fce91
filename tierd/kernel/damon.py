# SPDX-License-Identifier: Apache-2.0
"""DAMON's admin interface in sysfs: slots for kdamonds, of which some are ours.

Follows Documentation/admin-guide/mm/damon/usage.rst and mm/damon/sysfs.c:

    /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds      32
    .../kdamonds/0/state                                 on
    .../kdamonds/0/pid                                   412
    .../kdamonds/0/contexts/nr_contexts                  1
    .../0/contexts/0/avail_operations                    vaddr fvaddr paddr, a line each
    .../0/contexts/0/monitoring_attrs/intervals/sample_us    5000
    .../0/contexts/0/targets/0/pid_target                388

The interface belongs to everybody, so four of its habits matter:

- A write of nr_kdamonds answers EBUSY while any kdamond runs, and else removes every slot with
  what others had set up in it.
- Every command and some reads take one lock by trylock (damon_sysfs_lock): EBUSY may mean no more
  than that somebody else was in there, for up to an aggregation interval.
- `on` answers EBUSY while DAMON runs exclusively (damon_stat, damon_reclaim, damon_lru_sort).
- nr_contexts must not become 0 under a running kdamond: kernels with d809a7c64ba8 (6.17 on, until
  mended) follow a null pointer then.
"""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NewType, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import REGION
from tierd.errors import Conflict, TierdError, UnsupportedKernel
from tierd.kernel.task import give_way_likewise
from tierd.kernel.tunable import Files, KernelFiles
from tierd.model import Action, NodeShare, Pid, Quota, Scheme

SlotIndex = NewType("SlotIndex", int)
T = TypeVar("T")

LOCK_WAIT_S = 3.0
"""How long others may hold the interface's lock: some commands keep it for an aggregation."""
LOCK_POLL_S = 0.01

STAYED_CHARGE = 32
"""What a scheme looks through and leaves counts for its quota with one part of so many, where the
kernel can tell: about what finding out costs, compared with a move."""

EXCLUSIVE = ("damon_stat", "damon_reclaim", "damon_lru_sort")
"""In-kernel users of DAMON, of which a running one keeps everybody else out, and the reverse."""


class Operations(StrEnum):
    """What a kdamond watches."""

    VADDR = "vaddr"
    """All that a process has mapped, as that changes."""
    FVADDR = "fvaddr"
    """A fixed range of its addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the kernel tunes the intervals for (intervals_goal, where it exists)."""

    access_bp: int
    aggregations: int
    min_sample_us: int
    max_sample_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a kdamond of ours is to do: watch one process's virtual addresses.

    `update_us`, the interval at which DAMON follows the process's mappings, doubles as our mark:
    a value that nobody else would choose tells a slot of ours after a crash.
    """

    sample_us: int
    aggregation_us: int
    update_us: int
    min_regions: int
    max_regions: int
    goal: Goal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a scheme has done since its kdamond began.

    Bytes and regions count where something was moved, and `tried_bytes` what was looked through
    for it: of a region whose pages are where they should be nothing is applied.
    """

    tried_bytes: int
    bytes: int
    regions: int
    over_quota: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A directory of kdamonds/: what is set up in it, by whomever."""

    index: SlotIndex
    is_on: bool
    kdamond: Pid | None
    contexts: int
    operations: str | None
    targets: tuple[Pid, ...]
    update_us: int | None

    @property
    def is_free(self) -> bool:
        return not self.is_on and self.contexts == 0

    def __str__(self) -> str:
        state = f"on, pid {self.kdamond}" if self.is_on else "off"
        watches = f"{self.operations or 'nothing'}"
        if self.targets:
            watches += " of " + ", ".join(f"process {pid}" for pid in self.targets)
        return f"kdamond {self.index} ({state}; {watches})"


class Admin:
    """The admin directory. Slots are addressed by index; none is touched that wasn't named.

    Args:
        root: where sysfs' `/sys` hangs, `/` outside of tests.
        files: how its files are reached.
    """

    def __init__(self, root: Path = Path("/"), files: Files | None = None) -> None:
        self._files: Files = files if files is not None else KernelFiles()
        self._module = root / "sys/module"
        self._kdamonds = root / "sys/kernel/mm/damon/admin/kdamonds"

    def check(self) -> None:
        """Raises UnsupportedKernel where the interface is missing."""
        if not self._files.exists(self._kdamonds / "nr_kdamonds"):
            raise UnsupportedKernel(
                "this kernel has no DAMON interface in /sys/kernel/mm/damon/admin",
                hint="boot a kernel with CONFIG_DAMON_SYSFS=y and CONFIG_DAMON_VADDR=y, "
                "and see that sysfs is mounted",
            )

    def count(self) -> int:
        return int(self._read(self._kdamonds / "nr_kdamonds"))

    def resize(self, slots: int) -> None:
        """Makes this many empty slots, wiping those that are there. EBUSY while any runs."""
        self._write(self._kdamonds / "nr_kdamonds", slots)

    def slots(self) -> tuple[Slot, ...]:
        found = (self.slot(SlotIndex(index)) for index in range(self.count()))
        return tuple(slot for slot in found if slot is not None)

    def slot(self, index: SlotIndex) -> Slot | None:
        """Returns what is set up in a slot, None when there is no such slot (any more)."""
        try:
            return self._read_slot(index)
        except FileNotFoundError:
            return None

    def exclusive_holder(self) -> str | None:
        """Returns the in-kernel user that keeps DAMON for itself now."""
        for module in EXCLUSIVE:
            path = self.exclusive_switch(module)
            if self._files.exists(path) and self._read(path) == "Y":
                return module
        return None

    def exclusive_switch(self, module: str) -> Path:
        return self._module / module / "parameters/enabled"

    def has_goal(self, index: SlotIndex) -> bool:
        """Says whether the kernel can tune intervals itself; the slot must have a context."""
        return self._files.exists(
            self._context(index) / "monitoring_attrs/intervals/intervals_goal"
        )

    def claim(
        self, index: SlotIndex, mark_us: int, operations: Operations = Operations.VADDR
    ) -> None:
        """Makes a slot's context and marks it as ours.

        Raises:
            UnsupportedKernel: there are no such operations; the slot is empty again then.
        """
        self._write(self._slot(index) / "contexts/nr_contexts", 1)
        context = self._context(index)
        self._write(context / "monitoring_attrs/intervals/update_us", mark_us)
        if operations not in self._read(context / "avail_operations").split():
            self._write(self._slot(index) / "contexts/nr_contexts", 0)
            raise UnsupportedKernel(
                f"DAMON of this kernel cannot watch virtual addresses (no {operations} operations)",
                hint="boot a kernel with CONFIG_DAMON_VADDR=y",
            )
        self._write(context / "operations", operations)

    def set_target(self, index: SlotIndex, pid: Pid) -> None:
        targets = self._context(index) / "targets"
        self._write(targets / "nr_targets", 1)
        self._write(targets / "0/pid_target", pid)

    def set_range(self, index: SlotIndex, start: int, end: int, regions: int) -> None:
        """Limits a slot with FVADDR operations, whose target is set, to a range.

        Args:
            index: the slot.
            start: an address of a page, likewise `end`.
            end: where it ends.
            regions: of equal size, that it begins with; each takes some microseconds. 0 for none.
        """
        folder = self._context(index) / "targets/0/regions"
        self._write(folder / "nr_regions", regions)
        self._files.write_ranges(folder, start, (end - start) // max(regions, 1), regions)

    def set_up(self, index: SlotIndex, setup: Setup) -> None:
        """Writes a setup into the slot; it holds from the next `on` or `commit`."""
        attrs = self._context(index) / "monitoring_attrs"
        intervals = attrs / "intervals"
        self._write(intervals / "sample_us", setup.sample_us)
        self._write(intervals / "aggr_us", setup.aggregation_us)
        self._write(intervals / "update_us", setup.update_us)
        self._write(attrs / "nr_regions/min", setup.min_regions)
        self._write(attrs / "nr_regions/max", setup.max_regions)
        if setup.goal is not None:
            self._set_goal(intervals / "intervals_goal", setup.goal)

    def set_schemes(self, index: SlotIndex, schemes: Sequence[Scheme]) -> None:
        """Writes the slot's schemes, in place of those that are there; see set_up()."""
        folder = self._context(index) / "schemes"
        self._write(folder / "nr_schemes", len(schemes))
        for number, scheme in enumerate(schemes):
            self._set_scheme(folder / str(number), scheme)

    def require_migration(self, index: SlotIndex) -> None:
        """Leaves the slot, which must have a context, with a scheme that nobody is to run.

        Raises:
            UnsupportedKernel: DAMON cannot keep a process's memory between two nodes by itself.
        """
        schemes = self._context(index) / "schemes"
        self._write(schemes / "nr_schemes", 1)
        missing = list(self._missing_of_migration(schemes / "0"))
        if missing:
            raise UnsupportedKernel(
                f"DAMON of this kernel cannot place memory by itself: it has no "
                f"{', no '.join(missing)}",
                hint='set engine = "move_pages" in [migrate], which needs none of this',
            )

    def applied(self, index: SlotIndex, schemes: int) -> list[Applied]:
        """Reads what the first so many schemes have done, as of the last update_schemes_stats.

        It is fewer where there are fewer by now.
        """
        folder = self._context(index) / "schemes"
        there = min(schemes, int(self._read(folder / "nr_schemes")))
        return [self._read_applied(folder / f"{number}/stats") for number in range(there)]

    def turn_on(self, index: SlotIndex) -> Pid | None:
        """Starts the slot's kdamond; returns its pid, None when it has stopped again already.

        It gives way to others by as much as we do, where we may have it do so.

        Raises:
            ExclusiveUse: an in-kernel user holds DAMON for itself.
            OSError: EINVAL when there is no process of the target's pid, or for a bad setup.
        """
        self._retry(lambda: self._on(index))
        slot = self.slot(index)
        kdamond = None if slot is None else slot.kdamond
        if kdamond is not None:
            give_way_likewise(kdamond)
        return kdamond

    def command(self, index: SlotIndex, command: str) -> bool:
        """Gives a running kdamond a command; says False when it has stopped instead.

        Blocks until the kdamond has done it: for a sampling interval, on 6.12 up to an
        aggregation interval.
        """
        try:
            self._write(self._slot(index) / "state", command)
        except OSError as error:
            if error.errno in _STOPPED:
                return False
            raise
        return True

    def intervals_us(self, index: SlotIndex) -> tuple[int, int]:
        """Returns sampling and aggregation interval as last written or updated."""
        intervals = self._context(index) / "monitoring_attrs/intervals"
        read = self._read
        return int(read(intervals / "sample_us")), int(read(intervals / "aggr_us"))

    def release(self, index: SlotIndex) -> None:
        """Stops the slot's kdamond where it runs, and empties the slot."""
        self.command(index, "off")
        self._write(self._slot(index) / "contexts/nr_contexts", 0)

    def tried_regions(self, index: SlotIndex, *, most: int) -> NDArray[np.void] | None:
        """Reads the regions that the last update_schemes_tried_regions left (dtype REGION).

        Four files a region, some 100 us each. Returns None for more than `most` regions, for
        none, and when they change under the reader.
        """
        folder = self._context(index) / "schemes/0/tried_regions"
        try:
            names = [name for name in self._files.names(folder) if name.isdecimal()]
            if not 0 < len(names) <= most:
                return None
            rows = [self._read_region(folder / name) for name in names]
        except (FileNotFoundError, ValueError, OverflowError):
            return None
        regions = np.sort(np.array(rows, REGION), order="start")
        is_whole = (regions["start"] < regions["end"]).all() and (
            regions["end"][:-1] <= regions["start"][1:]
        ).all()
        return regions if is_whole else None

    def _read_region(self, folder: Path) -> tuple[int, ...]:
        return tuple(int(self._read(folder / name)) for name in REGION.names or ())

    def _slot(self, index: SlotIndex) -> Path:
        return self._kdamonds / str(index)

    def _context(self, index: SlotIndex) -> Path:
        return self._slot(index) / "contexts/0"

    def _read_slot(self, index: SlotIndex) -> Slot:
        read, slot, context = self._read, self._slot(index), self._context(index)
        contexts = int(read(slot / "contexts/nr_contexts"))
        kdamond = int(read(slot / "pid"))
        update = context / "monitoring_attrs/intervals/update_us"
        return Slot(
            index=index,
            is_on=read(slot / "state") == "on",
            kdamond=Pid(kdamond) if kdamond > 0 else None,
            contexts=contexts,
            operations=read(context / "operations") if contexts else None,
            targets=self._read_targets(context) if contexts else (),
            update_us=int(read(update)) if contexts else None,
        )

    def _read_targets(self, context: Path) -> tuple[Pid, ...]:
        read, targets = self._read, context / "targets"
        count = int(read(targets / "nr_targets"))
        pids = (int(read(targets / str(index) / "pid_target")) for index in range(count))
        return tuple(Pid(pid) for pid in pids if pid > 0)

    def _set_goal(self, path: Path, goal: Goal) -> None:
        self._write(path / "access_bp", goal.access_bp)
        self._write(path / "aggrs", goal.aggregations)
        self._write(path / "min_sample_us", goal.min_sample_us)
        self._write(path / "max_sample_us", goal.max_sample_us)

    def _set_scheme(self, folder: Path, scheme: Scheme) -> None:
        self._write(folder / "action", scheme.action)
        pattern, most = folder / "access_pattern", scheme.most_accesses
        self._write(pattern / "sz/max", _ULONG_MAX)
        self._write(pattern / "nr_accesses/min", scheme.least_accesses)
        self._write(pattern / "nr_accesses/max", _UINT_MAX if most is None else most)
        self._write(pattern / "age/min", scheme.least_age)
        self._write(pattern / "age/max", _UINT_MAX)
        if scheme.destination is not None:
            self._write(folder / "target_nid", scheme.destination)
            # Pages that are there already are isolated for target_nid, and passed by for dests.
            self._write(folder / "dests/nr_dests", 1)
            self._write(folder / "dests/0/id", scheme.destination)
            self._write(folder / "dests/0/weight", 1)
        if scheme.quota is not None:
            self._set_quota(folder / "quotas", scheme.quota)

    def _set_quota(self, folder: Path, quota: Quota) -> None:
        self._write(folder / "bytes", quota.bytes)
        self._write(folder / "reset_interval_ms", quota.interval_ms)
        if quota.by_accesses:
            self._write(folder / "weights/nr_accesses_permil", 1000)
        self._write(folder / "goals/nr_goals", 1)
        self._write(folder / "goals/0/target_metric", quota.goal.what)
        self._write(folder / "goals/0/nid", quota.goal.node)
        self._write(folder / "goals/0/target_value", quota.goal.least_bp)
        if self._files.exists(folder / "goal_tuner"):
            # On or off. The other way, a proportion, begins with a byte and doubles at most.
            self._write(folder / "goal_tuner", "temporal")
        if self._files.exists(folder / "fail_charge_denom"):
            self._write(folder / "fail_charge_num", 1)
            self._write(folder / "fail_charge_denom", STAYED_CHARGE)

    def _missing_of_migration(self, scheme: Path) -> Iterator[str]:
        """Names what is not there, trying all that can be tried."""
        for action in (Action.PROMOTE, Action.DEMOTE):
            if not self._takes(scheme / "action", action):
                yield f"action {action}"
        if not self._files.exists(scheme / "target_nid"):
            yield "target_nid"
        # A write of the action tells nothing of virtual addresses: the kdamond would just not move.
        # They came together with dests (mm/damon/vaddr.c, damos_va_migrate).
        if not self._files.exists(scheme / "dests/nr_dests"):
            yield "migration of virtual addresses (dests)"
        goals = scheme / "quotas/goals"
        self._takes(goals / "nr_goals", "1")  # there are kernels without any goals
        for share in NodeShare:
            if not self._takes(goals / "0/target_metric", share):
                yield f"goal {share}"

    def _takes(self, path: Path, value: str) -> bool:
        try:
            self._write(path, value)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise
            return False
        return True

    def _read_applied(self, folder: Path) -> Applied:
        names = ("sz_tried", "sz_applied", "nr_applied", "qt_exceeds")
        tried, size, regions, over = (int(self._read(folder / name)) for name in names)
        return Applied(tried_bytes=tried, bytes=size, regions=regions, over_quota=over)

    def _on(self, index: SlotIndex) -> None:
        try:
            self._files.write(self._slot(index) / "state", "on")
        except OSError as error:
            holder = self.exclusive_holder() if error.errno == errno.EBUSY else None
            if holder is None:
                raise
            raise ExclusiveUse(holder, self.exclusive_switch(holder)) from error

    def _read(self, path: Path) -> str:
        return self._retry(lambda: self._files.read(path))

    def _write(self, path: Path, value: str | int) -> None:
        self._retry(lambda: self._files.write(path, str(value)))

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Tries again while the interface's lock is taken, and names that when it stays taken."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return attempt()
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise _explained(error) from error
                if time.monotonic() > deadline:
                    raise Conflict(
                        f"{error.filename}: the kernel's DAMON interface has been busy for "
                        f"{LOCK_WAIT_S:g} s",
                        hint="see who else writes to it: fuser -v /sys/kernel/mm/damon/admin",
                    ) from error
            time.sleep(LOCK_POLL_S)


class ExclusiveUse(Conflict):
    """An in-kernel user of DAMON runs and keeps everybody else out."""

    def __init__(self, module: str, switch: Path) -> None:
        way_out = f"turn it off: echo N > {switch}"
        if module == "damon_stat":
            way_out = f"set take_over = true in [damon] of tierd.toml, or {way_out}"
        super().__init__(f"{module} holds DAMON for itself", hint=way_out)
        self.module = module
        self.switch = switch


_UINT_MAX = 2**32 - 1
_ULONG_MAX = 2**64 - 1
_STOPPED = frozenset({errno.EPERM, errno.EINVAL, errno.ECANCELED, errno.ENOENT})
"""What commands answer when the kdamond isn't running: off, commit on 6.12, commit on 7.2."""


def _explained(error: OSError) -> Exception:
    """Returns what to raise: words for what the operator can mend, else the error itself."""
    if error.errno == errno.EACCES:
        return TierdError(
            f"{error.filename}: not permitted to set up DAMON",
            hint="run tierd as root",
        )
    if error.errno == errno.EROFS:
        return TierdError(
            f"{error.filename}: sysfs is mounted read-only here",
            hint="run tierd outside of the container, or mount /sys writable",
        )
    return error
