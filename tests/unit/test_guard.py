# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.test_decide import FILLING
from tests.unit.world import BASE, mapped, snapshot
from tierd.bulk import PIECE
from tierd.decide.guard import LEAST_BYTES, Guard, judge, promotable, regret
from tierd.decide.heat import fold
from tierd.decide.worth import hot_from
from tierd.model import PAGE_BYTES, Policy

POLICY = Policy()
HOT = hot_from(np.inf, POLICY)
ENOUGH = LEAST_BYTES // PAGE_BYTES
NOW_S = 100.0
OWING = 100.0
"""More accesses per byte than any of these moves costs."""


def pieces(*rows: tuple[int, dict[str, float]]) -> NDArray[np.void]:
    """Pieces from pages and fields: moved up 10 s ago, owing all, hot, free to move since 5 s."""
    made, first = np.zeros(len(rows), PIECE), BASE
    usual: dict[str, float] = {
        "rose": 1,
        "owed": OWING,
        "short": HOT,
        "long": HOT,
        "moved_s": 90,
        "held_until_s": 95,
    }
    for piece, (count, fields) in zip(made, rows, strict=True):
        piece["start"], piece["end"] = first, first + count * PAGE_BYTES
        first += count * PAGE_BYTES
        piece["resident"][0] = 1
        for name, value in (usual | fields).items():
            piece[name] = value
    return made


COLD: dict[str, float] = {"short": 0, "long": 0}
SWUNG: dict[str, float] = {"rose": -1, "owed": 0, "swings": 1}


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({}, 0),
        (COLD, 1),
        (COLD | {"owed": 0}, 0),
        (COLD | {"held_until_s": NOW_S + 1}, 0),
        ({"short": HOT / 2, "long": HOT}, 0),
        (SWUNG, 1),
        (SWUNG | {"swings": 0}, 0),
        (COLD | {"rose": 0}, 0),
    ],
    ids=["hot", "cold", "paid", "resting", "cooler", "swung", "made way", "long ago"],
)
def test_what_counts_as_not_worth_it(fields: dict[str, float], share: float) -> None:
    made = pieces((ENOUGH, fields), (3 * ENOUGH, {}))
    counted = 4 if fields.get("rose") != 0 else 3
    assert regret(Guard(), made, np.inf, POLICY, now_s=NOW_S) == share / counted


@pytest.mark.parametrize(
    ("gaps_ns", "share"), [((), 1), ((100.0, 400.0), 0), ((400.0, 100.0), 1), ((400.0,), 0)]
)
def test_what_was_worth_its_move_is_not_cold(gaps_ns: tuple[float, ...], share: float) -> None:
    """A quarter of the heat is enough for a step that saves four times as much."""
    made = pieces((ENOUGH, {"short": HOT / 4, "long": HOT / 4}))
    made["resident"][:, :2] = [[0, 1]]
    assert regret(Guard(), made, np.inf, POLICY, now_s=NOW_S, gaps_ns=gaps_ns) == share


@pytest.mark.parametrize(("times", "share"), [(0.5, 0), (0.01, 1)])
def test_what_was_warm_enough_for_room_is_not_cold(times: float, share: float) -> None:
    made = pieces((ENOUGH, {"short": times * HOT, "long": times * HOT}))
    assert regret(Guard(), made, np.inf, FILLING, now_s=NOW_S) == share


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_what_was_won_back_of_a_move_is_no_regret(share: float) -> None:
    """It costs the way down as well; where a step saves a quarter, four times the accesses."""
    accesses = 2 * POLICY.move_cost_ns / POLICY.latency_gap_ns / PAGE_BYTES
    made = pieces((ENOUGH, COLD | {"owed": share * accesses}))
    assert regret(Guard(), made, np.inf, POLICY, now_s=NOW_S) == pytest.approx(share)
    gaps_ns = (POLICY.latency_gap_ns * 3 / 4, POLICY.latency_gap_ns / 4)
    for rank, times in enumerate((1, 1 / 4)):
        made["resident"][:, :2] = np.eye(2)[rank]
        found = regret(Guard(), made, np.inf, POLICY, now_s=NOW_S, gaps_ns=gaps_ns)
        assert found == pytest.approx(share * times)


def test_what_costs_nothing_is_no_regret() -> None:
    made = pieces((ENOUGH, COLD | {"owed": 0}))
    free = replace(POLICY, move_cost_ns=0)
    assert regret(Guard(), made, np.inf, free, now_s=NOW_S) == 0


def test_too_little_is_no_evidence() -> None:
    made = pieces((ENOUGH - 1, COLD))
    assert regret(Guard(), made, np.inf, POLICY, now_s=NOW_S) == 0
    assert regret(Guard(), pieces((ENOUGH, COLD)), np.inf, POLICY, now_s=NOW_S) == 1


