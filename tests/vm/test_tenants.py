# SPDX-License-Identifier: Apache-2.0
"""A tenant with a guarantee beside one whose hot window moves all the time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guests.guest import Guest
from guests.tiering import ballast, tierd
from guests.topology import slow_node
from guests.workloads import Hotset, hotset

DB, BATCH = "/tenants/db", "/tenants/batch"
DB_MIB, WINDOW_MIB, FREE_MIB, GUARANTEED_MIB = 24, 64, 96, 32
ARRIVE_S, WINDOWS, EACH_S, EACH_MOST_S = 150, 4, 10, 40
"""The neighbour's window moves each ten seconds, later on a slow host: once it has MOST of one."""
MOST = 0.5

SETTINGS = f"""
[[target]]
cgroup = "/tenants"
[[tenant]]
cgroup = "{DB}"
guaranteed_mib = {{ dram = {GUARANTEED_MIB} }}
[[tenant]]
cgroup = "{BATCH}"
weight = 10_000
[policy]
latency_gap_ns = 4000.0  # an emulated CPU makes a twentieth of the accesses, and moves take longer
regret_percent = 100.0  # the guard would have a neighbour rest that thrashes
"""


@pytest.mark.guest(slow_node())
def test_a_guarantee_is_kept_while_a_neighbour_thrashes(guest: Guest) -> None:
    with tierd(guest, settings=SETTINGS) as running:
        running.wait_until_up()
        with (
            ballast(guest, FREE_MIB),
            tenant(guest, DB, 64, DB_MIB) as db,
            tenant(guest, BATCH, 256, WINDOW_MIB) as batch,
        ):
            arrived = next((s for s in db.samples(ARRIVE_S) if s.hot_share >= 0.98), None)
            assert arrived is not None, running.status
            held, followed = zip(*thrashing(db, batch), strict=True)
            assert min(held) >= 0.98, (held, running.status)
            assert max(followed) > MOST, "the neighbour did ask for the memory"


def thrashing(db: Hotset, batch: Hotset) -> Iterator[tuple[float, float]]:
    """Yields what share of its hot window each has in a second, while the neighbour's moves."""
    for _ in range(WINDOWS):
        batch.move_window()
        both = zip(db.samples(EACH_MOST_S), batch.samples(EACH_MOST_S), strict=False)
        for second, (kept, moved) in enumerate(both):
            yield kept.hot_share, moved.hot_share
            if second >= EACH_S and moved.hot_share > MOST:
                break


@contextmanager
def tenant(guest: Guest, cgroup: str, buffer_mib: int, hot_mib: int) -> Iterator[Hotset]:
    """Runs hotset in a cgroup, its memory on the slow node."""
    options = ("--mib", f"{buffer_mib}", "--hot-mib", f"{hot_mib}", "--share", "98")
    with hotset(guest, *options, "--node", "1") as load:
        guest.run(["mkdir", "-p", f"/sys/fs/cgroup{cgroup}"])
        guest.write(f"/sys/fs/cgroup{cgroup}/cgroup.procs", str(load.pid).encode())
        load.sample()
        yield load
