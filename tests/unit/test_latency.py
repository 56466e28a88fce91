# SPDX-License-Identifier: Apache-2.0
"""What loads take, tier by tier, and the moves up that don't pay because of it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.conftest import CXL_ERRORS
from tests.unit.machine import DRAM, HOT, SPAN, FakeSampler, Machine, Memory, half_hot
from tests.unit.test_decide import HOT as HOT_RATE
from tests.unit.test_decide import POLICY, pages_moved, pieces, rooms
from tests.unit.test_hardware import SOURCES, FakeRing, fake_pmu, sampled
from tests.unit.test_topology import node, node_map
from tests.unit.world import World
from tierd.bulk import LOAD, Accesses, Plan, Target
from tierd.decide.latency import (
    FADE_S,
    GO_ON,
    LEAST_LOADS,
    MOST_CYCLES,
    Latencies,
    closed,
    loaded_gap_ns,
    take_in,
)
from tierd.decide.placement import plan
from tierd.model import PAGE_BYTES, Kept, NodeId, Pid, Rank, Tier, TierKind, TierRoom, Topology
from tierd.observe import metrics
from tierd.sample.hardware import Hardware

GIB = 1 << 30
WAY = (Rank(0), Rank(1))


# What loads take

TWO = node_map(node(0, range(GIB)), node(2, range(GIB, 2 * GIB)))


def tier_of(rank: int, *nodes: int) -> Tier:
    ids = tuple(map(NodeId, nodes))
    return Tier(rank=Rank(rank), name=f"t{rank}", kind=TierKind.DRAM, nodes=ids, capacity_bytes=GIB)


def loads(address: int, cycles: float, count: int = 2 * int(LEAST_LOADS)) -> NDArray[np.void]:
    """Loads of which half take a half more, and half as much less."""
    made = np.zeros(count, LOAD)
    made["address"] = address
    made["cycles"] = np.where(np.arange(count) % 2, 1.5 * cycles, 0.5 * cycles)
    return made


def known(*parts: NDArray[np.void], now_s: float = 0.0) -> Latencies:
    return take_in(Latencies(), np.concatenate(parts), TWO, now_s=now_s)


def test_each_tier_has_the_mean_of_its_nodes() -> None:
    found = known(loads(0, 300), loads(GIB, 700))
    assert found.cycles_of(tier_of(0, 0)) == pytest.approx(300)
    assert found.cycles_of(tier_of(1, 2)) == pytest.approx(700)
    assert found.cycles_of(tier_of(0, 0, 2)) == pytest.approx(500)


@pytest.mark.parametrize("nodes", [(1,), (3,), (), (1000,)])
def test_what_nothing_was_loaded_from_is_unknown(nodes: tuple[int, ...]) -> None:
    found = known(loads(0, 300), loads(GIB, 700))
    assert found.cycles_of(tier_of(0, *nodes)) is None
    assert found.loads_of(tier_of(0, *nodes)) == 0


def test_few_loads_tell_nothing() -> None:
    few = int(LEAST_LOADS) - 1
    found = known(loads(0, 300, few))
    assert found.cycles_of(tier_of(0, 0)) is None
    more = take_in(found, loads(0, 300, 1), TWO, now_s=0.0)
    assert more.cycles_of(tier_of(0, 0)) is not None


def test_loads_of_no_node_and_absurd_ones_are_left_out() -> None:
    absurd = loads(0, 0, 2), loads(0, 4 * MOST_CYCLES, 2), loads(5 * GIB, 50)
    found = known(loads(0, 300), *absurd)
    assert found.loads_of(tier_of(0, 0)) == 2 * LEAST_LOADS
    assert found.cycles_of(tier_of(0, 0)) == pytest.approx(300)


def test_the_mean_follows_and_what_is_not_seen_any_more_is_forgotten() -> None:
    found = known(loads(0, 300))
    found = take_in(found, loads(0, 900), TWO, now_s=FADE_S)
    assert found.cycles_of(tier_of(0, 0)) == pytest.approx((300 / np.e + 900) / (1 / np.e + 1))
    found = take_in(found, loads(0, 0, 0), TWO, now_s=4 * FADE_S)
    assert found.cycles_of(tier_of(0, 0)) is None


@given(st.permutations(range(8)), st.integers(1, 7))
def test_the_order_of_loads_is_irrelevant(order: Sequence[int], cut: int) -> None:
    made = np.concatenate([loads(GIB * (n % 2), 100 + n, 2 * int(LEAST_LOADS)) for n in order])
    at_once = known(made)
    parts = Latencies()
    for part in np.split(made, [cut * len(made) // 8]):
        parts = take_in(parts, part, TWO, now_s=0.0)
    for both in (tier_of(0, 0), tier_of(1, 2)):
        assert parts.cycles_of(both) == pytest.approx(at_once.cycles_of(both))


# Which ways up pay

cycles = st.one_of(st.none(), st.floats(1, 1e4))
tiers = st.lists(cycles, min_size=2, max_size=5)


def of_pair(upper: float | None, lower: float | None, *, was: bool = False) -> bool:
    return bool(closed(frozenset({WAY} if was else ()), [upper, lower]))


@pytest.mark.parametrize(
    ("upper", "lower", "was_open", "was_closed"),
    [
        (300, 301, False, True),
        (300, 300, True, True),
        (310, 240, True, True),
        (271, 300, False, True),
        (269, 300, False, False),
        (None, 300, False, False),
        (300, None, False, False),
    ],
)
def test_a_way_closes_at_once_and_opens_with_a_margin(
    upper: float | None, lower: float | None, was_open: bool, was_closed: bool
) -> None:
    assert of_pair(upper, lower) is was_open
    assert of_pair(upper, lower, was=True) is was_closed


@given(st.floats(1, 1e4), st.lists(st.floats(GO_ON + 1e-6, 1 - 1e-6), min_size=2), st.booleans())
def test_within_the_margin_nothing_flaps(lower: float, ratios: list[float], was: bool) -> None:
    told = [of_pair(ratio * lower, lower, was=was) for ratio in ratios]
    assert set(told) == {was}


@given(tiers, tiers)
def test_what_is_decided_stays_while_the_load_does(
    earlier: list[float | None], seen: list[float | None]
) -> None:
    once = closed(closed(frozenset(), earlier), seen)
    assert closed(once, seen) == once


@given(
    upper=st.floats(1, 1e4),
    lower=st.floats(1, 1e4),
    slower=st.floats(0, 1e4),
    faster=st.floats(0, 1),
    was=st.booleans(),
)
def test_more_load_above_or_less_below_never_opens_a_way(
    upper: float, lower: float, slower: float, faster: float, was: bool
) -> None:
    assume(of_pair(upper, lower, was=was))
    assert of_pair(upper + slower, lower, was=was)
    assert of_pair(upper, lower * (1 - faster), was=was)


@given(tiers, tiers)
def test_each_way_is_decided_by_itself(
    earlier: list[float | None], seen: list[float | None]
) -> None:
    before = closed(frozenset(), earlier)
    for upper, lower in combinations(range(len(seen)), 2):
        way = Rank(upper), Rank(lower)
        alone = of_pair(seen[upper], seen[lower], was=way in before)
        assert (way in closed(before, seen)) is alone


# What a move gains


def room(latency_ns: int | None, loaded_cycles: float | None) -> TierRoom:
    (usual,) = rooms(1)
    return replace(usual, latency_ns=latency_ns, loaded_cycles=loaded_cycles)


def test_without_load_the_gap_is_what_was_told() -> None:
    assert loaded_gap_ns(room(100, 300), room(250, 750)) == pytest.approx(150)


@pytest.mark.parametrize(
    ("upper", "lower"),
    [
        ((100, None), (250, 750)),
        ((100, 300), (250, None)),
        ((None, 300), (None, 750)),
    ],
)
def test_a_gap_that_cannot_be_known_is_not_made_up(
    upper: tuple[int | None, float | None], lower: tuple[int | None, float | None]
) -> None:
    assert loaded_gap_ns(room(*upper), room(*lower)) is None


@given(
    upper_ns=st.integers(50, 500),
    lower_ns=st.integers(50, 2000),
    upper_times=st.floats(1, 8),
    lower_times=st.floats(1, 8),
    per_ns=st.floats(0.5, 6),
)
def test_the_gap_is_no_more_than_it_truly_is(
    upper_ns: int, lower_ns: int, upper_times: float, lower_times: float, per_ns: float
) -> None:
    """Whatever the CPUs' clock, and however much more than alone each tier takes under load."""
    upper, lower = upper_ns * upper_times, lower_ns * lower_times
    truth = max(lower - upper, 1.0)
    pair = room(upper_ns, upper * per_ns), room(lower_ns, lower * per_ns)
    gap_ns = loaded_gap_ns(*pair)
    assert gap_ns is not None
    assert 1 <= gap_ns <= truth * (1 + 1e-6)
    if min(upper_times, lower_times) == 1:
        assert gap_ns == pytest.approx(truth, rel=1e-6)


