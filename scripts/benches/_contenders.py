# SPDX-License-Identifier: Apache-2.0
"""Who places a program's pages in the shootout: nobody, the kernel, DAMON by damo, or tierd."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from guests.damon import damon_stat
from guests.guest import Guest
from guests.tiering import tierd

RULE = """
[conflicts]
numa_balancing = "ignore"
[[target]]
command = "hotset"
[policy]
latency_gap_ns = 400.0  # moves take an emulated CPU twenty times as long
"""

BALANCING = "/proc/sys/kernel/numa_balancing"
DEMOTION = "/sys/kernel/mm/numa/demotion_enabled"

# As in damo's scripts/mem_tier.sh, which has DAMON tune itself.
DAMO = """
--numa_node 0 --monitoring_intervals_goal 4% 3 5ms 10s
    --damos_action migrate_cold 1 --damos_access_rate 0% 0% --damos_apply_interval 1s
    --damos_quota_interval 1s --damos_quota_space 200MB --damos_quota_goal node_mem_free_bp 0.5% 0
    --damos_filter reject young
--numa_node 1 --monitoring_intervals_goal 4% 3 5ms 10s
    --damos_action migrate_hot 0 --damos_access_rate 5% max --damos_apply_interval 1s
    --damos_quota_interval 1s --damos_quota_space 200MB --damos_quota_goal node_mem_used_bp 99.7% 0
    --damos_filter allow young
--damos_nr_quota_goals 1 1 --damos_nr_filters 1 1 --nr_targets 1 1 --nr_schemes 1 1 --nr_ctxs 1 1
"""

THREADS = re.compile(r"^\d+ \((kdamond|kswapd|kcompactd|tierd).*\) (.*)$", re.MULTILINE)
"""Of /proc/PID/stat: whose CPU time is that of placing."""
TICKS_PER_S = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to place pages; `has_all_fast` is none, but what could be had at the most."""

    name: str
    placing: Callable[[Guest], AbstractContextManager[object]]
    has_all_fast: bool = False


@contextmanager
def tunables(guest: Guest, values: Mapping[str, str]) -> Iterator[None]:
    """Sets files of the kernel's for as long as the context lasts."""
    before = {path: guest.read(path) for path in values}
    for path, value in values.items():
        guest.write(path, value.encode())
    try:
        yield
    finally:
        for path, content in before.items():
            guest.write(path, content)


@contextmanager
def by_kernel(guest: Guest) -> Iterator[None]:
    with tunables(guest, {BALANCING: "2", DEMOTION: "true"}), damon_stat(guest, "N"):
        yield


@contextmanager
def by_damo(guest: Guest) -> Iterator[None]:
    with tunables(guest, {BALANCING: "0"}), damon_stat(guest, "N"):
        guest.run(["damo", "start", *DAMO.split()], timeout=300)
        try:
            yield
        finally:
            guest.run(["damo", "stop"], timeout=300)


@contextmanager
def by_tierd(guest: Guest) -> Iterator[None]:
    with tunables(guest, {BALANCING: "0"}), tierd(guest, settings=RULE) as running:
        running.wait_until_up()
        yield


@contextmanager
def by_nobody(guest: Guest) -> Iterator[None]:
    with tunables(guest, {BALANCING: "0"}), damon_stat(guest, "N"):
        yield


CONTENDERS = (
    Contender(name="nothing", placing=by_nobody),
    Contender(name="kernel", placing=by_kernel),
    Contender(name="damo", placing=by_damo),
    Contender(name="tierd", placing=by_tierd),
    Contender(name="all fast", placing=by_nobody, has_all_fast=True),
)


def cpu_s(guest: Guest) -> float:
    """The CPU time that tierd and the kernel's threads of memory have taken since they started."""
    stats = guest.run(["sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null || true"]).stdout
    ticks = (fields.split()[11:13] for _, fields in THREADS.findall(stats))
    return sum(int(user) + int(system) for user, system in ticks) / TICKS_PER_S
