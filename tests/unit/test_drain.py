# SPDX-License-Identifier: Apache-2.0
"""A node is emptied, on a fake machine."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.machine import (
    CXL,
    DRAM,
    HOT,
    NODES,
    OTHER,
    PAGES,
    SPAN,
    FakeFree,
    FakeMover,
    FakeSampler,
    Machine,
    Memory,
    topology,
)
from tests.unit.replay import MIB
from tierd.bulk import MOVE, PIECE, Plan, Report
from tierd.decide.evacuate import hottest_first
from tierd.drains import Drains
from tierd.errors import NotFound, TierdError
from tierd.kernel.free import FreeMemory
from tierd.kernel.process import RANGE
from tierd.migrate.drain import Drain, apart
from tierd.migrate.mover import Mover
from tierd.model import NodeId, Outcome, Pid, Rank, Topology
from tierd.observe.flows import Direction, Flow

FAST, SLOW = NODES


class SlicedMover(FakeMover):
    """A fake that moves so many pages a call at most, and finds some that are busy."""

    def __init__(self, machine: Machine, most: int, busy: int = 0) -> None:
        super().__init__(machine)
        self.topology = apart(machine.topology, SLOW)
        self.most, self.busy = most, busy
        self.destinations: list[int] = []

    def interrupted(self) -> bool:
        return False

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        self.destinations += plan.moves["destination"].tolist()
        memory = self.machine.memory[plan.pids[0]]
        (move,) = plan.moves
        first = (int(move["start"]) - memory.span.start) // 4096
        there = first + np.flatnonzero(memory.rank[first:] == CXL)
        can = there[self.busy :] if first == 0 else there
        pages = np.zeros((1, len(Outcome)), np.int64)
        memory.rank[can[: self.most]] = DRAM
        pages[0, Outcome.MOVED] = len(can[: self.most])
        pages[0, Outcome.BUSY] = min(self.busy, len(there)) if first == 0 else 0
        pages[0, Outcome.LATER] = max(0, len(can) - self.most)
        reached = plan.moves["end"].copy()
        if len(can) > self.most:
            reached[0] = memory.span.start + int(can[self.most]) * 4096
        self.machine.now_s += 0.1
        return Report(plan=plan, pages=pages, reached=reached, busy_ns=0)


def drain(machine: Machine, mover: SlicedMover, room: int = 1 << 30) -> Drain:
    return Drain(
        node=SLOW,
        mover=cast(Mover, mover),
        room=lambda node: room,
        find=lambda: [*machine.memory],
        find_in=machine.find_in,
        learn=lambda report: None,
        clock=machine.monotonic,
    )


def finish(work: Drain, machine: Machine) -> int:
    """Runs it in slices; returns how many there were."""
    for slices in range(1, 100):
        work.run(machine.now_s + 0.25)
        if work.is_done:
            return slices
    raise AssertionError("it does not end")


def test_all_processes_leave_the_node_in_slices(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    machine.start(OTHER, Memory(SPAN))
    work = drain(machine, SlicedMover(machine, PAGES // 4))
    assert finish(work, machine) > 2
    assert machine.memory[HOT].share(SPAN, DRAM) == machine.memory[OTHER].share(SPAN, DRAM) == 1
    assert work.moved_pages == 2 * PAGES
    assert not work.left
    assert (work.processes, work.processes_left) == (2, 0)


def piece(start: int, heat: float, there: float = 1.0) -> NDArray[np.void]:
    made = np.zeros(1, PIECE)
    made["start"], made["end"] = start * 4096, (start + 1) * 4096
    made["short"] = made["long"] = heat
    made["resident"][:, CXL] = there
    return made


def test_what_is_hot_goes_first_and_what_is_cold_with_the_rest() -> None:
    known = {
        HOT: np.concatenate([piece(1, 1e-3), piece(2, 0.0), piece(3, 1e-3), piece(4, 9.0)]),
        OTHER: np.concatenate([piece(7, 0.2), piece(8, 9.5), piece(9, 9.0, there=0.0)]),
    }
    turns = [(pid, (ranges["start"] // 4096).tolist()) for pid, ranges in hottest_first(known, CXL)]
    assert turns == [(HOT, [4]), (OTHER, [8]), (OTHER, [7]), (HOT, [1, 3])]


def test_the_hottest_is_moved_first(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    machine.start(OTHER, Memory(SPAN))
    hot = np.array([(SPAN.start, SPAN.stop)], RANGE)
    moved = list[Pid]()
    work = drain(machine, SlicedMover(machine, PAGES // 2))
    work.hottest = lambda: [(OTHER, hot)]
    work.learn = lambda report: moved.extend(report.plan.pids)
    finish(work, machine)
    assert moved[:3] == [OTHER, OTHER, HOT]
    assert work.processes == 2
    assert work.moved_pages == 2 * PAGES


def test_what_cannot_be_moved_is_told_and_ends_it(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    work = drain(machine, SlicedMover(machine, PAGES, busy=5))
    finish(work, machine)
    assert work.left == {Outcome.BUSY: 5}
    assert work.moved_pages == PAGES - 5
    assert work.passes == 2, "a second one finds nothing more to move"


def test_a_process_that_comes_meanwhile_is_emptied_too(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    work = drain(machine, SlicedMover(machine, PAGES // 2))
    work.run(machine.now_s + 0.05)
    machine.start(OTHER, Memory(SPAN))
    finish(work, machine)
    assert machine.memory[OTHER].share(SPAN, DRAM) == 1


def test_a_process_that_has_gone_is_passed_over(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    work = drain(machine, SlicedMover(machine, 10))
    work.run(machine.now_s + 0.05)
    machine.end(HOT)
    finish(work, machine)
    assert not work.left


def test_without_any_process_it_is_done(machine: Machine) -> None:
    assert finish(drain(machine, SlicedMover(machine, 1)), machine) == 1


def of_three() -> Topology:
    """As the fake machine's, and a second node in its slow tier."""
    two = topology(64 * MIB)
    fast, slow = two.tiers

    return replace(two, tiers=(fast, replace(slow, nodes=(SLOW, NodeId(7)))))


