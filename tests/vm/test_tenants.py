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
ARRIVE_S, THRASHING_S, EACH_S = 150, 40, 10
FOLLOWS_WITHIN_S = 160
"""It thrashes on until it had most of a window, on a slow host not one of the first four."""

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
latency_gap_ns = 400.0  # moves take an emulated CPU twenty times as long
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
            held, followed = list[float](), list[float]()
            for thrashed_s in range(0, FOLLOWS_WITHIN_S, EACH_S):
                if thrashed_s >= THRASHING_S and max(followed) > 0.5:
                    break
                batch.move_window()
                held += [sample.hot_share for sample in db.samples(EACH_S)]
                followed += [sample.hot_share for sample in batch.samples(EACH_S)]
            assert min(held) >= 0.98, (held, running.status)
            assert max(followed) > 0.5, "the neighbour did ask for the memory"


@contextmanager
def tenant(guest: Guest, cgroup: str, buffer_mib: int, hot_mib: int) -> Iterator[Hotset]:
    """Runs hotset in a cgroup, its memory on the slow node."""
    options = ("--mib", f"{buffer_mib}", "--hot-mib", f"{hot_mib}", "--share", "98")
    with hotset(guest, *options, "--node", "1") as load:
        guest.run(["mkdir", "-p", f"/sys/fs/cgroup{cgroup}"])
        guest.write(f"/sys/fs/cgroup{cgroup}/cgroup.procs", str(load.pid).encode())
        load.sample()
        yield load
