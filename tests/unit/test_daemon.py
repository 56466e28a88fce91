# SPDX-License-Identifier: Apache-2.0
"""The daemon over fakes of all that it touches: clock, processes, their memory, sampler, mover."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import tierd.daemon
from tests.unit.replay import BUFFER, MIB, WINDOW, Replay, recorded
from tests.unit.test_status_file import STATUS
from tests.unit.world import BASE, snapshot
from tierd.cli.status import as_text
from tierd.config import Config, MigrateConfig, Mode, PolicyConfig
from tierd.daemon import FIRST_PAGES, LOOK_AGAIN_S, STALE_AGGREGATIONS, Daemon
from tierd.errors import Conflict
from tierd.kernel.process import RANGE, Process
from tierd.migrate.mover import Mover
from tierd.model import (
    PAGE_BYTES,
    Accesses,
    Backing,
    Node,
    NodeId,
    Outcome,
    Pid,
    Plan,
    Rank,
    Report,
    Tier,
    TierKind,
    Topology,
)

DRAM, CXL = Rank(0), Rank(1)
NODES = (NodeId(0), NodeId(2))  # not the same numbers as the ranks'
HOT, OTHER = Pid(640), Pid(641)
AGGREGATION_S = 0.4
MOVE_NS = 3000


def topology(fast_bytes: int) -> Topology:
    def node(id: NodeId, size_bytes: int, backing: Backing) -> Node:
        return Node(
            id=id,
            cpus=(),
            total_bytes=size_bytes,
            distances={},
            any_initiator=None,
            cpu_initiator=None,
            kernel_tier=None,
            backing=backing,
        )

    def tier(rank: Rank, kind: TierKind, size_bytes: int) -> Tier:
        nodes = (NODES[rank],)
        return Tier(rank=rank, name=kind, kind=kind, nodes=nodes, capacity_bytes=size_bytes)

    slow_bytes = 1 << 30
    return Topology(
        nodes=(
            node(NODES[DRAM], fast_bytes, Backing.DRAM),
            node(NODES[CXL], slow_bytes, Backing.CXL),
        ),
        tiers=(tier(DRAM, TierKind.DRAM, fast_bytes), tier(CXL, TierKind.CXL, slow_bytes)),
        warnings=("node 3 is in no tier",),
    )


def a_process(pid: Pid, start_ticks: int = 1) -> Process:
    return Process(
        pid=pid,
        leader=pid,
        command="hotset",
        start_ticks=start_ticks,
        resident_bytes=64 * MIB,
        is_kernel_thread=False,
        user_id=0,
        cgroup=None,
        allowed_nodes=None,
        locked_bytes=0,
    )


class Memory:
    """A fake process's memory: mapped over `span`, each page on a rank."""

    def __init__(self, span: range, rank: Rank = CXL) -> None:
        self.span = span
        self.rank = np.full(len(span) // PAGE_BYTES, rank)

    def index(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (addresses.astype(np.int64) - self.span.start) // PAGE_BYTES

    def share(self, part: range, rank: Rank) -> float:
        first = (part.start - self.span.start) // PAGE_BYTES
        return float(np.mean(self.rank[first : first + len(part) // PAGE_BYTES] == rank))


class FakeSampler(Replay):
    """A fake that plays snapshots, and tells of exits as it is told to."""

    def __init__(self, snapshots: Sequence[Accesses], machine: "Machine") -> None:
        super().__init__(snapshots, machine.monotonic)
        self.machine = machine
        self.lost: list[Pid] = []
        self.refused: set[Pid] = set()
        self.calls: list[tuple[str, Pid]] = []

    def watch(self, pid: Pid) -> None:
        self.calls.append(("watch", pid))
        if pid not in self.machine.memory:
            raise ProcessLookupError
        if pid in self.refused:
            raise Conflict("DAMON has no free slot")
        super().watch(pid)

    def unwatch(self, pid: Pid) -> None:
        self.calls.append(("unwatch", pid))
        super().unwatch(pid)

    def gone(self) -> list[Pid]:
        gone, self.lost = self.lost, []
        return gone


class FakeMover:
    """A fake that moves all that it is asked to, at a fixed cost."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.moved: list[int] = []

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        assert deadline_s > self.machine.now_s
        pages = np.zeros((len(plan.moves), len(Outcome)), np.int64)
        reached = plan.moves["end"].copy()
        for row, move in enumerate(plan.moves):
            memory = self.machine.memory[plan.pids[move["target"]]]
            first, behind = memory.index(np.array([move["start"], move["end"]]))
            there = first + np.flatnonzero(memory.rank[first:behind] == move["source"])
            there = there[: -(-int(move["bytes"]) // PAGE_BYTES)]
            memory.rank[there] = move["destination"]
            pages[row, Outcome.MOVED] = len(there)
            if len(there) * PAGE_BYTES >= move["bytes"]:
                reached[row] = memory.span.start + (there[-1] + 1) * PAGE_BYTES
        moved = int(pages.sum())
        self.moved.append(moved)
        return Report(plan=plan, pages=pages, reached=reached, busy_ns=moved * MOVE_NS)


class Machine:
    """Fakes of the kernel's side: /proc/PID/maps, move_pages(2)'s query, free memory, the clock."""

    def __init__(self, fast_bytes: int = 128 * MIB) -> None:
        self.now_s = 5000.0
        self.topology = topology(fast_bytes)
        self.processes: list[Process] = []
        self.memory: dict[Pid, Memory] = {}
        self.looks = 0
        self.told: list[dict[str, Any]] = []
        self.mover = FakeMover(self)

    def start(self, pid: Pid, memory: Memory, start_ticks: int = 1) -> None:
        self.processes.append(a_process(pid, start_ticks))
        self.memory[pid] = memory

    def end(self, pid: Pid) -> None:
        self.processes = [process for process in self.processes if process.pid != pid]
        self.memory.pop(pid, None)

    def monotonic(self) -> float:
        return self.now_s

    def find(self) -> list[Process]:
        self.looks += 1
        return list(self.processes)

    def read_mapped(self, pid: Pid) -> NDArray[np.void] | None:
        if pid not in self.memory:
            return None
        span = self.memory[pid].span
        return np.array([(span.start, span.stop)], RANGE)

    def query(self, pid: Pid, folios: NDArray[np.void]) -> None:
        if pid not in self.memory:
            raise ProcessLookupError
        memory = self.memory[pid]
        folios["node"] = np.array(NODES)[memory.rank[memory.index(folios["addr"])]]

    def free_bytes(self) -> dict[NodeId, int]:
        on = sum(np.bincount(memory.rank, minlength=2) for memory in self.memory.values())
        used = np.zeros(2, int) + on * PAGE_BYTES
        return {
            tier.nodes[0]: tier.capacity_bytes - int(used[tier.rank])
            for tier in self.topology.tiers
        }

    def daemon(
        self, sampler: FakeSampler, config: Config | None = None, *, moves: bool = True
    ) -> Daemon:
        daemon = Daemon(
            config or Config(),
            topology=self.topology,
            sampler=sampler,
            mover=cast(Mover, self.mover) if moves else None,
            find=self.find,
            free_bytes=self.free_bytes,
            tell=self.told.append,
        )
        daemon.rng = np.random.default_rng(1)
        return daemon

    def rounds(self, daemon: Daemon, seconds: float) -> list[int]:
        """Goes round each second; returns the pages moved in each round."""
        moved = []
        for _ in range(round(seconds)):
            before = sum(self.mover.moved)
            daemon.round()
            moved.append(sum(self.mover.moved) - before)
            self.now_s += 1.0
        return moved


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(tierd.daemon, "time", machine)
    monkeypatch.setattr("tierd.kernel.process.read_mapped", machine.read_mapped)
    monkeypatch.setattr("tierd.kernel.pages.query", machine.query)
    return machine


SPAN = range(BASE, BASE + 64 * MIB)
PAGES = len(SPAN) // PAGE_BYTES
HALF_HOT = range(BASE, BASE + 32 * MIB)


def half_hot(snapshots: int) -> list[Accesses]:
    """Snapshots of which the first half of SPAN is as hot as it can be."""
    return [
        snapshot([0, PAGES // 2, PAGES], [20, 0], at_s=number * AGGREGATION_S)
        for number in range(snapshots)
    ]


def budget(mbps: float, mode: Mode = Mode.PLACE) -> Config:
    return Config(migrate=MigrateConfig(budget_mbps=mbps), policy=PolicyConfig(mode=mode))


def test_a_recorded_hot_set_moves_to_fast_memory_and_stays(machine: Machine) -> None:
    machine.start(HOT, Memory(BUFFER))
    daemon = machine.daemon(FakeSampler(recorded(), machine))
    moved = machine.rounds(daemon, 70)
    window_pages = len(WINDOW) // PAGE_BYTES
    assert machine.memory[HOT].share(WINDOW, DRAM) >= 0.95
    assert sum(moved) <= 1.5 * window_pages
    assert sum(moved[-30:]) < 0.01 * window_pages


def test_the_first_moves_are_few(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    moved = machine.rounds(machine.daemon(FakeSampler(half_hot(20), machine)), 8)
    first, second = [pages for pages in moved if pages][:2]
    assert 0 < first <= FIRST_PAGES < second


def test_a_round_keeps_to_the_budget(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    moved = machine.rounds(machine.daemon(FakeSampler(half_hot(40), machine), budget(1)), 16)
    assert max(moved) == MIB // PAGE_BYTES


def test_a_dry_run_moves_nothing_and_tells_what_it_sees(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    config = budget(256, Mode.OBSERVE)
    machine.rounds(machine.daemon(FakeSampler(half_hot(20), machine), config, moves=False), 8)
    status = machine.told[-1]
    assert machine.memory[HOT].share(SPAN, CXL) == 1
    assert not machine.mover.moved
    assert (status["mode"], status["moved"]) == ("observe", [])
    assert status["targets"][0]["hot"] == {"dram": 0, "cxl": len(HALF_HOT)}


def test_without_samples_nothing_moves(machine: Machine) -> None:
    """1 MiB a round would take 32 rounds; the samples end in the midst of it."""
    machine.start(HOT, Memory(SPAN))
    sampled_s = 10
    snapshots = half_hot(round(sampled_s / AGGREGATION_S))
    moved = machine.rounds(machine.daemon(FakeSampler(snapshots, machine), budget(1)), 30)
    stale_s = sampled_s + STALE_AGGREGATIONS * AGGREGATION_S + 1
    assert all(moved[5:sampled_s])
    assert not any(moved[round(stale_s) + 1 :])
    assert machine.memory[HOT].share(HALF_HOT, CXL) > 0.5
    assert len(machine.told) == 30


def test_targets_come_and_go(machine: Machine) -> None:
    sampler = FakeSampler(half_hot(50), machine)
    daemon = machine.daemon(sampler)
    machine.rounds(daemon, 3)
    assert machine.told[-1]["targets"] == []
    machine.start(HOT, Memory(SPAN))
    machine.start(OTHER, Memory(SPAN))
    machine.rounds(daemon, 3)
    assert [target["pid"] for target in machine.told[-1]["targets"]] == [HOT, OTHER]
    machine.end(HOT)
    machine.rounds(daemon, 3)
    assert [target["pid"] for target in machine.told[-1]["targets"]] == [OTHER]
    assert sampler.calls == [("watch", HOT), ("watch", OTHER), ("unwatch", HOT)]


def test_processes_are_looked_for_now_and_then(machine: Machine) -> None:
    machine.rounds(machine.daemon(FakeSampler(half_hot(2), machine)), 10)
    assert machine.looks == 10 / LOOK_AGAIN_S


def test_a_pid_that_another_process_got_is_another_target(machine: Machine) -> None:
    sampler = FakeSampler(half_hot(50), machine)
    daemon = machine.daemon(sampler, moves=False)
    machine.start(HOT, Memory(SPAN))
    machine.rounds(daemon, 4)
    assert machine.told[-1]["targets"][0]["pieces"] > 0
    machine.end(HOT)
    sampler.snapshots = [replace(accesses, at_s=9e9) for accesses in sampler.snapshots]
    machine.start(HOT, Memory(SPAN), start_ticks=2)
    machine.rounds(daemon, 2)
    assert sampler.calls == [("watch", HOT), ("unwatch", HOT), ("watch", HOT)]
    assert machine.told[-1]["targets"][0]["pieces"] == 0, "what the other one did is forgotten"


def test_a_process_that_exits_before_it_is_watched_is_left_out(machine: Machine) -> None:
    machine.processes.append(a_process(HOT))
    machine.start(OTHER, Memory(SPAN))
    sampler = FakeSampler(half_hot(50), machine)
    machine.rounds(machine.daemon(sampler), 1)
    assert sampler.calls == [("watch", HOT), ("watch", OTHER)]
    assert [target["pid"] for target in machine.told[-1]["targets"]] == [OTHER]


def test_without_its_first_target_the_daemon_says_why_and_ends(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    sampler = FakeSampler(half_hot(50), machine)
    sampler.refused = {HOT}
    with pytest.raises(Conflict, match="no free slot"):
        machine.rounds(machine.daemon(sampler), 1)


def test_a_later_target_that_cannot_be_watched_is_left_out_and_told(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.start(HOT, Memory(SPAN))
    sampler = FakeSampler(half_hot(50), machine)
    daemon = machine.daemon(sampler)
    machine.rounds(daemon, 1)
    machine.start(OTHER, Memory(SPAN))
    sampler.refused = {OTHER}
    machine.rounds(daemon, 10)
    assert [target["pid"] for target in machine.told[-1]["targets"]] == [HOT]
    notes = [note for note in machine.told[-1]["notes"] if "not watched" in note]
    assert len(notes) == 1
    assert f"process {OTHER}" in notes[0]
    assert "no free slot" in notes[0]
    assert len([r for r in caplog.records if "not watched" in r.message]) == 1
    sampler.refused = set()
    machine.rounds(daemon, 5)
    assert [target["pid"] for target in machine.told[-1]["targets"]] == [HOT, OTHER]
    assert not [note for note in machine.told[-1]["notes"] if "not watched" in note]


def test_what_the_sampler_lost_is_let_go_and_taken_up_again(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    sampler = FakeSampler(half_hot(50), machine)
    daemon = machine.daemon(sampler)
    machine.rounds(daemon, 1)
    sampler.lost = [HOT]
    machine.rounds(daemon, 1)
    assert machine.told[-1]["targets"] == []
    machine.rounds(daemon, 2)
    assert [target["pid"] for target in machine.told[-1]["targets"]] == [HOT]
    assert sampler.calls == [("watch", HOT), ("unwatch", HOT), ("watch", HOT)]


def test_a_process_that_exits_unseen_is_left_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last snapshots are there still, its memory is not, and nobody has told yet."""
    machine.start(HOT, Memory(SPAN))
    machine.start(OTHER, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(50), machine), budget(1))
    machine.rounds(daemon, 5)
    del machine.memory[HOT]
    made: list[tuple[Pid, ...]] = []
    move = machine.mover.run

    def tap(plan: Plan, *, deadline_s: float) -> Report:
        made.append(plan.pids)
        return move(plan, deadline_s=deadline_s)

    monkeypatch.setattr(machine.mover, "run", tap)
    machine.rounds(daemon, 2)
    assert made == [(OTHER,), (OTHER,)]


def test_mappings_are_looked_at_now_and_then(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def slowly(pid: Pid) -> NDArray[np.void] | None:
        nonlocal looks
        looks += 1
        machine.now_s += 0.05  # a big process's maps
        return machine.read_mapped(pid)

    monkeypatch.setattr("tierd.kernel.process.read_mapped", slowly)
    machine.start(HOT, Memory(SPAN))
    machine.rounds(machine.daemon(FakeSampler(half_hot(100), machine)), 20)
    assert 3 <= looks <= 5, "once in 5 s, 100 times what it took"


def test_accesses_of_nobody_are_ignored(machine: Machine) -> None:
    sampler = FakeSampler(half_hot(5), machine)
    sampler.begun_s[OTHER], sampler._played[OTHER] = machine.now_s, 0
    machine.rounds(machine.daemon(sampler), 2)
    assert machine.told[-1]["targets"] == []


def test_status_is_as_documented_and_can_be_shown(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    machine.rounds(machine.daemon(FakeSampler(half_hot(20), machine)), 8)
    status = {"pid": os.getpid(), **machine.told[-1]}
    assert status.keys() == STATUS.keys()
    for name in ("tiers", "targets", "moved"):
        assert status[name][0].keys() == STATUS[name][0].keys()
    assert status["sampler"].keys() == STATUS["sampler"].keys()
    assert as_text(json.loads(json.dumps(status))).startswith(f"tierd {os.getpid()}: place, 8 ")


def test_status_tells_what_was_done(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    machine.rounds(machine.daemon(FakeSampler(half_hot(40), machine)), 12)
    status = machine.told[-1]
    target, (fast, slow) = status["targets"][0], status["tiers"]
    assert target["resident"] == {"dram": len(HALF_HOT), "cxl": len(SPAN) - len(HALF_HOT)}
    assert target["hot"] == {"dram": len(HALF_HOT), "cxl": 0}
    assert status["moved"] == [{"from": "cxl", "to": "dram", "pages": PAGES // 2}]
    assert (fast["nodes"], fast["backing"], fast["free"]) == ([0], ["dram"], 96 * MIB)
    assert (slow["nodes"], slow["backing"], slow["capacity"]) == ([2], ["cxl"], 1 << 30)
    assert fast["headroom"] == int(0.02 * 128 * MIB)
    assert status["notes"] == ["node 3 is in no tier"]
    assert status["page_cost_ns"] == pytest.approx(MOVE_NS, rel=0.1)


def test_a_hot_set_larger_than_fast_memory_is_told_as_kept(machine: Machine) -> None:
    machine.topology = topology(16 * MIB)
    machine.start(HOT, Memory(SPAN))
    machine.rounds(machine.daemon(FakeSampler(half_hot(40), machine)), 12)
    room = 16 * MIB - int(0.02 * 16 * MIB)
    assert machine.memory[HOT].share(HALF_HOT, DRAM) * len(HALF_HOT) == pytest.approx(
        room, abs=PAGE_BYTES
    )
    kept = machine.told[-1]["kept"]["no room, and nothing colder to make way"]
    assert kept == pytest.approx(len(HALF_HOT) - room, abs=0.1 * MIB)


def idle_daemon(machine: Machine) -> Daemon:
    """One with nothing to do, once a second."""
    return machine.daemon(FakeSampler(half_hot(2), machine))


def test_the_loop_ends_when_it_is_asked_to(machine: Machine) -> None:
    waits: list[float] = []

    def ask(wait_s: float) -> bool:
        machine.now_s += wait_s
        waits.append(wait_s)
        return len(waits) == 4

    idle_daemon(machine).run(ask)
    assert len(machine.told) == 4
    assert waits == pytest.approx([1.0] * 4)


def test_the_loop_ends_when_its_time_is_up(machine: Machine) -> None:
    begin_s = machine.now_s

    def wait(wait_s: float) -> bool:
        machine.now_s += wait_s
        return False

    idle_daemon(machine).run(wait, for_s=2.5)
    assert len(machine.told) == 3
    assert machine.now_s - begin_s == pytest.approx(2.5)


def test_a_round_that_takes_too_long_is_not_made_up_for(machine: Machine) -> None:
    begun_s: list[float] = []
    daemon = idle_daemon(machine)

    def slow_first(status: dict[str, Any]) -> None:
        begun_s.append(machine.now_s)
        machine.now_s += 3.5 if len(begun_s) == 1 else 0.0

    def wait(wait_s: float) -> bool:
        machine.now_s += max(wait_s, 0.0)
        return len(begun_s) == 3

    daemon.tell = slow_first
    daemon.run(wait)
    assert [at_s - begun_s[0] for at_s in begun_s] == pytest.approx([0.0, 3.5, 4.5])
