# SPDX-License-Identifier: Apache-2.0
"""Whose memory is to be placed: the processes that the [[target]] rules name.

Kernel threads have no memory of their own, and tierd never places itself.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tierd.config import TargetConfig
from tierd.errors import ConfigError
from tierd.kernel import process
from tierd.kernel.process import Process
from tierd.model import Pid


def find_targets(
    rules: Sequence[TargetConfig], root: Path = Path("/"), own: Pid | None = None
) -> tuple[Process, ...]:
    """Finds the processes that a rule names, in ascending order of pid.

    What is not there, a kernel thread or tierd itself is left out. Rules with a command or a cgroup
    look at every process: 15 µs each.

    Args:
        rules: the configuration's.
        root: where /proc is.
        own: tierd's own pid; this process where it is None.
    """
    own = Pid(os.getpid()) if own is None else own
    matching = (pid for pid in _candidates(rules, root) if pid != own)
    processes = (process.read_process(pid, root) for pid in matching)
    return tuple(found for found in processes if found is not None and _is_placeable(found))


def check_targets(
    rules: Iterable[TargetConfig], root: Path = Path("/"), own: Pid | None = None
) -> None:
    """Refuses rules that name a pid whose memory cannot be placed. To be called once, at the start.

    Raises:
        ConfigError: every pid of them that does not exist, is a kernel thread, a thread or tierd.
    """
    own = Pid(os.getpid()) if own is None else own
    reasons = ((rule, _refusal(rule.pid, root, own)) for rule in rules if rule.pid is not None)
    problems = [rule.place.problem(reason) for rule, reason in reasons if reason is not None]
    if problems:
        raise ConfigError(problems)


def _candidates(rules: Sequence[TargetConfig], root: Path) -> list[Pid]:
    named = {rule.pid for rule in rules if rule.pid is not None}
    commands = frozenset(rule.command for rule in rules if rule.command is not None)
    cgroups = tuple(rule.cgroup for rule in rules if rule.cgroup is not None)
    return sorted(named | set(_searched(commands, cgroups, root)))


def _searched(commands: frozenset[str], cgroups: tuple[str, ...], root: Path) -> Iterator[Pid]:
    for pid in process.read_pids(root) if commands or cgroups else ():
        by_command = bool(commands) and process.read_command(pid, root) in commands
        if by_command or (cgroups and _is_below(process.read_cgroup(pid, root), cgroups)):
            yield pid


def _is_below(cgroup: str | None, above: Iterable[str]) -> bool:
    if cgroup is None:
        return False
    return any(f"{cgroup}/".startswith(f"{path.rstrip('/')}/") for path in above)


def _is_placeable(found: Process) -> bool:
    return not found.is_kernel_thread and found.leader == found.pid


def _refusal(pid: Pid, root: Path, own: Pid) -> str | None:
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
