# SPDX-License-Identifier: Apache-2.0
"""Room that single CPUs keep aside, and for how long a plan counts it."""

import numpy as np
import pytest

from tierd.bulk import MOVE, Plan, Report
from tierd.decide.aside import WAITS_S, Awaited
from tierd.model import Outcome, Rank, TierRoom

ROOMS = [
    TierRoom(
        rank=Rank(rank),
        capacity_bytes=1 << 30,
        free_bytes=1 << 20,
        headroom_bytes=1 << 20,
        latency_ns=None,
        aside_bytes=8 << 20,
    )
    for rank in range(2)
]


def report(*moves: tuple[int, int, int]) -> Report:
    """Of moves to a tier each, with the pages that were moved and that found no room."""
    made, pages = np.zeros(len(moves), MOVE), np.zeros((len(moves), len(Outcome)), np.int64)
    for row, (destination, moved, refused) in enumerate(moves):
        made["destination"][row] = destination
        pages[row, Outcome.MOVED], pages[row, Outcome.NO_ROOM] = moved, refused
    return Report(plan=Plan(moves=made, pids=()), pages=pages, reached=made["end"], busy_ns=0)


def aside(awaited: Awaited, now_s: float) -> list[int]:
    return [room.aside_bytes >> 20 for room in awaited.counted(ROOMS, now_s=now_s)]


def test_it_counts_for_some_seconds_in_which_it_does_not_come() -> None:
    awaited = Awaited()
    for second in range(round(WAITS_S)):
        awaited = awaited.after(report((0, 10, 500), (1, 20, 0)), now_s=float(second))
        assert aside(awaited, float(second)) == [8, 8]
    assert aside(awaited, WAITS_S) == [0, 8]


@pytest.mark.parametrize(
    ("reported", "counts"),
    [
        (report((0, 0, 500)), 0),
        (report((0, 400, 500)), 0),
        (report((0, 400, 0), (0, 0, 500)), 0),
        (report((0, 500, 500)), 8),
        (report((0, 500, 0)), 8),
        (report((1, 500, 0)), 0),
        (report(), 0),
    ],
)
def test_it_counts_again_once_most_of_what_is_sent_finds_room(
    reported: Report, counts: int
) -> None:
    waited = Awaited({Rank(0): 0.0}).after(reported, now_s=WAITS_S)
    assert aside(waited, WAITS_S) == [counts, 8]
