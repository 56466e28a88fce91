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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tierd.config import DiscoverConfig, TargetConfig
from tierd.errors import ConfigError
from tierd.kernel import process
from tierd.kernel.process import Process
from tierd.model import Pid

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CONTAINER = re.compile(r"(?:[a-z][a-z-]*-)?([0-9a-f]{64})(?:\.scope)?")


class Finder:
    """Finds the targets now.

    Those named by pid are the processes that had it when it was named. Others are targets from the
    configured size and age on, until they end.

    Args:
        rules: the configuration's.
        limits: from when on a process is worth watching.
        root: where /proc is.
        own: tierd's own pid; this process where it is None.
        clock_s: seconds since boot, as processes' starts are told.
    """

    def __init__(
        self,
        rules: Sequence[TargetConfig],
        limits: DiscoverConfig,
        *,
        root: Path = Path("/"),
        own: Pid | None = None,
        clock_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._root, self._own, self._clock_s = root, own, clock_s
        self._rules: list[TargetConfig] = []
        self._given: dict[Pid, Process] = {}
        self._admitted: set[tuple[Pid, int]] = set()
        self.follow(rules, limits)

    def follow(self, rules: Sequence[TargetConfig], limits: DiscoverConfig) -> None:
        """Goes by other rules from now on."""
        pids = {rule.pid for rule in rules if rule.pid is not None}
        added = [rule for rule in rules if rule.pid is not None and rule.pid not in self._given]
        found = {process.pid: process for process in find_targets(added, self._root, self._own)}
        self._given = {pid: p for pid, p in (self._given | found).items() if pid in pids}
        self._rules = [rule for rule in rules if rule.pid is None]
        self._limits = limits

    def __call__(self) -> list[Process]:
        """Returns the targets in ascending order of pid."""
        given = {pid: p for pid, p in self._given.items() if process.is_alive(p, self._root)}
        found = [p for p in find_targets(self._rules, self._root, self._own) if self._admits(p)]
        self._admitted = {(p.pid, p.start_ticks) for p in found}
        return [p for _, p in sorted(({p.pid: p for p in found} | given).items())]

    def _admits(self, found: Process) -> bool:
        if (found.pid, found.start_ticks) in self._admitted:
            return True
        age_s = self._clock_s() - found.start_ticks / TICKS_PER_S
        large = found.resident_bytes >= self._limits.min_mib * (1 << 20)
        return large and age_s >= self._limits.min_age_s


def find_targets(
    rules: Sequence[TargetConfig], root: Path = Path("/"), own: Pid | None = None
) -> tuple[Process, ...]:
    """Finds the processes that a rule names, in ascending order of pid.

    What is not there, a kernel thread or tierd itself is left out. Rules other than of a pid look
    at every process, at 10 µs for each file of it that they need.

    Args:
        rules: the configuration's.
        root: where /proc is.
        own: tierd's own pid; this process where it is None.
    """
    own = Pid(os.getpid()) if own is None else own
    processes = (process.read_process(pid, root) for pid in _candidates(rules, root) if pid != own)
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


def _candidates(rules: Sequence[TargetConfig], root: Path) -> list[Pid]:
    named = {rule.pid for rule in rules if rule.pid is not None}
    by_marks = [_Marks.of(rule) for rule in rules if rule.pid is None]
    searched = process.read_pids(root) if by_marks else ()
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

    def match(self, look: _Look) -> bool:
        rule = self.rule
        return (
            (rule.command is None or look.command == rule.command)
            and (rule.cgroup is None or _is_below(look.cgroup, rule.cgroup))
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


def _is_below(cgroup: str | None, above: str) -> bool:
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