def test_a_loaded_gap_decides_whether_a_move_is_worth_it() -> None:
    """Worth it by what was told, not by what is left of that under load; and the reverse."""
    rate = 0.8 * HOT_RATE / 1000
    told = [room(100, None), room(400, None)]
    assert moved(told, rate) == 10
    assert moved([room(100, 900), room(400, 1000)], rate) == 0
    assert moved([room(100, 300), room(200, 3000)], rate) == 10


# Placement


def moved(told: list[TierRoom], heat: float) -> float:
    usual = zip(rooms(100, 100), told, strict=True)
    both = [
        replace(one, latency_ns=other.latency_ns, loaded_cycles=other.loaded_cycles)
        for one, other in usual
    ]
    return pages_moved(placed(both, pieces((0, 10, heat, [0, 1]))), 1, 0)


def placed(
    room: list[TierRoom],
    made: NDArray[np.void],
    ways: frozenset[tuple[Rank, Rank]] = frozenset(),
    *,
    pinned: bool = False,
) -> Plan:
    return plan(
        [Target(pid=Pid(1), pieces=made, ceiling=np.inf, pinned=pinned)],
        room,
        POLICY,
        now_s=0.0,
        budget_bytes=GIB,
        closed=ways,
    )


def test_by_a_closed_way_nothing_moves_up_and_the_reason_is_told() -> None:
    made = pieces((0, 10, HOT_RATE, [0, 1, 0]), (10, 20, HOT_RATE, [0, 0, 1]))
    room = rooms(100, 100, 100)
    all_open = placed(room, made)
    assert (pages_moved(all_open, 1, 0), pages_moved(all_open, 2, 0)) == (10, 20)
    one = placed(room, made, frozenset({WAY}))
    assert (pages_moved(one, 1, 0), pages_moved(one, 2, 0)) == (0, 20)
    assert one.kept == {Kept.LOADED: 10 * PAGE_BYTES}
    both = placed(room, made, frozenset({WAY, (Rank(0), Rank(2))}))
    assert (pages_moved(both, 1, 0), pages_moved(both, 2, 0), pages_moved(both, 2, 1)) == (0, 0, 20)


