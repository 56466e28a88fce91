# SPDX-License-Identifier: Apache-2.0
"""Pinned ranges: as sets of pages, and in plans."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.machine import CXL, DRAM
from tests.unit.test_decide import pieces, rooms
from tests.unit.world import BASE
from tierd.bulk import Plan, Target
from tierd.decide.explain import REASONS, Why, explain
from tierd.decide.pins import MOST, NO_PINS, Pins, add, by_name, cut_at, merge, remove, within
from tierd.decide.placement import plan
from tierd.decide.zoom import most_doubtful
from tierd.errors import Conflict, NotFound, TierdError
from tierd.model import PAGE_BYTES, PIN_CODE, Kept, Pid, Pin, Policy

PAGES = 60
HOT_PER_BYTE = 100 / PAGE_BYTES
MAPPED = np.array([(BASE, BASE + PAGES * PAGE_BYTES)], [("start", "u8"), ("end", "u8")])

RANGES = st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)).map(
    lambda pair: pages(pair[0], min(pair[0] + pair[1], PAGES))
)
SAID = st.lists(st.tuples(RANGES, st.none() | st.sampled_from(Pin)), max_size=12)


def pages(first: int, behind: int) -> range:
    return range(BASE + first * PAGE_BYTES, BASE + behind * PAGE_BYTES)


def by_page(pins: Pins) -> list[int]:
    """The oracle: each page's code."""
    codes = [0] * PAGES
    for start, end, code in pins.tolist():
        first, behind = (start - BASE) // PAGE_BYTES, (end - BASE) // PAGE_BYTES
        codes[first:behind] = [code] * (behind - first)
    return codes


