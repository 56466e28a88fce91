# SPDX-License-Identifier: Apache-2.0
"""Embedding tables: each row is what was written, and the hot ones come to the fast tier."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.drawer import Drawer
from tierd.arena import Arena
from tierd.errors import NotFound, TierdError
from tierd.tiers.memory import cxl, dram
from tierd.uses import EmbeddingTable, KeepHot, by_frequency
from tierd.uses.hot import MARGIN, choose

BLOCK, WIDTH, PER_BLOCK = 256, 3, 21
"""Rows of 12 bytes: the last four of a block are left over."""


def some_rows(count: int, width: int = WIDTH) -> NDArray[np.float32]:
    return np.random.default_rng(1).random((count, width), dtype=np.float32)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(BLOCK, [dram(8 * BLOCK), cxl(40 * BLOCK)], checksums=True) as arena:
        yield arena


@pytest.mark.parametrize("hottest", [None, [5, 700, 3]])
def test_a_lookup_is_numpys(arena: Arena, hottest: list[int] | None) -> None:
    values = some_rows(801)
    table = EmbeddingTable(arena, 801, WIDTH, hottest=hottest)
    table.write(values)
    rng = np.random.default_rng(2)
    for size in (0, 1, 5, 3000):
        rows = rng.integers(0, 801, size)
        assert (table.lookup(rows) == values[rows]).all()
    into = np.zeros((2, WIDTH), np.float32)
    assert table.lookup([800, 800], into) is into
    assert (into == values[800]).all()


def test_a_lookup_where_the_slow_tier_has_no_addresses() -> None:
    values = some_rows(400)
    drawer = Drawer(24, BLOCK)
    with Arena(BLOCK, [dram(8 * BLOCK), drawer], blocks=20) as arena:
        table = EmbeddingTable(arena, 400, WIDTH, keep_hot=False)
        table.write(values)
        rows = np.random.default_rng(3).permutation(400)
        assert (table.lookup(rows) == values[rows]).all()
        assert drawer.calls > 0


def test_each_row_that_is_looked_up_is_counted_once(arena: Arena) -> None:
    table = EmbeddingTable(arena, 100, WIDTH, keep_hot=False)
    table.write(some_rows(100))
    before = arena.counts(table.ids)
    rows = np.array([0, 0, 1, 20, 21, 99, 99, 99])
    table.lookup(rows)
    counted = arena.counts(table.ids) - before
    assert counted.tolist() == np.bincount(rows // PER_BLOCK, minlength=5).tolist()


def test_hits_are_rows_whose_block_was_in_the_fastest_tier(arena: Arena) -> None:
    table = EmbeddingTable(arena, 20 * PER_BLOCK, WIDTH, keep_hot=False)
    assert table.lookups.hit_ratio is None
    table.write(some_rows(20 * PER_BLOCK))
    places = arena.places(table.ids)
    rows = np.random.default_rng(4).integers(0, 20 * PER_BLOCK, 500)
    table.lookup(rows)
    assert table.lookups.rows == 500
    assert table.lookups.fast == np.count_nonzero(places[rows // PER_BLOCK] == 0) > 0


def test_hot_rows_share_the_first_blocks(arena: Arena) -> None:
    seen = np.array([7, 7, 7, 500, 500, 30])
    hottest = by_frequency(seen, 800)
    assert hottest.tolist() == [7, 500, 30]
    table = EmbeddingTable(arena, 800, WIDTH, first_block=2, hottest=hottest)
    assert table.blocks_of([7, 500, 30, 0]).tolist() == [2, 2, 2, 2]
    assert table.blocks_of([799]).tolist() == [2 + 799 // PER_BLOCK]


def test_what_is_wrong_is_named(arena: Arena) -> None:
    table = EmbeddingTable(arena, 100, WIDTH)
    with pytest.raises(NotFound, match="never written"):
        table.lookup([1])
    table.write(some_rows(100))
    for rows, told in (([100], "no row 100"), ([3, -1], "no row -1")):
        with pytest.raises(NotFound, match=told):
            table.lookup(rows)
    with pytest.raises(TierdError, match="rows are whole numbers"):
        table.lookup([0.5])
    with pytest.raises(TierdError, match=r"the table: float64 \(100, 3\), not float32"):
        table.write(np.zeros((100, 3)))
    with pytest.raises(TierdError, match=r"into: float32 \(1, 3\)"):
        table.lookup([1, 2], np.zeros((1, 3), np.float32))
    with pytest.raises(TierdError, match="hottest has a row twice"):
        EmbeddingTable(arena, 100, WIDTH, hottest=[1, 1])
    with pytest.raises(TierdError, match="a row of 400 bytes in blocks of 256"):
        EmbeddingTable(arena, 100, 100)
    with pytest.raises(NotFound, match="of an arena with 46"):
        EmbeddingTable(arena, 10_000, WIDTH)
    with pytest.raises(TierdError, match="no fixed size"):
        EmbeddingTable(arena, 10, WIDTH, np.object_)
    with pytest.raises(TierdError, match="nothing is to be kept"):
        EmbeddingTable(arena, 0, WIDTH)
    with pytest.raises(TierdError, match="from 1 on"):
        KeepHot(arena, table.ids, halve_after=0)


def zipf(rows: int, count: int, exponent: float) -> NDArray[np.int64]:
    rng = np.random.default_rng(5)
    share = 1 / np.arange(1, rows + 1) ** exponent
    ranks = rng.choice(rows, count, p=share / share.sum())
    return rng.permutation(rows)[ranks]


def hits_of_lru(blocks: NDArray[np.int64], slots: int, since: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, block in enumerate(blocks.tolist()):
        hits += number >= since and block in kept
        kept[block] = None
        kept.move_to_end(block)
        if len(kept) > slots:
            kept.popitem(last=False)
    return hits


@pytest.mark.parametrize("exponent", [0.8, 1.05, 1.2])
def test_zipfian_rows_are_fast_nearly_as_by_hindsight(exponent: float) -> None:
    rows, width, slots, lookups = 20_000, 16, 160, 400_000
    blocks = rows // 16
    trace = zipf(rows, lookups, exponent)
    with Arena(1024, [dram(slots * 1024), cxl((blocks + 64) * 1024)], blocks=blocks) as arena:
        table = EmbeddingTable(arena, rows, width)
        table.write(some_rows(rows, width))
        fast = []
        for at in range(0, lookups, 2000):
            table.lookup(trace[at : at + 2000])
            arena.wait(table.ids)
            fast.append(table.lookups.fast)
        hits = fast[-1] - fast[len(fast) // 2 - 1]
    measured = trace[lookups // 2 :] // 16
    best = np.sort(np.bincount(measured))[-slots:].sum()
    assert hits / len(measured) > best / len(measured) - 0.02
    assert hits > hits_of_lru(trace // 16, slots, lookups // 2)


def test_a_change_of_what_is_hot_is_followed(arena: Arena) -> None:
    table = EmbeddingTable(arena, 30 * PER_BLOCK, WIDTH, halve_after=500)
    table.write(some_rows(30 * PER_BLOCK))
    for hot in (range(20, 28), range(6)):
        rows = np.repeat(np.array(hot) * PER_BLOCK, 50)
        for _ in range(8):
            table.lookup(rows)
            arena.wait(table.ids)
        assert (arena.places(np.array(hot)) == 0).all()


def test_what_others_have_in_the_fastest_tier_is_left_to_them(arena: Arena) -> None:
    others = np.arange(40, 46)
    arena.write(others, np.zeros((6, BLOCK), np.uint8))
    table = EmbeddingTable(arena, 10 * PER_BLOCK, WIDTH)
    table.write(some_rows(10 * PER_BLOCK))
    rows = np.repeat(np.arange(5, 10) * PER_BLOCK, 10)
    for _ in range(5):
        table.lookup(rows)
        arena.wait(table.ids)
    assert (arena.places(others) == 0).all()
    assert np.count_nonzero(arena.places(table.ids) == 0) == 2


@given(
    heat=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    room=st.integers(0, 40),
    most=st.integers(1, 40),
    data=st.data(),
)
def test_who_changes_places(heat: list[int], room: int, most: int, data: st.DataObject) -> None:
    places = np.array(
        data.draw(st.lists(st.sampled_from([0, 1, 255]), min_size=len(heat), max_size=len(heat))),
        np.uint8,
    )
    hot = np.array(heat, float)
    swap = choose(hot, places, room, most)
    here = int(np.count_nonzero(places == 0))
    assert len(swap.up) <= most
    assert (places[swap.up] == 1).all()
    assert (places[swap.down] == 0).all()
    assert here + len(swap.up) - len(swap.down) <= max(room, here)
    if len(swap.down):
        came = hot[swap.up[-len(swap.down) :]]
        assert (np.sort(came)[::-1] > MARGIN * np.sort(hot[swap.down])).all()
    places[swap.up], places[swap.down] = 0, 1
    assert not len(choose(hot, places, room, most).down) or len(swap.up) == most
