# SPDX-License-Identifier: Apache-2.0
"""Arenas whose bandwidth the daemon divides: what it sees and sends, and what programs get."""

import itertools
import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.clock import Clock
from tests.unit.conftest import CXL_ERRORS
from tests.unit.drawer import Drawer
from tests.unit.machine import FakeSampler, Machine, half_hot
from tests.unit.test_arenas import BLOCK_BYTES, FakeLease, tenant
from tests.unit.test_leases import until
from tierd.arena import Arena
from tierd.arena.bandwidth import BURST_S, MIB
from tierd.arena.wire import LIMIT, unpack_limit
from tierd.arenas import Arenas
from tierd.cli.status import as_text
from tierd.config import Config, Mode, TenantConfig
from tierd.config.values import ArenaConfig
from tierd.daemon import Daemon
from tierd.decide.blocks import NOWHERE, copied
from tierd.leases import Leases
from tierd.model import TierKind
from tierd.observe import metrics
from tierd.tiers import Tier
from tierd.tiers.memory import dram

PER_MIB = MIB // BLOCK_BYTES
BLOCKS = 8192
NEAR, FAR = 0, 1


def test_what_is_copied_is_what_has_changed_its_tier() -> None:
    before = np.array([0, 0, 1, 1, 2, 2, NOWHERE, NOWHERE, 1], np.uint8)
    after = np.array([0, 1, 1, 0, 1, NOWHERE, 2, NOWHERE, NOWHERE], np.uint8)
    assert copied(before, after, 3).tolist() == [2, 3, 2]


def sharing(total_mbps: float | None, *tenants: TenantConfig) -> Config:
    totals = {} if total_mbps is None else {TierKind.SWAP: total_mbps}
    return replace(Config(), arena=ArenaConfig(far_mbps=totals), tenants=tenants)


def a_daemon(machine: Machine, config: Config, *leases: FakeLease) -> Daemon:
    daemon = machine.daemon(FakeSampler(half_hot(20), machine), config)
    daemon.arenas = Arenas(lambda: leases)
    return daemon


def a_lease(cgroup: str) -> FakeLease:
    """All blocks are near, of a tier with room for no more."""
    lease = FakeLease(BLOCKS, BLOCKS, cgroup)
    lease.shared.places[:] = NEAR
    return lease


def copies(lease: FakeLease, mib: int) -> None:
    """Has so much go down, or come up where it is down."""
    some = slice(None, mib * PER_MIB)
    lease.shared.places[some] = FAR - lease.shared.places[some]


def limits(lease: FakeLease) -> list[int | None]:
    """What it was told to keep to, one after the other."""
    sent = [pair for commands in lease.sent for pair in commands.tolist()]
    told = [unpack_limit(tier) for block, tier in sent if block == LIMIT]
    assert {number for number, _ in told} <= {FAR}
    return [mbps for _, mbps in told]


def test_nothing_is_limited_that_is_not_configured(machine: Machine) -> None:
    lease = a_lease("/db")
    daemon = a_daemon(machine, sharing(None, tenant("/db")), lease)
    for _ in range(4):
        copies(lease, 100)
        machine.rounds(daemon, 1)
    assert limits(lease) == []
    [told] = machine.told[-1]["arenas"]
    assert (told["far_used_mbps"], told["far_limit_mbps"]) == ({"nvme": 100.0}, {})


def test_who_wants_more_has_what_others_leave(machine: Machine) -> None:
    noisy, quiet = a_lease("/noisy"), a_lease("/quiet")
    config = sharing(100, tenant("/noisy"), tenant("/quiet"))
    daemon = a_daemon(machine, config, noisy, quiet)
    machine.rounds(daemon, 1)
    assert limits(noisy) == limits(quiet) == [50], "nobody wants any yet"
    for _ in range(3):
        copies(noisy, limits(noisy)[-1] or 0)
        machine.rounds(daemon, 1)
    assert (limits(noisy)[-1], limits(quiet)[-1]) == (97, 2)
    for _ in range(3):
        copies(noisy, limits(noisy)[-1] or 0)
        copies(quiet, limits(quiet)[-1] or 0)
        machine.rounds(daemon, 1)
    assert (limits(noisy)[-1], limits(quiet)[-1]) == (50, 50)
    for _ in range(8):
        copies(noisy, limits(noisy)[-1] or 0)
        copies(quiet, 20)
        machine.rounds(daemon, 1)
    assert (limits(noisy)[-1], limits(quiet)[-1]) == pytest.approx((76, 24), abs=2)


def test_of_weights_each_has_its_part_and_of_a_tenants_arenas_too(machine: Machine) -> None:
    leases = [a_lease("/large"), a_lease("/small"), a_lease("/small")]
    config = sharing(120, tenant("/large", weight=300), tenant("/small", weight=100))
    daemon = a_daemon(machine, config, *leases)
    for _ in range(4):
        for lease in leases:
            copies(lease, 400)
        machine.rounds(daemon, 1)
    assert [limits(lease)[-1] for lease in leases] == pytest.approx([90, 15, 15], rel=0.05)


