# SPDX-License-Identifier: Apache-2.0
"""The mover that is DAMOS: schemes in the slots of the targets' kdamonds, and what they have moved.

A kdamond takes schemes over with `commit`, and tells what they did with `update_schemes_stats`. It
answers after a sampling interval, or after a batch of moves, so both are asked in another thread.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from tierd.errors import TierdError
from tierd.kernel.damon import Admin, Applied, Setup, SlotIndex
from tierd.model import Action, Scheme

log = logging.getLogger("tierd")

COUNT_S = 2.0
"""How often a kdamond is asked what its schemes have done."""

NOTHING = Applied(tried_bytes=0, bytes=0, regions=0, over_quota=0)

Make = Callable[[Setup, int], tuple[Scheme, ...]]
"""What makes a target's schemes of its sampling and of the number of targets."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A target's slot: its schemes, `kept` before ours, and their counts as last read."""

    kept: tuple[Scheme, ...]
    ours: tuple[Scheme, ...]
    counts: Mapping[Action, Applied]
    counted_s: float
    pending: Future["_Answer | None"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a kdamond has told of the schemes that it had, and those that it has now."""

    counts: Mapping[Action, Applied]
    ours: tuple[Scheme, ...]


class KernelSchemes:
    """Hands schemes to the kdamonds of a tierd.sample.session.Session.

    Args:
        admin: DAMON.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._make: Make = make_none
        self._slots: dict[SlotIndex, _Slot] = {}
        self._applied = dict.fromkeys((Action.PROMOTE, Action.DEMOTE), NOTHING)

    @property
    def applied(self) -> Mapping[Action, Applied]:
        """What was done ever, by those too that have ended."""
        return dict(self._applied)

    def hand(self, make: Make) -> None:
        """Has kdamonds go on by other schemes, from the next follow() on."""
        self._make = make

    def require(self, slot: SlotIndex) -> None:
        """Tries in a slot, to be emptied then, whether DAMOS can do it.

        Raises:
            UnsupportedKernel: it cannot.
        """
        self._admin.require_migration(slot)

    def set_up(
        self,
        slot: SlotIndex,
        setup: Setup,
        *,
        kept: tuple[Scheme, ...],
        targets: int,
        now_s: float,
    ) -> None:
        """Writes the schemes of a target whose kdamond is about to begin.

        Args:
            slot: its slot.
            setup: how it is sampled.
            kept: schemes of others, which stand before.
            targets: how many there are with it.
            now_s: CLOCK_MONOTONIC.
        """
        ours = self._make(setup, targets)
        self._slots[slot] = _Slot(kept=kept, ours=ours, counts={}, counted_s=now_s)
        self._admin.set_schemes(slot, kept + ours)

    def follow(self, setups: Mapping[SlotIndex, Setup], worker: Executor, now_s: float) -> None:
        """Has what is sampled otherwise, or is to be, get its schemes, and asks what they did.

        Args:
            setups: how the targets are sampled now.
            worker: where to wait for their kdamonds.
            now_s: CLOCK_MONOTONIC.
        """
        for index, setup in setups.items():
            slot = self._slots[index]
            if slot.pending is not None:
                if not slot.pending.done():
                    continue
                self._settle(slot)
            wanted = self._make(setup, len(setups))
            if wanted != slot.ours:
                slot.pending = worker.submit(self._commit, index, slot, setup, wanted)
            elif slot.ours and now_s - slot.counted_s >= COUNT_S:
                slot.pending = worker.submit(self._count, index, slot)
            if slot.pending is not None:
                slot.counted_s = now_s

    def leave(self, index: SlotIndex) -> None:
        """Waits for what is under way; the slot is about to be emptied."""
        slot = self._slots.pop(index)
        if slot.pending is not None:
            slot.pending.exception()
            self._settle(slot)

    def _settle(self, slot: _Slot) -> None:
        """Takes over what was told; what failed is tried again."""
        assert slot.pending is not None
        done, slot.pending = slot.pending, None
        if isinstance(error := done.exception(), OSError | TierdError):
            log.debug("a kdamond's schemes are as they were: %s", error)
            return
        answer = done.result()
        if answer is None:
            return  # it has stopped, which its reader tells
        for action, now in answer.counts.items():
            more = _difference(now, slot.counts.get(action, NOTHING))
            self._applied[action] = _sum(self._applied[action], more)
        same = len(answer.ours) == len(slot.ours)
        slot.counts, slot.ours = answer.counts if same else {}, answer.ours

    def _count(self, index: SlotIndex, slot: _Slot) -> _Answer | None:
        """Asks what the schemes have done; runs in the worker."""
        if not self._admin.command(index, "update_schemes_stats"):
            return None
        first = len(slot.kept)
        found = self._admin.applied(index, first + len(slot.ours))[first:]
        counts = {scheme.action: done for scheme, done in zip(slot.ours, found, strict=False)}
        return _Answer(counts=counts, ours=slot.ours)

    def _commit(
        self, index: SlotIndex, slot: _Slot, setup: Setup, wanted: tuple[Scheme, ...]
    ) -> _Answer | None:
        """Has the kdamond go on by other schemes; runs in the worker."""
        answer = self._count(index, slot)
        if answer is None:
            return None
        if setup.goal is not None:  # else the intervals that the kernel has come to are put back
            self._admin.command(index, "update_tuned_intervals")
        self._admin.set_schemes(index, slot.kept + wanted)
        if not self._admin.command(index, "commit"):
            return None
        return _Answer(counts=answer.counts, ours=wanted)


def make_none(_: Setup, __: int) -> tuple[Scheme, ...]:
    """Has nothing moved."""
    return ()


def _sum(one: Applied, other: Applied) -> Applied:
    return Applied(
        tried_bytes=one.tried_bytes + other.tried_bytes,
        bytes=one.bytes + other.bytes,
        regions=one.regions + other.regions,
        over_quota=one.over_quota + other.over_quota,
    )


def _difference(now: Applied, before: Applied) -> Applied:
    return Applied(
        tried_bytes=now.tried_bytes - before.tried_bytes,
        bytes=now.bytes - before.bytes,
        regions=now.regions - before.regions,
        over_quota=now.over_quota - before.over_quota,
    )
