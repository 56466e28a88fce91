# SPDX-License-Identifier: Apache-2.0
"""The targets: which processes come and go, what they have mapped, and what of it is pinned."""

import logging
from collections.abc import Sequence
from typing import Any

from tierd.config import TargetConfig
from tierd.decide.pins import NO_PINS, add, by_name, remove, within
from tierd.discover.targets import pins_by_name
from tierd.errors import NotFound, TierdError
from tierd.kernel.process import Process
from tierd.machine import Machine
from tierd.model import Pid, Pin
from tierd.observe.events import event
from tierd.sample.sampler import Sampler
from tierd.watched import Watched

log = logging.getLogger("tierd")

FIND_AGAIN_S = 0.5
"""Targets are found no more often than that, and so in each round of a second."""
LOOK_AGAIN_S = 2.0
LOOK_COST = 100
"""Reading a target's mappings is repeated after so many times what it took."""


class Targets:
    """Those that there are, and those that cannot be watched.

    Args:
        rules: the configured ones, which may pin mappings by name.
        machine: tells of processes.
        sampler: watches them.
    """

    def __init__(
        self, rules: Sequence[TargetConfig], *, machine: Machine, sampler: Sampler
    ) -> None:
        self.rules, self.machine, self.sampler = rules, machine, sampler
        self.watched: dict[Pid, Watched] = {}
        self.unwatched: dict[Pid, str] = {}
        """Why others are not."""
        self.find_at_s = 0.0

    def reconfigure(self, rules: Sequence[TargetConfig]) -> None:
        """Goes by other rules; what is known of targets stays."""
        self.rules = rules
        self.find_soon()
        for watched in self.watched.values():
            watched.look_at_s = 0.0  # others may be pinned now

    def find_soon(self) -> None:
        """Has the next follow() look at all processes."""
        self.find_at_s = 0.0

    def follow(self, now_s: float, *, is_first: bool) -> None:
        """Takes in who has come and who has gone.

        Args:
            now_s: the instant.
            is_first: whether nothing is placed yet: better no daemon then than one that does
                nothing.

        Raises:
            TierdError: a process cannot be watched, at first.
        """
        for pid in self.sampler.gone():
            self._forget(pid)
        if now_s < self.find_at_s:
            return
        found = {target.pid: target for target in self.machine.find()}
        for pid in [pid for pid in self.watched if pid not in found]:
            self._forget(pid)
        self.unwatched = {pid: note for pid, note in self.unwatched.items() if pid in found}
        for pid, target in found.items():
            known = self.watched.get(pid)
            if known is not None and known.process.start_ticks != target.start_ticks:
                self._forget(pid)
            if pid in self.watched:
                self.watched[pid].process = target  # it may be in another cgroup by now
            else:
                self._watch(target, is_first=is_first)
        self.find_at_s = now_s + FIND_AGAIN_S

    def look_at_mappings(self, watched: Watched, now_s: float) -> None:
        """Reads what a target has mapped, and which of it is pinned, where that is due."""
        if now_s < watched.look_at_s:
            return
        begin_s = self.machine.monotonic()
        watched.mapped = self.machine.mapped(watched.process.pid)
        took_s = self.machine.monotonic() - begin_s
        watched.look_at_s = now_s + max(LOOK_AGAIN_S, LOOK_COST * took_s)
        self._look_at_pins(watched)

    def get(self, pid: Pid) -> Watched:
        """Returns what is known of a target.

        Raises:
            NotFound: it is none.
        """
        watched = self.watched.get(pid)
        if watched is None:
            raise NotFound(
                f"process {pid} is no target",
                hint="tierctl targets lists them; [[target]] in the configuration chooses them",
            )
        return watched

    def pin(self, pid: Pid, pin: Pin | None, part: range | None = None) -> None:
        """Keeps a target's memory in the fastest tier, or where it is, or no more (None).

        Args:
            pid: the target's.
            pin: of the target, ranges that are pinned by themselves hold before it; None unpins
                these too.
            part: addresses of a range alone.

        Raises:
            NotFound: it is no target, or nothing of the range is pinned.
            TierdError: the range cannot be pinned; see decide.pins.add().
        """
        watched = self.get(pid)
        if part is None:
            watched.pin = pin
            watched.pins = NO_PINS if pin is None else watched.pins
        elif pin is None:
            watched.pins = remove(watched.pins, part)
        else:
            mapped = self.machine.mapped(pid)
            if mapped is None:
                raise NotFound(f"process {pid} has ended")
            watched.pins = add(watched.pins, part, pin, mapped)

    def pins(self, pid: Pid) -> list[dict[str, Any]]:
        """Lists the ranges of a target that are pinned by themselves.

        Raises:
            NotFound: it is no target.
        """
        watched, pins = self.get(pid), list(Pin)
        return [
            {"start": start, "end": end, "pin": str(pins[code - 1]), "by": by}
            for by, ranges in (("operator", watched.pins), ("configuration", watched.named))
            for start, end, code in ranges.tolist()
        ]

    def _look_at_pins(self, watched: Watched) -> None:
        """Has pins end where their memory is unmapped, and those by name follow their mappings."""
        if watched.mapped is not None:
            watched.pins = within(watched.pins, watched.mapped)
        wanted = pins_by_name(watched.process, self.rules)
        found = self.machine.named(watched.process.pid, [*wanted]) if wanted else []
        watched.named = by_name(found, wanted)

    def _watch(self, target: Process, *, is_first: bool) -> None:
        try:
            self.sampler.watch(target.pid)
        except ProcessLookupError:
            return
        except TierdError as error:
            if is_first:
                raise
            self._leave_out(target, error)
            return
        self.unwatched.pop(target.pid, None)
        self.watched[target.pid] = Watched(process=target)
        log.info(
            "watching process %d (%s)",
            target.pid,
            target.command,
            extra=event("target.new", pid=target.pid, command=target.command),
        )

    def _leave_out(self, target: Process, error: TierdError) -> None:
        """Goes on without a target that cannot be watched now, and says so once."""
        note = f"process {target.pid} ({target.command}) is not watched: {error}"
        if self.unwatched.get(target.pid) != note:
            log.warning("%s; the others are", note, extra=event("target.left", pid=target.pid))
        self.unwatched[target.pid] = note

    def _forget(self, pid: Pid) -> None:
        watched = self.watched.pop(pid, None)
        if watched is not None:
            self.sampler.unwatch(pid)
            log.info(
                "process %d (%s) is no target any more",
                pid,
                watched.process.command,
                extra=event("target.gone", pid=pid, command=watched.process.command),
            )