def test_what_waits_for_a_closed_way_is_hot_by_the_gap_without_load() -> None:
    upper, lower = rooms(100, 100)
    room = [
        replace(upper, latency_ns=100, loaded_cycles=950.0),
        replace(lower, latency_ns=400, loaded_cycles=1000.0),
    ]
    made = pieces((0, 10, 0.8 * HOT_RATE / 1000, [0, 1]))
    assert placed(room, made).kept == {}
    assert placed(room, made, frozenset({WAY})).kept == {Kept.LOADED: 10 * PAGE_BYTES}


def test_a_pin_goes_before_the_load() -> None:
    made = pieces((0, 10, 0.0, [0, 1]))
    assert pages_moved(placed(rooms(100, 100), made, frozenset({WAY}), pinned=True), 1, 0) == 10


def test_what_a_full_tier_needs_still_makes_way() -> None:
    made = pieces((0, 10, 0.0, [1, 0]), (10, 10, HOT_RATE, [0, 1]))
    room = rooms(0, 100, headroom_pages=5)
    found = placed(room, made, frozenset({WAY}))
    assert (pages_moved(found, 0, 1), pages_moved(found, 1, 0)) == (5, 0)


# A machine whose fast tier cannot take it all

PAGES = 1000


class Queue(World):
    """A program, equally hot all over, that asks for more than either tier can give alone.

    A load waits as in a queue of one server: its latency alone, over the share of the bandwidth
    that is left. Both could answer in 1500 cycles, with 73 % of the pages in the fast one.
    """

    ALONE, BANDWIDTH, DEMAND = np.array([300.0, 600.0]), np.array([1.0, 0.5]), 1.1

    def __init__(self, *, is_watched: bool) -> None:
        rate = np.full(PAGES, 50.0)
        super().__init__(rate, np.ones(PAGES, np.int64), (2 * PAGES, 2 * PAGES), 1)
        self.is_watched, self.latencies, self.changes = is_watched, Latencies(), 0

    def share(self) -> NDArray[np.float64]:
        return np.bincount(self.tier, minlength=2) / PAGES

    def answers_in(self) -> NDArray[np.float64]:
        used = np.minimum(self.DEMAND * self.share() / self.BANDWIDTH, 0.98)
        return np.asarray(self.ALONE / (1 - used))

    def mean(self) -> float:
        return float(self.share() @ self.answers_in())

    def watch(self) -> None:
        """Samples 400 loads, as they take by chance."""
        tier = self.rng.choice(2, 400, p=self.share())
        seen = np.zeros(len(tier), LOAD)
        seen["address"] = tier * GIB
        seen["cycles"] = 1 + self.rng.exponential(self.answers_in()[tier])
        self.latencies = take_in(self.latencies, seen, TWO, now_s=self.now_s)
        told = [self.latencies.cycles_of(each) for each in (tier_of(0, 0), tier_of(1, 2))]
        before, self.closed = self.closed, closed(self.closed, told)
        self.changes += before != self.closed

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            if self.is_watched:
                self.watch()
            self.round(budget_pages=2)