def test_the_node_gets_a_tier_of_its_own() -> None:
    alone = apart(topology(64 * MIB), SLOW)
    assert [(tier.rank, tier.nodes) for tier in alone.tiers] == [(0, (0,)), (1, (SLOW,))]
    beside = apart(of_three(), SLOW)
    assert [tier.nodes for tier in beside.tiers] == [(0,), (7,), (SLOW,)]


@pytest.mark.parametrize(("full", "destination"), [((), 0), ((0,), 1), ((0, 7), 0)])
def test_pages_go_to_the_fastest_tier_with_room(
    machine: Machine, full: tuple[int, ...], destination: int
) -> None:
    machine.topology = of_three()
    machine.start(HOT, Memory(SPAN))
    mover = SlicedMover(machine, PAGES)
    work = drain(machine, mover)
    work.room = lambda node: 0 if node in full else 1 << 30
    work.run(machine.now_s + 0.05)
    assert mover.destinations == [destination]


def test_only_what_is_mapped_is_walked(machine: Machine) -> None:
    def none(pid: Pid, cursor: int) -> tuple[NDArray[np.void], None]:
        return np.zeros(0, RANGE), None

    machine.start(HOT, Memory(SPAN))
    machine.start(OTHER, Memory(SPAN))
    mover = SlicedMover(machine, PAGES)
    work = drain(machine, mover)
    work.find_in = none
    finish(work, machine)
    assert mover.destinations == []


