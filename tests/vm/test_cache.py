# SPDX-License-Identifier: Apache-2.0
"""Page cache that nobody uses makes way for a hot set that has too little room without it."""

import pytest
from guests.guest import Guest
from guests.kernels import Kernel
from guests.tiering import (
    DEMOTION,
    WITHIN_S,
    Tierd,
    ballast,
    counter,
    node_kib,
    start_tierd,
    tell,
    tierd,
    until,
)
from guests.topology import slow_node
from guests.workloads import hotset

LEAST = "/proc/sys/vm/min_unmapped_ratio"
CACHE_MIB, HOT_MIB, FREE_MIB = 96, 64, 64
"""Of FREE_MIB some 19 are headroom, so that as much is lacking."""
LEAST_PAGES = 10 * 256
NOT_YET_PAGES = 256
"""What CPUs have counted and a node's vmstat does not tell yet: 125 each at most."""
ARRIVED, KEPT = 0.95, 0.95
READ = f"cat /usr/lib/x86_64-linux-gnu/*.so* | head --bytes={CACHE_MIB}M > /dev/null"
DROP = "sync; echo 3 > /proc/sys/vm/drop_caches"

RULE = """
[[target]]
command = "hotset"
[migrate]
demote_cache = true
[policy]
latency_gap_ns = 400.0  # an emulated CPU makes a twentieth of the accesses, and moves take longer
long_s = 20.0
"""


@pytest.mark.guest(slow_node(), only=Kernel.LATEST)
def test_page_cache_makes_way_and_is_not_dropped(guest: Guest) -> None:
    options = ("--mib", "128", "--hot-mib", f"{HOT_MIB}", "--share", "98", "--node", "1")
    assert guest.read(DEMOTION) == b"false\n"
    with tierd(guest, settings=RULE) as running:
        running.wait_until_up()
        guest.run(["sh", "-c", f"{DROP}; {READ}"])
        cached, before = cache_mib(guest), counter(guest, "pgdemote_proactive")
        assert cached[0] >= CACHE_MIB
        with ballast(guest, FREE_MIB), hotset(guest, *options) as load:
            until(load, running, lambda: load.sample().hot_share >= ARRIVED)
            assert guest.read(DEMOTION) == b"true\n"
            assert guest.read(LEAST) == b"0\n"
            assert sum(cache_mib(guest)) >= KEPT * sum(cached)
            tell(guest, "pause")
            until(load, running, lambda: guest.read(DEMOTION) == b"false\n")
            made_way = counter(guest, "pgdemote_proactive") - before
            assert made_way >= LEAST_PAGES
            until(load, running, lambda: abs(told_pages(running) - made_way) <= NOT_YET_PAGES)
    assert guest.read(DEMOTION) == b"false\n"
    assert guest.read(LEAST) == b"1\n"


@pytest.mark.guest(slow_node(), only=Kernel.LTS)
def test_a_kernel_that_cannot_is_refused(guest: Guest) -> None:
    done = start_tierd(guest, settings=RULE).wait(WITHIN_S)
    assert done.rc == 1
    assert "that takes Linux 6.17" in done.stderr
    assert guest.read(DEMOTION) == b"false\n"


def told_pages(running: Tierd) -> int:
    """The page cache that made way, as tierd tells; it does so at the end of a round."""
    status = running.status
    assert status is not None
    pages: int = status["cache_pages"]
    return pages


def cache_mib(guest: Guest) -> list[int]:
    """The page cache of each node."""
    return [node_kib(guest, node, "FilePages") >> 10 for node in (0, 1)]
