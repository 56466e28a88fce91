# SPDX-License-Identifier: Apache-2.0
"""What comes next, and how far ahead: orders, strides, the pace, and who makes way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.arena.order import Declared, Pace, Strided, Strides, last
from tierd.errors import TierdError

some_ids = st.lists(st.integers(0, 20), min_size=1, max_size=30)
positions = st.integers(0, 100)
times = st.floats(1e-6, 10)


@given(some_ids, positions, positions)
def test_an_order_that_repeats_is_its_ids_again_and_again(
    ids: list[int], first: int, count: int
) -> None:
    order = Declared(ids, repeats=True)
    expected = [ids[position % len(ids)] for position in range(first, first + count)]
    assert order.ids(first, first + count).tolist() == expected


@given(some_ids, positions, positions)
def test_an_order_that_is_done_once_ends(ids: list[int], first: int, count: int) -> None:
    found = Declared(ids, repeats=False).ids(first, first + count)
    assert found.tolist() == ids[first : first + count]


@given(some_ids, st.booleans(), positions, positions, st.integers(1, 5))
def test_what_is_found_is_there_and_the_next(
    ids: list[int], repeats: bool, begin: int, at: int, count: int
) -> None:
    order = Declared(ids, repeats=repeats)
    wanted = order.ids(at, at + count)
    if not len(wanted):
        return
    found = order.find(wanted, begin)
    if found is not None:
        assert found >= begin
        assert order.ids(found, found + len(wanted)).tolist() == wanted.tolist()
    elif count == 1:
        assert wanted[0] not in order.ids(begin, begin + len(ids))


def test_steps_of_several_ids_and_none() -> None:
    order = Declared([[0, 1], 2, np.array([3])], repeats=False)
    assert [step.tolist() for step in order.steps] == [[0, 1], [2], [3]]
    assert order.ids(0, 9).tolist() == [0, 1, 2, 3]
    assert order.fits(4)
    assert not order.fits(3)
    with pytest.raises(TierdError, match="an order of no ids"):
        Declared([], repeats=True)
    with pytest.raises(TierdError, match="ids are whole numbers"):
        Declared([0.5], repeats=True)


@given(st.integers(-30, 30).filter(bool), st.lists(st.integers(400, 600), min_size=1, max_size=5))
def test_a_stride_is_found_after_three_steps(stride: int, step: list[int]) -> None:
    strides = Strides(1000)
    seen = [strides.seen(np.array(step) + number * stride) for number in range(3)]
    assert seen[:2] == [None, None]
    assert seen[2] is not None
    third, size = np.array(step) + 2 * stride, len(step)
    assert seen[2].ids(0, size).tolist() == third.tolist()
    ahead = seen[2].ids(size, 3 * size).tolist()
    assert ahead == [*(third + stride), *(third + 2 * stride)]


@given(st.integers(1, 50), st.integers(-9, 9).filter(bool), st.integers(0, 49), positions)
def test_a_stride_ends_where_there_are_no_blocks(
    blocks: int, stride: int, at: int, end: int
) -> None:
    ids = Strided(np.array([at % blocks]), stride, blocks).ids(0, end)
    assert all(0 <= block < blocks for block in ids)
    assert len(ids) == end or not 0 <= at % blocks + len(ids) * stride < blocks


@pytest.mark.parametrize("steps", [[[1]] * 9, [[1], [2], [4], [7]], [[1], [2], [3, 4], [4]]])
def test_no_stride(steps: list[list[int]]) -> None:
    strides = Strides(100)
    assert [strides.seen(np.array(step)) for step in steps] == [None] * len(steps)


@given(times, times, st.integers(0, 64))
def test_the_window_is_a_moves_time_over_a_steps_and_one(
    move_s: float, step_s: float, most: int
) -> None:
    pace = Pace(most, most)
    for _ in range(200):
        pace.moved(move_s)
        pace.used(step_s)
    expected = int(np.ceil(move_s / step_s)) + 1
    assert min(expected, most) <= pace.steps <= min(expected + 1, most)


@given(times, times)
def test_a_latency_that_is_known_counts_from_the_first_step(move_s: float, step_s: float) -> None:
    pace = Pace(64, 64, move_s)
    assert pace.steps == 2, "how long a step takes is not known yet"
    pace.used(step_s)
    assert pace.steps >= min(int(np.ceil(move_s / step_s)) + 1, 64)
    for _ in range(200):
        pace.moved(step_s / 2)
    assert pace.steps <= 3, "what is seen counts for more"


@given(st.lists(st.tuples(st.sampled_from("mu"), times)), st.lists(st.booleans()))
def test_the_window_is_never_more_than_allowed(
    told: list[tuple[str, float]], guesses: list[bool]
) -> None:
    pace = Pace(16, 2)
    for kind, seconds in told:
        (pace.moved if kind == "m" else pace.used)(seconds)
    for is_right in guesses:
        (pace.right if is_right else pace.wrong)()
        assert 0 <= pace.steps <= 16


def test_wrong_guesses_end_it_and_right_ones_bring_it_back() -> None:
    pace = Pace(32, 32)
    pace.moved(1e3)
    pace.used(1e-3)
    assert pace.steps == 32
    for _ in range(6):
        pace.wrong()
    assert pace.steps == 0
    for _ in range(20):
        pace.right()
    assert pace.steps == 32
    for _ in range(40):  # half of them wrong: not worth it
        pace.right()
        pace.wrong()
    assert pace.steps <= 1


@given(some_ids, st.integers(0, 9), st.data())
def test_who_makes_way_may_and_was_used_last(
    behind: list[int], count: int, data: st.DataObject
) -> None:
    may = data.draw(st.lists(st.booleans(), min_size=len(behind), max_size=len(behind)))
    going = last(np.array(behind), np.array(may), count)
    assert (
        going.tolist() == [block for block, m in zip(behind, may, strict=True) if m][::-1][:count]
    )


@given(st.integers(4, 24), st.integers(1, 40), st.integers(1, 6))
def test_a_sweep_has_no_misses_and_the_fewest_copies(fast: int, more: int, window: int) -> None:
    """Moves that are done at once; Belady's bound for each lap is what does not fit, and a bit."""
    window = min(window, fast - 2)
    order = Declared(range(fast + more), repeats=True)
    near = np.arange(fast + more) < fast
    copies = 0
    for position in range(3 * (fast + more)):
        block = order.ids(position, position + 1)
        assert near[block].all(), "a miss"
        ahead = order.ids(position, position + 1 + window)
        coming = ahead[~near[ahead]]
        first = max(0, position - fast)
        behind = order.ids(first, position)
        free = fast - int(np.count_nonzero(near))
        going = last(behind, near[behind] & ~np.isin(behind, ahead), max(0, len(coming) - free))
        near[going] = False
        near[coming] = True
        assert np.count_nonzero(near) <= fast
        copies += len(coming) * (position >= fast + more)
    assert copies <= 2 * (more + window + 1)