def said(rows: Sequence[tuple[range, Pin | None]]) -> tuple[Pins, list[int]]:
    """What comes of pins and unpins, one after the other, and of each page by itself."""
    pins, codes = NO_PINS, [0] * PAGES
    for part, pin in rows:
        first, behind = ((at - BASE) // PAGE_BYTES for at in (part.start, part.stop))
        code, now = PIN_CODE.get(pin, 0) if pin else 0, set(codes[first:behind])
        try:
            pins = remove(pins, part) if pin is None else add(pins, part, pin, MAPPED)
        except Conflict:
            assert now - {0, code}
            continue
        except NotFound:
            assert now == {0}
            continue
        assert pin is None or not now - {0, code}
        codes[first:behind] = [code] * (behind - first)
    return pins, codes


@given(rows=SAID)
def test_pins_are_sets_of_pages(rows: Sequence[tuple[range, Pin | None]]) -> None:
    pins, codes = said(rows)
    assert by_page(pins) == codes
    assert (pins["start"][1:] >= pins["end"][:-1]).all()
    adjoining = pins["start"][1:] == pins["end"][:-1]
    assert (pins["pin"][1:] != pins["pin"][:-1])[adjoining].all(), "alike ones are joined"


@given(top=SAID, below=SAID)
def test_of_two_layers_the_upper_holds(
    top: Sequence[tuple[range, Pin | None]], below: Sequence[tuple[range, Pin | None]]
) -> None:
    (upper, codes), (lower, others) = said(top), said(below)
    assert by_page(merge(upper, lower)) == [a or b for a, b in zip(codes, others, strict=True)]


@given(rows=SAID, part=RANGES)
def test_a_pin_ends_where_its_memory_does(
    rows: Sequence[tuple[range, Pin | None]], part: range
) -> None:
    pins, codes = said(rows)
    left = np.array([(part.start, part.stop)], MAPPED.dtype)
    inside = [BASE + page * PAGE_BYTES in part for page in range(PAGES)]
    assert by_page(within(pins, left)) == [c * i for c, i in zip(codes, inside, strict=True)]


def test_a_pin_is_of_whole_pages() -> None:
    pins = add(NO_PINS, range(BASE + 5000, BASE + 5001), Pin.HERE, MAPPED)
    assert pins.tolist() == [(BASE + 4096, BASE + 8192, PIN_CODE[Pin.HERE])]
    assert not len(remove(pins, range(BASE + 8191, BASE + 9000)))


@pytest.mark.parametrize(
    ("part", "error", "told"),
    [
        (range(9, 9), TierdError, "9-9 is no range: its end must be above its start"),
        (range(9, 3), TierdError, "is no range"),
        (range(4096, 8192), TierdError, "1000-2000 is not all mapped: nothing is at 1000"),
        (pages(PAGES - 1, PAGES + 2), TierdError, f"nothing is at {pages(PAGES, PAGES).start:x}"),
        (pages(3, 9), Conflict, f"{pages(5, 7).start:x}-{pages(5, 7).stop:x} is pinned otherwise"),
    ],
)
def test_what_cannot_be_pinned_is_told(part: range, error: type[Exception], told: str) -> None:
    pinned = add(NO_PINS, pages(5, 7), Pin.HERE, MAPPED)
    with pytest.raises(error, match=told) as caught:
        add(pinned, part, Pin.FASTEST, MAPPED)
    assert type(caught.value) is error


def test_no_more_ranges_than_can_be_listed() -> None:
    mapped = np.array([(BASE, BASE + 4 * MOST * PAGE_BYTES)], MAPPED.dtype)
    pins = NO_PINS
    for number in range(MOST):
        pins = add(pins, pages(2 * number, 2 * number + 1), Pin.FASTEST, mapped)
    with pytest.raises(TierdError, match="64 ranges of the process are pinned already"):
        add(pins, pages(3 * MOST, 3 * MOST + 1), Pin.FASTEST, mapped)
    assert len(add(pins, pages(0, 2 * MOST), Pin.FASTEST, mapped)) == 1


@pytest.mark.parametrize("part", [pages(0, 5), pages(7, 9), range(9, 3)])
def test_what_is_not_pinned_cannot_be_unpinned(part: range) -> None:
    with pytest.raises(NotFound, match="nothing is pinned in"):
        remove(add(NO_PINS, pages(5, 7), Pin.HERE, MAPPED), part)


def test_mappings_that_adjoin_are_one_pin() -> None:
    found = [(0, 4096, "/a"), (4096, 8192, "[heap]"), (8192, 12288, "/b")]
    pins = by_name(found, {"/a": Pin.HERE, "[heap]": Pin.HERE, "/b": Pin.FASTEST})
    assert pins.tolist() == [(0, 8192, PIN_CODE[Pin.HERE]), (8192, 12288, PIN_CODE[Pin.FASTEST])]
    assert not len(by_name([], {}))


# Plans

PIECES = st.lists(
    st.tuples(st.integers(1, 20), st.floats(0, HOT_PER_BYTE), st.floats(0, 1)),
    min_size=1,
    max_size=6,
)


def made_of(drawn: Sequence[tuple[int, float, float]]) -> np.typing.NDArray[np.void]:
    """Pieces that leave a page between each other."""
    first, rows = 0, []
    for count, heat, fast in drawn:
        rows.append((first, count, heat, [fast, 1 - fast]))
        first += count + 1
    return pieces(*rows)


@given(drawn=PIECES, rows=SAID)
def test_cut_pieces_are_as_before(
    drawn: Sequence[tuple[int, float, float]], rows: Sequence[tuple[range, Pin | None]]
) -> None:
    made, (pins, codes) = made_of(drawn), said(rows)
    parts, code = cut_at(made, pins)
    within = np.searchsorted(made["start"], parts["start"], "right") - 1
    assert (parts["end"] <= made["end"][within]).all()
    whole = np.bincount(within, parts["end"] - parts["start"], len(made))
    assert whole.tolist() == (made["end"] - made["start"]).tolist()
    for name in ("short", "resident", "held_until_s"):
        assert (parts[name] == made[name][within]).all()
    for part, each in zip(parts, code, strict=True):
        first, behind = ((int(part[at]) - BASE) // PAGE_BYTES for at in ("start", "end"))
        assert {*codes[first:behind]} <= {each}


@given(drawn=PIECES, data=st.data(), free=st.integers(-20, 20), budget=st.integers(0, 200))
def test_no_plan_moves_what_is_fixed_or_takes_what_is_pinned(
    drawn: Sequence[tuple[int, float, float]], data: st.DataObject, free: int, budget: int
) -> None:
    made = made_of(drawn)
    code = np.array([data.draw(st.integers(0, 2)) for _ in made])
    pinned, fixed = (code == PIN_CODE[pin] for pin in (Pin.FASTEST, Pin.HERE))
    moves = decide(made, pinned, fixed, free=free, budget=budget).moves
    at = np.searchsorted(made["start"], moves["start"])
    assert not fixed[at].any()
    assert (moves["destination"][pinned[at]] == DRAM).all()


@given(drawn=PIECES, free=st.integers(-20, 60), budget=st.integers(0, 200))
def test_pins_of_nothing_change_no_plan(
    drawn: Sequence[tuple[int, float, float]], free: int, budget: int
) -> None:
    made = made_of(drawn)
    none = np.zeros(len(made), np.bool_)
    with_none = decide(made, none, none, free=free, budget=budget)
    assert with_none.moves.tobytes() == decide(made, free=free, budget=budget).moves.tobytes()


def decide(
    made: np.typing.NDArray[np.void],
    pinned: np.typing.NDArray[np.bool_] | bool = False,
    fixed: np.typing.NDArray[np.bool_] | bool = False,
    *,
    free: int = 0,
    budget: int = 1000,
) -> Plan:
    target = Target(pid=Pid(1), pieces=made, ceiling=np.inf, pinned=pinned, fixed=fixed)
    room, budget_bytes = rooms(free, 1000), budget * PAGE_BYTES
    return plan([target], room, Policy(), now_s=0, budget_bytes=budget_bytes)


def test_a_pinned_range_takes_the_place_of_a_hotter_one() -> None:
    made = pieces((0, 10, HOT_PER_BYTE, [1]), (10, 20, 0.0, [0, 1]))
    parts, code = cut_at(made, add(NO_PINS, pages(14, 18), Pin.FASTEST, MAPPED))
    moves = decide(parts, code == PIN_CODE[Pin.FASTEST]).moves
    told = [(int(m["start"]), m["destination"], m["bytes"] // PAGE_BYTES) for m in moves]
    assert told == [(BASE, CXL, 4), (pages(14, 18).start, DRAM, 4)]


def test_what_is_fixed_is_told() -> None:
    made = pieces((0, 10, HOT_PER_BYTE, [0, 1]), (10, 5, 0.0, [0, 1]))
    fixed = np.ones(2, np.bool_)
    refused = decide(made, False, fixed, free=100)
    assert not len(refused.moves)
    assert refused.kept == {Kept.PINNED: 10 * PAGE_BYTES}


def test_why_a_cold_pinned_range_is_not_in_the_fastest_is_told() -> None:
    made = pieces((0, 10, 0.0, [1]), (10, 10, 0.0, [0, 1]))
    made["probed_s"] = 0.0
    made["kept"] = decide(made, np.ones(2, np.bool_)).kept_codes
    told = [REASONS[why] for why in explain(made, np.inf, Policy())]
    assert told == [Why.FASTEST, Kept.NO_ROOM]


def test_what_is_fixed_is_not_looked_at() -> None:
    lukewarm = pieces((0, 600, 1.0 / PAGE_BYTES, [0, 1]))
    target = Target(pid=Pid(1), pieces=lukewarm, ceiling=HOT_PER_BYTE)
    assert most_doubtful([target], Policy(), now_s=0) is not None
    fixed = replace(target, fixed=np.ones(1, np.bool_))
    assert most_doubtful([fixed], Policy(), now_s=0) is None