@pytest.mark.parametrize(
    ("moved", "cost_ns", "share"),
    [(ENOUGH, 4e3, 0), (2 * ENOUGH - 1, 4e3, 0), (2 * ENOUGH, 4e3, 1), (ENOUGH, 1e6, 1)],
    ids=["few", "fewer than half", "half", "dear"],
)
def test_a_few_moves_beside_much_that_is_hot_are_no_evidence(
    moved: int, cost_ns: float, share: float
) -> None:
    """As the edges of what the kernel has taken up by itself."""
    policy = replace(POLICY, move_cost_ns=cost_ns, payback=4e3 / cost_ns * POLICY.payback)
    made = pieces((moved, COLD), (4 * ENOUGH, {"rose": 0}), (9 * ENOUGH, COLD | {"rose": 0}))
    assert regret(Guard(), made, np.inf, policy, now_s=NOW_S) == share
    made["resident"][1, :2] = [0, 1]
    assert regret(Guard(), made, np.inf, policy, now_s=NOW_S) == 1, "it is not there"


def test_what_is_not_there_does_not_count() -> None:
    made = pieces((4 * ENOUGH, COLD))
    made["resident"] /= 8
    assert regret(Guard(), made, np.inf, POLICY, now_s=NOW_S) == 0


def test_a_target_whose_moves_do_not_pay_rests_ever_longer() -> None:
    guard, now_s, rests = Guard(), NOW_S, []
    for _ in range(30):
        made = pieces((ENOUGH, COLD), (ENOUGH - 1, {}))
        made["moved_s"], made["held_until_s"] = now_s - 10, now_s - 5
        guard = judge(guard, made, np.inf, POLICY, now_s=now_s)
        assert guard.rests(now_s)
        rests.append(guard.rests_until_s - now_s)
        now_s = guard.rests_until_s + 20
    assert rests[:3] == [POLICY.horizon_s, 2 * POLICY.horizon_s, 4 * POLICY.horizon_s]
    assert max(rests) == rests[-1] == POLICY.retry_most_s


@pytest.mark.parametrize("between_s", [1, 2, 10, 25])
def test_a_move_is_compared_with_those_before_it(between_s: int) -> None:
    """What moved a little earlier and is hot still counts while what did not pay is judged."""
    made, guard = pieces((9 * ENOUGH, {}), (ENOUGH, COLD)), Guard()
    moved_s = np.array([NOW_S, NOW_S + between_s])
    made["moved_s"], made["held_until_s"] = moved_s, moved_s + POLICY.dwell_s
    regrets = []
    for now_s in NOW_S + between_s + np.arange(3 * POLICY.horizon_s):
        hits = snapshot([0, 9 * ENOUGH, 10 * ENOUGH], [20, 0], now_s)
        made = fold(made, [hits], mapped(10 * ENOUGH), POLICY)
        regrets.append(regret(guard, made, np.inf, POLICY, now_s=now_s))
        guard = judge(guard, made, np.inf, POLICY, now_s=now_s)
    assert max(regrets) == 0.1
    assert guard == Guard()


def test_a_swing_is_held_against_a_target_for_as_long_as_other_moves() -> None:
    """However long it rests itself."""
    made = pieces((ENOUGH, SWUNG | {"held_until_s": NOW_S + POLICY.retry_most_s}), (ENOUGH, {}))
    made["moved_s"] = NOW_S
    judged_s = POLICY.dwell_s + POLICY.horizon_s
    for after_s, share in ((0, 0.5), (judged_s - 1, 0.5), (judged_s, 0)):
        assert regret(Guard(), made, np.inf, POLICY, now_s=NOW_S + after_s) == share


def test_half_is_not_too_much() -> None:
    made = pieces((ENOUGH, COLD), (ENOUGH, {}))
    assert judge(Guard(), made, np.inf, POLICY, now_s=NOW_S) == Guard()


def test_moves_are_held_against_a_target_once() -> None:
    made = pieces((ENOUGH, COLD))
    guard = judge(Guard(), made, np.inf, POLICY, now_s=NOW_S)
    later_s = guard.rests_until_s
    assert not guard.rests(later_s)
    assert judge(guard, made, np.inf, POLICY, now_s=later_s) == guard


def test_a_long_time_without_regret_is_a_new_beginning() -> None:
    guard = judge(Guard(), pieces((ENOUGH, COLD)), np.inf, POLICY, now_s=NOW_S)
    fine = pieces((ENOUGH, {}))
    soon_s = guard.rests_until_s + POLICY.retry_most_s
    assert judge(guard, fine, np.inf, POLICY, now_s=soon_s).strikes == 1
    assert judge(guard, fine, np.inf, POLICY, now_s=soon_s + 1).strikes == 0


@pytest.mark.parametrize(
    ("percent", "share"), [(None, 1), (0, 1), (5, 1), (7.5, 0.5), (10, 0), (100, 0)]
)
def test_waiting_for_memory_slows_and_then_stops_moves_up(
    percent: float | None, share: float
) -> None:
    assert promotable(percent, POLICY) == share
