# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.config import DamonConfig
from tierd.kernel.damon import Setup
from tierd.sample import tuning

CONFIG = DamonConfig(
    sample_us=20_000, aggregation_us=400_000, min_regions=10, max_regions=1000, cpu_percent=2.0
)
MARK_US = 1_012_345
LARGE = 1 << 40


def setup(
    thrift: float,
    *,
    config: DamonConfig = CONFIG,
    resident_bytes: int = LARGE,
    has_goal: bool = False,
) -> Setup:
    return tuning.setup(
        config,
        thrift=thrift,
        resident_bytes=resident_bytes,
        has_goal=has_goal,
        mark_us=MARK_US,
    )


def test_without_thrift_all_is_as_configured() -> None:
    assert setup(1.0) == Setup(
        sample_us=20_000,
        aggregation_us=400_000,
        update_us=MARK_US,
        min_regions=10,
        max_regions=1000,
    )


def test_the_most_thrift_is_a_fifth_of_the_regions_at_five_times_the_intervals() -> None:
    most = setup(tuning.MOST_THRIFT)

    assert (most.sample_us, most.aggregation_us, most.max_regions) == (100_000, 2_000_000, 200)


def test_the_kernel_tunes_between_the_interval_and_twice_that() -> None:
    goal = setup(4.0, has_goal=True).goal

    assert goal is not None
    assert (goal.min_sample_us, goal.max_sample_us) == (40_000, 80_000)


def test_there_are_never_fewer_regions_than_configured() -> None:
    few = replace(CONFIG, min_regions=500)

    made = setup(tuning.MOST_THRIFT, config=few)

    assert (made.min_regions, made.max_regions) == (500, 500)


@pytest.mark.parametrize(
    ("mib", "regions"), [(0, 400), (400, 400), (500, 500), (1000, 1000), (5000, 1000)]
)
def test_a_process_has_a_region_for_each_mib(mib: int, regions: int) -> None:
    """Four times the fewest at any rate, or none would be cut."""
    assert setup(1.0, resident_bytes=mib << 20).max_regions == regions
    least = setup(1.0, config=replace(CONFIG, min_regions=200), resident_bytes=mib << 20)
    assert least.max_regions == max(800, regions)


@pytest.mark.parametrize(
    ("mib", "is_regrown"), [(600, False), (750, False), (751, True), (479, True)]
)
def test_regions_are_others_once_a_process_has_grown_by_a_quarter(
    mib: int, *, is_regrown: bool
) -> None:
    was, wanted = (setup(1.0, resident_bytes=size << 20) for size in (600, mib))
    assert tuning.is_regrown(was, wanted) is is_regrown


@given(st.floats(1, tuning.MOST_THRIFT), st.integers(0, LARGE), st.booleans())
def test_a_setup_is_one_that_damon_takes(
    thrift: float, resident_bytes: int, has_goal: bool
) -> None:
    """damon_set_attrs() refuses fewer than 3 regions, and sampling longer than aggregation."""
    made = setup(thrift, resident_bytes=resident_bytes, has_goal=has_goal)

    assert 3 <= made.min_regions <= made.max_regions
    assert made.sample_us <= made.aggregation_us
    assert made.aggregation_us / made.sample_us == pytest.approx(20, rel=1e-3)


@pytest.mark.parametrize("used", [1.2, 1.5, 2.0])
def test_within_the_budget_nothing_changes(used: float) -> None:
    assert tuning.next_thrift(3.0, used=used, budget=2.0) == 3.0


def test_an_excess_is_taken_back_with_room_to_spare() -> None:
    assert tuning.next_thrift(1.0, used=2.4, budget=2.0) == pytest.approx(1.5)


@given(
    thrift=st.floats(1, tuning.MOST_THRIFT),
    used=st.floats(0, 1000),
    budget=st.floats(0.1, 100),
)
def test_a_step_is_gentle_and_within_bounds(thrift: float, used: float, budget: float) -> None:
    following = tuning.next_thrift(thrift, used=used, budget=budget)

    assert 1 <= following <= tuning.MOST_THRIFT
    assert thrift / 1.2501 <= following <= thrift * 2
    assert (following >= thrift) if used > budget else (following <= thrift)


@given(work=st.floats(0.01, 40), budget=st.floats(0.5, 20))
def test_it_settles_and_stays_for_a_steady_load(work: float, budget: float) -> None:
    """A kdamond whose cost is what the thrift is meant to divide."""
    thrift = 1.0
    for _ in range(60):
        thrift = tuning.next_thrift(thrift, used=work / thrift, budget=budget)

    assert tuning.next_thrift(thrift, used=work / thrift, budget=budget) == thrift
    assert work / thrift <= budget or thrift == tuning.MOST_THRIFT
