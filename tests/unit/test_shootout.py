# SPDX-License-Identifier: Apache-2.0
"""What the shootout makes of the seconds that its loads tell."""

from collections.abc import Sequence

import pytest
from benches._costs import moved_pages, pages_on
from benches._runs import Run, Second, least_pages, second
from benches._speed import Steps
from guests.workloads import Sample

HOT, COLD = 100, 300


def sample(t: float = 0.0, *, window: int = 0, hits: float = 0.0, ops: float = 1.0) -> Sample:
    """A second of a load."""
    return Sample(
        t=t,
        ops_per_s=ops,
        window=window,
        hot_pages=HOT,
        hot_on_fast=0,
        cold_pages=COLD,
        cold_on_slow=COLD,
        absent=0,
        hit_ratio=hits,
        hot_ratio=0.9,
    )


def run(seconds: Sequence[Second], bare: Sequence[Second] = (), cpu_speed: float = 1.0) -> Run:
    return Run(
        load="",
        contender="",
        seconds=tuple(seconds),
        bare_seconds=tuple(bare),
        cpu_speed=cpu_speed,
        moved_pages=0,
        least_pages=1,
        cpu_percent=0.0,
    )


def seconds(*hits: float, window: int = 0, since: float = 0.0) -> list[Second]:
    return [second([sample(since + t, window=window, hits=share)]) for t, share in enumerate(hits)]


def test_programs_count_by_their_accesses() -> None:
    both = second([sample(hits=1.0, ops=30), sample(hits=0.0, ops=10)])
    assert both.hit_ratio == 0.75
    assert both.ops_per_s == (30, 10)


def test_the_hot_set_has_arrived_with_95_percent_of_its_hits() -> None:
    done = run(seconds(0.0, 0.85, 0.86, 0.9))
    assert done.has_arrived
    assert done.arrived_s == 2


def test_a_first_second_is_no_arrival_where_the_next_ones_miss() -> None:
    done = run(seconds(0.88, 0.6, 0.6, 0.6, 0.6, 0.86, 0.86, 0.9, 0.84, 0.86))
    assert done.has_arrived
    assert done.arrived_s == 5
    assert not run(seconds(0.88, 0.6, 0.6)).has_arrived


def test_a_window_that_never_arrives_counts_with_its_length() -> None:
    done = run(seconds(0.0, 0.9, 0.9) + seconds(0.0, 0.1, 0.2, 0.3, window=1, since=3))
    assert not done.has_arrived
    assert done.arrived_s == (1 + 3) / 2


def test_throughput_is_that_of_the_program_that_fares_worst() -> None:
    own = [second([sample(ops=50), sample(ops=90)])]
    assert run(own, bare=[second([sample(ops=100), sample(ops=100)])]).throughput == 0.5


def test_throughput_is_not_lost_where_the_cpu_was_slower() -> None:
    own, bare = [second([sample(ops=50)])], [second([sample(ops=100)])]
    assert run(own, bare, cpu_speed=0.5).throughput == 1.0


def test_a_cpu_is_as_fast_as_it_took_steps_in_its_time() -> None:
    before, after = Steps(count=100, cpu_ns=1_000_000), Steps(count=300, cpu_ns=3_000_000)
    assert after.per_s(since=before) == 100_000


@pytest.mark.parametrize(
    ("window", "room", "least"),
    [
        (0, 2 * HOT, HOT),  # once up
        (1, 2 * HOT, 2 * HOT),  # both windows have room
        (1, HOT, 3 * HOT),  # the first one has to go back
    ],
)
def test_the_least_is_each_window_up_and_what_lacks_room_down(
    window: int, room: int, least: int
) -> None:
    assert least_pages([sample()], [sample(window=window)], HOT, room) == least


@pytest.mark.parametrize(("room", "makes_way"), [(1000, 0), (HOT + 20, 30)])
def test_what_is_held_at_the_end_had_to_be_moved(room: int, makes_way: int) -> None:
    assert least_pages([sample()], [sample()], HOT + 50, room) == HOT + 50 + makes_way


def test_what_a_process_has_on_a_node_is_told_of_all_its_mappings() -> None:
    maps = """\
5600a0000000 default file=/usr/bin/redis-server mapped=400 N0=100 N1=300 kernelpagesize_kB=4
7f12c8000000 default anon=900 dirty=900 active=0 N1=200 N0=700 kernelpagesize_kB=4
7f12d0000000 default anon=5 dirty=5 N10=5 kernelpagesize_kB=4
7ffd00000000 default
"""
    assert pages_on([0], maps) == 800
    assert pages_on([0, 10], maps) == 805


def test_what_is_moved_within_a_node_does_not_count() -> None:
    histogram = """# event histogram
#
# trigger info: hist:keys=reason:vals=hitcount,succeeded:sort=hitcount:size=2048 [active]
#

{ reason:          0 } hitcount:          3  succeeded:         64
{ reason:          8 } hitcount:         12  succeeded:       1000
{ reason:          5 } hitcount:        200  succeeded:        200

Totals:
    Hits: 215
    Entries: 3
    Dropped: 0
"""
    assert moved_pages(histogram) == 1200
