# SPDX-License-Identifier: Apache-2.0
"""Kdamonds of ours, beside those of others: each in the journal before it is set up."""

import errno
import logging
import secrets
import select
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tierd.errors import Conflict, TierdError
from tierd.journal import EntryId, Journal, Kdamond, Slots
from tierd.kernel.damon import Admin, ExclusiveUse, Operations, Setup, Slot, SlotIndex
from tierd.model import Pid
from tierd.sample.governor import Started

log = logging.getLogger("tierd")

SLOTS = 32
"""Kdamond slots that are made where nobody has made any: the most targets, and room for others."""

MARK_FIRST_US, MARKS = 1_000_001, 99_999
"""A session's mark is the interval at which DAMON follows mappings: 1 s and some odd us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A slot that is ours, as `change` tells in the journal."""

    slot: SlotIndex
    entry: EntryId
    change: Kdamond


class Kdamonds:
    """Starts and stops them; what is left at close() is stopped and put back, last things first.

    Args:
        admin: DAMON.
        journal: where changes are recorded.
        take_over: whether damon_stat may be stopped for ours.
    """

    def __init__(self, admin: Admin, journal: Journal, *, take_over: bool) -> None:
        self._admin, self._journal, self._take_over = admin, journal, take_over
        self.mark_us = MARK_FIRST_US + secrets.randbelow(MARKS)
        self._entries: list[EntryId] = []
        self._left: list[EntryId] = []

    def start(
        self,
        pid: Pid,
        pidfd: int,
        set_up: Callable[[SlotIndex], Setup],
    ) -> Started:
        """Starts a kdamond, stopping damon_stat for it where that is allowed.

        Args:
            pid: the process that it watches.
            pidfd: of the same.
            set_up: writes what it is to do into its slot, and returns that.

        Raises:
            ProcessLookupError: there is no such process any more.
            Conflict: others hold DAMON, or all its slots; the message says who.
            UnsupportedKernel: DAMON has no such operations.
            TierdError: DAMON may not be set up by us.
        """
        try:
            return self._start(pid, pidfd, set_up)
        except ExclusiveUse as use:
            if use.module != "damon_stat" or not self._take_over:
                raise
            entry = self._journal.write(use.switch, "N")
        if entry is not None:
            self._entries.append(entry)
        return self._start(pid, pidfd, set_up)

    def claim(self, pid: Pid, operations: Operations) -> Claimed:
        """Takes a slot for a kdamond over a process, to be set up and turned on by the caller.

        Raises:
            Conflict: others hold all slots; the message says who.
            UnsupportedKernel: DAMON has no such operations.
            TierdError: DAMON may not be set up by us.
        """
        slot = self._free_slot()
        change = Kdamond(slot=slot, mark_us=self.mark_us, target=pid)
        entry = self._journal.record(change)
        with ExitStack() as stack:
            stack.callback(self._journal.revert, entry)
            self._admin.claim(slot, self.mark_us, operations)
            stack.pop_all()
        return Claimed(slot=slot, entry=entry, change=change)

    def try_out(self, attempt: Callable[[SlotIndex], None]) -> None:
        """Has something tried in a slot that is set up for it, and emptied again.

        Raises:
            Conflict: others hold all slots of DAMON; the message says who.
            UnsupportedKernel: DAMON cannot watch virtual addresses.
            TierdError: DAMON may not be set up by us.
        """
        claimed = self.claim(Pid(0), Operations.VADDR)
        try:
            attempt(claimed.slot)
        finally:
            self._journal.revert(claimed.entry)

    def stop(self, entry: EntryId) -> None:
        """Stops a kdamond and empties its slot, with the next if DAMON is busy now."""
        self._left.append(entry)
        self.stop_left()

    def stop_left(self) -> None:
        """What stays left is in the journal, and so stopped at the end at the latest."""
        while self._left:
            try:
                self._journal.revert(self._left[0])
            except TierdError as error:
                log.warning("a kdamond that is needed no more goes on for now: %s", error)
                return
            del self._left[0]

    def close(self) -> None:
        """Puts back what else was changed; those that run are stopped before."""
        with ExitStack() as last_first:
            for entry in self._entries:
                last_first.callback(self._journal.revert, entry)
            last_first.callback(self.stop_left)

    def _start(self, pid: Pid, pidfd: int, set_up: Callable[[SlotIndex], Setup]) -> Started:
        claimed = self.claim(pid, Operations.VADDR)
        slot, entry = claimed.slot, claimed.entry
        with ExitStack() as stack:
            stack.callback(self._journal.revert, entry)
            setup = set_up(slot)
            kdamond = self._turn_on(slot, pid, pidfd)
            self._journal.amend(entry, replace(claimed.change, pid=kdamond))
            stack.pop_all()
        return Started(slot=slot, pid=kdamond, entry=entry, setup=setup)

    def _turn_on(self, slot: SlotIndex, pid: Pid, pidfd: int) -> Pid:
        try:
            kdamond = self._admin.turn_on(slot)
        except OSError as error:
            if error.errno != errno.EINVAL or not has_exited(pidfd):
                raise
            kdamond = None
        if kdamond is None or has_exited(pidfd):  # its number might be another's by now
            raise no_process(pid)
        return kdamond

    def _free_slot(self) -> SlotIndex:
        """Returns a slot that nobody uses, the last one: others count from the first."""
        slots = self._admin.slots()
        if len(slots) < SLOTS and all(slot.is_free for slot in slots):
            self._entries.append(self._journal.record(Slots(before=len(slots), after=SLOTS)))
            self._admin.resize(SLOTS)
            slots = self._admin.slots()
        free = [slot.index for slot in slots if slot.is_free]
        if not free:
            raise self._no_slot(slots)
        return free[-1]

    def _no_slot(self, slots: tuple[Slot, ...]) -> Conflict:
        changes = self._journal.changes.values()
        ours = {change.slot for change in changes if isinstance(change, Kdamond)}
        others = [str(slot) for slot in slots if slot.index not in ours]
        if not others:
            return Conflict(
                f"tierd watches {len(slots)} processes already, the most it can",
                hint="name fewer targets",
            )
        return Conflict(
            f"DAMON has no free slot of {len(slots)}; others hold {'; '.join(others)}",
            hint="stop one (echo off > its state file) or wait for its end; slots are added by "
            "/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds, which empties all of them",
        )


def has_exited(pidfd: int) -> bool:
    """Says whether a process has ended, also when nobody has waited for it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def no_process(pid: Pid) -> ProcessLookupError:
    """Returns what is raised for a process that is none."""
    return ProcessLookupError(errno.ESRCH, f"no process {pid}")
