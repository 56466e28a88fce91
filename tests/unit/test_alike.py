# SPDX-License-Identifier: Apache-2.0
"""Whether memory is hot throughout, as a few of its pages tell."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.test_decide import pieces
from tests.unit.world import BASE
from tierd.bulk import Target
from tierd.decide.alike import (
    LEAST_PER_S,
    PAGES,
    PART,
    RUN_PAGES,
    TELLS_S,
    is_like_looked_at,
    most_promising,
)
from tierd.model import PAGE_BYTES, Pid

HOT = 10 / PAGE_BYTES
SLOW, FAST = [0, 1], [1]


def target(*places: tuple[int, int, float, Sequence[float]], pid: int = 1) -> Target:
    return Target(pid=Pid(pid), pieces=pieces(*places), ceiling=5 * HOT, unsorted=True)


LONG = target((0, 100, 0.0, SLOW), (100, 900, HOT, SLOW), (1000, 1100, 2 * HOT, SLOW))


def pages_of(start: int, end: int) -> tuple[int, int]:
    return (start - BASE) // PAGE_BYTES, (end - BASE) // PAGE_BYTES


def test_a_few_pages_amid_what_adjoins_are_looked_at() -> None:
    doubt = most_promising([LONG])
    assert doubt is not None
    assert pages_of(doubt.start, doubt.end) == (844, 844 + PAGES)
    assert doubt.per_page_s == pytest.approx(20)
    assert doubt.accesses_s == pytest.approx(31_000)


def test_those_are_first_from_where_most_accesses_come_below() -> None:
    less, beside = target((0, 2000, HOT, SLOW), pid=2), target((0, 9000, HOT, [0.8, 0.2]), pid=3)
    doubt = most_promising([less, LONG, beside])
    assert doubt is not None
    assert doubt.pid == LONG.pid


@pytest.mark.parametrize(
    "one",
    [
        target((0, RUN_PAGES - 1, HOT, SLOW)),
        target((0, 700, HOT, SLOW), (900, 700, HOT, SLOW)),
        target((0, 2000, HOT, FAST)),
        target((0, 2000, 0.9 * LEAST_PER_S / PAGE_BYTES, SLOW)),
        replace(LONG, unsorted=False),
        replace(LONG, fixed=True),
        replace(LONG, rests=True),
        target(),
    ],
    ids=["small", "parted", "fast", "rare", "placed", "fixed", "rests", "nothing"],
)
def test_nothing_is_looked_at(one: Target) -> None:
    assert most_promising([one]) is None


@pytest.mark.parametrize("known", ["huge", "zoomed_s"])
def test_what_is_known_is_not_looked_at(known: str) -> None:
    """Of a huge page one bit is seen, whichever of its pages are accessed."""
    one = replace(LONG, pieces=LONG.pieces.copy())
    one.pieces[known] = 1
    assert most_promising([one]) is None


def looked_at(*heats: float, pages: int = PAGES) -> NDArray[np.void]:
    """Pieces of 500 pages, and one that was looked at, of the second heat, after the first one."""
    first, one, *others = heats
    made = pieces(
        (0, 500, first, SLOW),
        (500, pages, one, SLOW),
        *((500 * (2 + at), 500, heat, SLOW) for at, heat in enumerate(others)),
    )
    made["end"][1] = made["start"][2]
    made["start"][1] = made["end"][1] - np.uint64(pages * PAGE_BYTES)
    made["end"][0] = made["start"][1]
    made["zoomed_s"][1] = 1.0
    return made


def test_what_adjoins_is_like_what_was_looked_at() -> None:
    made = looked_at(HOT, HOT, 2 * HOT, 0.4 * HOT, PART * HOT / 2, HOT)
    assert is_like_looked_at(made, now_s=2.0).tolist() == [True] * 4 + [False] * 2
    parted = looked_at(HOT, HOT, HOT, HOT)
    parted["start"][3:] += np.uint64(PAGE_BYTES)
    assert is_like_looked_at(parted, now_s=2.0).tolist() == [True] * 3 + [False]


def test_a_look_tells_nothing_of_huge_pages() -> None:
    made = looked_at(HOT, HOT, HOT, HOT)
    made["huge"][2] = True
    assert is_like_looked_at(made, now_s=2.0).tolist() == [True] * 2 + [False] * 2
    made["huge"][1] = True
    assert not is_like_looked_at(made, now_s=2.0).any()


def test_a_look_that_has_cut_its_pages_or_seen_next_to_nothing_tells_nothing() -> None:
    assert not is_like_looked_at(looked_at(HOT, HOT, HOT, pages=PAGES // 2 - 1), now_s=2.0).any()
    rare = 0.9 * LEAST_PER_S / PAGE_BYTES
    assert not is_like_looked_at(looked_at(rare, rare, rare), now_s=2.0).any()
    assert not is_like_looked_at(pieces(), now_s=2.0).any()


def test_a_look_tells_for_a_while() -> None:
    made = looked_at(HOT, HOT, HOT)
    assert is_like_looked_at(made, now_s=0.9 + TELLS_S).all()
    assert not is_like_looked_at(made, now_s=1.1 + TELLS_S).any()
