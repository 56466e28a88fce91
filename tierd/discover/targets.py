# SPDX-License-Identifier: Apache-2.0
"""Whose memory is to be placed: the processes that the [[target]] rules name.

Kernel threads have no memory of their own, and tierd never places itself.

Units and containers are known by the cgroups that systemd and the runtimes make for them::

    /system.slice/redis-server.service
    /user.slice/user-1000.slice/user@1000.service/app.slice/run-42.scope
    /system.slice/docker-3f4a...(64 digits).scope        also libpod-, cri-containerd-, crio-
    /docker/3f4a...                                      docker with its cgroupfs driver
    /kubepods.slice/kubepods-burstable.slice/.../cri-containerd-3f4a....scope
"""

import os
import pwd
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.config import DiscoverConfig, TargetConfig
from tierd.errors import ConfigError
from tierd.kernel import process
from tierd.kernel.proc_events import ENDED
from tierd.kernel.process import Process
from tierd.model import Pid, Pin

SCAN_COST = 100
"""All processes are looked at again after so many times what it took."""

SCAN_REST_S = 60.0
"""And not before, where events tell of most changes."""

WAIT_S = 5.0
"""After so long a process that was too small is looked at again."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CONTAINER = re.compile(r"(?:[a-z][a-z-]*-)?([0-9a-f]{64})(?:\.scope)?")


class Events(Protocol):
    """Tells of processes that began, changed or ended (tierd.kernel.proc_events)."""

    def read(self) -> tuple[NDArray[np.void], bool]: ...


class Finder:
    """Finds the targets now.

    Those named by pid are the processes that had it when it was named. Others are targets from the
    configured size and age on, until they end or no rule names them any more.

    With events only processes that have changed are looked at, once they may be old enough: one
    that has ended by then costs its two events. All are looked at from time to time, since nothing
    tells that a process was put into another cgroup.

    Args:
        rules: the configuration's.
        limits: from when on a process is worth watching.
        listen: called when rules first need events; gives None where there are none, and all
            processes are looked at, as often as SCAN_COST allows.
        root: where /proc is.
        own: tierd's own pid; this process where it is None.
        clock_s: seconds since boot, as processes' starts are told.
    """

    def __init__(
        self,
        rules: Sequence[TargetConfig],
        limits: DiscoverConfig,
        listen: Callable[[], Events | None] = lambda: None,
        *,
        root: Path = Path("/"),
        own: Pid | None = None,
        clock_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._listen, self._root, self._own, self._clock_s = listen, root, own, clock_s
        self._events: Events | None = None
        self._rules: list[TargetConfig] = []
        self._given: dict[Pid, Process] = {}
        self._admitted: dict[Pid, Process] = {}
        self._look_at_s: dict[Pid, float] = {}
        self.follow(rules, limits)

    def follow(self, rules: Sequence[TargetConfig], limits: DiscoverConfig) -> None:
        """Goes by other rules from now on."""
        pids = {rule.pid for rule in rules if rule.pid is not None}
        added = [rule for rule in rules if rule.pid is not None and rule.pid not in self._given]
        found = {process.pid: process for process in find_targets(added, self._root, self._own)}
        self._given = {pid: p for pid, p in (self._given | found).items() if pid in pids}
        self._rules = [rule for rule in rules if rule.pid is None]
        self._limits = limits
        if self._rules and self._events is None:
            self._events = self._listen()
        self._scan_at_s = self._rested_at_s = float("-inf")

    def __call__(self) -> list[Process]:
        """Returns the targets in ascending order of pid."""
        now_s = self._clock_s()
        if self._take_events(now_s):
            self._scan_at_s = min(self._scan_at_s, self._rested_at_s)
        if now_s >= self._scan_at_s:
            self._scan(now_s)
        else:
            self._look(now_s)
        targets = self._admitted | self._given
        return [p for _, p in sorted(targets.items()) if process.is_alive(p, self._root)]

    def _take_events(self, now_s: float) -> bool:
        """Notes whom to look at, and when; returns whether events were lost."""
        if self._events is None:
            return False
        events, any_lost = self._events.read()
        pids, from_last = np.unique(events["pid"][::-1], return_index=True)
        ended = events["kind"][::-1][from_last] == ENDED
        for pid in map(Pid, pids[ended].tolist()):
            self._look_at_s.pop(pid, None)
            self._admitted.pop(pid, None)
        due_s = now_s + self._limits.min_age_s / 2  # an event may be a round old by now
        self._look_at_s.update(dict.fromkeys(map(Pid, pids[~ended].tolist()), due_s))
        return any_lost

    def _scan(self, now_s: float) -> None:
        """Looks at all processes."""
        self._look_at_s.clear()
        before = self._admitted
        self._admitted = {}
        self._judge(find_targets(self._rules, self._root, self._own), before, now_s)
        self._rested_at_s = now_s + SCAN_COST * (self._clock_s() - now_s)
        rest_s = 0.0 if self._events is None else SCAN_REST_S
        self._scan_at_s = max(now_s + rest_s, self._rested_at_s)

    def _look(self, now_s: float) -> None:
        """Looks at those whose time has come."""
        due = [pid for pid, at_s in self._look_at_s.items() if at_s <= now_s]
        if not due:
            return
        before = {pid: self._admitted.pop(pid) for pid in due if pid in self._admitted}
        for pid in due:
            del self._look_at_s[pid]
        self._judge(find_targets(self._rules, self._root, self._own, among=due), before, now_s)

    def _judge(self, found: Iterable[Process], before: Mapping[Pid, Process], now_s: float) -> None:
        """Admits what was a target before or is worth it now, and has the others wait."""
        for candidate in found:
            known = before.get(candidate.pid)
            age_s = now_s - candidate.start_ticks / TICKS_PER_S
            is_large = candidate.resident_bytes >= self._limits.min_mib * (1 << 20)
            if known is not None and known.start_ticks == candidate.start_ticks:
                self._admitted[candidate.pid] = known
            elif is_large and age_s >= self._limits.min_age_s:
                self._admitted[candidate.pid] = candidate
            else:
                rest_s = self._limits.min_age_s - age_s if is_large else WAIT_S
                self._look_at_s[candidate.pid] = now_s + rest_s


def find_targets(
    rules: Sequence[TargetConfig],
    root: Path = Path("/"),
    own: Pid | None = None,
    among: Sequence[Pid] | None = None,
) -> tuple[Process, ...]:
    """Finds the processes that a rule names, in ascending order of pid.

    What is not there, a kernel thread or tierd itself is left out. Rules other than of a pid look
    at every process, or those given, at 10 µs for each file of it that they need.

    Args:
        rules: the configuration's.
        root: where /proc is.
        own: tierd's own pid; this process where it is None.
        among: the processes to look at, None for all.
    """
    own = Pid(os.getpid()) if own is None else own
    matching = (pid for pid in _candidates(rules, root, among) if pid != own)
    processes = (process.read_process(pid, root) for pid in matching)
    return tuple(found for found in processes if found is not None and _is_placeable(found))


def check_targets(
    rules: Iterable[TargetConfig], root: Path = Path("/"), own: Pid | None = None
) -> None:
    """Refuses rules that name what cannot be placed. To be called once, when they are new.

    Raises:
        ConfigError: every pid of them that does not exist, is a kernel thread, a thread or tierd,
            and every user that does not exist.
    """
    own = Pid(os.getpid()) if own is None else own
    reasons = ((rule, _refusal(rule, root, own)) for rule in rules)
    problems = [rule.place.problem(reason) for rule, reason in reasons if reason is not None]
    if problems:
        raise ConfigError(problems)


def pins_by_name(found: Process, rules: Sequence[TargetConfig]) -> dict[str, Pin]:
    """Returns how mappings of a target are pinned, by their names; of two rules the later holds."""
    pins: dict[str, Pin] = {}
    for rule in rules:
        if rule.pin and (
            _Marks.of(rule).match(found) if rule.pid is None else rule.pid == found.pid
        ):
            pins |= rule.pin
    return pins


class _Marked(Protocol):
    """What rules ask of a process."""

    @property
    def command(self) -> str | None: ...
    @property
    def cgroup(self) -> str | None: ...
    @property
    def user_id(self) -> int | None: ...


@dataclass(frozen=True)
class _Look:
    """What rules ask of a process, read when it is asked for."""

    pid: Pid
    root: Path

    @cached_property
    def command(self) -> str | None:
        return process.read_command(self.pid, self.root)

    @cached_property
    def cgroup(self) -> str | None:
        return process.read_cgroup(self.pid, self.root)

    @cached_property
    def user_id(self) -> int | None:
        return process.read_user_id(self.pid, self.root)


def _candidates(
    rules: Sequence[TargetConfig], root: Path, among: Sequence[Pid] | None
) -> list[Pid]:
    named = {rule.pid for rule in rules if rule.pid is not None}
    by_marks = [_Marks.of(rule) for rule in rules if rule.pid is None]
    searched = (process.read_pids(root) if among is None else among) if by_marks else ()
    looks = (_Look(pid, root) for pid in searched)
    matching = {look.pid for look in looks if any(marks.match(look) for marks in by_marks)}
    return sorted(named | matching)


@dataclass(frozen=True, slots=True)
class _Marks:
    """A rule other than of a pid, its user looked up."""

    rule: TargetConfig
    user_id: int | None

    @classmethod
    def of(cls, rule: TargetConfig) -> "_Marks":
        return cls(rule, None if rule.user is None else _user_id(rule.user))

    def match(self, look: _Marked) -> bool:
        rule = self.rule
        return (
            (rule.command is None or look.command == rule.command)
            and (rule.cgroup is None or is_below(look.cgroup, rule.cgroup))
            and (rule.unit is None or rule.unit in (look.cgroup or "").split("/"))
            and (rule.container is None or _is_inside(look.cgroup, rule.container))
            and (rule.user is None or (self.user_id is not None and look.user_id == self.user_id))
        )


def _user_id(user: str) -> int | None:
    """Returns the id of a user by name or number; None where there is no such name."""
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def is_below(cgroup: str | None, above: str) -> bool:
    """Tells whether a cgroup is another one, or below it."""
    return cgroup is not None and f"{cgroup}/".startswith(f"{above.rstrip('/')}/")


def _is_inside(cgroup: str | None, container: str) -> bool:
    parts = (_CONTAINER.fullmatch(part) for part in (cgroup or "").split("/"))
    return any(match is not None and match[1].startswith(container) for match in parts)


def _is_placeable(found: Process) -> bool:
    return not found.is_kernel_thread and found.leader == found.pid


def _refusal(rule: TargetConfig, root: Path, own: Pid) -> str | None:
    if rule.user is not None and _user_id(rule.user) is None:
        return f"there is no user {rule.user}"
    return None if rule.pid is None else _refusal_of_pid(rule.pid, root, own)


def _refusal_of_pid(pid: Pid, root: Path, own: Pid) -> str | None:
    if pid == own:
        return f"process {pid} is tierd itself"
    found = process.read_process(pid, root)
    if found is None:
        return f"there is no process {pid}"
    if found.is_kernel_thread:
        return f"process {pid} is a kernel thread ({found.command}): it has no memory of its own"
    if found.leader != pid:
        return f"{pid} is a thread of process {found.leader} ({found.command}): name that one"
    return None
