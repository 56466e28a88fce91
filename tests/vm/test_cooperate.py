# SPDX-License-Identifier: Apache-2.0
"""The kernel promotes single hot pages, tierd what is hot throughout."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guests.damon import footprint
from guests.guest import Guest
from guests.kernels import version
from guests.tiering import DEMOTION, Tierd, ballast, tell, tierd, until
from guests.topology import slow_node
from guests.workloads import Hotset, hotset

BALANCING = "/proc/sys/kernel/numa_balancing"
LIMIT = f"{BALANCING}_promote_rate_limit_MBps"
LOOKS = "/sys/kernel/debug/sched/numa_balancing/"
SETTINGS = (
    BALANCING,
    DEMOTION,
    LIMIT,
    f"{LOOKS}scan_period_min_ms",
    f"{LOOKS}scan_period_max_ms",
    f"{LOOKS}hot_threshold_ms",
    f"{LOOKS}scan_size_mb",
)
OFF = (b"0\n", b"false\n", b"65536\n", b"1000\n", b"60000\n", b"1000\n", b"256\n")
ON, LESS = (
    (b"2\n", b"true\n", limit, b"1000\n", b"1000\n", b"700\n", b"256\n")
    for limit in (b"128\n", b"64\n")
)
AT_REST = (b"0\n", b"true\n", b"65536\n", b"1000\n", b"60000\n", b"1000\n", b"256\n")

SPARSE = ("--mib", "128", "--hot-mib", "48", "--stride")
WINDOW = ("--mib", "256", "--hot-mib", "64")
"""By itself the kernel brought a seventh of the second window in half a minute."""
ARRIVED, WITHIN_S = 0.9, 30
SET_WITHIN_S = 60
CACHE_SINCE = (6, 17)
"""The kernel that can be asked to demote page cache."""

RULE = """
[conflicts]
numa_balancing = "cooperate"
[[target]]
command = "hotset"
[migrate]
budget_mbps = 128.0
demote_cache = {both}  # which has the kernel demote too
[policy]
latency_gap_ns = 4000.0  # an emulated CPU makes a twentieth of the accesses, and moves take longer
"""


@pytest.mark.guest(slow_node())
def test_sparse_hot_pages_are_placed_and_the_kernel_rests_while_tierd_does(guest: Guest) -> None:
    with cooperating(guest) as running:
        tell(guest, "set", "migrate.budget_mbps=64")
        becomes(guest, running, LESS)
        assert f"undone: {DEMOTION}" not in running.process.stderr
        tell(guest, "pause")
        becomes(guest, running, OFF)
        tell(guest, "resume")
        becomes(guest, running, LESS)
        with workload(guest, *SPARSE, free_mib=80) as load:
            arrive(load, window=0)


@pytest.mark.thorough
@pytest.mark.guest(slow_node())
def test_a_window_that_moves_is_followed(guest: Guest) -> None:
    with cooperating(guest) as running, workload(guest, *WINDOW, free_mib=120) as load:
        arrive(load, window=0)
        until(load, running, lambda: how_set(guest) == AT_REST)
        load.move_window()
        arrive(load, window=1)


@contextmanager
def cooperating(guest: Guest) -> Iterator[Tierd]:
    """A tierd beside the kernel's balancing, and all as it was in the end."""
    as_it_was = footprint(guest)
    assert how_set(guest) == OFF
    both = str(version(guest.facts.release) >= CACHE_SINCE).lower()
    with tierd(guest, settings=RULE.format(both=both)) as running:
        running.wait_until_up()
        assert how_set(guest) == ON
        yield running
    assert how_set(guest) == OFF
    assert footprint(guest) == as_it_was


def becomes(guest: Guest, running: Tierd, wanted: tuple[bytes, ...]) -> None:
    """Waits until the kernel is set so. Where no target is it is to promote, for minutes."""
    deadline = time.monotonic() + SET_WITHIN_S
    while (found := how_set(guest)) != wanted:
        assert time.monotonic() < deadline, f"{found}: {running.status} {running.process.stderr}"
        time.sleep(0.2)


def how_set(guest: Guest) -> tuple[bytes, ...]:
    return tuple(guest.read(path) for path in SETTINGS)


@contextmanager
def workload(guest: Guest, *options: str, free_mib: int) -> Iterator[Hotset]:
    """One whose hot memory has room in the fast node, and begins in the slow one."""
    given = ("--share", "98", "--node", f"{guest.facts.slow[0]}")
    with ballast(guest, free_mib), hotset(guest, *options, *given) as load:
        yield load


def arrive(load: Hotset, *, window: int) -> None:
    """Waits until most of the window of that number is in the fast node."""
    seen = []
    for sample in load.samples(WITHIN_S):
        seen.append((sample.t, sample.hot_share))
        if sample.window == window and sample.hot_share >= ARRIVED:
            return
    raise AssertionError(f"{seen}")
