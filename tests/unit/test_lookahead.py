# SPDX-License-Identifier: Apache-2.0
"""Looking ahead: what is foreseen is there, and what is not costs copies alone."""

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from tests.unit.drawer import Drawer
from tierd.arena import Arena, Lookahead
from tierd.arena.held import Held
from tierd.errors import NotFound, TierdError
from tierd.tiers import Tier
from tierd.tiers.memory import cxl, dram

BLOCK, FAST = 4096, 16
BLOCKS = 2 * FAST
DATA = np.repeat(np.arange(BLOCKS, dtype=np.uint8), BLOCK).reshape(BLOCKS, BLOCK)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Twice as much as is fast, its second half where it has to be fetched."""
    with filled(Drawer(BLOCKS + 4, BLOCK)) as arena:
        yield arena


def filled(below: Tier) -> Arena:
    arena = Arena(BLOCK, [dram(FAST * BLOCK), below], blocks=BLOCKS)
    arena.write(np.arange(BLOCKS), DATA)
    arena.demote(np.arange(BLOCKS))
    settle(arena)
    arena.prefetch(np.arange(FAST))
    settle(arena)
    assert arena.places(np.arange(BLOCKS)).tolist() == [0] * FAST + [1] * FAST
    return arena


def settle(arena: Arena) -> None:
    """Stands for work that takes longer than all moves."""
    arena.wait(np.arange(arena.blocks))


def lap(arena: Arena, lookahead: Lookahead) -> None:
    for held in lookahead:
        assert (held[0] == held.ids[0]).all()
        settle(arena)


def test_a_sweep_over_twice_the_fast_tier_never_misses(arena: Arena) -> None:
    lookahead = Lookahead(arena, range(BLOCKS), repeats=True)
    lap(arena, lookahead)
    before, moved = lookahead.foresight, arena.moves().moved
    for _ in range(4):
        lap(arena, lookahead)
    after = lookahead.foresight
    assert (after.late, after.strayed, after.wasted) == (before.late, 0, 0)
    assert after.ready == before.ready + 4 * BLOCKS
    # Not each block comes and goes in each lap: some stay, however far it looks ahead.
    assert arena.moves().moved - moved <= 4 * 2 * (BLOCKS - FAST + FAST // 2 + 3)


def test_without_it_the_sweep_misses_each_block(arena: Arena) -> None:
    """So the test above shows something: a clock over the counts is no better than LRU here."""
    missed = 0
    for _ in range(2):
        for number in range(BLOCKS):
            missed += int(arena.places([number])[0] != 0)
            arena.acquire([number]).release()
            settle(arena)
    assert missed > 1.8 * FAST


def test_it_looks_further_ahead_as_there_is_room(arena: Arena) -> None:
    """For more than that, a clock would choose who makes way, and it knows nothing of the order."""
    lookahead = Lookahead(arena, range(BLOCKS), repeats=True)
    lookahead._pace.used(3600.0)
    for _ in range(2):
        lap(arena, lookahead)
    assert lookahead.window == 2
    before = lookahead.foresight
    for number in range(BLOCKS):
        free, asked = FAST - arena.moves().used[0], lookahead.foresight.asked
        if number == FAST:  # far from what stays from lap to lap
            lookahead._pace.moved(3600.0)
        with lookahead.acquire([number]):
            assert lookahead.foresight.asked - asked <= free
            settle(arena)
    assert lookahead.window == FAST
    assert lookahead.foresight.late == before.late


def test_what_is_held_for_long_keeps_nothing_out(arena: Arena) -> None:
    """What was to make way for others and cannot: then a clock chooses."""
    lookahead = Lookahead(arena, range(BLOCKS), repeats=True)
    lookahead._pace.used(3600.0)
    held: deque[Held] = deque()
    for number in [*range(BLOCKS)] * 5:
        held.append(lookahead.acquire([number]))
        settle(arena)
        if len(held) == 4:
            held.popleft().release()
    for last in held:
        last.release()
    assert lookahead.foresight.late < FAST


@pytest.mark.parametrize("size", [2, 3])
def test_steps_of_several_blocks(arena: Arena, size: int) -> None:
    steps = np.arange(BLOCKS // size * size).reshape(-1, size)
    lookahead = Lookahead(arena, steps, repeats=True)
    late = []
    for _ in range(3):
        for held in lookahead:
            assert all((block == id_).all() for block, id_ in zip(held, held.ids, strict=True))
            settle(arena)
        late.append(lookahead.foresight.late)
    assert late[1] == late[2]


def test_an_order_that_fits_stays(arena: Arena) -> None:
    """Only others make way."""
    wanted = range(FAST, FAST + FAST // 2)
    lookahead = Lookahead(arena, wanted, repeats=True)
    for _ in range(2):
        lap(arena, lookahead)
    asked = lookahead.foresight.asked
    lap(arena, lookahead)
    assert lookahead.foresight.asked == asked
    assert (arena.places(wanted) == 0).all()


def test_an_order_that_is_done_once(arena: Arena) -> None:
    lookahead = Lookahead(arena, range(BLOCKS))
    for _ in range(2):
        lap(arena, lookahead)
    foresight = lookahead.foresight
    assert foresight.ready + foresight.late == 2 * BLOCKS
    assert foresight.strayed == 0


def test_memory_below_is_fetched_before_it_is_used() -> None:
    with filled(cxl((BLOCKS + 4) * BLOCK)) as arena:
        lookahead = Lookahead(arena, range(BLOCKS), repeats=True)
        lap(arena, lookahead)
        before = lookahead.foresight
        lap(arena, lookahead)
        assert lookahead.foresight.late == before.late


def test_a_stride_is_found_and_its_end_met(arena: Arena) -> None:
    arena.discard(np.arange(1, FAST, 2))  # there is room for its first blocks
    lookahead = Lookahead(arena)
    for number in range(0, BLOCKS, 2):
        with lookahead.acquire([number]) as held:
            assert (held[0] == number).all()
        settle(arena)
    foresight = lookahead.foresight
    assert foresight.strayed == 3, "what it was found by"
    assert foresight.ready == BLOCKS // 2 - 3
    assert foresight.late == foresight.wasted == 0
    lookahead.acquire([0]).release()
    assert lookahead.foresight.strayed == 4


def test_a_stride_that_breaks_off(arena: Arena) -> None:
    lookahead = Lookahead(arena)
    for number in range(FAST - 4, FAST):
        lookahead.acquire([number]).release()
        settle(arena)
    asked = lookahead.foresight.asked
    assert asked > 0
    lookahead.acquire([3]).release()
    assert lookahead.foresight.wasted == asked
    lookahead.acquire([9]).release()
    assert lookahead.foresight.asked == asked, "it asked on"


def test_random_accesses_ask_for_nothing(arena: Arena) -> None:
    lookahead = Lookahead(arena)
    for number in np.random.default_rng(1).permutation(BLOCKS):
        with lookahead.acquire([number]) as held:
            assert (held[0] == number).all()
    foresight = lookahead.foresight
    assert foresight.asked <= 4
    assert foresight.strayed + foresight.ready + foresight.late == BLOCKS


def test_an_order_that_is_not_kept(arena: Arena) -> None:
    """The window closes, and what is read is right all the same."""
    lookahead = Lookahead(arena, range(BLOCKS), repeats=True)
    random = np.random.default_rng(1)
    for _ in range(3):
        for number in random.permutation(BLOCKS):
            with lookahead.acquire([number]) as held:
                assert (held[0] == number).all()
            settle(arena)
    foresight = lookahead.foresight
    assert foresight.strayed > 2 * BLOCKS
    assert foresight.asked < 2 * BLOCKS, "it went on asking for what was not used"
    assert lookahead.window <= 2
    for _ in range(2):
        lap(arena, lookahead)
    before = lookahead.foresight.late
    lap(arena, lookahead)
    assert lookahead.foresight.late == before, "it did not come back"


def test_steps_that_are_left_out_are_wasted(arena: Arena) -> None:
    lookahead = Lookahead(arena, range(FAST, BLOCKS))
    settle(arena)
    asked = lookahead.foresight.asked
    assert asked == 2
    lookahead.acquire([FAST + 1]).release()
    foresight = lookahead.foresight
    assert (foresight.wasted, foresight.strayed) == (1, 1)
    settle(arena)
    lookahead.acquire([FAST + 2]).release()
    assert lookahead.foresight.strayed == 1


def test_blocks_that_are_not_of_the_order(arena: Arena) -> None:
    lookahead = Lookahead(arena, range(8), repeats=True)
    lookahead.acquire([0]).release()
    lookahead.acquire([BLOCKS - 1]).release()
    lookahead.acquire([]).release()
    lookahead.acquire([1]).release()
    foresight = lookahead.foresight
    assert (foresight.ready + foresight.late, foresight.strayed) == (2, 1)


def test_a_slow_tier_has_it_look_further_ahead() -> None:
    """A tier whose copies last as long as three steps, whatever the machine does meanwhile."""
    drawer, steps = Drawer(BLOCKS + 4, BLOCK), threading.Semaphore(0)

    def three_steps() -> None:
        for _ in range(3):
            assert steps.acquire(timeout=1), "nobody goes on"

    with filled(drawer) as arena:
        arena.discard(np.arange(FAST))  # so that nothing has to go
        lookahead = Lookahead(arena, range(FAST, BLOCKS))
        settle(arena)
        drawer.on_load = three_steps
        windows = []
        for number in range(FAST, BLOCKS):
            steps.release(3)
            with lookahead.acquire([number]) as held:
                assert (held[0] == number).all()
            windows.append(lookahead.window)
        steps.release(1000)
        settle(arena)
    assert max(windows) >= 3


def test_what_cannot_be(arena: Arena) -> None:
    with pytest.raises(NotFound, match="there is no block 99"):
        Lookahead(arena, [1, 99])
    with pytest.raises(TierdError, match="an order of no ids"):
        Lookahead(arena, [])
    with pytest.raises(TierdError, match="no order was declared"):
        next(iter(Lookahead(arena)))
    lookahead = Lookahead(arena, range(4))
    for ids in ([-1], [99]):
        with pytest.raises(NotFound, match="there is no block"):
            lookahead.acquire(ids)
    lookahead.acquire([0]).release()


def test_one_tier_alone() -> None:
    with Arena(BLOCK, [dram(4 * BLOCK)]) as arena:
        arena.write(np.arange(4), DATA[:4])
        lookahead = Lookahead(arena, range(4), repeats=True)
        for _ in range(3):
            lap(arena, lookahead)
        assert lookahead.foresight.ready == 12


def test_a_fast_tier_of_two_blocks() -> None:
    """Nothing can be fetched ahead there, and all is right."""
    with Arena(BLOCK, [dram(2 * BLOCK), Drawer(8, BLOCK)], blocks=6) as arena:
        arena.write(np.arange(6), DATA[:6])
        lookahead = Lookahead(arena, range(6), repeats=True)
        for _ in range(2):
            lap(arena, lookahead)
        assert lookahead.foresight.asked == 0
