# SPDX-License-Identifier: Apache-2.0
"""The daemon on a fake machine."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.conftest import CXL_ERRORS
from tests.unit.machine import (
    AGGREGATION_S,
    CXL,
    DRAM,
    HALF_HOT,
    HOT,
    MOVE_NS,
    OTHER,
    PAGES,
    SPAN,
    FakeSampler,
    Machine,
    Memory,
    a_process,
    half_hot,
    topology,
)
from tests.unit.replay import BUFFER, MIB, WINDOW, recorded
from tests.unit.test_status_file import STATUS
from tests.unit.world import snapshot
from tierd.bulk import Accesses, Plan, Report
from tierd.cli.status import as_text
from tierd.config import Config, MigrateConfig, Mode, PolicyConfig
from tierd.daemon import CALM_S, CALM_TIMES, FEW_PAGES, PROBE_PAGES_AT_REST, STEP_MOST_S, Daemon
from tierd.errors import Conflict
from tierd.model import PAGE_BYTES, KernelMoves, Pid, Pin, Policy, Rank, TierKind, Topology
from tierd.sample.residence import PAGES_PER_PIECE
from tierd.targets import FIND_AGAIN_S
from tierd.watched import STALE_AGGREGATIONS, Watched


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


@pytest.mark.parametrize(("pages", "runs"), [(5, 4), (FEW_PAGES, 39)])
def test_few_pages_are_moved_at_most_so_often(machine: Machine, pages: int, runs: int) -> None:
    """A program that has so many more hot ones every second."""
    machine.start(HOT, Memory(SPAN))
    edges = [0, *range(pages, 41 * pages, pages), PAGES]
    grows = [
        snapshot(edges, [20] * seconds + [0] * (41 - seconds), at_s=seconds)
        for seconds in range(1, 41)
    ]
    daemon = machine.daemon(FakeSampler(grows, machine))
    moved = machine.rounds(daemon, 40)
    assert sum(n > 0 for n in moved) == runs


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


def test_where_one_piece_is_new_no_more_pages_are_looked_for_than_at_rest(machine: Machine) -> None:
    edges, counts = np.linspace(0, PAGES, 65, dtype=int), [20, 0] * 32
    machine.start(HOT, Memory(SPAN))
    snapshots = [snapshot(edges, counts, at_s=number * AGGREGATION_S) for number in range(100)]
    daemon = machine.daemon(FakeSampler(snapshots, machine))
    moved = machine.rounds(daemon, 20)
    assert not any(moved[-5:])
    asked, query = list[int](), machine.query

    def counted(pid: Pid, folios: NDArray[np.void]) -> None:
        asked.append(len(folios))
        query(pid, folios)

    with patch.object(machine, "query", counted):
        for is_new, pages in (
            (slice(0, 1), PROBE_PAGES_AT_REST),
            (slice(0, 40), 40 * PAGES_PER_PIECE),
        ):
            daemon.watched[HOT].pieces["probed_s"][is_new] = -np.inf
            machine.rounds(daemon, 1)
            assert asked.pop() == pages
            assert np.isfinite(daemon.watched[HOT].pieces["probed_s"]).all()


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
    daemon = machine.daemon(FakeSampler(half_hot(2), machine))
    machine.rounds(daemon, 10)
    assert machine.looks == 10
    for _ in range(40):
        daemon.round()
        machine.now_s += FIND_AGAIN_S / 4
    assert machine.looks == 10 + 40 / 4


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
    machine.rounds(daemon, 4)
    assert machine.told[-1]["targets"][0]["pieces"] > 0
    sampler.lost = [HOT]
    sampler.snapshots = [replace(accesses, at_s=9e9) for accesses in sampler.snapshots]
    machine.rounds(daemon, 1)
    assert [target["pid"] for target in machine.told[-1]["targets"]] == [HOT]
    assert machine.told[-1]["targets"][0]["pieces"] == 0, "it is watched anew"
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
        return look(pid)

    look = machine.mapped
    monkeypatch.setattr(machine, "mapped", slowly)
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
    text = as_text(json.loads(json.dumps(status)) | {"cxl": CXL_ERRORS})
    assert text.startswith(f"tierd {os.getpid()}: place, 8 ")
    assert ["mem0", "region0", "poison", "uncorrected", "3"] in map(str.split, text.splitlines())


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


def only(whole: Topology, kind: TierKind) -> Topology:
    """The topology where one tier alone has memory."""
    tiers = [tier for tier in whole.tiers if tier.kind is kind]
    (node,) = tiers[0].nodes
    return replace(
        whole,
        nodes=tuple(n for n in whole.nodes if n.id == node),
        tiers=(replace(tiers[0], rank=Rank(0)),),
        warnings=("this machine has no second memory node",),
    )


def test_a_tier_goes_and_comes_back(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(200), machine))
    mover, whole = daemon.mover, machine.topology
    machine.rounds(daemon, 12)
    promoted = machine.told[-1]["moved"]
    assert promoted == [{"from": "cxl", "to": "dram", "pages": PAGES // 2}]

    machine.memory[HOT].rank[:] = DRAM  # as the kernel does when the slow node goes offline
    daemon.retier(only(whole, TierKind.DRAM), mover)
    assert not any(machine.rounds(daemon, 5))
    status = machine.told[-1]
    assert status["notes"] == ["this machine has no second memory node"]
    assert [tier["name"] for tier in status["tiers"]] == ["dram"]
    assert status["moved"] == promoted, "totals outlive the tier"
    assert status["targets"][0]["resident"] == {"dram": len(SPAN)}

    machine.memory[HOT].rank[:] = CXL
    daemon.retier(whole, mover)
    machine.rounds(daemon, 12)
    assert machine.memory[HOT].share(HALF_HOT, DRAM) == 1
    status = machine.told[-1]
    assert status["moved"] == [{"from": "cxl", "to": "dram", "pages": PAGES}]
    assert status["targets"][0]["resident"] == {"dram": len(HALF_HOT), "cxl": len(HALF_HOT)}


def test_no_tier_at_all_is_survived(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(50), machine))
    machine.rounds(daemon, 3)
    daemon.retier(replace(machine.topology, tiers=()), daemon.mover)
    machine.rounds(daemon, 3)
    status = machine.told[-1]
    assert (status["tiers"], status["targets"][0]["resident"]) == ([], {})


def test_where_ranks_shift_pieces_are_looked_for_anew(machine: Machine) -> None:
    """The slow tier becomes the fastest: what lay on rank 1 lies on rank 0 now."""
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(50), machine), moves=False)
    machine.rounds(daemon, 8)
    watched = daemon.watched[HOT]
    heat = watched.pieces["long"].copy()
    assert watched.pieces["resident"][:, CXL].all()
    watched.pieces["held_until_s"], watched.pieces["refusals"] = machine.now_s + 600, 9
    daemon.retier(only(machine.topology, TierKind.CXL), None)
    assert not watched.pieces["resident"].any()
    assert not watched.pieces["refusals"].any()
    assert (watched.pieces["held_until_s"] < machine.now_s).all()
    assert (watched.pieces["long"] == heat).all()
    machine.rounds(daemon, 1)
    assert machine.told[-1]["targets"][0]["resident"] == {"cxl": len(SPAN)}


def test_a_tier_that_only_shrinks_leaves_pieces_as_they_are(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(50), machine), moves=False)
    machine.rounds(daemon, 8)
    before = daemon.watched[HOT].pieces.copy()
    fast, slow = machine.topology.tiers
    less = replace(machine.topology, tiers=(fast, replace(slow, capacity_bytes=512 * MIB)))
    daemon.retier(less, None)
    assert (daemon.watched[HOT].pieces == before).all()
    machine.rounds(daemon, 1)
    assert machine.told[-1]["tiers"][1]["capacity"] == 512 * MIB


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

    def slow_first(*_: object) -> None:
        begun_s.append(machine.now_s)
        machine.now_s += 3.5 if len(begun_s) == 1 else 0.0

    def wait(wait_s: float) -> bool:
        machine.now_s += max(wait_s, 0.0)
        return len(begun_s) == 3

    daemon.tell = slow_first
    daemon.run(wait)
    assert [at_s - begun_s[0] for at_s in begun_s] == pytest.approx([0.0, 3.5, 4.5])


@pytest.mark.parametrize("hits", [20, 5])
def test_few_accesses_are_worth_no_move(machine: Machine, hits: int) -> None:
    """Of what is accessed five times a second, beside memory that is 35 times as hot, or twice."""
    machine.start(HOT, Memory(SPAN))
    machine.rounds(machine.daemon(FakeSampler(half_hot(60, hits, 2), machine)), 20)
    memory = machine.memory[HOT]
    assert memory.share(HALF_HOT, DRAM) == 1
    assert memory.share(SPAN, DRAM) == (0.5 if hits == 20 else 1)


def test_while_paused_nothing_moves(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(60), machine))
    daemon.paused = True
    assert not any(machine.rounds(daemon, 8))
    assert machine.told[-1]["targets"][0]["hot"]["cxl"] == len(HALF_HOT), "it samples all the same"
    daemon.paused = False
    assert any(machine.rounds(daemon, 8))


@pytest.mark.parametrize(
    ("full_from", "demotes", "ends"),
    [(0, False, False), (0, True, True), (5, False, True), (10, True, False)],
)
def test_the_kernel_sorts_until_the_tier_is_full(
    machine: Machine, full_from: int, *, demotes: bool, ends: bool
) -> None:
    """Half of the memory may be a mixture, and next to nothing of it is moved."""
    machine.start(HOT, Memory(SPAN))
    machine.kernels = KernelMoves(promoted=1000, demoted=1000)
    daemon = machine.daemon(FakeSampler(half_hot(60, hits=3), machine), budget(0.1))
    daemon.sorted_by_kernel = True
    all_of_it = range(machine.topology.tiers[DRAM].capacity_bytes)
    for done in range(10):
        if done == full_from:
            machine.memory[OTHER] = Memory(all_of_it, DRAM)
        machine.rounds(daemon, 1)
        _, _, promoted, demoted = machine.kernels
        machine.kernels = KernelMoves(promoted=promoted + 100, demoted=demoted + 100 * demotes)
    assert daemon.sorting.is_due is not ends


@pytest.mark.parametrize("by_kernel", [False, True])
def test_huge_pages_that_are_accessed_at_times_are_left_to_the_kernel(
    machine: Machine, *, by_kernel: bool
) -> None:
    """By one access in a while nobody can tell how many of their pages are hot."""
    machine.start(HOT, Memory(SPAN))
    machine.memory[HOT].is_huge = True
    daemon = machine.daemon(FakeSampler(half_hot(30, hits=16), machine))
    daemon.sorted_by_kernel = by_kernel
    assert any(machine.rounds(daemon, 10)) is not by_kernel


def test_huge_pages_that_are_accessed_all_the_time_rise_beside_the_kernel(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    machine.memory[HOT].is_huge = True
    daemon = machine.daemon(FakeSampler(half_hot(30), machine))
    daemon.sorted_by_kernel = True
    assert any(machine.rounds(daemon, 10))


def test_what_the_kernel_did_long_ago_ends_nothing(machine: Machine) -> None:
    """Before the start, or in a pause, it may have had much make way."""
    machine.start(HOT, Memory(SPAN))
    machine.kernels = KernelMoves(promoted=1000, demoted=1000)
    daemon = machine.daemon(FakeSampler(half_hot(60, hits=3), machine), budget(0.1))
    daemon.sorted_by_kernel = True
    machine.rounds(daemon, 2)
    machine.kernels = KernelMoves(promoted=2000, demoted=2000)
    machine.now_s += 2 * STEP_MOST_S
    machine.rounds(daemon, 2)
    assert daemon.sorting.is_due


def test_the_kernel_rests_once_regions_are_where_they_belong(machine: Machine) -> None:
    """With the round in which most of them arrive, and not with the one after it."""
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(60), machine), budget(8))
    daemon.sorted_by_kernel, before = True, 0.0
    while daemon.sorting.is_due:
        before = machine.memory[HOT].share(HALF_HOT, DRAM)
        machine.rounds(daemon, 1)
    assert before < 0.8
    assert machine.memory[HOT].share(HALF_HOT, DRAM) > 0.9


def test_while_tasks_wait_for_memory_nothing_is_moved_up(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(60), machine))
    machine.stall_percent = 12.0
    assert not any(machine.rounds(daemon, 8))
    note = "tasks wait for memory 12 % of the time: nothing is moved up"
    *others, last = machine.told[-1]["notes"]
    assert last == note
    assert [record.message for record in caplog.records].count(note) == 1
    machine.stall_percent = 0.0
    assert any(machine.rounds(daemon, 8))
    assert machine.told[-1]["notes"] == others


@pytest.mark.parametrize(("lukewarm_s", "rests"), [(5, True), (6, False)])
def test_a_process_whose_moves_do_not_pay_is_left_alone_and_told(
    machine: Machine, caplog: pytest.LogCaptureFixture, lukewarm_s: int, rests: bool
) -> None:
    """A half is lukewarm for some of 20 seconds: worth a move, if it only stayed so.

    In 6 it wins back more than half of what it costs; that is no reason to leave the rest alone.
    """
    machine.start(HOT, Memory(SPAN))
    edges, seconds = [0, PAGES // 2, PAGES], 40
    at_s = np.arange(0, seconds, AGGREGATION_S).tolist()
    lukewarm = [snapshot(edges, [2 * (now_s % 20 < lukewarm_s), 0], now_s) for now_s in at_s]
    config = Config(policy=PolicyConfig(placement=Policy(latency_gap_ns=200)))
    daemon = machine.daemon(FakeSampler(lukewarm, machine), config)
    moved = machine.rounds(daemon, seconds)
    assert sum(moved[:15]) > 0
    assert sum(moved[20:]) == 0
    assert machine.told[-1]["targets"][0]["rests"] == rests
    assert ("most of what was moved lately was not worth it" in caplog.text) == rests


def test_what_is_hot_goes_by_the_gap_between_the_tiers(machine: Machine) -> None:
    """As what is moved does: a half is too cold for the configured gap."""
    dram, cxl = machine.topology.tiers
    tiers = (replace(dram, latency_ns=90), replace(cxl, latency_ns=490))
    machine.topology = replace(machine.topology, tiers=tiers)
    machine.start(HOT, Memory(SPAN))
    edges, at_s = [0, PAGES // 2, PAGES], np.arange(0, 20, AGGREGATION_S).tolist()
    lukewarm = [snapshot(edges, [1, 0], now_s) for now_s in at_s]
    machine.rounds(machine.daemon(FakeSampler(lukewarm, machine)), 20)
    assert machine.told[-1]["targets"][0]["hot"] == {"dram": len(HALF_HOT), "cxl": 0}


class Looking(FakeSampler):
    """A fake that can look at single pages; `counts` are what is seen of them, in turn."""

    can_look = can_zoom = True

    def __init__(
        self, snapshots: Sequence[Accesses], machine: Machine, counts: Sequence[int]
    ) -> None:
        super().__init__(snapshots, machine)
        self.counts, self.looks = counts, 0
        self.seen: list[Accesses] = []

    def zoom(self, pid: Pid, start: int, end: int, *, per_page_s: float) -> bool:
        first = (start - SPAN.start) // PAGE_BYTES
        edges = np.arange(first, min(first + PAGES // 16, PAGES) + 1)
        counts = np.resize(self.counts, len(edges) - 1)
        self.seen.append(replace(snapshot(edges, counts, self.machine.now_s), zoomed=True))
        self.looks += 1
        return True

    def poll(self) -> list[Accesses]:
        seen, self.seen = self.seen, []
        return super().poll() + [replace(accesses, pid=HOT) for accesses in seen]


@pytest.mark.parametrize(("counts", "least", "most"), [((3,), 5, 12), ((20, 0, 0, 0), 16, 20)])
def test_pages_that_are_alike_are_looked_at_ever_more_rarely(
    machine: Machine, counts: Sequence[int], least: int, most: int
) -> None:
    """Of pages that are not, each is looked at once in 300 s."""
    machine.start(HOT, Memory(SPAN))
    at_s = np.arange(0, 200, AGGREGATION_S).tolist()
    lukewarm = [snapshot([0, PAGES], [n % 40 == 0], now_s) for n, now_s in enumerate(at_s)]
    sampler = Looking(lukewarm, machine, counts)
    machine.rounds(machine.daemon(sampler), 200)
    assert least <= sampler.looks <= most


@pytest.mark.parametrize(("counts", "rises"), [((3, 4), True), ((7, 0), False)])
def test_what_a_look_of_the_kernels_has_missed_rises_where_a_few_pages_are_alike(
    machine: Machine, counts: Sequence[int], *, rises: bool
) -> None:
    """Beside the kernel, though single pages are not to be looked at wherever there is doubt."""
    machine.start(HOT, Memory(SPAN))
    sampler = Looking(half_hot(60, hits=4), machine, counts)
    sampler.can_zoom = False
    daemon = machine.daemon(sampler)
    daemon.sorted_by_kernel = True
    for _ in range(15):
        machine.rounds(daemon, 1)
        faults, *others = machine.kernels
        machine.kernels = KernelMoves(faults + 100, *others)
    assert sampler.looks == 1
    assert (machine.memory[HOT].share(HALF_HOT, DRAM) > 0.9) is rises


def test_memory_waits_for_looks_while_they_go_on_but_not_for_ever() -> None:
    watched = Watched(a_process(HOT))
    assert not watched.is_looked_at(100.0)
    for now_s in np.arange(100.0, 140.0):
        watched.note_look(now_s)
        assert watched.is_looked_at(now_s + 1) == (now_s < 129)
    assert not watched.is_looked_at(150.0)
    watched.note_look(200.0)
    assert watched.is_looked_at(204.0)
    assert not watched.is_looked_at(206.0)


def test_what_is_pinned_where_it_is_stays(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(60), machine))
    machine.look(daemon)
    daemon.targets.pin(HOT, Pin.HERE)
    machine.rounds(daemon, 10)
    assert machine.memory[HOT].share(SPAN, CXL) == 1
    daemon.targets.pin(HOT, None)
    machine.rounds(daemon, 10)
    assert machine.memory[HOT].share(HALF_HOT, DRAM) == 1


def test_what_is_pinned_to_the_fastest_comes_first_and_makes_way_for_nobody(
    machine: Machine,
) -> None:
    machine.topology = topology(48 * MIB)
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(100), machine))
    machine.rounds(daemon, 12)
    assert machine.memory[HOT].share(HALF_HOT, DRAM) == 1
    cold = range(HALF_HOT.stop, SPAN.stop)
    assert machine.memory[HOT].share(cold, DRAM) == 0
    daemon.targets.pin(HOT, Pin.FASTEST)
    machine.rounds(daemon, 12)
    assert machine.memory[HOT].share(HALF_HOT, DRAM) == 1
    room = 48 * MIB - int(0.02 * 48 * MIB) - len(HALF_HOT)
    assert machine.memory[HOT].share(cold, DRAM) * len(cold) == pytest.approx(room, abs=PAGE_BYTES)


def test_where_nothing_moves_it_looks_more_rarely_and_more_roughly(machine: Machine) -> None:
    """Until anything does, a target comes, or there is none."""
    machine.start(HOT, Memory(SPAN))
    still = half_hot(300)
    for late in still[200:]:
        late.regions["nr_accesses"] = [0, 20]
    sampler = FakeSampler(still, machine)
    daemon = machine.daemon(sampler)

    def run(for_s: float) -> tuple[float, bool]:
        """For how long it waits for the next round in the end, and whether it is calm."""
        until_s, waits = machine.now_s + for_s, [0.0]

        def stop_asked(wait_s: float) -> bool:
            machine.now_s += wait_s
            waits.append(wait_s)
            return machine.now_s >= until_s

        daemon.run(stop_asked)
        return round(waits[-1], 1), sampler.is_calm

    assert run(CALM_S - 5) == (1.0, False)
    assert run(50) == (CALM_TIMES, True)
    assert run(30) == (1.0, False)
