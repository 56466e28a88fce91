# SPDX-License-Identifier: Apache-2.0
"""Arenas that the daemon's loop steers: real ones over a real socket, and what is hostile."""

import mmap
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.conftest import CXL_ERRORS
from tests.unit.machine import (
    DRAM,
    HALF_HOT,
    HOT,
    NODES,
    PAGES,
    SPAN,
    FakeSampler,
    Machine,
    Memory,
    half_hot,
)
from tests.unit.replay import MIB
from tests.unit.test_leases import until
from tests.unit.world import snapshot
from tierd.arena import Arena
from tierd.arena.shared import Copies, Shared, SharedTier
from tierd.arena.wire import GIVE_BACK
from tierd.arenas import GIVING_ROUNDS, Arenas
from tierd.config import Config, Mode, Place, PolicyConfig, TenantConfig
from tierd.daemon import Daemon
from tierd.leases import Leases
from tierd.model import NodeId, NodeRoom, Pid, TierKind
from tierd.observe import metrics
from tierd.tiers.memory import cxl, dram

BLOCK_BYTES, FAST, SLOW = 64 << 10, 32, 160


def a_daemon(machine: Machine, leases: Leases, config: Config | None = None) -> Daemon:
    daemon = machine.daemon(FakeSampler(half_hot(100), machine), config)
    daemon.arenas = Arenas(leases.all)
    return daemon


def an_arena(path: Path) -> Arena:
    tiers = [dram(FAST * BLOCK_BYTES), cxl(SLOW * BLOCK_BYTES)]
    return Arena(BLOCK_BYTES, tiers, blocks=120, daemon=path, name="kv")


def fill(arena: Arena, *, full: bool = False) -> NDArray[np.int64]:
    """Writes all blocks; returns some that are in the slow tier, and are to be hot.

    The fast one is `full` of others, or empty.
    """
    ids = np.arange(arena.blocks)
    arena.write(ids, np.ones((len(ids), BLOCK_BYTES), np.uint8))
    if not full:
        arena.demote(ids)
        arena.wait(ids)
    return np.array(ids[arena.places(ids) == 1][::6][: FAST - 12])


def has_followed(arena: Arena, commands: int) -> bool:
    return arena.steered is not None and arena.steered.commands == commands


def rounds(machine: Machine, daemon: Daemon, arena: Arena, hot: NDArray[np.int64], n: int) -> None:
    """Has the program use its hot blocks while the daemon goes round."""
    for _ in range(n):
        for _ in range(40):
            arena.touch(hot)
        machine.rounds(daemon, 1)
        asked = machine.told[-1]["arenas"][0]["asked"]
        until(partial(has_followed, arena, asked))
        arena.wait(np.arange(arena.blocks))


@pytest.mark.parametrize("full", [False, True])
def test_hot_blocks_come_to_the_fast_tier(
    machine: Machine, leases: Leases, path: Path, *, full: bool
) -> None:
    with an_arena(path) as arena:
        hot = fill(arena, full=full)
        until(lambda: len(leases.all()) == 1)
        daemon = a_daemon(machine, leases)
        assert (arena.places(hot) == 1).all()
        for _ in range(30):
            rounds(machine, daemon, arena, hot, 1)
            if (arena.places(hot) == 0).all():
                break
        assert (arena.places(hot) == 0).all()
        rounds(machine, daemon, arena, hot, 2)
        [told] = machine.told[-1]["arenas"]
        assert (told["name"], told["pid"], told["tenant"]) == ("kv", os.getpid(), "others")
        assert told["moved"] >= len(hot)
        assert told["asked"] >= told["moved"]
        before = told["asked"]
        rounds(machine, daemon, arena, hot, 10)
        assert machine.told[-1]["arenas"][0]["asked"] - before <= 4
    until(lambda: not leases.all())
    machine.rounds(daemon, 1)
    assert machine.told[-1]["arenas"] == []