@pytest.mark.parametrize(("total", "others"), [(100, 70), (None, None)])
def test_a_tenants_maximum_is_kept(
    machine: Machine, total: float | None, others: int | None
) -> None:
    leases = [a_lease("/db"), a_lease("/others")]
    config = sharing(total, tenant("/db", far_mbps={TierKind.SWAP: 30.0}))
    daemon = a_daemon(machine, config, *leases)
    for _ in range(4):
        for lease in leases:
            copies(lease, 200)
        machine.rounds(daemon, 1)
    assert limits(leases[0])[-1] == 30
    assert limits(leases[1])[-1:] == ([] if others is None else [others])
    db, rest = machine.told[-1]["tenants"]
    assert db["far_maximum_mbps"] == {"swap": 30.0}
    assert db["far_limit_mbps"] == {"swap": 30}
    assert (rest["far_used_mbps"], rest["far_maximum_mbps"]) == ({"swap": 200.0}, {})


def test_small_changes_are_not_sent(machine: Machine) -> None:
    noisy, quiet = a_lease("/noisy"), a_lease("/quiet")
    daemon = a_daemon(machine, sharing(1000, tenant("/noisy"), tenant("/quiet")), noisy, quiet)
    for mib in (100, 100, 100, 100, 100, 100, 102, 99, 101):
        copies(noisy, 400)  # of 512 MiB: more than half
        copies(quiet, mib)
        machine.rounds(daemon, 1)
    before = limits(noisy), limits(quiet)
    copies(noisy, 400)
    copies(quiet, 103)
    machine.rounds(daemon, 1)
    assert (limits(noisy), limits(quiet)) == before
    copies(quiet, 150)
    machine.rounds(daemon, 1)
    assert len(limits(quiet)) == len(before[1]) + 1


def test_a_limit_that_was_not_taken_is_sent_again(machine: Machine) -> None:
    lease = a_lease("/db")
    daemon = a_daemon(machine, sharing(100), lease)
    lease.takes = 0
    machine.rounds(daemon, 2)
    assert machine.told[-1]["arenas"][0]["far_limit_mbps"] == {}
    lease.takes = 1 << 30
    machine.rounds(daemon, 2)
    assert limits(lease) == [100]


@pytest.mark.parametrize("how", ["no total", "observe"])
def test_limits_end_with_what_they_come_of(machine: Machine, how: str) -> None:
    lease = a_lease("/db")
    daemon = a_daemon(machine, sharing(100), lease)
    machine.rounds(daemon, 1)
    daemon.paused = True
    machine.rounds(daemon, 1)
    assert limits(lease) == [100], "a pause ends it"
    if how == "observe":
        observing = replace(daemon.config.policy, mode=Mode.OBSERVE)
        daemon.reconfigure(replace(daemon.config, policy=observing), daemon.mover)
    else:
        daemon.reconfigure(sharing(None), daemon.mover)
    machine.rounds(daemon, 2)
    assert limits(lease) == [100, None]


def test_who_has_more_copied_than_is_seen_is_given_its_part(machine: Machine) -> None:
    """A sweep over few near blocks: each has changed its place many times."""
    sweep, noisy = a_lease("/sweep"), a_lease("/noisy")
    sweep.shared.places[32:] = FAR
    daemon = a_daemon(machine, sharing(100, tenant("/sweep"), tenant("/noisy")), sweep, noisy)
    for _ in range(8):
        sweep.shared.places[:64] = FAR - sweep.shared.places[:64]
        copies(noisy, 90)
        machine.rounds(daemon, 1)
    assert machine.told[-1]["arenas"][0]["far_used_mbps"] == {"nvme": 4.0}
    assert limits(sweep) == [50]


def test_bandwidth_is_told(machine: Machine) -> None:
    leases = [a_lease("/db"), a_lease("/db"), a_lease("/etl")]
    config = sharing(100, tenant("/db", far_mbps={TierKind.SWAP: 80.0}), tenant("/etl"))
    daemon = a_daemon(machine, config, *leases)
    machine.rounds(daemon, 1)
    copies(leases[0], 20)
    copies(leases[1], 10)
    machine.rounds(daemon, 1)
    told = {**machine.told[-1], "pid": 1, "cxl": CXL_ERRORS}
    scraped = metrics.as_text(told, {})
    for metric, tenants in (
        ("far_bytes_per_second", {"/db": 30, "/etl": 0}),
        ("far_limit_bytes_per_second", {"/db": 66, "/etl": 33}),
    ):
        for name, mbps in tenants.items():
            found = re.search(
                rf'tierd_arena_{metric}{{tenant="{name}",tier="nvme"}} (\S+)', scraped
            )
            assert found is not None
            assert float(found[1]) == pytest.approx(mbps * MIB, abs=3 * MIB), (metric, name)
    shown = as_text(told)
    assert re.search(r"^evil .* nvme 20 of \d+ ", shown, re.MULTILINE)
    assert re.search(r"^/db +swap +30 +6\d +80$", shown, re.MULTILINE)
    assert re.search(r"^/etl +swap +0 +3\d +-$", shown, re.MULTILINE)
    assert "others  swap" not in shown


