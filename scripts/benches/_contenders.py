# SPDX-License-Identifier: Apache-2.0
"""Who places a program's pages in the shootout: nobody, the kernel, DAMON by damo, or tierd.

Tierd by itself, beside the kernel's balancing, and with its policy in DAMON's hands, its own memory
on the slow node: of what room there is for a load it would take a tenth as it goes on, and of a
server's nothing. For all of them the kernel may demote, where the fast node lacks memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from guests.damon import KDAMONDS, damon_stat
from guests.guest import Guest
from guests.tiering import tierd, tunables

from benches._loads import PLACED

RULE = """
zoom = {zoom}  # in [damon], which stands before this
[conflicts]
numa_balancing = "{balancing}"
[migrate]
engine = "{engine}"
demote_cache = {makes_way}
[policy]
latency_gap_ns = 4000.0
headroom_percent = 0.5
{policy}
""" + "".join(f'[[target]]\ncgroup = "/{group}"\n' for group in PLACED)
"""An emulated CPU makes a twentieth of the accesses, and moves take three times as long. With such
a gap 0.16 accesses of a page in a second pay its move back, where by default it takes 2.7. As much
is kept free as by DAMO: of a node of 1 GiB the default is a quarter of what there is room for.
Room that is left the kernel fills, where it is there for that; tierd by itself is asked to."""

BALANCING = "/proc/sys/kernel/numa_balancing"

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

PROMOTED = f"{KDAMONDS}/1"
"""The second kdamond of DAMO, whose quota is told when it was asked for."""
TUNED_BYTES, TUNE_S = 200_000_000, 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to place pages; `has_all_fast` is none, but what could be had at the most."""

    name: str
    placing: Callable[[Guest], AbstractContextManager[object]]
    is_ours: bool = False
    has_all_fast: bool = False


@contextmanager
def by_nobody(guest: Guest) -> Iterator[None]:
    with tunables(guest, {BALANCING: "0"}), damon_stat(guest, "N"):
        yield


@contextmanager
def by_kernel(guest: Guest) -> Iterator[None]:
    with tunables(guest, {BALANCING: "2"}), damon_stat(guest, "N"):
        yield


@contextmanager
def by_damo(guest: Guest) -> Iterator[None]:
    with by_nobody(guest):
        guest.run(["damo", "start", *DAMO.split()], timeout=300)
        try:
            wait_until_tuned(guest)
            yield
        finally:
            guest.run(["damo", "stop"], timeout=300)
            # damo leaves its slots, of which tierd would not know whether they are free.
            guest.write(f"{KDAMONDS}/nr_kdamonds", b"0")


def wait_until_tuned(guest: Guest) -> None:
    """Waits until DAMON lets as much be moved as its user allows.

    A quota begins at one byte and grows each second by the share that its goal is off
    (mm/damon/core.c: damon_feed_loop_next_input), so that in a node nine tenths full DAMON moves
    nothing for two minutes. On a server that has been up for long, it isn't to be held against it.
    """
    deadline_s = guest.uptime_s() + TUNE_S
    quota = f"{PROMOTED}/contexts/0/schemes/0/quotas/effective_bytes"
    while int(guest.read(quota)) < TUNED_BYTES:
        assert guest.uptime_s() < deadline_s, guest.read(quota)
        time.sleep(1)
        guest.write(f"{PROMOTED}/state", b"update_schemes_effective_quotas")


def by_tierd(
    *,
    zoom: bool = False,
    balancing: str = "ignore",
    engine: str = "move_pages",
    policy: str = "",
) -> Callable[[Guest], AbstractContextManager[object]]:
    """A tierd that looks at single pages, beside the kernel's balancing, or with DAMON's moves.

    `policy` is what else its [policy] has.
    """
    rule = RULE.format(
        zoom=str(zoom).lower(),
        balancing=balancing,
        engine=engine,
        policy=policy,
        makes_way=str(engine == "move_pages").lower(),
    )

    @contextmanager
    def placing(guest: Guest) -> Iterator[None]:
        (slow,) = guest.facts.slow
        with tunables(guest, {BALANCING: "0"}), tierd(guest, settings=rule, node=slow) as running:
            running.wait_until_up()
            yield

    return placing


CONTENDERS = (
    Contender(name="all fast", placing=by_nobody, has_all_fast=True),
    Contender(name="kernel", placing=by_kernel),
    Contender(name="damo", placing=by_damo),
    Contender(name="nothing", placing=by_nobody),
    Contender(
        name="tierd", placing=by_tierd(zoom=True, policy="room_horizon_s = 600.0"), is_ours=True
    ),
    Contender(name="tierd+kernel", placing=by_tierd(balancing="cooperate"), is_ours=True),
    Contender(name="tierd+damos", placing=by_tierd(engine="damos"), is_ours=True),
)
