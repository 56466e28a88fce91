# SPDX-License-Identifier: Apache-2.0
"""What goes below the fastest tier, and for which memory that matters."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.unit.test_decide import PLACES, POLICY, on_three_tiers, pieces
from tierd.decide.below import (
    FEW,
    LUKEWARM,
    Lacking,
    below,
    cold_bytes,
    is_spare,
    lacking,
    least_heat,
)
from tierd.decide.heat import score
from tierd.decide.worth import hot_from
from tierd.model import PAGE_BYTES

HOT = 10 / PAGE_BYTES
ROUNDS = 1 + 1 / 31
"""Heat is told to so much."""


@pytest.mark.parametrize(
    ("places", "share"),
    [
        ([(0, 100, HOT, [1]), (100, 100, HOT, [0, 1])], 0.5),
        ([(0, 100, HOT, [0.5, 0.5])], 0.25),
        ([(0, 100, HOT, [0.9, 0.1])], 0.01),
        ([(0, 100, HOT, [0, 0.5, 0.5])], 1.0),
    ],
)
def test_of_a_mixture_the_hottest_pages_are_above(
    places: list[tuple[int, int, float, Sequence[float]]], share: float
) -> None:
    assert below(pieces(*places)) == pytest.approx(share)


@pytest.mark.parametrize("places", [[(0, 100, 0.0, [0, 1])], []])
def test_of_no_accesses_there_is_no_share(
    places: list[tuple[int, int, float, Sequence[float]]],
) -> None:
    assert below(pieces(*places)) is None


def test_what_may_be_anywhere_counts_as_below() -> None:
    one = pieces((0, 100, HOT, [1]), (100, 100, HOT, []), (200, 100, HOT, []))
    one["probed_s"][1] = -np.inf
    assert below(one) == pytest.approx(0.5), "the third is known to be nowhere"


def test_what_is_accessed_all_the_time_hides_nothing() -> None:
    """A program's code and tables beside its data, of which a fifth is in fast memory."""
    code = (0, 50, 1e4 * HOT, [1])
    data = [(50, 190, HOT, [1]), (240, 760, HOT, [0, 1])]
    assert below(pieces(code, *data)) == pytest.approx(0.76)


@given(PLACES)
def test_it_is_a_share(places: list[tuple[int, float, int]]) -> None:
    share = below(on_three_tiers(places))
    assert share is None or 0 <= share <= 1 + 1e-9


def spare(*places: tuple[int, int, float, Sequence[float]]) -> list[bool]:
    made = pieces(*places)
    told: list[bool] = np.broadcast_to(is_spare(made), len(made)).tolist()
    return told


WINDOW = (0, 100, HOT, [1])


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ([(100, 100, HOT / 50, [0, 1])], [True]),
        ([(100, 100, HOT / 10, [0, 1])], [False]),
        ([(100, 10, HOT / 10, [0, 1])], [False]),
        ([(100, 10, HOT / 10, [0, 1]), (110, 90, HOT / 100, [0, 1])], [False, True]),
        ([(100, 200, HOT / 50, [0, 1])], [False]),
        ([(100, 200, HOT / 50, [0.5, 0.5])], [True]),
        ([(100, 3, HOT, [0, 1])], [False]),
        ([(100, 200, 0.0, [0, 1])], [True]),
    ],
)
def test_spare_is_what_is_lukewarm_and_little_of_it_all(
    rest: list[tuple[int, int, float, Sequence[float]]], told: list[bool]
) -> None:
    """A few accesses alone make memory that is as hot as others none."""
    assert spare(WINDOW, *rest)[1:] == told


def test_nothing_is_spare_of_what_is_not_accessed() -> None:
    assert spare((0, 100, 0.0, [0, 1])) == [False]
    assert spare() == []


@given(PLACES)
def test_what_is_spare_gets_few_accesses_and_each_page_less_than_others(
    places: list[tuple[int, float, int]],
) -> None:
    made = on_three_tiers(places)
    is_few = np.broadcast_to(is_spare(made), len(made))
    size = (made["end"] - made["start"]).astype(np.float64)
    accesses = size * score(made)
    lies_below = 1 - made["resident"][:, 0]
    assert (accesses * lies_below)[is_few].sum() <= FEW * accesses.sum() * ROUNDS
    hottest = score(made).max(initial=0.0)
    assert (score(made)[is_few] <= LUKEWARM * hottest * ROUNDS).all()


def test_few_accesses_go_below_once_what_lacks_has_risen() -> None:
    made = pieces((0, 50, HOT, [1]), (50, 30, HOT, [0, 1]), (80, 40, HOT / 50, [0, 1]))
    lacks = lacking(made)
    assert lacks.bytes == 30 * PAGE_BYTES
    assert lacks.heat == pytest.approx(HOT, rel=1 / 32)
    made["resident"][1] = made["resident"][0]
    assert (below(made) or 0.0) < FEW
    assert lacking(made) == Lacking(bytes=0, heat=math.inf)
    assert least_heat(made) == math.inf


def test_the_least_heat_is_that_of_nearly_all_accesses_of_what_lacks() -> None:
    for warm_pages, least in ((10, HOT), (100, HOT / 10)):  # 3 and 25 % of the accesses
        made = pieces((0, 33, HOT, [0, 1]), (50, warm_pages, HOT / 10, [0, 1]))
        assert least_heat(made) == pytest.approx(least, rel=1 / 32)
        assert lacking(made).heat == pytest.approx(HOT, rel=1 / 32)
        made["long"] = 0
        assert least_heat(made) == pytest.approx(least, rel=1 / 32), "of what is new"


@given(PLACES)
def test_what_lacks_is_below(places: list[tuple[int, float, int]]) -> None:
    made = on_three_tiers(places)
    size = (made["end"] - made["start"]).astype(np.float64)
    most = float((size * (1 - made["resident"][:, 0])).sum())
    lacks = lacking(made)
    assert 0 <= lacks.bytes <= most
    assert (lacks.heat < math.inf) == (lacks.bytes > 0)


@pytest.mark.parametrize(
    ("piece", "cold"),
    [
        ((0, 100, 0.5, [1]), 100),
        ((0, 100, 1.1, [1]), 0),
        ((0, 100, 0.0, [0, 1]), 0),
        ((0, 100, 0.2, [0.25, 0.75]), 25),
        ((0, 100, 0.3, [0.25, 0.75]), 0),
    ],
)
def test_cold_is_what_is_too_cold_though_all_accesses_go_to_the_pages_there(
    piece: tuple[int, int, float, Sequence[float]], cold: int
) -> None:
    """By heat in times of the one from which memory is warm."""
    warm_from = hot_from(math.inf, POLICY) / POLICY.hysteresis
    start, size, heat, resident = piece
    made = pieces((start, size, heat * warm_from, resident))
    assert cold_bytes(made, math.inf, POLICY) == pytest.approx(cold * PAGE_BYTES)


def test_what_is_hot_near_the_ceiling_is_not_cold_however_dear_a_move() -> None:
    dear = replace(POLICY, move_cost_ns=1e9)
    made = pieces((0, 100, HOT, [1]))
    assert cold_bytes(made, 2 * HOT, dear) == 0
    assert cold_bytes(made, math.inf, dear) == 100 * PAGE_BYTES
