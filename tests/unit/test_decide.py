# SPDX-License-Identifier: Apache-2.0
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.world import AGGREGATION_S, BASE, World, mapped, snapshot, window
from tierd.bulk import PIECE, Plan, Report, Target
from tierd.decide.explain import REASONS, Why, explain
from tierd.decide.heat import coalesce, fold, of_single_pages, overlay, rates, score
from tierd.decide.lately import newly_cold, newly_hot
from tierd.decide.placement import plan
from tierd.decide.settle import settle
from tierd.decide.steps import times_the_mean
from tierd.decide.worth import warm_from, worthwhile
from tierd.model import KEPT_CODE, PAGE_BYTES, Kept, Outcome, Pid, Policy, Rank, Tenant, TierRoom

POLICY = Policy()
FILLING = replace(POLICY, room_horizon_s=600.0)
"""Gives what is warm the room that is left."""
MIB = 1 << 20
HOT = worthwhile(POLICY, POLICY.latency_gap_ns) * 1000


def pieces(*rows: tuple[int, int, float, Sequence[float]], base: int = BASE) -> NDArray[np.void]:
    """Pieces from (first page, pages, heat, shares by tier)."""
    made = np.zeros(len(rows), PIECE)
    for piece, (first, count, heat, shares) in zip(made, rows, strict=True):
        piece["start"] = base + first * PAGE_BYTES
        piece["end"] = base + (first + count) * PAGE_BYTES
        piece["short"] = piece["long"] = heat
        piece["resident"][: len(shares)] = shares
        piece["held_until_s"] = piece["moved_s"] = piece["zoomed_s"] = -np.inf
    return made


def per_byte(*per_page: float) -> NDArray[np.float32]:
    return np.array([each / PAGE_BYTES for each in per_page], np.float32)


def rooms(*free_pages: int, headroom_pages: int = 0) -> list[TierRoom]:
    return [
        TierRoom(
            rank=Rank(rank),
            capacity_bytes=1 << 30,
            free_bytes=pages * PAGE_BYTES,
            headroom_bytes=headroom_pages * PAGE_BYTES if rank == 0 else 0,
            latency_ns=None,
        )
        for rank, pages in enumerate(free_pages)
    ]


def decide(
    made: NDArray[np.void],
    room: list[TierRoom],
    *,
    budget_pages: int = 1 << 20,
    now_s: float = 0.0,
    ceiling: float = np.inf,
    sorted_by_kernel: bool = False,
    policy: Policy = POLICY,
) -> Plan:
    return plan(
        [Target(pid=Pid(1), pieces=made, ceiling=ceiling)],
        room,
        policy,
        now_s=now_s,
        budget_bytes=budget_pages * PAGE_BYTES,
        sorted_by_kernel=sorted_by_kernel,
    )


def pages_moved(made: Plan, source: int, destination: int) -> float:
    moves = made.moves
    pair = (moves["source"] == source) & (moves["destination"] == destination)
    return float(moves["bytes"][pair].sum() / PAGE_BYTES)


# Heat


def test_rate_is_found_again_from_the_share_of_intervals() -> None:
    accesses = snapshot([0, 1, 2, 3], [0, 10, 20])
    per_page_s = rates(accesses) * PAGE_BYTES
    assert per_page_s[0] == 0
    assert per_page_s[1] == pytest.approx(-np.log(0.5) / 0.02, rel=1e-5)
    assert per_page_s[2] == pytest.approx(-np.log(1 / 40) / 0.02, rel=1e-5)


@given(cut=st.lists(st.integers(1, 999), max_size=30), count=st.integers(0, 20))
def test_heat_does_not_depend_on_the_cut(cut: list[int], count: int) -> None:
    edges = sorted({0, 1000, *cut})
    whole = fold(np.zeros(0, PIECE), [snapshot([0, 1000], [count])], mapped(1000), POLICY)
    regions = snapshot(edges, [count] * (len(edges) - 1))
    parts = fold(np.zeros(0, PIECE), [regions], mapped(1000), POLICY)
    assert len(parts) == len(whole) == 1
    assert parts["short"] == pytest.approx(whole["short"], rel=1e-5)


