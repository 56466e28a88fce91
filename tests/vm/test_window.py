# SPDX-License-Identifier: Apache-2.0
"""A hot window that moves, in a fast node too small for two of it."""

from collections.abc import Callable
from statistics import fmean

import pytest
from guests.guest import Guest
from guests.tiering import (
    DAMON_STAT,
    PAGE_KIB,
    Tierd,
    at_rest,
    ballast,
    counter,
    room_kib,
    tierd,
)
from guests.topology import slow_node
from guests.workloads import Hotset, Sample, hotset

WINDOW_MIB, BUFFER_MIB, FREE_MIB = 64, 256, 120
WINDOW_PAGES = WINDOW_MIB * 256
MOVES = 2
CONVERGED, START_S, CONVERGE_S, SETTLE_S, REST_S = 0.95, 150, 15, 20, 30

SHARE = 98
"""Percent of the accesses that go to the window."""

RULE = """
[[target]]
command = "hotset"
[policy]
latency_gap_ns = {gap_ns:.0f}
"""


def until(workload: Hotset, holds: Callable[[Sample], bool], seconds: float) -> Sample | None:
    """The first sample for which it holds, None if none does in so many seconds."""
    return next((sample for sample in workload.samples(seconds) if holds(sample)), None)


@pytest.mark.guest(slow_node())
def test_a_moving_window_is_followed(guest: Guest) -> None:
    guest.write("/proc/sys/vm/compaction_proactiveness", b"0")  # it migrates pages too
    kills, damon_stat = counter(guest, "oom_kill"), tunable(guest, DAMON_STAT)
    options = ("--mib", f"{BUFFER_MIB}", "--hot-mib", f"{WINDOW_MIB}", "--share", f"{SHARE}")
    with (
        hotset(guest, *options, "--node", "1") as load,
        tierd(guest, settings=RULE.format(gap_ns=access_ns(load))) as running,
    ):
        arrive(load, START_S, running, window=0)
        with ballast(guest, FREE_MIB - WINDOW_MIB):
            before = at_rest(load, running)
            capacity_pages = room_kib(guest, 0) // PAGE_KIB + WINDOW_PAGES
            for turn in range(1, 1 + MOVES):
                load.move_window()
                arrive(load, CONVERGE_S, running, window=turn)
            list(load.samples(SETTLE_S))
            settled = counter(guest, "pgmigrate_success")
            demoted = max(0, (1 + MOVES) * WINDOW_PAGES - capacity_pages)
            least = MOVES * WINDOW_PAGES + demoted
            assert settled - before[0] <= 1.5 * least, running.status
            assert min(s.hot_share for s in load.samples(REST_S)) >= CONVERGED
            rested = counter(guest, "pgmigrate_success")
            assert rested - settled < 0.01 * WINDOW_PAGES, running.process.stderr
            told = sum(running.moved.values()) - before[1]
            assert abs(told - (rested - before[0])) <= 0.01 * told
    assert counter(guest, "oom_kill") == kills
    assert tunable(guest, DAMON_STAT) == damon_stat


def access_ns(load: Hotset) -> float:
    """What an access takes the program here.

    It is taken for the gap too, as if the slow node took twice as long. An emulated CPU accesses
    memory some twenty times less often than a real one, on a slow host sixty times, and takes so
    much longer to move a page: by the gap of a real machine that would hardly be paid back.
    """
    return 1e9 / fmean(sample.ops_per_s for sample in load.samples(5))


def arrive(load: Hotset, seconds: float, running: Tierd, *, window: int) -> None:
    """Waits until the window of that number is in the fast node."""
    arrived = until(load, lambda s: s.window == window and s.hot_share >= CONVERGED, seconds)
    assert arrived, f"{load.sample()} {running.status} {running.process.stderr}"


def tunable(guest: Guest, path: str) -> bytes | None:
    """A tunable's value, None on a kernel without it."""
    try:
        return guest.read(path)
    except FileNotFoundError:
        return None