# Real arenas over a real socket

LARGE_BYTES = 512 << 10


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Counting(Drawer):
    """A network to a far tier, of which it is counted what goes through it."""

    copied = 0

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        self.copied += len(slots)
        return super().store(slots, data)

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        self.copied += len(slots)
        return super().load(slots, into)


class Program:
    """Sweeps over more blocks than have room near, as fast as they come, while it `is_busy`."""

    def __init__(self, name: str, path: Path) -> None:
        self.far = Counting(64, LARGE_BYTES)
        tiers: list[Tier] = [dram(16 * LARGE_BYTES), self.far]
        self.arena = Arena(LARGE_BYTES, tiers, blocks=64, daemon=path, name=name)
        ids = np.arange(self.arena.blocks)
        self.arena.write(ids, np.ones((len(ids), LARGE_BYTES), np.uint8))
        self.is_busy, self.is_over = threading.Event(), False
        self.thread = threading.Thread(target=self.run, daemon=True, name=name)
        self.thread.start()

    def run(self) -> None:
        for block in itertools.cycle(range(self.arena.blocks)):
            self.is_busy.wait()
            if self.is_over:
                return
            self.arena.acquire([block]).release()

    @property
    def is_held_back(self) -> bool:
        return self.arena._bandwidths[FAR].is_held_back

    def has_ended(self, clock: Clock) -> bool:
        """Whether its last block has come, for which the clock has to go on."""
        clock.pass_by(1)
        self.is_over = True
        self.is_busy.set()
        return not self.thread.is_alive()


class Host:
    """A daemon and programs, and a clock for all of them that the test drives."""

    def __init__(self, leases: Leases, clock: Clock, total_mbps: float) -> None:
        self.machine, self.clock, self.leases = Machine(), clock, leases
        config = sharing(total_mbps, tenant("/noisy"), tenant("/quiet"))
        self.daemon = self.machine.daemon(FakeSampler(half_hot(20), self.machine), config)
        self.daemon.arenas = Arenas(leases.all)

    def begin(self, programs: list[Program]) -> None:
        self.programs = programs
        until(lambda: len(self.leases.all()) == len(programs))
        for lease in self.leases.all():  # they are all of this process
            lease.cgroup = partial(str, f"/{lease.name}")  # type: ignore[method-assign]

    def rounds(self, count: int) -> list[int]:
        """Goes round each second of the clock; returns what each program has copied, in blocks."""
        before = [program.far.copied for program in self.programs]
        for _ in range(count):
            self.machine.rounds(self.daemon, 1)
            until(self.is_told)
            for _ in range(20):
                self.clock.pass_by(0.05)
                until(self.is_settled)
        return [p.far.copied - was for p, was in zip(self.programs, before, strict=True)]

    def is_told(self) -> bool:
        told = [arena["far_limit_mbps"] for arena in self.machine.told[-1]["arenas"]]
        has = [program.arena.limits for program in self.programs]
        return sorted(map(str, told)) == sorted(map(str, has))

    def is_settled(self) -> bool:
        """Whether nobody copies anything more until the clock goes on."""
        return all(p.is_held_back for p in self.programs if p.is_busy.is_set())


def test_a_quiet_tenant_has_its_part_beside_a_noisy_one(
    leases: Leases, clock: Clock, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 MiB a second are 96 blocks. The noisy tenant has two arenas."""
    clock.drives(monkeypatch)
    host, whole = Host(leases, clock, 48), 48 * MIB // LARGE_BYTES
    programs = [Program(name, path) for name in ("noisy", "noisy", "quiet")]
    try:
        host.begin(programs)
        host.rounds(1)  # from here on there are limits
        for program in programs[:2]:
            program.is_busy.set()
        host.rounds(3)
        alone = sum(host.rounds(4)[:2])
        assert 0.8 * 4 * whole < alone <= (4 + BURST_S) * 1.05 * whole

        programs[2].is_busy.set()
        host.rounds(3)
        *noisy, quiet = host.rounds(4)
        assert 0.4 * 4 * whole < quiet < 0.6 * 4 * whole
        assert 0.4 * 4 * whole < sum(noisy) < 0.6 * 4 * whole
        assert min(noisy) > 0.4 * sum(noisy), "its arenas share likewise"

        programs[2].is_busy.clear()
        host.rounds(8)
        *noisy, quiet = host.rounds(4)
        assert quiet < 0.1 * whole
        assert sum(noisy) > 0.8 * 4 * whole
    finally:
        for program in programs:
            until(partial(program.has_ended, clock))
            program.arena.close()