@given(
    first=st.lists(st.integers(1, 999), max_size=10),
    second=st.lists(st.integers(1, 999), max_size=10),
    data=st.data(),
)
def test_snapshots_may_be_taken_in_together(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    """Heat is the same as by one after the other; it may be parted finer."""
    seen = []
    for at_s, cuts in ((AGGREGATION_S, first), (2 * AGGREGATION_S, second)):
        edges = sorted({0, 1000, *cuts})
        counts = [data.draw(st.integers(0, 20)) for _ in edges[1:]]
        seen.append(snapshot(edges, counts, at_s))
    together = fold(np.zeros(0, PIECE), seen, mapped(1000), POLICY)
    each = np.zeros(0, PIECE)
    for accesses in seen:
        each = fold(each, [accesses], mapped(1000), POLICY)
    for name in ("short", "long"):
        heats = [(p[name] * (p["end"] - p["start"])).sum() for p in (together, each)]
        assert heats[0] == pytest.approx(heats[1], rel=1e-5)


def test_memory_that_was_mapped_between_two_snapshots_was_idle_before() -> None:
    seen = [snapshot([0, 10], [20], 0), snapshot([0, 10, 20], [20, 20], AGGREGATION_S)]
    old, new = fold(np.zeros(0, PIECE), seen, mapped(20), POLICY)
    once = fold(np.zeros(0, PIECE), seen[1:], mapped(20), POLICY)
    assert new["short"] == once["short"][0] < old["short"]


def test_averages_follow_with_their_time_constants() -> None:
    made = np.zeros(0, PIECE)
    for n in range(5):
        made = fold(made, [snapshot([0, 10], [10], n * AGGREGATION_S)], mapped(10), POLICY)
    rate = rates(snapshot([0, 10], [10]))[0]
    elapsed = 5 * AGGREGATION_S
    assert made["short"][0] == pytest.approx(rate * -np.expm1(-elapsed / POLICY.short_s), rel=1e-4)
    assert made["long"][0] == pytest.approx(rate * -np.expm1(-elapsed / POLICY.long_s), rel=1e-4)


def test_heat_outside_of_the_mappings_is_forgotten() -> None:
    made = fold(np.zeros(0, PIECE), [snapshot([0, 100], [20])], mapped(40), POLICY)
    assert made["end"].max() == BASE + 40 * PAGE_BYTES


def test_a_region_of_one_page_cuts_out_one_page() -> None:
    made = fold(
        np.zeros(0, PIECE), [snapshot([0, 500, 501, 1000], [0, 20, 0])], mapped(1000), POLICY
    )
    hot = made[score(made) > 0]
    assert [(hot["start"][0] - BASE) // PAGE_BYTES, len(hot)] == [500, 1]


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1e3)), min_size=1, max_size=200))
def test_joining_keeps_the_heat_and_the_bound(parts: list[tuple[int, float]]) -> None:
    first, rows = 0, []
    for length, per_page_s in parts:
        rows.append((first, length, per_page_s / PAGE_BYTES, [1.0]))
        first += length
    before = pieces(*rows)
    after = coalesce(before, 0.0, most=8)

    def total(made: NDArray[np.void]) -> float:
        return float((score(made).astype(float) * (made["end"] - made["start"])).sum())

    assert total(after) == pytest.approx(total(before), rel=1e-4, abs=1e-6)
    assert len(after) <= max(8, len(before) // 4 + 8)
    assert (after["start"][1:] == after["end"][:-1]).all()


def test_huge_pages_have_the_heat_of_each_of_their_pages() -> None:
    """But for those that were accessed all the time, and by how much nobody knows."""
    made = pieces((0, 512, HOT, [1]), (512, 512, HOT, [1]), (1024, 512, 1.9 * HOT, [1]))
    assert of_single_pages(made, 2 * HOT) is made
    made["huge"] = [False, True, True]
    by_pages = of_single_pages(made, 2 * HOT)
    for name in ("short", "long"):
        assert by_pages[name] == pytest.approx([HOT, HOT / 512, 1.9 * HOT])
        assert made[name] == pytest.approx([HOT, HOT, 1.9 * HOT])


def test_huge_pages_are_not_joined_with_others() -> None:
    made = pieces((0, 512, HOT, [1]), (512, 512, HOT, [1]), (1024, 512, HOT, [1]))
    made["huge"] = [False, True, True]
    joined = coalesce(made, 0.0, most=8)
    assert ((joined["start"] - BASE) // PAGE_BYTES).tolist() == [0, 512]
    assert joined["huge"].tolist() == [False, True]


def test_overlay_cuts_at_every_edge() -> None:
    a, b = pieces((0, 10, 0, [])), pieces((5, 10, 0, []))
    start, end, (in_a, in_b) = overlay(a, b)
    assert ((start - BASE) // PAGE_BYTES).tolist() == [0, 5, 10]
    assert ((end - BASE) // PAGE_BYTES).tolist() == [5, 10, 15]
    assert in_a.tolist() == [0, 0, -1]
    assert in_b.tolist() == [-1, 0, 0]


# Placement


def test_hottest_bytes_take_the_room_first() -> None:
    made = decide(
        pieces((0, 100, HOT, [0, 1]), (100, 100, 3 * HOT, [0, 1]), (200, 100, 2 * HOT, [0, 1])),
        rooms(150, 1000),
    )
    assert ((made.moves["start"] - BASE) // PAGE_BYTES).tolist() == [100, 200]
    assert (made.moves["bytes"] // PAGE_BYTES).tolist() == [100, 50]
    assert made.kept == {Kept.NO_ROOM: 150 * PAGE_BYTES}
    assert made.kept_codes.tolist() == [KEPT_CODE[Kept.NO_ROOM], 0, KEPT_CODE[Kept.NO_ROOM]]


def test_what_is_looked_at_soon_waits_where_not_all_finds_room() -> None:
    """The first is clearly hotter than what is left out, and the third is known by its pages."""
    made = pieces(*((100 * n, 100, heat * HOT, [0, 1]) for n, heat in enumerate((5, 1.3, 1.2, 1))))
    target = Target(
        pid=Pid(1), pieces=made, ceiling=np.inf, awaits_look=np.array([True, True, False, True])
    )

    def rising(free_pages: int) -> tuple[list[int], dict[Kept, int]]:
        found = plan([target], rooms(free_pages, 1000), POLICY, now_s=0.0, budget_bytes=1 << 40)
        assert found.moves["destination"].tolist() == [0] * len(found.moves)
        first = (found.moves["start"] - BASE) // PAGE_BYTES
        return first.tolist(), {why: size // PAGE_BYTES for why, size in found.kept.items()}

    assert rising(300) == ([0, 200], {Kept.LOOK: 100, Kept.NO_ROOM: 100})
    assert rising(400) == ([0, 100, 200, 300], {})


def test_demotions_come_before_the_promotions_that_need_their_room() -> None:
    made = decide(pieces((0, 100, 0, [1]), (100, 60, HOT, [0, 1])), rooms(10, 1000))
    assert made.moves["destination"].tolist() == [1, 0]
    assert (made.moves["bytes"] // PAGE_BYTES).tolist() == [50, 60]


def test_cold_bytes_stay_where_nobody_needs_the_room() -> None:
    made = decide(pieces((0, 100, 0, [1]), (100, 60, HOT, [0, 1])), rooms(60, 1000))
    assert pages_moved(made, 0, 1) == 0


def test_each_piece_is_explained() -> None:
    made = pieces(
        *((0, 100, HOT, [1]), (100, 100, 0, [0, 1]), (200, 100, HOT, [0, 1])),
        *((300, 100, 2 * HOT, [0, 1]), (400, 100, HOT, [0, 1]), (500, 100, HOT, [])),
    )
    made["probed_s"][-1] = -np.inf
    made["held_until_s"][4] = 9.0
    made["kept"] = decide(made, rooms(100, 1000), now_s=5).kept_codes
    assert [REASONS[why] for why in explain(made, np.inf, POLICY)] == [
        Why.FASTEST,
        Why.COLD,
        Kept.NO_ROOM,
        Why.RISING,
        Kept.HELD,
        Why.UNSEEN,
    ]


def test_near_equals_do_not_swap_places() -> None:
    made = decide(pieces((0, 100, 10 * HOT, [1]), (100, 100, 14 * HOT, [0, 1])), rooms(0, 1000))
    assert not len(made.moves)
    made = decide(pieces((0, 100, 10 * HOT, [1]), (100, 100, 16 * HOT, [0, 1])), rooms(0, 1000))
    assert pages_moved(made, 1, 0) == 100


@pytest.mark.parametrize(("times", "moves"), [(0.9, 0), (1.1, 0), (3, 1)])
def test_what_does_not_pay_back_beyond_doubt_stays(times: float, moves: int) -> None:
    least = worthwhile(POLICY, POLICY.latency_gap_ns)
    made = decide(pieces((0, 9, times * least, [0, 1])), rooms(99, 99))
    assert len(made.moves) == moves


def test_what_is_hot_beyond_measure_moves_whatever_it_costs() -> None:
    least = worthwhile(POLICY, POLICY.latency_gap_ns)
    lukewarm = pieces((0, 9, 0.5 * least, [0, 1]))
    for ceiling, moves in ((0.6 * least * 4, 0), (0.1 * least * 4, 1)):
        made = decide(lukewarm, rooms(99, 99), ceiling=ceiling)
        assert len(made.moves) == moves


def test_a_costlier_move_needs_hotter_bytes() -> None:
    cheap, dear = (worthwhile(replace(POLICY, move_cost_ns=ns), 100) for ns in (1e3, 1e5))
    assert dear == pytest.approx(100 * cheap)


def test_held_pieces_neither_move_nor_make_way() -> None:
    made = pieces((0, 100, 0, [1]), (100, 100, HOT, [0, 1]))
    made["held_until_s"] = [9.0, -np.inf]
    assert not len(decide(made, rooms(0, 1000), now_s=5).moves)
    made["held_until_s"] = [-np.inf, 9.0]
    refused = decide(made, rooms(0, 1000), now_s=5)
    assert not len(refused.moves)
    assert refused.kept == {Kept.HELD: 100 * PAGE_BYTES}
    assert pages_moved(decide(made, rooms(0, 1000), now_s=10), 1, 0) == 100


@pytest.mark.parametrize(
    ("rose", "refusals", "swings", "rises"),
    [(1, 0, 0, True), (-1, 0, 0, False), (1, 1, 0, False), (1, 0, 1, False)],
    ids=["risen", "sunk", "refused", "swung"],
)
def test_what_has_just_risen_may_rise_on(
    rose: int, refusals: int, swings: int, rises: bool
) -> None:
    """But what was left behind in the slowest tier is not tried again at once."""
    made = pieces((0, 100, HOT, [0, 0.7, 0.3]))
    made["held_until_s"], made["rose"] = 5, rose
    made["refusals"], made["swings"] = refusals, swings
    assert ways(decide(made, rooms(500, 500, 500))) == ([(1, 0)] if rises else [])


def test_what_rests_makes_way_and_does_not_rise() -> None:
    resting = Target(
        pid=Pid(1), pieces=pieces((0, 9, 0, [1]), (9, 9, HOT, [0, 1])), ceiling=np.inf, rests=True
    )
    other = Target(pid=Pid(2), pieces=pieces((0, 9, HOT, [0, 1])), ceiling=np.inf)
    made = plan([resting, other], rooms(0, 99), POLICY, now_s=0, budget_bytes=1 << 30)
    assert made.moves[["target", "destination"]].tolist() == [(0, 1), (1, 0)]
    assert made.kept == {Kept.RESTS: 9 * PAGE_BYTES}
    held_up = plan(
        [replace(resting, pinned=True)], rooms(9, 99), POLICY, now_s=0, budget_bytes=1 << 30
    )
    assert pages_moved(held_up, 1, 0) == 9, "who pinned it knows better"


@pytest.mark.parametrize(("promotable", "pages"), [(0, 0), (0.5, 25), (1, 50)])
def test_a_share_of_the_budget_may_be_kept_from_moves_up(promotable: float, pages: int) -> None:
    target = Target(pid=Pid(1), pieces=pieces((0, 100, HOT, [0, 1])), ceiling=np.inf)
    room, budget = rooms(500, 0), 50 * PAGE_BYTES
    made = plan([target], room, POLICY, now_s=0, budget_bytes=budget, promotable=promotable)
    assert pages_moved(made, 1, 0) == pages


def test_headroom_is_restored_from_cold_bytes_only() -> None:
    cold_and_hot = pieces((0, 100, 0, [1]), (100, 100, HOT, [1]))
    made = decide(cold_and_hot, rooms(10, 1000, headroom_pages=150))
    assert pages_moved(made, 0, 1) == 100
    enough = decide(cold_and_hot, rooms(80, 1000, headroom_pages=150))
    assert not len(enough.moves)


def test_a_deep_shortage_is_mended_before_anything_rises() -> None:
    made = decide(
        pieces((0, 900, 0, [1]), (900, 100, HOT, [0, 1])), rooms(-300, 1000), budget_pages=200
    )
    assert (pages_moved(made, 0, 1), pages_moved(made, 1, 0)) == (200, 0)


def test_within_the_headroom_a_page_makes_way_for_a_page() -> None:
    """What is missing of the headroom is not demoted for the sake of one page."""
    one_is_hot = pieces((0, 200, 0, [1]), (200, 1, HOT, [0, 1]))
    made = decide(one_is_hot, rooms(100, 1000, headroom_pages=150))
    assert (pages_moved(made, 0, 1), pages_moved(made, 1, 0)) == (1, 1)


def test_what_has_cooled_does_not_rise_for_its_past() -> None:
    was_hot = pieces((0, 100, HOT, [0, 1]), (100, 100, HOT, [1]))
    was_hot["short"] = HOT / 1e6
    made = decide(was_hot, rooms(1000, 1000))
    assert not len(made.moves), "nor does it make way while nobody needs the room"


def test_nothing_is_demoted_into_a_full_tier() -> None:
    made = decide(pieces((0, 100, 0, [1]), (100, 100, HOT, [0, 1])), rooms(0, 30))
    assert (pages_moved(made, 0, 1), pages_moved(made, 1, 0)) == (30, 30)


def test_what_the_kernel_has_sorted_stays_as_it_is() -> None:
    """Two equal mixtures, one of which DAMON has seen twice as often."""
    made = pieces((0, 100, HOT, (0.5, 0.5)), (100, 100, 2 * HOT, (0.5, 0.5)))
    assert len(decide(made, rooms(0, 1000)).moves)
    assert not len(decide(made, rooms(0, 1000), sorted_by_kernel=True).moves)


def test_what_is_alike_is_moved_beside_the_kernel_too() -> None:
    made = pieces((0, 100, 0.0, (1,)), (100, 100, HOT, (0, 1)), (200, 100, 0.0, (0.1, 0.9)))
    plan = decide(made, rooms(0, 1000), sorted_by_kernel=True)
    assert pages_moved(plan, 1, 0) == pages_moved(plan, 0, 1) == 100


def test_what_is_left_to_the_kernel_does_not_rise() -> None:
    """Neither as hot memory nor, being warm, into room that is left; what is pinned does."""
    made = pieces((0, 9, 2 * HOT, [0, 1]), (9, 9, HOT, [0, 1]), (18, 9, HOT / 2000, [0, 1]))
    target = Target(pid=Pid(1), pieces=made, ceiling=np.inf)
    first, last = np.array([True, False, False]), np.array([False, False, True])

    def rising(target: Target) -> tuple[list[int], dict[Kept, int]]:
        found = plan([target], rooms(100, 0), FILLING, now_s=0, budget_bytes=1 << 30)
        start = (found.moves["start"] - BASE) // PAGE_BYTES
        return sorted(start.tolist()), {why: size // PAGE_BYTES for why, size in found.kept.items()}

    assert rising(target) == ([0, 9, 18], {})
    assert rising(replace(target, unsorted=first)) == ([9], {Kept.SORTS: 9})
    assert rising(replace(target, unsorted=last)) == ([0, 9], {})
    assert rising(replace(target, unsorted=first, pinned=first)) == ([0, 9, 18], {})


def test_what_waits_for_the_kernel_fills_room_and_displaces_nobody() -> None:
    """After what is hot, hottest first; what is held, or too cold for a move, is not among it."""
    made = pieces(
        (0, 50, HOT, [0, 1]),
        (50, 50, 2 * HOT, [0, 1]),
        (100, 30, HOT, [0, 1]),
        (130, 50, 3 * HOT, [0, 1]),
        (180, 50, HOT / 2000, [0, 1]),
        (230, 50, 0.0, [1]),
    )
    made["held_until_s"][3] = 10.0
    waits = np.array([True, True, False, True, True, False])
    target = Target(pid=Pid(1), pieces=made, ceiling=np.inf, unsorted=waits)

    def filled(room: int, *, fills: bool) -> tuple[dict[int, int], Plan]:
        told = [replace(target, fills=fills)]
        found = plan(told, rooms(room, 1000), POLICY, now_s=0, budget_bytes=1 << 30)
        up = found.moves[found.moves["destination"] == 0]
        starts, sizes = (up["start"] - BASE) // PAGE_BYTES, up["bytes"] // PAGE_BYTES
        return dict(zip(starts.tolist(), sizes.tolist(), strict=True)), found

    assert filled(110, fills=False)[0] == {100: 30}
    rises, found = filled(110, fills=True)
    assert rises == {100: 30, 50: 50, 0: 30}
    assert not (found.moves["destination"] == 1).any()
    assert found.kept[Kept.SORTS] == (20 + 50) * PAGE_BYTES
    assert [bool(code) for code in found.kept_codes] == [True, False, False, True, False, False]
    rises, found = filled(0, fills=True)
    assert rises == {100: 30}, "as hot memory does, for which others make way"
    assert pages_moved(found, 0, 1) == 30


def test_what_is_spare_does_not_rise_to_the_fastest_tier() -> None:
    """But to one in between, and being warm, into room that is left."""
    made = pieces((0, 9, 2 * HOT, [0, 0, 1]), (9, 9, HOT, [0, 0, 1]), (18, 9, HOT, [0, 1]))
    target = Target(pid=Pid(1), pieces=made, ceiling=np.inf, spare=np.array([False, True, True]))

    def placed(target: Target, policy: Policy = POLICY) -> Plan:
        return plan([target], rooms(100, 100, 0), policy, now_s=0, budget_bytes=1 << 30)

    kept = placed(target)
    assert [pages_moved(kept, *way) for way in ((2, 0), (2, 1), (1, 0))] == [9, 9, 0]
    assert kept.kept == {Kept.SPARE: 18 * PAGE_BYTES}
    assert pages_moved(placed(replace(target, pinned=target.spare)), 1, 0) == 9
    assert pages_moved(placed(target, FILLING), 1, 0) == 9


def test_beside_the_kernel_nothing_is_demoted_for_room_alone() -> None:
    made = pieces((0, 100, 0.0, (1,)))
    short = rooms(0, 1000, headroom_pages=50)
    assert len(decide(made, short).moves)
    assert not len(decide(made, short, sorted_by_kernel=True).moves)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=4).filter(any))
def test_the_parts_of_a_sorted_piece_have_its_mean(pages: list[int]) -> None:
    size = np.array([pages], np.float64)
    times = times_the_mean(size)
    assert (times * size).sum() == pytest.approx(size.sum())
    assert np.all(np.diff(times[size > 0]) < 0)


def test_three_tiers_cascade() -> None:
    made = decide(
        pieces((0, 50, 0, [1]), (50, 50, 0, [0, 1]), (100, 50, HOT, [0, 0, 1])), rooms(0, 0, 500)
    )
    assert pages_moved(made, 2, 0) == 50
    assert pages_moved(made, 0, 1) + pages_moved(made, 0, 2) == 50


def ways(made: Plan) -> list[tuple[int, int]]:
    return [(int(move["source"]), int(move["destination"])) for move in made.moves]


def test_what_makes_way_takes_the_place_of_what_is_colder() -> None:
    made = decide(
        pieces((0, 50, HOT, [1]), (50, 50, 0, [0, 1]), (100, 50, 4 * HOT, [0, 0, 1])),
        rooms(0, 0, 500),
    )
    assert ways(made) == [(1, 2), (0, 1), (2, 0)]
    assert (made.moves["bytes"] == 50 * PAGE_BYTES).all()


@pytest.mark.parametrize("headroom_pages", [0, 60, 200])
def test_what_lies_a_tier_apart_changes_places(headroom_pages: int) -> None:
    """Through half of what is to stay free on the lower tier."""
    made = pieces((0, 50, HOT, [1]), (50, 50, 4 * HOT, [0, 1]), (100, 500, HOT, [0, 1]))
    upper, middle, lower = rooms(0, headroom_pages, 500)
    middle = replace(middle, headroom_bytes=middle.free_bytes)
    moved = decide(made, [upper, middle, lower])
    assert pages_moved(moved, 1, 0) == 50
    assert pages_moved(moved, 0, 1) == min(headroom_pages // 2, 50)
    assert pages_moved(moved, 0, 1) + pages_moved(moved, 0, 2) == 50


def flow(made: Plan) -> dict[tuple[int, int], float]:
    return {way: pages_moved(made, *way) for way in set(ways(made))}


def carry_out(made: NDArray[np.void], planned: Plan, room: list[TierRoom]) -> list[TierRoom]:
    """Moves as planned; returns what is free then."""
    free = [tier.free_bytes for tier in room]
    for move in planned.moves:
        piece = made[made["start"] == move["start"]][0]
        moved, size = int(move["bytes"]), int(piece["end"] - piece["start"])
        resident = made["resident"][made["start"] == move["start"]][0]
        resident[move["source"]] -= moved / size
        resident[move["destination"]] += moved / size
        made["resident"][made["start"] == move["start"]] = resident
        free[move["source"]] += moved
        free[move["destination"]] -= moved
    return [replace(tier, free_bytes=now) for tier, now in zip(room, free, strict=True)]


PLACES = st.lists(
    st.tuples(st.integers(1, 100), st.sampled_from([0.0, 1.0, 4.0, 16.0, 64.0]), st.integers(0, 2)),
    min_size=1,
    max_size=15,
)


def on_three_tiers(places: list[tuple[int, float, int]]) -> NDArray[np.void]:
    """Pieces of these numbers of pages, times as hot as HOT, on these tiers."""
    first, rows = 0, []
    for length, times, tier in places:
        rows.append((first, length, times * HOT, [float(tier == rank) for rank in range(3)]))
        first += length
    return pieces(*rows)


@given(places=PLACES, free=st.tuples(*[st.integers(0, 150)] * 2))
def test_three_tiers_come_to_rest_sorted_by_heat(
    places: list[tuple[int, float, int]], free: tuple[int, int]
) -> None:
    """Whatever lies where: nothing hot is left below what is cold, and then nothing moves."""
    made, room = on_three_tiers(places), rooms(*free, 2000)
    for _ in range(10):
        planned = decide(made, room)
        if not len(planned.moves):
            break
        room = carry_out(made, planned, room)
        assert min(tier.free_bytes for tier in room) >= -PAGE_BYTES
    else:
        pytest.fail("it goes on moving")
    heat, on = score(made), made["resident"][:, :3] * (made["end"] - made["start"])[:, None]
    for rank in (0, 1):
        lowest = heat[on[:, rank] >= PAGE_BYTES].min(initial=np.inf)
        below = heat[(on[:, rank + 1 :] >= PAGE_BYTES).any(axis=1)].max(initial=0)
        has_room = room[rank].free_bytes >= PAGE_BYTES
        assert below <= (0 if has_room else lowest) * (1 + 1e-6)


@given(
    places=PLACES,
    free=st.tuples(*[st.integers(-20, 150)] * 2),
    headroom=st.integers(0, 100),
    budget=st.integers(0, 1500),
)
def test_nothing_passes_what_is_colder_on_its_way_down(
    places: list[tuple[int, float, int]], free: tuple[int, int], headroom: int, budget: int
) -> None:
    made, room = on_three_tiers(places), rooms(free[0], free[1] + headroom, 2000)
    room[1] = replace(room[1], headroom_bytes=headroom * PAGE_BYTES)
    planned = decide(made, room, budget_pages=budget)
    moves, slack = planned.moves, PAGE_BYTES * (len(planned.moves) + 1)
    assert moves["bytes"].sum() <= budget * PAGE_BYTES + slack
    least = min(room[1].free_bytes, headroom * PAGE_BYTES / 2)
    free_bytes = room[1].free_bytes
    for move in moves:
        free_bytes += int(move["bytes"]) * (int(move["source"] == 1) - (move["destination"] == 1))
        assert free_bytes >= least - slack
    passes = (moves["source"] == 0) & (moves["destination"] == 2)
    if not passes.any() or moves["bytes"].sum() >= budget * PAGE_BYTES - slack:
        return
    carry_out(made, planned, room)
    size = (made["end"] - made["start"]) * made["resident"][:, 1]
    came = np.isin(made["start"], moves["start"][moves["destination"] == 1])
    stays = score(made)[(size >= slack) & ~came]
    hottest = moves["gain"][passes].max()
    assert hottest <= POLICY.hysteresis * stays.min(initial=np.inf)


HEATS = st.floats(0, 100 * HOT)
ROWS = st.lists(
    st.tuples(st.integers(1, 300), HEATS, st.floats(0, 1), st.booleans()), min_size=1, max_size=40
)


def _rows(drawn: list[tuple[int, float, float, bool]]) -> NDArray[np.void]:
    first, rows = 0, []
    for length, heat, fast, touched in drawn:
        rows.append((first, length, heat, [fast, (1 - fast) * touched]))
        first += length
    return pieces(*rows)


@given(drawn=ROWS, free=st.integers(-50, 500), low=st.integers(0, 500), budget=st.integers(0, 600))
def test_no_plan_exceeds_budget_or_room(
    drawn: list[tuple[int, float, float, bool]], free: int, low: int, budget: int
) -> None:
    made = decide(_rows(drawn), rooms(free, low), budget_pages=budget)
    up, down = pages_moved(made, 1, 0), pages_moved(made, 0, 1)
    slack = len(made.moves) + 1e-6
    assert up + down <= budget + slack
    assert down <= low + slack
    assert up <= max(free, 0) + down + slack


@given(drawn=ROWS, free=st.integers(0, 500), split=st.integers(0, 40), seed=st.integers(0, 9))
def test_the_order_of_input_does_not_matter(
    drawn: list[tuple[int, float, float, bool]], free: int, split: int, seed: int
) -> None:
    made = _rows(drawn)
    heats = np.arange(1, len(made) + 1) * HOT / 7
    made["short"] = made["long"] = np.random.default_rng(seed).permutation(heats)
    targets = [
        Target(pid=Pid(1), pieces=made[:split], ceiling=np.inf),
        Target(pid=Pid(2), pieces=made[split:], ceiling=np.inf),
    ]

    def moved(order: list[Target]) -> set[tuple[int, ...]]:
        result = plan(order, rooms(free, 400), POLICY, now_s=0, budget_bytes=300 * PAGE_BYTES)
        return {
            (
                result.pids[m["target"]],
                *(int(m[n]) for n in ("source", "destination", "start", "end")),
            )
            for m in result.moves
        }

    assert moved(targets) == moved(targets[::-1])


# Settling


def report(made: Plan, *outcomes: dict[Outcome, int], reached: list[int]) -> Report:
    pages = np.zeros((len(made.moves), len(Outcome)), np.int64)
    for row, counts in zip(pages, outcomes, strict=True):
        for outcome, count in counts.items():
            row[outcome] = count
    at = np.array([BASE + page * PAGE_BYTES for page in reached], np.uint64)
    return Report(plan=made, pages=pages, reached=at, busy_ns=1)


def test_a_move_that_stopped_half_way_is_settled_up_to_there() -> None:
    before = pieces((0, 100, HOT, [0, 1]))
    made = decide(before, rooms(40, 0))
    after = settle(before, report(made, {Outcome.MOVED: 40}, reached=[40]), 0, POLICY, now_s=1)
    assert ((after["end"] - BASE) // PAGE_BYTES).tolist() == [40, 100]
    assert after["resident"][:, :2].tolist() == [[1, 0], [0, 1]]
    assert after["held_until_s"].tolist() == [1 + POLICY.dwell_s, -np.inf]


def test_refusals_are_tried_again_ever_more_rarely() -> None:
    made, now_s, waits = pieces((0, 100, HOT, [0, 1])), 0.0, []
    for _ in range(10):
        refused = decide(made, rooms(500, 0), now_s=now_s)
        assert len(refused.moves) == 1
        counts = {Outcome.BUSY: 100}
        made = settle(made, report(refused, counts, reached=[100]), 0, POLICY, now_s=now_s)
        waits.append(float(made["held_until_s"][0]) - now_s)
        now_s = float(made["held_until_s"][0])
    assert waits[:3] == [10, 20, 40]
    assert max(waits) == POLICY.retry_most_s


def swing(made: NDArray[np.void], *, now_s: float) -> NDArray[np.void]:
    """Up if it lies below, else down since it is cold now and the tier too full."""
    below = bool(made["resident"][0, 1] > 0)
    made["short"] = made["long"] = HOT if below else 0
    room = rooms(500, 0) if below else rooms(0, 500, headroom_pages=500)
    chosen = decide(made, room, now_s=now_s)
    assert pages_moved(chosen, *((1, 0) if below else (0, 1))) == 100
    counts = report(chosen, {Outcome.MOVED: 100}, reached=[100])
    return settle(made, counts, 0, POLICY, now_s=now_s)


def test_what_swings_back_rests_ever_longer() -> None:
    made, now_s, rests = pieces((0, 100, HOT, [0, 1])), 0.0, []
    for _ in range(20):
        made = swing(made, now_s=now_s)
        rests.append(float(made["held_until_s"][0]) - now_s)
        now_s = float(made["held_until_s"][0])
    assert rests[:8] == [POLICY.dwell_s, 10, POLICY.dwell_s, 20, POLICY.dwell_s, 40, 5, 80]
    assert max(rests) == POLICY.retry_most_s
    made["short"] = made["long"] = HOT
    assert decide(made, rooms(500, 500), now_s=now_s - 1).kept == {Kept.SWINGS: 100 * PAGE_BYTES}


@pytest.mark.parametrize(("seen", "swings"), [(6, 0), (1, 1)])
def test_what_has_won_back_its_moves_may_come_again(seen: int, swings: int) -> None:
    """Both moves cost 80 accesses; 5 seconds of 18 or 3 accesses each are seen."""
    made, now_s = swing(pieces((0, 100, HOT, [0, 1])), now_s=0), 0.0
    while now_s < POLICY.dwell_s:
        now_s += AGGREGATION_S
        made = fold(made, [snapshot([0, 100], [seen], now_s)], mapped(100), POLICY)
    assert swing(made, now_s=now_s)["swings"].tolist() == [swings]


def test_a_move_the_same_way_is_no_swing() -> None:
    made = pieces((0, 100, HOT, [0, 0, 1]))
    for now_s, free in ((0.0, (0, 500, 0)), (POLICY.dwell_s, (500, 0, 0))):
        chosen = decide(made, rooms(*free), now_s=now_s)
        counts = report(chosen, {Outcome.MOVED: 100}, reached=[100])
        made = settle(made, counts, 0, POLICY, now_s=now_s)
    assert (made["resident"][0, 0], made["rose"][0], made["swings"][0]) == (1, 1, 0)


@pytest.mark.parametrize(("stays_s", "swings"), [(POLICY.horizon_s - 1, 1), (POLICY.horizon_s, 0)])
def test_what_stayed_for_a_horizon_has_not_swung(stays_s: float, swings: int) -> None:
    made = swing(pieces((0, 100, HOT, [0, 1])), now_s=0)
    back_s = POLICY.dwell_s + stays_s + AGGREGATION_S
    made = fold(made, [snapshot([0, 100], [0], back_s)], mapped(100), POLICY)
    assert swing(made, now_s=back_s)["swings"].tolist() == [swings]


def test_another_targets_moves_are_left_out() -> None:
    before = pieces((0, 100, HOT, [0, 1]))
    made = decide(before, rooms(500, 0))
    after = settle(before, report(made, {Outcome.MOVED: 100}, reached=[100]), 1, POLICY, now_s=1)
    assert (after == before).all()


# Room that is left

WARM = 0.5 * worthwhile(POLICY, POLICY.latency_gap_ns)


def test_room_that_is_left_is_for_what_is_warm() -> None:
    warm = pieces((0, 100, 0, [1]), (100, 100, WARM, [0, 1]), (200, 100, 1.2 * WARM, [0, 1]))
    made = decide(warm, rooms(150, 0), policy=FILLING)
    assert (pages_moved(made, 1, 0), pages_moved(made, 0, 1)) == (150, 0)
    assert made.moves["bytes"][made.moves["start"] == warm["start"][2]] == 100 * PAGE_BYTES
    assert not made.kept
    assert not len(decide(warm, rooms(150, 0)).moves), "by default room is for what is hot"


def test_nothing_makes_way_for_what_is_warm() -> None:
    warm = pieces((0, 100, 0, [1]), (100, 100, WARM, [0, 1]))
    assert not len(decide(warm, rooms(0, 1000), policy=FILLING).moves)
    assert not len(decide(warm, rooms(50, 1000, headroom_pages=50), policy=FILLING).moves)


@pytest.mark.parametrize(("budget_pages", "warm_pages"), [(300, 100), (250, 50), (200, 0), (99, 0)])
def test_what_is_warm_comes_after_what_is_hot(budget_pages: int, warm_pages: int) -> None:
    both = pieces((0, 200, 10 * WARM, [0, 1]), (200, 100, WARM, [0, 1]))
    made = decide(both, rooms(500, 0), budget_pages=budget_pages, policy=FILLING)
    moved = made.moves["bytes"][made.moves["start"] == both["start"][1]].sum()
    assert moved == warm_pages * PAGE_BYTES


@pytest.mark.parametrize(("since_s", "warm_pages"), [(1, 30), (29, 30), (31, 130)])
def test_as_much_is_kept_for_what_becomes_hot_as_became_hot_lately(
    since_s: float, warm_pages: int
) -> None:
    both = pieces((0, 100, 10 * WARM, [1]), (100, 200, WARM, [0, 1]))
    both["rose"][0], both["moved_s"][0] = 1, 100 - since_s
    assert pages_moved(decide(both, rooms(130, 0), now_s=100, policy=FILLING), 1, 0) == warm_pages
    both["short"][0] = both["long"][0] = WARM  # it rose to room that was left
    assert pages_moved(decide(both, rooms(130, 0), now_s=100, policy=FILLING), 1, 0) == 130


def test_beside_the_kernel_all_that_is_hot_counts_as_risen_lately() -> None:
    both = pieces((0, 100, 10 * WARM, [1]), (100, 200, WARM, [0, 1]))
    for by_kernel, warm_pages in ((False, 130), (True, 30)):
        made = decide(both, rooms(130, 0), policy=FILLING, sorted_by_kernel=by_kernel)
        assert pages_moved(made, 1, 0) == warm_pages


@pytest.mark.parametrize(("times", "moves"), [(0.9, 0), (1.1, 1)])
def test_what_is_warm_pays_back_its_move_as_long_as_there_is_room(times: float, moves: int) -> None:
    least = warm_from(FILLING, POLICY.latency_gap_ns)
    assert least == pytest.approx(2 * WARM / 20)
    made = decide(pieces((0, 9, times * least, [0, 1])), rooms(99, 0), policy=FILLING)
    assert len(made.moves) == moves


def test_what_was_hot_and_is_not_hit_any_more_is_not_warm() -> None:
    was_hot = pieces((0, 100, HOT, [0, 1]), (100, 100, HOT, [1]))
    was_hot["short"][0] = 0
    assert len(decide(was_hot, rooms(1000, 1000), policy=FILLING).moves), "in 2 s that may be"
    longer = replace(FILLING, short_s=60.0)
    assert not len(decide(was_hot, rooms(1000, 1000), policy=longer).moves)


def test_what_has_a_maximum_gets_no_room_beyond_what_is_worth_it() -> None:
    warm = Target(pid=Pid(1), pieces=pieces((0, 9, WARM, [0, 1])), ceiling=np.inf)
    limited = replace(warm, pid=Pid(2), tenant=1)
    tenants = (Tenant(name="a"), Tenant(name="b", maximum_bytes={Rank(0): 1 << 30}))
    made = plan(
        [warm, limited], rooms(99, 0), FILLING, now_s=0, budget_bytes=1 << 30, tenants=tenants
    )
    assert made.moves["target"].tolist() == [0]


@pytest.mark.parametrize(
    ("free", "hot", "cold", "lack"),
    [(150, 100, 0, 0), (60, 100, 0, 40), (60, 100, 30, 10), (0, 100, 200, 0)],
    ids=["room", "none makes way", "some makes way", "all that is lacking makes way"],
)
def test_what_lacks_room_beyond_what_makes_way_is_told(
    free: int, hot: int, cold: int, lack: int
) -> None:
    rows = [(0, hot, HOT, [0, 1]), *([(hot, cold, 0.0, [1])] if cold else [])]
    made = decide(pieces(*rows), rooms(free, 1000))
    assert made.lacks == (lack * PAGE_BYTES,)


def test_what_is_warm_lacks_room_only_where_it_is_to_have_it() -> None:
    warm = pieces((0, 100, WARM, [0, 1]))
    assert decide(warm, rooms(30, 0)).lacks == (0,)
    for budget_pages in (1000, 10, 0):
        made = decide(warm, rooms(30, 0), budget_pages=budget_pages, policy=FILLING)
        assert made.lacks == (70 * PAGE_BYTES,)


@pytest.mark.parametrize(("free", "lack"), [(50, 70), (40, 80), (39, 0)])
def test_what_is_warm_lacks_no_room_that_is_kept_for_what_becomes_hot(free: int, lack: int) -> None:
    made = pieces((0, 40, HOT, [1]), (40, 80, WARM, [0, 1]))
    made["moved_s"][0], made["rose"][0] = 0.0, 1
    assert decide(made, rooms(free, 1000), policy=FILLING).lacks == (lack * PAGE_BYTES,)


def test_hot_memory_that_changes_places_lacks_room() -> None:
    both = pieces((0, 100, HOT, [1]), (100, 100, 100 * HOT, [0, 1]))
    made = decide(both, rooms(0, 1000))
    assert pages_moved(made, 1, 0) == 100
    assert made.lacks == (100 * PAGE_BYTES,)


def test_who_has_a_maximum_lacks_no_room() -> None:
    hot = Target(pid=Pid(1), pieces=pieces((0, 100, HOT, [0, 1])), ceiling=np.inf)
    limited = replace(hot, pid=Pid(2), tenant=1)
    tenants = (Tenant(name="a"), Tenant(name="b", maximum_bytes={Rank(0): 10 * PAGE_BYTES}))
    made = plan([hot, limited], rooms(0, 0), POLICY, now_s=0, budget_bytes=1 << 30, tenants=tenants)
    assert made.lacks == (100 * PAGE_BYTES,)


# The loop


@settings(max_examples=15, deadline=None)
@example(seed=313, start=120, length=548, capacity=1000)
@given(
    seed=st.integers(0, 1 << 16),
    start=st.integers(0, 3000),
    length=st.integers(200, 900),
    capacity=st.integers(1000, 2000),
)
def test_a_steady_hot_set_converges_and_then_nothing_moves(
    seed: int, start: int, length: int, capacity: int
) -> None:
    rate = window(4096, start, length, hot=2000, rest=0.05)
    world = World(rate, np.ones(4096, int), [capacity, 8192], seed)
    for _ in range(40):
        world.round()
    assert world.fast_share(rate > 1) > 0.97
    moves, times = list[int](), np.zeros(len(rate), int)
    for _ in range(100):
        before, moved = world.tier.copy(), world.moved_pages
        world.round()
        moves.append(world.moved_pages - moved)
        times += world.tier != before
    assert times.max() <= 1, "none comes back"
    *others, widest = sorted(moves)
    at_the_edges = 64  # regions are cut up to four pages off, and one in hundreds of runs 89
    assert sum(others) <= 0.01 * length + at_the_edges
    assert widest <= 2 * at_the_edges


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 1 << 16))
def test_a_program_that_does_little_has_its_room_and_stays_there(seed: int) -> None:
    """No page of it pays back a move in half a minute. It is moved once, and then no more."""
    pages, room = 1024, 512
    rate = np.minimum(0.04 * pages / (np.arange(pages) + 1) ** 0.99, 2.0)
    world = World(rate, np.ones(pages, int), [room, 8192], seed)
    world.policy = FILLING
    for _ in range(round(60 / AGGREGATION_S)):
        world.round()
    hits = rate[world.tier == 0].sum() / rate.sum()
    assert hits > 0.6
    assert world.moved_pages <= 1.05 * room
    for _ in range(round(120 / AGGREGATION_S)):
        world.round()
    assert world.moved_pages <= 1.3 * room


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 1 << 16), period_s=st.floats(8, 20))
@example(seed=0, period_s=20.0)
@example(seed=3, period_s=20.0)
def test_to_and_fro_that_does_not_pay_comes_to_rest(seed: int, period_s: float) -> None:
    """Two sets are lukewarm in turn, too briefly to win back a move, in a tier for one of them."""
    pages, length, minute = 2048, 512, round(60 / AGGREGATION_S)
    world = World(np.zeros(pages), np.ones(pages, int), [600, 8192], seed)
    by_minute = []
    for _ in range(8):
        before = world.moved_pages
        for _ in range(minute):
            start = 1024 * (int(world.now_s // period_s) % 2)
            world.rate = window(pages, start, length, hot=6, rest=0.05)
            world.round()
        by_minute.append(world.moved_pages - before)
    following = 2 * length * 60 / period_s
    assert np.mean(by_minute[4:]) <= 0.2 * following, by_minute


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 16))
def test_a_window_that_moves_is_followed_at_little_more_than_the_least_volume(seed: int) -> None:
    pages, length, capacity = 4096, 1024, 1800
    world = World(np.zeros(pages), np.ones(pages, int), [capacity, 8192], seed)
    world.policy = replace(POLICY, move_cost_ns=40_000)
    for start in (0, 2000, 3000):
        world.rate = window(pages, start, length, hot=1000, rest=10)
        for _ in range(round(15 / AGGREGATION_S)):
            world.round(budget_pages=1024)
        assert world.fast_share(world.rate > 100) > 0.95
        for _ in range(round(30 / AGGREGATION_S)):
            world.round(budget_pages=1024)
    least = 3 * length + (2 * length - capacity) + length - 24
    assert world.moved_pages <= 1.5 * least


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 16), hot=st.sampled_from([100, 1000]))
def test_a_window_that_moves_is_followed_once_that_pays(seed: int, hot: float) -> None:
    """By its scores alone it is after 3.6 s at the earliest, of which a fifth has room at once."""
    pages, length = 4000, 1000
    world = World(np.zeros(pages), np.ones(pages, int), [1200, 8192], seed)
    for start, seconds in ((0, 24), (2000, 3)):
        world.rate = window(pages, start, length, hot=hot, rest=0.05)
        for _ in range(round(seconds / AGGREGATION_S)):
            world.round()
    assert world.fast_share(world.rate > 1) > 0.9
    assert world.moved_pages <= 3.1 * length


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1 << 16), pause_s=st.sampled_from([2, 4, 8]))
def test_what_pauses_keeps_its_place_from_what_is_less_hot(seed: int, pause_s: float) -> None:
    pages, length = 4000, 1000
    world = World(np.zeros(pages), np.ones(pages, int), [length, 8192], seed)
    for hot, seconds in ((150, 24), (0, pause_s), (150, 10), (0, pause_s)):
        world.rate = window(pages, 0, length, hot=hot, rest=30)
        for _ in range(round(seconds / AGGREGATION_S)):
            world.round()
    assert world.moved_pages <= 1.02 * length


@pytest.mark.parametrize(
    ("short", "long", "heat"),
    [
        (100, 30, [100 - 2 * math.sqrt(50)]),
        (100, 15, []),  # too few accesses as yet
        (100, 40, []),  # too many before
        (1, 0.3, []),
    ],
)
def test_newly_hot_memory_counts_as_it_is_now(
    short: float, long: float, heat: Sequence[float]
) -> None:
    new, found = newly_hot(per_byte(short), per_byte(long), 160 / PAGE_BYTES, POLICY)
    assert new.tolist() == [0] * len(heat)
    assert found * PAGE_BYTES == pytest.approx(heat, rel=1e-6)


@pytest.mark.parametrize(("paid", "heat"), [(10, 40 / 2.25), (160, 160 / 3 / 1.5), (0, 40 / 2.25)])
def test_idle_memory_makes_way_for_what_has_won_back_both_moves(paid: float, heat: float) -> None:
    """Idle for 3 s, of what its averages tell."""
    short = 40 * math.exp(-3 * 0.9) - 1.5
    idle, found = newly_cold(per_byte(short), per_byte(40), paid / PAGE_BYTES, POLICY)
    assert idle.tolist() == [0]
    assert found * PAGE_BYTES == pytest.approx(heat, rel=1e-5)


def test_steady_memory_is_neither_newly_hot_nor_newly_cold() -> None:
    rate = per_byte(1, 50, 184)
    for told in (newly_hot, newly_cold):
        assert not len(told(rate, rate, 0.0, POLICY)[0])


@pytest.mark.parametrize("seed", range(5))
def test_what_cools_does_not_pass_the_middle_tier(seed: int) -> None:
    """A window moves over three tiers, and leaves warm memory behind it.

    For each page that becomes hot one goes down each step, and one up each: what is hot now is
    found by and by, and mostly rises by the middle tier. Of 160 seeds the worst has 9 % pass it,
    but one that was drawn before had 13.
    """
    pages, length, steps, step = 4096, 512, 7, 256
    world = World(np.zeros(pages), np.full(pages, 2), [600, 1200, 8192], seed)
    world.policy = replace(POLICY, move_cost_ns=20_000)
    flows = defaultdict[tuple[int, int], float](float)
    for index in range(steps + 1):
        behind = (np.arange(pages) + index * step) % pages
        is_hot, is_warm = behind < length, (behind >= length) & (behind < 3 * length)
        world.rate = np.select([is_hot, is_warm], [1000.0, 60.0], 0.02)
        for _ in range(round(30 / AGGREGATION_S)):
            moved = flow(world.round(budget_pages=1024))
            for way, size in moved.items():
                flows[way] += size * (index > 0)
        assert world.fast_share(is_hot) > 0.95
        assert np.mean(world.tier[is_warm] == 1) > 0.85
    assert flows[0, 2] <= 0.1 * steps * step
    assert sum(flows.values()) <= 1.1 * 4 * steps * step