def test_what_the_fast_tier_cannot_take_stays() -> None:
    blind, watched = Queue(is_watched=False), Queue(is_watched=True)
    for world in (blind, watched):
        world.run(800)
    assert blind.share()[0] == 1
    assert 0.7 < watched.share()[0] < 0.85
    assert watched.mean() < blind.mean() / 5
    moved = watched.moved_pages
    watched.run(400)
    assert watched.changes <= 3
    assert watched.moved_pages - moved < 0.02 * PAGES


# The daemon


@pytest.fixture
def pmu(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    return fake_pmu(monkeypatch)


class LoadedSampler(FakeSampler):
    """A fake of DAMON beside a PMU: what it samples of each node is as it is told to be."""

    def __init__(self, snapshots: Sequence[Accesses], machine: Machine, pmu: Hardware) -> None:
        super().__init__(snapshots, machine)
        self.pmu, self.cycles = pmu, (300, 700)

    def poll(self) -> list[Accesses]:
        memory = SOURCES["Intel, local memory"][0]
        FakeRing.written = b"".join(
            sampled(memory, n * GIB + PAGE_BYTES, cycles) for n, cycles in enumerate(self.cycles)
        ) * int(LEAST_LOADS)
        self.pmu.read([])
        self.loads = self.pmu.loads
        return super().poll()


def with_blocks(topology: Topology) -> Topology:
    blocks = range(GIB), range(GIB, 2 * GIB)
    pairs = zip(topology.nodes, blocks, strict=True)
    return replace(topology, nodes=tuple(replace(one, blocks=(own,)) for one, own in pairs))


def test_while_the_fast_tier_is_the_slower_one_nothing_is_moved_up(
    pmu: Hardware, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tierd")
    machine = Machine()
    machine.topology = with_blocks(machine.topology)
    machine.start(HOT, Memory(SPAN))
    sampler = LoadedSampler(half_hot(200), machine, pmu)
    sampler.cycles = 810, 640
    daemon = machine.daemon(sampler)
    assert not any(machine.rounds(daemon, 8))
    note = "dram answers in 810 cycles, cxl in 640: nothing is moved up from there to it"
    status = machine.told[-1]
    assert status["notes"][-1] == note
    assert [tier["loaded_cycles"] for tier in status["tiers"]] == [810, 640]
    assert [tier["closed_to"] for tier in status["tiers"]] == [["cxl"], []]
    assert status["tiers"][0]["loads"] >= LEAST_LOADS
    scraped = metrics.as_text({**status, "cxl": CXL_ERRORS}, {})
    assert 'tierd_tier_closed{source="cxl",tier="dram"} 1.0' in scraped
    assert 'tierd_tier_loaded_cycles{tier="cxl"} 640.0' in scraped
    assert set(status["kept"]) == {Kept.LOADED}
    assert [record.message for record in caplog.records].count(note) == 1

    sampler.cycles = 300, 640
    assert any(machine.rounds(daemon, 60))
    assert note not in machine.told[-1]["notes"]
    assert machine.told[-1]["tiers"][0]["closed_to"] == []
    assert "moves up from cxl to dram go on" in caplog.text
    assert machine.memory[HOT].share(SPAN, DRAM) > 0


def test_with_other_tiers_all_ways_are_open_until_loads_tell(pmu: Hardware) -> None:
    machine = Machine()
    daemon = machine.daemon(LoadedSampler(half_hot(20), machine, pmu))
    daemon.closed = frozenset({WAY})
    daemon.retier(replace(machine.topology, tiers=machine.topology.tiers[:1]), None)
    assert not daemon.closed


def test_memory_that_has_come_is_known_by_its_blocks(pmu: Hardware) -> None:
    machine = Machine()
    daemon = machine.daemon(LoadedSampler(half_hot(20), machine, pmu))
    machine.rounds(daemon, 2)
    assert [tier["loads"] for tier in machine.told[-1]["tiers"]] == [0, 0]
    daemon.retier(with_blocks(machine.topology), daemon.mover)
    machine.rounds(daemon, 2)
    assert all(tier["loads"] > LEAST_LOADS for tier in machine.told[-1]["tiers"])
