# SPDX-License-Identifier: Apache-2.0
"""When steps are made beside a program's copies."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.remote.gaps import Gaps

ENDLESS_S = 1e9
TICK_S = 0.001
SOON_S = 4 * TICK_S


class Clock:
    """A clock of which each look takes a millisecond; and an event that never comes, by it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.pass_by(TICK_S)
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds

    def clear(self) -> None: ...

    def set(self) -> None: ...

    def wait(self, timeout: float) -> bool:
        self.pass_by(timeout)
        return False


def gaps_by(clock: Clock) -> Gaps:
    gaps = Gaps(clock)
    gaps._has_ended = clock  # type: ignore[assignment]
    return gaps


def copy_often(clock: Clock, gaps: Gaps, gap_s: float) -> None:
    for number in range(10):
        clock.pass_by(gap_s if number else 0.0)
        with gaps.copy():
            pass


def step(clock: Clock, gaps: Gaps, step_s: float = 0.0, most_s: float = ENDLESS_S) -> float:
    """Makes a step of that length; returns how long it waited."""
    begin_s = clock.now_s
    with gaps.step(begin_s + most_s):
        waited_s = clock.now_s - begin_s
        clock.pass_by(step_s)
    return waited_s


def test_nothing_is_waited_for_where_nothing_was_copied() -> None:
    clock = Clock()
    assert step(clock, gaps_by(clock)) < SOON_S


@given(st.floats(0.01, 0.08), st.floats(0.0, 0.08))
def test_a_step_is_made_where_it_fits_the_gap_or_the_program_rests(
    gap_s: float, step_s: float
) -> None:
    clock = Clock()
    gaps = gaps_by(clock)
    step(clock, gaps, step_s)
    copy_often(clock, gaps, gap_s)
    waited_s = step(clock, gaps, step_s)
    if step_s + SOON_S < gap_s:
        assert waited_s < SOON_S
    elif step_s > gap_s + SOON_S:
        assert min(0.1, 4 * gap_s) <= waited_s + SOON_S


def test_steps_are_made_in_a_gap_until_the_next_would_be_met() -> None:
    clock = Clock()
    gaps = gaps_by(clock)
    step(clock, gaps, 0.02)
    copy_often(clock, gaps, 0.075)
    waited = [step(clock, gaps, 0.02) < SOON_S for _ in range(4)]
    assert waited == [True, True, True, False]


def test_it_waits_no_longer_than_it_may() -> None:
    clock = Clock()
    gaps = gaps_by(clock)
    with gaps.copy():
        assert 0.5 <= step(clock, gaps, most_s=0.5) <= 0.5 + SOON_S


def test_a_long_rest_is_no_gap() -> None:
    clock = Clock()
    gaps = gaps_by(clock)
    step(clock, gaps, 0.05)
    copy_often(clock, gaps, 0.02)
    copy_often(clock, gaps, 3600.0)
    assert step(clock, gaps) > SOON_S


@pytest.mark.parametrize("step_s", [0.0, 0.02])
def test_a_step_begins_when_a_copy_ends(step_s: float) -> None:
    """However long steps are: what begins at the end of a gap is met for sure."""
    gaps, order, is_there = Gaps(), [], threading.Event()
    with gaps.step(0.0):
        time.sleep(step_s)

    def make_step() -> None:
        is_there.set()
        with gaps.step(time.monotonic() + ENDLESS_S):
            order.append("step")

    stepping = threading.Thread(target=make_step)
    with gaps.copy():
        stepping.start()
        assert is_there.wait(10)
        stepping.join(0.05)
        order.append("copy")
    stepping.join(10)
    assert order == ["copy", "step"]