@pytest.fixture
def drains(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Drains:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler([], machine))
    monkeypatch.setattr("tierd.kernel.nodes.read_in_use", lambda node: 32 << 20)
    monkeypatch.setattr("tierd.kernel.process.read_pids", lambda: [*machine.memory])
    monkeypatch.setattr("tierd.kernel.process.read_mapped", machine.mapped)
    monkeypatch.setattr("tierd.kernel.process.read_cgroup", lambda pid: "/db")

    def make_mover(topology: Topology) -> Mover:
        return cast(Mover, SlicedMover(machine, PAGES // 2))

    return Drains(daemon=daemon, free=cast(FreeMemory, FakeFree()), make_mover=make_mover)


def test_a_node_is_closed_and_opened_again(drains: Drains) -> None:
    told = drains.begin(SLOW)
    assert (told["node"], told["done"], told["in_use"]) == (SLOW, False, 32 << 20)
    assert drains.free.closed == {SLOW}
    assert drains.begin(SLOW) == told, "asked for once more it tells how far it is"
    assert drains.end(SLOW) == told
    assert drains.free.closed == set()
    with pytest.raises(NotFound, match="not being drained"):
        drains.end(SLOW)


def test_a_failing_node_is_fenced_without_room(drains: Drains) -> None:
    drains.fence(SLOW)
    drains.fence(SLOW)
    assert drains.free.closed == {SLOW}
    (told,) = drains.accounts()
    assert (told["node"], told["done"]) == (SLOW, False)
    drains.end(SLOW)
    assert drains.free.closed == set()


def test_where_data_are_lost_what_is_hot_does_not_go_first(
    drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be moved by its addresses, and the pages whose data are lost with it."""
    hot = [(HOT, np.array([(SPAN.start, SPAN.stop)], RANGE))]
    monkeypatch.setattr("tierd.drains.hottest_first", lambda pieces, rank: hot)
    drains.begin(SLOW)
    assert drains.going[SLOW].hottest() == hot
    drains.is_bad = lambda node: node == SLOW
    assert drains.going[SLOW].hottest() == []


def test_what_a_drain_moves_is_among_the_flows(drains: Drains) -> None:
    drains.begin(SLOW)
    for _ in range(100):
        drains.go_on()
    assert drains.going[SLOW].is_done
    flow = Flow("/db", "cxl", "dram", Direction.PROMOTION, Outcome.MOVED)
    assert drains.daemon.flows.pages[flow] == PAGES
    assert drains.daemon.flows.moved == {("cxl", "dram"): PAGES}


def test_a_drain_of_one_node_of_several_tells_the_tiers_as_they_are(
    drains: Drains, machine: Machine
) -> None:
    """The plan's ranks are those of a topology with the node in a tier of its own."""
    whole = of_three()
    fast, slow = whole.tiers
    drains.daemon.topology = replace(
        whole, tiers=(replace(fast, nodes=(*fast.nodes, NodeId(5))), slow)
    )
    drains.begin(fast.nodes[0])
    work = drains.going[fast.nodes[0]]
    for rank in (0, 1):
        work.learn(moved(from_rank=2, to_rank=rank, pages=10 + rank))
    assert drains.daemon.flows.pages == {
        Flow("/db", "dram", "dram", Direction.LEVEL, Outcome.MOVED): 10,
        Flow("/db", "dram", "cxl", Direction.DEMOTION, Outcome.MOVED): 11,
    }


def moved(from_rank: int, to_rank: int, pages: int) -> Report:
    moves = np.zeros(1, MOVE)
    moves["source"], moves["destination"] = from_rank, to_rank
    counts = np.zeros((1, len(Outcome)), np.int64)
    counts[0, Outcome.MOVED] = pages
    return Report(
        plan=Plan(pids=(HOT,), moves=moves), pages=counts, reached=moves["end"], busy_ns=0
    )


def test_placing_rests_during_a_drain_and_a_pause_holds_it(
    drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices: list[float] = []
    monkeypatch.setattr("tierd.migrate.drain.Drain.run", lambda self, s: slices.append(s))
    daemon = drains.daemon
    drains.go_on()
    assert (daemon.yields, slices) == (False, [])
    drains.begin(SLOW)
    daemon.paused = True
    drains.go_on()
    assert (daemon.yields, slices) == (True, [])
    daemon.paused = False
    drains.go_on()
    assert len(slices) == 1
    drains.going[SLOW].is_done = True
    drains.go_on()
    assert (daemon.yields, len(slices)) == (False, 1)


def test_a_drain_that_cannot_be_is_refused(drains: Drains, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="node 9 is in no tier"):
        drains.begin(NodeId(9))
    monkeypatch.setattr("tierd.kernel.nodes.read_in_use", lambda node: 65 << 20)
    with pytest.raises(TierdError, match=r"holds 65 MiB .* room for 64 MiB"):
        drains.begin(SLOW)
    monkeypatch.setattr("tierd.kernel.nodes.read_in_use", lambda node: 0)
    drains.begin(SLOW)
    with pytest.raises(TierdError, match="no node that could take"):
        drains.begin(FAST)
    drains.daemon.mover = None
    with pytest.raises(TierdError, match="only observes"):
        drains.begin(FAST)


def test_a_drain_ends_with_its_node_and_where_no_other_is_left(
    drains: Drains, machine: Machine
) -> None:
    whole = machine.topology
    for left in whole.tiers:
        drains.daemon.topology = whole
        drains.begin(SLOW)
        drains.daemon.topology = replace(whole, tiers=(replace(left, rank=Rank(0)),))
        drains.follow()
        assert (drains.going, drains.free.closed) == ({}, set())