PROGRAM = """
import sys
import numpy as np
from tierd.arena import Arena
from tierd.tiers.memory import cxl, dram
arena = Arena(65536, [dram(32 * 65536), cxl(160 * 65536)], blocks=120, daemon=sys.argv[1])
ids = np.arange(120)
arena.write(ids, np.ones((120, 65536), np.uint8))
hot = np.arange(119, 60, -4)
arena.demote(ids)
arena.wait(ids)
for line in sys.stdin:
    for _ in range(40):
        with arena.acquire(hot) as held:
            sum(int(block[0]) for block in held)
    arena.wait(ids)
    print(int((arena.places(hot) == 0).sum()), len(hot), flush=True)
"""


def test_another_program_is_steered(machine: Machine, leases: Leases, path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        until(lambda: len(leases.all()) == 1)
        daemon = a_daemon(machine, leases)
        fast, of = 0, -1
        for _ in range(60):
            program.stdin.write("go on\n")
            program.stdin.flush()
            fast, of = map(int, program.stdout.readline().split())
            if fast == of:
                break
            machine.rounds(daemon, 1)
            until(lambda: not leases.all()[0].is_behind())
        assert fast == of
        program.stdin.close()
        assert program.stderr.read() == "", "it ends as it is, without close()"


@pytest.mark.parametrize("how", ["observe", "pause"])
def test_where_nothing_is_to_move_nothing_is_asked(
    machine: Machine, leases: Leases, path: Path, how: str
) -> None:
    mode = Mode.OBSERVE if how == "observe" else Mode.PLACE
    with an_arena(path) as arena:
        hot = fill(arena)
        until(lambda: len(leases.all()) == 1)
        daemon = a_daemon(machine, leases, Config(policy=PolicyConfig(mode=mode)))
        daemon.paused = how == "pause"
        rounds(machine, daemon, arena, hot, 6)
        assert machine.told[-1]["arenas"][0]["asked"] == 0
        daemon.paused = False
        daemon.config = Config()
        rounds(machine, daemon, arena, hot, 3)
        assert machine.told[-1]["arenas"][0]["asked"] > 0


class FakeLease:
    """A fake that a test writes to as a hostile program does, and keeps what it is sent."""

    name, pid, user_id, command = "evil", Pid(666), 0, "evil"

    def __init__(
        self, blocks: int, slots: int, cgroup: str | None = None, far_ns: int | None = None
    ) -> None:
        told = [
            SharedTier(name="dram", kind=TierKind.DRAM, slots=slots, gives_back=True),
            SharedTier(name="nvme", kind=TierKind.SWAP, slots=blocks, latency_ns=far_ns),
        ]
        self.shared = Shared.create(BLOCK_BYTES, blocks, told)
        self.copies = Copies(self.shared.fd)
        self.is_in = cgroup
        self.behind, self.takes = False, 1 << 30
        self.sent: list[NDArray[np.void]] = []

    def cgroup(self) -> str | None:
        return self.is_in

    def copy(self, counts: NDArray[np.uint32], places: NDArray[np.uint8]) -> bool:
        self.copies.counts(self.shared.fd, counts)
        self.copies.places(self.shared.fd, places)
        return True

    def is_behind(self) -> bool:
        return self.behind

    def send(self, commands: NDArray[np.void]) -> int:
        self.sent.append(commands[: self.takes])
        return min(len(commands), self.takes)

    def end(self) -> None: ...


@settings(max_examples=30, deadline=None)
@given(
    noise=st.lists(st.binary(min_size=8, max_size=64), min_size=2, max_size=6),
    slots=st.sampled_from([0, 1, 20, 1 << 62, (1 << 64) - 1]),
)
def test_garbage_neither_stops_the_daemon_nor_its_commands(noise: list[bytes], slots: int) -> None:
    machine, lease = Machine(), FakeLease(500, slots)
    daemon = machine.daemon(FakeSampler(half_hot(20), machine))
    daemon.arenas = Arenas(lambda: [lease])
    with mmap.mmap(lease.shared.fd, 0) as hostile:
        for part in noise:
            hostile[:] = (part * len(hostile))[: len(hostile)]
            machine.rounds(daemon, 1)
            machine.now_s += 7
    assert machine.told[-1]["arenas"][0]["blocks"] == 500
    for sent in lease.sent:
        assert (sent["block"] < 500).all()
        assert (sent["tier"] < 2).all()


def heated(lease: FakeLease, hot: NDArray[np.intp]) -> None:
    lease.shared.counts[hot] += 400


@pytest.mark.parametrize("far_ns", [101, None])
def test_what_a_program_says_of_a_tiers_latency_counts(
    machine: Machine, far_ns: int | None
) -> None:
    lease = FakeLease(200, 40, far_ns=far_ns)
    lease.shared.places[:] = 1
    daemon = machine.daemon(FakeSampler(half_hot(20), machine))
    daemon.arenas = Arenas(lambda: [lease])
    for _ in range(3):
        heated(lease, np.arange(100, 120))
        machine.rounds(daemon, 1)
    assert any(map(len, lease.sent)) == (far_ns is None)


def test_of_a_program_that_is_behind_only_what_rises_is_sent(machine: Machine) -> None:
    lease = FakeLease(200, 40)
    lease.shared.places[:40], lease.shared.places[40:] = 0, 1
    daemon = machine.daemon(FakeSampler(half_hot(20), machine))
    daemon.arenas = Arenas(lambda: [lease])
    lease.behind, lease.takes = True, 5
    for _ in range(3):
        heated(lease, np.arange(100, 120))
        machine.rounds(daemon, 1)
    sent = np.concatenate(lease.sent)
    assert len(sent)
    assert set(sent["tier"]) == {0}
    assert set(sent["block"]) <= {*range(100, 120)}
    [told] = machine.told[-1]["arenas"]
    assert told["dropped"] > 0
    assert told["moved"] == 0


def test_what_does_not_come_is_tried_again_ever_later(machine: Machine) -> None:
    lease = FakeLease(50, 40)
    lease.shared.places[:] = 1
    daemon = machine.daemon(FakeSampler(half_hot(20), machine))
    daemon.arenas = Arenas(lambda: [lease])
    asked_at = []
    for second in range(80):
        heated(lease, np.array([7]))
        before = len(lease.sent)
        machine.rounds(daemon, 1)
        asked_at += [second] * (len(lease.sent) - before)
    apart = np.diff(asked_at)
    assert len(apart) >= 2
    assert (np.diff(apart) > 0).all()
    assert machine.told[-1]["arenas"][0]["unmoved"] >= 2


def tenant(cgroup: str, **more: object) -> TenantConfig:
    place = Place(file="a test", line=None, key="tenant")
    return TenantConfig(cgroup=cgroup, place=place, **more)  # type: ignore[arg-type]


def test_more_than_a_tenants_maximum_goes_down(machine: Machine) -> None:
    lease = FakeLease(200, 40, "/db")
    lease.shared.places[:40], lease.shared.places[40:] = 0, 255
    most_mib = 10 * BLOCK_BYTES / (1 << 20)
    config = Config(tenants=(tenant("/db", maximum_mib={"dram": most_mib}),))
    daemon = machine.daemon(FakeSampler(half_hot(20), machine), config)
    daemon.arenas = Arenas(lambda: [lease])
    machine.rounds(daemon, 2)
    sent = lease.sent[0]
    assert set(sent["tier"]) == {1}
    assert len(sent) == 30
    lease.shared.places[sent["block"]] = 1
    machine.rounds(daemon, 20)
    later = np.concatenate(lease.sent[1:])
    assert set(later["block"]) == {GIVE_BACK}, "what it left is for others"
    assert len(later) == GIVING_ROUNDS
    db, _ = machine.told[-1]["tenants"]
    assert db["resident"]["dram"] == 10 * BLOCK_BYTES


def test_an_arenas_bytes_count_for_its_tenants_share(machine: Machine) -> None:
    """The process of a tenant that has its maximum in an arena gets nothing more of the tier."""
    machine.start(HOT, Memory(SPAN))
    config = Config(tenants=(tenant("/db", maximum_mib={"dram": 16}),))
    lease = FakeLease(256, 256, "/db")
    lease.shared.places[:] = 0
    daemon = machine.daemon(FakeSampler(half_hot(40), machine), config)
    in_db = [p.__class__(**{n: getattr(p, n) for n in p.__slots__} | {"cgroup": "/db"})
             for p in machine.processes]  # fmt: skip
    machine.processes = in_db
    daemon.arenas = Arenas(lambda: [lease])
    machine.rounds(daemon, 10)
    assert sum(machine.mover.moved) == 0
    lease.shared.places[:] = 255
    machine.rounds(daemon, 5)
    assert sum(machine.mover.moved) > 0


class Obedient(FakeLease):
    """A fake arena that does at once what it is told, and holds memory until it gives it back."""

    def __init__(self, blocks: int, cgroup: str) -> None:
        super().__init__(blocks, blocks, cgroup)
        self.shared.places[:] = 0
        self.held = blocks

    def send(self, commands: NDArray[np.void]) -> int:
        for block, tier in commands.tolist():
            if block == GIVE_BACK:
                self.held = self.on_dram()
            else:
                self.shared.places[block] = tier
        self.held = max(self.held, self.on_dram())
        return super().send(commands)

    def on_dram(self) -> int:
        return int(np.count_nonzero(self.shared.places == 0))


class SharedMachine(Machine):
    """A fake machine whose DRAM an arena holds too."""

    def __init__(self, lease: Obedient) -> None:
        super().__init__(fast_bytes=(lease.held + 8) * BLOCK_BYTES)
        self.lease = lease

    def rooms(self) -> dict[NodeId, NodeRoom]:
        rooms = super().rooms()
        free_bytes = rooms[NODES[0]].free_bytes - self.lease.held * BLOCK_BYTES
        assert free_bytes >= 0
        return rooms | {NODES[0]: NodeRoom(free_bytes)}


@pytest.mark.parametrize(
    ("warm", "weight", "left_mib"), [(0, 100, 32), (1024, 100, 32), (1024, 300, 48), (512, 100, 32)]
)
def test_an_arena_leaves_what_others_have_a_share_of(
    warm: int, weight: float, left_mib: int
) -> None:
    """64 MiB of DRAM are an arena's; of a process of another tenant 32 MiB are hot."""
    lease = Obedient(1024, "/db")
    machine = SharedMachine(lease)
    machine.start(HOT, Memory(SPAN))
    config = Config(
        tenants=(tenant("/db", weight=weight),),
        policy=replace(Config().policy, headroom_percent=0),
    )
    daemon = machine.daemon(FakeSampler(half_hot(900), machine), config)
    daemon.arenas = Arenas(lambda: [lease])
    for _ in range(150):
        lease.shared.counts[:warm] += 40
        machine.rounds(daemon, 1)
    there = lease.on_dram() * BLOCK_BYTES / MIB
    assert there == pytest.approx(left_mib, abs=4)
    assert machine.memory[HOT].share(HALF_HOT, DRAM) * 32 == pytest.approx(64 - there, abs=5)
    before = len(lease.sent)
    for _ in range(30):
        lease.shared.counts[:warm] += 40
        machine.rounds(daemon, 1)
    assert sum(len(sent) for sent in lease.sent[before:]) <= 40, "it goes up and down"

    machine.end(HOT)
    daemon.sampler.lost.append(HOT)  # type: ignore[attr-defined]
    for _ in range(60):
        lease.shared.counts[:warm] += 40
        machine.rounds(daemon, 1)
    if warm > 512:
        assert lease.on_dram() * BLOCK_BYTES / MIB > 60, "what it left comes back"


@pytest.mark.parametrize("tenants", [(), (tenant("/db"),)])
@pytest.mark.parametrize(("warm", "left_mib"), [(0, 32), (768, 48), (1024, 64)])
def test_unused_blocks_make_way_for_hot_pages_of_the_same_tenant(
    tenants: tuple[TenantConfig, ...], warm: int, left_mib: int
) -> None:
    """64 MiB of DRAM are an arena's; of a process of the same tenant 32 MiB are hot."""
    lease = Obedient(1024, "/other")
    machine = SharedMachine(lease)
    machine.start(HOT, Memory(SPAN))
    policy = replace(Config().policy, headroom_percent=0)
    daemon = machine.daemon(
        FakeSampler(half_hot(900), machine), Config(tenants=tenants, policy=policy)
    )
    daemon.arenas = Arenas(lambda: [lease])
    for seconds in range(100):
        lease.shared.counts[:warm] += 40
        machine.rounds(daemon, 1)
        assert lease.on_dram() == 1024 or seconds >= policy.placement.long_s
    there = lease.on_dram() * BLOCK_BYTES / MIB
    assert there == pytest.approx(left_mib, abs=2)
    assert machine.memory[HOT].share(HALF_HOT, DRAM) * 32 == pytest.approx(64 - there, abs=3)
    before = len(lease.sent)
    for _ in range(30):
        lease.shared.counts[:warm] += 40
        machine.rounds(daemon, 1)
    assert sum(len(sent) for sent in lease.sent[before:]) <= 40, "it goes up and down"


def test_what_nobody_lacks_an_arena_keeps() -> None:
    lease = Obedient(1024, "/db")
    machine = SharedMachine(lease)
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(
        FakeSampler([snapshot([0, PAGES], [0], at_s=n * 0.4) for n in range(100)], machine),
        Config(tenants=(tenant("/db"),), policy=replace(Config().policy, headroom_percent=0)),
    )
    daemon.arenas = Arenas(lambda: [lease])
    machine.rounds(daemon, 30)
    assert lease.on_dram() == lease.held == 1024
    assert lease.sent == []


def test_metrics_tell_of_arenas_by_tenant(machine: Machine) -> None:
    leases = [FakeLease(50, 40), FakeLease(50, 40)]
    for lease in leases:
        lease.shared.places[:10], lease.shared.places[10:] = 0, 255
    daemon = machine.daemon(FakeSampler(half_hot(20), machine))
    daemon.arenas = Arenas(lambda: leases)
    machine.rounds(daemon, 1)
    scraped = metrics.as_text({**machine.told[-1], "cxl": CXL_ERRORS, "pid": 1}, {})
    assert "tierd_arenas 2.0" in scraped
    found = re.search(r'tierd_arena_resident_bytes{tenant="others",tier="dram"} (\S+)', scraped)
    assert found is not None
    assert float(found[1]) == 20 * BLOCK_BYTES


def test_what_was_asked_of_arenas_is_told_when_they_have_gone(machine: Machine) -> None:
    lease = FakeLease(50, 40)
    lease.shared.places[:] = 1
    leases = [lease]
    daemon = machine.daemon(FakeSampler(half_hot(20), machine))
    daemon.arenas = Arenas(lambda: leases)
    for _ in range(3):
        heated(lease, np.array([7]))
        machine.rounds(daemon, 1)
    asked = machine.told[-1]["arenas"][0]["asked"]
    assert asked > 0
    leases.clear()
    machine.rounds(daemon, 2)
    assert machine.told[-1]["arenas"] == []
    assert machine.told[-1]["arena_blocks"]["asked"] == asked
    scraped = metrics.as_text({**machine.told[-1], "cxl": CXL_ERRORS, "pid": 1}, {})
    assert f'tierd_arena_blocks_total{{outcome="asked"}} {float(asked)}' in scraped
