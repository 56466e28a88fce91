# SPDX-License-Identifier: Apache-2.0
"""Arenas: what is written is read, wherever it is, whoever moves it, and whatever goes wrong."""

import ctypes
import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.drawer import Drawer
from tierd.arena import Arena
from tierd.errors import Busy, Damaged, Lost, NoRoom, NotFound, TierdError, TierFailed
from tierd.tiers import Health, Space, Tier
from tierd.tiers.memory import MemorySpace, cxl, dram

BLOCK = 4096
FAST, SLOW = 8, 16


def some_blocks(count: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK), dtype=np.uint8)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Two tiers of memory."""
    tiers = [dram(FAST * BLOCK), cxl(SLOW * BLOCK)]
    with Arena(BLOCK, tiers, checksums=True) as arena:
        yield arena


@pytest.fixture
def drawer() -> Drawer:
    return Drawer(SLOW, BLOCK)


@pytest.fixture
def deep(drawer: Drawer) -> Iterator[Arena]:
    """Memory above a tier without addresses."""
    with Arena(BLOCK, [dram(FAST * BLOCK), drawer], checksums=True, deadline_s=60) as arena:
        yield arena
    assert drawer.freed


def test_what_is_written_is_read(arena: Arena) -> None:
    data = some_blocks(arena.blocks)
    ids = np.random.default_rng(2).permutation(arena.blocks)
    arena.write(ids, data)
    assert (arena.read(ids) == data).all()
    assert (arena.read(ids[::-1]) == data[::-1]).all()
    into = np.zeros((3, BLOCK), np.uint8)
    assert arena.read(ids[:3], into) is not None
    assert (into == data[:3]).all()


def test_new_blocks_fill_the_fastest_tier_first(arena: Arena) -> None:
    ids = np.arange(arena.blocks)
    assert (arena.places(ids) == 255).all()
    arena.write(ids, some_blocks(len(ids)))
    assert arena.places(ids).tolist() == [0] * FAST + [1] * (len(ids) - FAST)
    assert arena.moves().used == (FAST, len(ids) - FAST)


@pytest.mark.parametrize("ids", [[-1], [22], [0, 1 << 40], np.array([1 << 63], np.uint64)])
def test_an_id_that_is_out_of_range(arena: Arena, ids: list[int]) -> None:
    assert arena.blocks == 22
    arena.write([0], some_blocks(1))
    calls: list[Callable[[], object]] = [
        lambda: arena.touch(ids),
        lambda: arena.acquire(ids),
        lambda: arena.read(ids),
        lambda: arena.write(ids, some_blocks(len(ids))),
        lambda: arena.discard(ids),
        lambda: arena.prefetch(ids),
        lambda: arena.demote(ids),
        lambda: arena.wait(ids),
        lambda: arena.places(ids),
        lambda: arena.counts(ids),
    ]
    for call in calls:
        with pytest.raises(NotFound, match="there is no block"):
            call()
    assert arena.counts([0])[0] == 1, "it was counted in spite of the error"


@pytest.mark.parametrize("ids", [[0.5], ["a"], [None]])
def test_ids_that_are_no_numbers(arena: Arena, ids: list[object]) -> None:
    with pytest.raises(TierdError, match="ids are whole numbers"):
        arena.touch(ids)  # type: ignore[arg-type]


def test_no_ids_at_all(arena: Arena) -> None:
    arena.touch([])
    arena.write([], some_blocks(0))
    assert arena.read([]).shape == (0, BLOCK)
    assert arena.prefetch([]) == 0
    arena.acquire([]).release()


def test_a_block_that_was_never_written(arena: Arena) -> None:
    with pytest.raises(NotFound, match="block 3 was never written"):
        arena.read([3])
    with pytest.raises(NotFound, match="block 3 was never written"):
        arena.acquire([3])
    with arena.acquire([3], write=True) as held:
        assert not held[0].any()
    assert not arena.read([3]).any()


def test_a_new_block_has_nothing_of_an_old_one(arena: Arena) -> None:
    ids = np.arange(arena.blocks)
    arena.write(ids, np.full((len(ids), BLOCK), 7, np.uint8))
    arena.discard(ids)
    assert arena.moves().used == (0, 0)
    with arena.acquire(ids, write=True) as held:
        assert not any(block.any() for block in held)


def test_what_is_given_up_twice(arena: Arena) -> None:
    arena.write([1, 2], some_blocks(2))
    arena.discard([1])
    with pytest.raises(NotFound, match="block 1 was never written"):
        arena.discard([1])
    assert arena.moves().used[0] == 1


def test_views_are_the_blocks_themselves(arena: Arena) -> None:
    data = some_blocks(2)
    arena.write([4, 5], data)
    with arena.acquire([5, 4]) as held:
        assert (held[0] == data[1]).all()
        assert held[0].ctypes.data == held.addresses[0]
        assert not held[0].flags.writeable
    with arena.acquire([4], write=True) as held:
        held[0].view(np.float32)[:] = 1.5
        shown = np.from_dlpack(held[0])
        assert shown.ctypes.data == held.addresses[0]
    assert (arena.read([4]).view(np.float32) == 1.5).all()


def test_many_blocks_are_gathered_by_memory(arena: Arena) -> None:
    data = some_blocks(arena.blocks)
    arena.write(np.arange(arena.blocks), data)
    ids = np.array([20, 3, 9, 3])
    gathered = np.zeros((4, BLOCK), np.uint8)
    with arena.acquire(ids) as held:
        for tier, (memory, found, slots) in enumerate(held.by_memory()):
            assert (arena.places(ids[found]) == tier).all()
            assert not memory.flags.writeable
            gathered[found] = memory[slots]
    assert (gathered == data[ids]).all()
    with pytest.raises(TierdError, match="not held any more"):
        next(held.by_memory())


def test_what_is_released_twice(arena: Arena) -> None:
    arena.write([4], some_blocks(1))
    first, second = arena.acquire([4]), arena.acquire([4])
    first.release()
    with pytest.raises(TierdError, match="released twice"):
        first.release()
    with pytest.raises(TierdError, match="block 4 is not held"):
        first[0]
    with pytest.raises(Busy, match="block 4 is held"):
        arena.write([4], some_blocks(1), timeout_s=0)
    second.release()
    arena.write([4], some_blocks(1))


def test_readers_share_and_a_writer_is_alone(arena: Arena) -> None:
    arena.write([1, 2], some_blocks(2))
    with arena.acquire([1, 1, 2]), pytest.raises(Busy):
        arena.acquire([2], write=True, timeout_s=0)
    with arena.acquire([2], write=True):
        for busy in (
            lambda: arena.acquire([1, 2], timeout_s=0),
            lambda: arena.acquire([2], write=True, timeout_s=0),
            lambda: arena.read([2], timeout_s=0),
            lambda: arena.discard([2], timeout_s=0),
        ):
            with pytest.raises(Busy, match="block 2 is held"):
                busy()
        arena.write([1], some_blocks(1), timeout_s=0)  # of [1, 2] none was left held
    with pytest.raises(TierdError, match="given twice"):
        arena.acquire([1, 1], write=True)
    arena.write([1], some_blocks(1), timeout_s=0)


def test_who_waits_gets_it(arena: Arena) -> None:
    arena.write([1], some_blocks(1))
    held = arena.acquire([1])
    got = threading.Event()

    def write() -> None:
        arena.write([1], np.full(BLOCK, 3, np.uint8))
        got.set()

    writing = threading.Thread(target=write)
    writing.start()
    assert not got.wait(0.05)
    held.release()
    assert got.wait(30)
    writing.join()
    assert (arena.read([1]) == 3).all()


def test_accesses_are_counted_by_all_threads(arena: Arena) -> None:
    ids = np.repeat([1, 2, 2], 20_000)  # long enough for calls to overlap

    def touch() -> None:
        for _ in range(20):
            arena.touch(ids)

    threads = [threading.Thread(target=touch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.counts([0, 1, 2]).tolist() == [0, 1_600_000, 3_200_000]


def test_counters_go_round(arena: Arena) -> None:
    arena.shared.counts[5] = (1 << 32) - 1
    arena.touch([5, 5])
    assert arena.counts([5])[0] == 1


def test_prefetch_swaps_with_what_is_not_used(arena: Arena) -> None:
    """Also when every tier is full, but for the movers' own slots."""
    ids, data = np.arange(arena.blocks), some_blocks(arena.blocks)
    arena.write(ids, data)
    wanted = ids[-FAST // 2 :]
    arena.touch(ids[:2])
    assert arena.prefetch(wanted) == len(wanted)
    assert not arena.wait(wanted).any()
    assert (arena.places(wanted) == 0).all()
    assert (arena.places(ids) == 0).sum() == FAST
    assert (arena.read(ids) == data).all()
    assert arena.prefetch(wanted) == 0


def test_what_goes_already_makes_way_and_nothing_else() -> None:
    size, ids = 1 << 20, np.arange(12)
    with Arena(size, [dram(6 * size), cxl(12 * size)], movers=4) as arena:
        arena.write(ids, np.zeros((12, size), np.uint8))
        for _ in range(20):
            arena.demote([0, 1])
            arena.prefetch([6, 7])
            assert not arena.wait(ids).any()
            assert arena.places(ids).tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
            arena.demote([6, 7])
            arena.prefetch([0, 1])
            assert not arena.wait(ids).any()
            assert arena.places(ids).tolist() == 6 * [0] + 6 * [1]


def test_what_is_used_stays(arena: Arena) -> None:
    ids = np.arange(arena.blocks)
    arena.write(ids, some_blocks(len(ids)))
    arena.prefetch(ids[FAST : FAST + 1])
    arena.wait(ids)  # from here on it is known what was used since
    used = ids[arena.places(ids) == 0][:4]
    for newcomer in ids[arena.places(ids) == 1]:
        arena.touch(used)
        arena.prefetch([newcomer])
        arena.wait([newcomer])
    assert (arena.places(used) == 0).all()


def test_demote_and_back(arena: Arena) -> None:
    data = some_blocks(4)
    arena.write(range(4), data)
    arena.demote(range(4))
    assert not arena.wait(range(4)).any()
    assert (arena.places(range(4)) == 1).all()
    arena.prefetch(range(4), "dram")
    arena.wait(range(4))
    assert (arena.places(range(4)) == 0).all()
    assert (arena.read(range(4)) == data).all()
    with pytest.raises(NotFound, match="no tier 'tape'"):
        arena.prefetch([1], "tape")


PRESENT = 1 << 63
"""Of a page in /proc/PID/pagemap: it is in memory (Documentation/admin-guide/mm/pagemap.rst)."""


def present(memory: NDArray[np.uint8]) -> int:
    """How many of its pages are there."""
    first = memory.ctypes.data // BLOCK
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        found = os.pread(pagemap.fileno(), 8 * (memory.nbytes // BLOCK), 8 * first)
    return int(np.count_nonzero(np.frombuffer(found, np.uint64) & np.uint64(PRESENT)))


class Remembered:
    """Memory that can be looked at, and a fault that comes before it is given back."""

    def __init__(self, slots: int) -> None:
        self._tier = dram(slots * BLOCK)
        self.facts = self._tier.facts
        self.memory = np.zeros((0, 0), np.uint8)
        self.fault: Callable[[], object] = bool

    def health(self) -> Health:
        return Health.GOOD

    def reserve(self, block_bytes: int, slots: int) -> Space:
        space = self._tier.reserve(block_bytes, slots)
        self.memory, tier = space.memory, self

        class Faulty(MemorySpace):
            def give_back(self, slots: NDArray[np.int64]) -> None:
                tier.fault()
                super().give_back(slots)

        return Faulty(space.memory, space.nodes)


def test_what_is_free_is_left_to_others_until_it_is_used() -> None:
    tier, data, ids = Remembered(64), some_blocks(64), np.arange(64)
    with Arena(BLOCK, [tier, cxl(128 * BLOCK)], blocks=100, checksums=True) as arena:
        arena.write(ids, data)
        assert arena.give_back() == 0, "all of it is used"
        arena.demote(ids[10:])
        arena.wait(ids)
        assert present(tier.memory) == 64
        assert arena.give_back("dram") == 54 * BLOCK
        assert present(tier.memory) == 10
        assert arena.give_back() == 0, "it was given back already"
        assert (arena.read(ids) == data).all()
        arena.prefetch(ids[10:40])
        arena.wait(ids)
        assert present(tier.memory) == 40
        assert arena.places(ids[:40]).tolist() == [0] * 40
        assert (arena.read(ids) == data).all()
        assert arena.give_back() == 0, "what was not used since has nothing to give"
        arena.discard(ids[:40])
        assert arena.give_back() == 40 * BLOCK
        with arena.acquire([70], write=True) as held:
            assert not held[0].any(), "a new block is of zeros"
        assert present(tier.memory) == 1


def test_blocks_that_share_pages_are_not_given_back() -> None:
    with Arena(64, [dram(64 * 64)]) as arena:
        assert arena.give_back() == 0


def test_a_tier_without_addresses_has_nothing_to_give_back(deep: Arena) -> None:
    assert deep.give_back("drawer") == 0
    with pytest.raises(NotFound):
        deep.give_back("shelf")


def test_what_a_tier_may_still_give_back_is_not_used() -> None:
    """It hangs: its slots are nobody's, and when it goes on nothing is lost."""
    tier, goes_on = Remembered(16), threading.Event()
    data, ids = some_blocks(16), np.arange(16)
    with Arena(BLOCK, [tier, cxl(32 * BLOCK)], blocks=20, deadline_s=0.1) as arena:
        arena.write(ids, data)
        arena.demote(ids[8:])
        arena.wait(ids)
        tier.fault = partial(goes_on.wait, 10)
        with pytest.raises(TierFailed, match=r"give_back: no answer in 0\.1 s"):
            arena.give_back()
        assert "dram" in arena.fenced
        arena.prefetch(ids)
        arena.wait(ids)
        assert (arena.read(ids) == data).all()
        goes_on.set()
        deadline_s = time.monotonic() + 10
        while present(tier.memory) > 8:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert (arena.read(ids) == data).all()
        assert arena.moves().used[0] == 16, "eight that are used, and eight that are lost"


def test_a_tier_that_cannot_give_back_keeps_what_it_has() -> None:
    def fail() -> None:
        raise OSError(errno.EINVAL, "before Linux 5.18")

    tier, data, ids = Remembered(16), some_blocks(4), np.arange(4)
    with Arena(BLOCK, [tier, cxl(32 * BLOCK)], blocks=20) as arena:
        arena.write(ids, data)
        tier.fault = fail
        with pytest.raises(TierFailed, match=r"before Linux 5\.18"):
            arena.give_back()
        assert arena.moves().used[0] == 4
        assert (arena.read(ids) == data).all()


def test_what_is_held_is_not_moved(arena: Arena) -> None:
    arena.write(range(3), some_blocks(3))
    with arena.acquire([1]):
        arena.demote(range(3))
        assert arena.wait(range(3)).tolist() == [0, errno.EBUSY, 0]
    assert arena.places(range(3)).tolist() == [1, 0, 1]


def test_blocks_beyond_memory_come_when_they_are_read(deep: Arena, drawer: Drawer) -> None:
    ids, data = np.arange(deep.blocks), some_blocks(deep.blocks)
    assert deep.blocks == FAST + SLOW - 2
    deep.write(ids, data)
    assert (deep.places(ids) == 1).sum() >= len(ids) - FAST
    for _ in range(3):
        assert (deep.read(ids) == data).all()
    away = ids[deep.places(ids) == 1][:3]
    with deep.acquire(away) as held:
        assert all((block == data[id_]).all() for block, id_ in zip(held, away, strict=True))
    deep.write(away, data[away] ^ 0xFF)
    deep.demote(away)
    deep.wait(away)
    assert (deep.read(away) == data[away] ^ 0xFF).all()
    assert deep.fenced == {}
    assert drawer.calls < 300


def test_more_than_memory_cannot_be_held(deep: Arena) -> None:
    deep.write(range(FAST + 1), some_blocks(FAST + 1))
    with pytest.raises(NoRoom, match="memory has room for 8"):
        deep.acquire(range(FAST + 1))
    with deep.acquire(range(FAST)), pytest.raises(NoRoom, match="block 8"):
        deep.read([FAST], timeout_s=0.05)
    assert (deep.read([FAST]) == some_blocks(FAST + 1)[FAST]).all()


def test_out_of_memory_in_every_tier() -> None:
    with Arena(BLOCK, [dram(4 * BLOCK), cxl(4 * BLOCK)], blocks=100) as arena:
        data = some_blocks(6)
        arena.write(range(6), data)
        with pytest.raises(NoRoom, match="block 6: every tier is full"):
            arena.write([6], data[:1], timeout_s=0.05)
        with pytest.raises(NoRoom):
            arena.acquire([7, 8], write=True, timeout_s=0.05)
        assert (arena.read(range(6)) == data).all()
        assert (arena.places([6, 7, 8]) == 255).all()
        arena.discard([0])
        arena.write([6], data[:1])
        assert (arena.read([6]) == data[0]).all()


def during_store(deep: Arena, drawer: Drawer, happens: Callable[[], object]) -> int:
    """Returns the errno of block 1's way to the drawer, if something happens on it."""
    drawer.on_store = lambda: (happens(), None)[1]
    deep.demote([1])
    outcome = int(deep.wait([1])[0])
    drawer.on_store = lambda: None
    return outcome


def test_a_block_that_is_written_while_it_moves(deep: Arena, drawer: Drawer) -> None:
    old, new = some_blocks(1, 1), some_blocks(1, 2)
    deep.write([1], old)
    assert during_store(deep, drawer, lambda: deep.write([1], new)) == errno.EBUSY
    assert deep.places([1])[0] == 0
    assert (deep.read([1]) == new).all()
    assert deep.moves().used == (1, 0)


def test_a_block_that_is_read_while_it_moves(deep: Arena, drawer: Drawer) -> None:
    data = some_blocks(1)
    deep.write([1], data)
    read: list[NDArray[np.uint8]] = []
    assert during_store(deep, drawer, lambda: read.append(deep.read([1]))) == 0
    assert (read[0] == data).all()
    assert deep.places([1])[0] == 1


def test_a_block_that_is_held_while_it_moves(deep: Arena, drawer: Drawer) -> None:
    data = some_blocks(1)
    deep.write([1], data)
    held: list[object] = []
    assert during_store(deep, drawer, lambda: held.append(deep.acquire([1]))) == errno.EBUSY
    assert deep.places([1])[0] == 0


def test_a_block_that_is_given_up_while_it_moves(deep: Arena, drawer: Drawer) -> None:
    data = some_blocks(2)
    deep.write([1], data[:1])

    def replace() -> None:
        deep.discard([1])
        deep.write([2, 1], data[::-1].copy())

    assert during_store(deep, drawer, replace) == errno.EBUSY
    assert (deep.read([1, 2]) == data).all()
    assert deep.moves().used == (2, 0)


def test_a_block_that_is_given_up_while_it_comes(deep: Arena, drawer: Drawer) -> None:
    deep.write([1], some_blocks(1))
    deep.demote([1])
    deep.wait([1])
    drawer.on_load = lambda: deep.discard([1])
    deep.prefetch([1])
    assert deep.wait([1])[0] == errno.EBUSY
    assert deep.moves().used == (0, 0)
    assert deep.places([1])[0] == 255


def test_a_tier_that_raises_loses_nothing(deep: Arena, drawer: Drawer) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ids, data = np.arange(FAST + 4), some_blocks(FAST + 4)
    deep.write(ids, data)
    drawer.on_store = fail
    here = ids[deep.places(ids) == 0]
    deep.demote(here)
    assert set(deep.wait(here).tolist()) <= {errno.EIO, errno.ENOSPC}
    assert "No space left" in deep.fenced["drawer"]
    assert (deep.places(here) == 0).all()
    with pytest.raises(NoRoom):  # some may find room: more may have made way than had to
        deep.write(ids[-1] + 1 + np.arange(FAST), some_blocks(FAST), timeout_s=0.05)
    assert (deep.read(here) == data[here]).all()
    deep.discard(here[:1])
    for block in ids[deep.places(ids) == 1]:  # what is on it comes, as far as there is room
        assert (deep.read([block]) == data[block]).all()
        deep.discard([block])


def test_a_tier_that_does_not_give_a_block(deep: Arena, drawer: Drawer) -> None:
    data = some_blocks(2)
    deep.write([1, 2], data)
    deep.demote([1])
    deep.wait([1])
    drawer.short = 1
    for wrong in (lambda: deep.read([1]), lambda: deep.acquire([2, 1])):
        with pytest.raises(TierFailed, match=r"block 1 is on a tier .* load: 0 of 1 blocks"):
            wrong()
    deep.write([2], data[1:], timeout_s=0)  # of [2, 1] none was left held
    drawer.short = 0
    assert (deep.read([1, 2]) == data).all()


def test_a_tier_that_cannot_now_is_waited_for(deep: Arena, drawer: Drawer) -> None:
    """Neither to bring a block, nor to take one in exchange; and it is used again after it."""

    def fail() -> None:
        raise Busy("the other host is away")

    ids, data = np.arange(FAST + 4), some_blocks(FAST + 4)
    deep.write(ids, data)
    deep.wait(ids)
    while room := FAST - np.count_nonzero(deep.places(ids) == 0):  # more has made way than had to
        deep.read(ids[deep.places(ids) == 1][:room])
        deep.wait(ids)
    there = ids[deep.places(ids) == 1]
    for drawer.on_load, drawer.on_store in ((fail, fail), (lambda: None, fail)):
        with pytest.raises(Busy, match="waits for a tier: drawer: the other host is away"):
            deep.read(there[:1], timeout_s=0.05)
    assert deep.fenced == {}
    later = threading.Timer(0.1, lambda: setattr(drawer, "on_store", lambda: None))
    later.start()
    assert (deep.read(ids) == data).all()
    later.join()


def test_a_block_that_a_tier_has_lost_is_named_and_others_come(deep: Arena, drawer: Drawer) -> None:
    data = some_blocks(3)
    deep.write([1, 2, 3], data)
    deep.demote([1, 2, 3])
    deep.wait([1, 2, 3])
    slot = int(np.flatnonzero((drawer.kept == data[1]).all(axis=1))[0])

    def lose(slots: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        if slot in slots:
            into[slots == slot] = 7
            raise Lost(f"nobody has slot {slot}", np.array([slot]))

    drawer.after_load = lose
    deep.prefetch([1, 2, 3])
    assert deep.wait([1, 2, 3]).tolist() == [0, errno.EBADMSG, 0]
    with pytest.raises(Damaged, match=f"block 2 is lost: drawer: nobody has slot {slot}"):
        deep.read([2])
    assert deep.fenced == {}
    assert (deep.read([1, 3]) == data[[0, 2]]).all()
    deep.discard([2])
    deep.write([2], data[1:2])
    assert (deep.read([2]) == data[1]).all()


def hang(gate: threading.Event) -> None:
    assert gate.wait(30)


def test_a_tier_that_hangs(drawer: Drawer) -> None:
    """Its block stays, others move on, and what it does later harms nobody."""
    gate = threading.Event()
    data = some_blocks(4)
    tiers: list[Tier] = [dram(4 * BLOCK), cxl(4 * BLOCK), drawer]
    with Arena(BLOCK, tiers, checksums=True, deadline_s=0.1) as arena:
        arena.write(range(4), data)
        arena.demote([0], "drawer")
        arena.wait([0])
        drawer.on_load = lambda: hang(gate)
        with pytest.raises(TierFailed, match=r"load: no answer in 0.1 s"):
            arena.read([0])
        assert "drawer" in arena.fenced
        arena.demote([1, 2], "cxl")
        assert not arena.wait([1, 2]).any()
        assert (arena.read([1, 2, 3]) == data[1:]).all()
        with pytest.raises(TierFailed):
            arena.read([0])
        gate.set()
        while drawer.busy.locked():
            time.sleep(0.001)
        assert (arena.read(range(4)) == data).all()


def test_a_tier_that_gives_other_bytes(drawer: Drawer) -> None:
    """It is found without checksums too: what is on such a tier always has one."""
    with Arena(BLOCK, [dram(4 * BLOCK), drawer]) as arena:
        data = some_blocks(2)
        arena.write([1, 2], data)
        arena.demote([1, 2])
        arena.wait([1, 2])
        drawer.spoils = True
        with pytest.raises(Damaged, match="block 1 is not what was stored"):
            arena.read([1])
        assert "other bytes" in arena.fenced["drawer"]
        drawer.spoils = False
        assert (arena.read([1, 2]) == data).all()


def test_memory_that_changes_by_itself_is_found(arena: Arena) -> None:
    data = some_blocks(1)
    arena.write([1], data)
    with arena.acquire([1]) as held:
        ctypes.c_ubyte.from_address(int(held.addresses[0])).value ^= 1
        with pytest.raises(Damaged, match="block 1 is not what was written"):
            arena.read([1])
    with pytest.raises(Damaged):
        arena.acquire([1])
    arena.demote([1])
    assert arena.wait([1])[0] == errno.EBADMSG
    arena.write([1], data)
    assert (arena.read([1]) == data).all()


def test_arguments_that_cannot_be(drawer: Drawer) -> None:
    arguments: list[tuple[Callable[[], Arena], str]] = [
        (lambda: Arena(100, [dram(1 << 20)]), "no multiple of 64"),
        (lambda: Arena(0, [dram(1 << 20)]), "no multiple of 64"),
        (lambda: Arena(BLOCK, []), "0 tiers"),
        (lambda: Arena(BLOCK, [drawer]), "no tier has addresses"),
        (lambda: Arena(BLOCK, [dram(1 << 20), dram(1 << 20)]), "the same name"),
        (lambda: Arena(BLOCK, [dram(BLOCK - 1)]), "less than a block"),
        (lambda: Arena(BLOCK, [dram(BLOCK)], blocks=0), "blocks 0"),
        (lambda: Arena(BLOCK, [dram(BLOCK)], movers=0), "movers 0"),
    ]
    for wrong, why in arguments:
        with pytest.raises(TierdError, match=why):
            wrong()


def test_data_of_another_size(arena: Arena) -> None:
    with pytest.raises(TierdError, match="4096 bytes for 2 blocks"):
        arena.write([1, 2], some_blocks(1))
    with pytest.raises(TierdError, match="contiguous"):
        arena.write([1], np.zeros((BLOCK, 2), np.uint8)[:, 0])


def test_a_closed_arena(arena: Arena) -> None:
    arena.write([1], some_blocks(1))
    held = arena.acquire([1])
    arena.close()
    arena.close()
    with pytest.raises(TierdError, match="the arena is closed"):
        arena.read([1])
    assert (held[0] == some_blocks(1)[0]).all()
    held.release()


def test_an_arena_that_is_forgotten_ends(drawer: Drawer) -> None:
    before = threading.active_count()
    arena = Arena(BLOCK, [dram(4 * BLOCK), drawer])
    arena.write([1], some_blocks(1))
    assert threading.active_count() > before
    del arena
    gc.collect()
    assert drawer.freed
    assert not [t for t in threading.enumerate() if t.name.startswith("mover")]


def test_a_program_and_its_fork_end_with_an_arena_open() -> None:
    program = f"""
import os
import numpy as np
from tierd.arena import Arena
from tierd.tiers import Tier
from tierd.tiers.memory import cxl, dram
arena = Arena({BLOCK}, [dram(4 << 20), cxl(4 << 20)])
arena.write(range(arena.blocks), np.zeros((arena.blocks, {BLOCK}), np.uint8))
arena.demote(range(1000))
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    arena.wait(range(1000))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_nothing_is_torn() -> None:
    """Writers, readers and movers at the same blocks: each block read is of one write, whole.

    Each write is of a number of its own, in every word; a block's numbers only rise.
    """
    blocks, words = 24, BLOCK // 8
    tiers: list[Tier] = [dram(8 * BLOCK), cxl(10 * BLOCK), Drawer(12, BLOCK)]
    arena = Arena(BLOCK, tiers, blocks=blocks, checksums=True)
    until = time.process_time() + 2
    wrong: list[str] = []
    reads = [0, 0]

    def writer(ids: NDArray[np.int64]) -> None:
        number = 1
        while time.process_time() < until:
            number += 1
            arena.write(ids, np.full((len(ids), words), number, np.uint64))
            with arena.acquire(ids[:1], write=True) as held:
                held[0].view(np.uint64)[:] = number + 1
            number += 1

    def reader(which: int) -> None:
        random, last = np.random.default_rng(which), np.zeros(blocks, np.uint64)
        while time.process_time() < until:
            ids = random.permutation(blocks)[:4]
            if which:
                found = arena.read(ids).view(np.uint64)
            else:
                with arena.acquire(ids) as held:
                    found = np.stack([block.view(np.uint64) for block in held])
            if (found != found[:, :1]).any() or (found[:, 0] < last[ids]).any():
                wrong.append(f"{which}: {ids} {found.min(axis=1)} {found.max(axis=1)}")
            last[ids] = found[:, 0]
            reads[which] += 1

    def mover() -> None:
        random = np.random.default_rng(9)
        while time.process_time() < until:
            ids = random.permutation(blocks)[:6]
            arena.prefetch(ids[:3])
            arena.demote(ids[3:], ["cxl", "drawer"][random.integers(2)])
            arena.wait(ids)

    def guarded(work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001  # it is told below
            wrong.append(repr(error))

    with arena:
        arena.write(range(blocks), np.ones((blocks, words), np.uint64))
        threads = [
            threading.Thread(target=guarded, args=arguments)
            for arguments in [
                (writer, np.arange(0, 8)),
                (writer, np.arange(8, 12)),
                (reader, 0),
                (reader, 1),
                (mover,),
            ]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        arena.wait(range(blocks))
        moves = arena.moves()
        assert wrong == []
        assert sum(moves.used) == blocks
    assert min(reads) > 20
    assert moves.moved > 100


@pytest.mark.parametrize("seed", range(6))
def test_any_calls_in_any_order(seed: int) -> None:
    """Against a dictionary, on three tiers, the last of which fails half-way with odd seeds."""
    random = np.random.default_rng(seed)
    drawer = Drawer(10, BLOCK)
    expected: dict[int, int] = {}
    tiers: list[Tier] = [dram(4 * BLOCK), cxl(6 * BLOCK), drawer]
    with Arena(BLOCK, tiers, blocks=14, checksums=bool(seed % 3)) as arena:
        for step in range(400):
            if step == 200:
                drawer.short = seed % 2
            some = random.permutation(14)[: random.integers(1, 4)]
            known = np.array([id_ for id_ in some if id_ in expected], np.int64)
            with suppress(NoRoom, TierFailed, Busy):  # at the latest after 20 ms
                match int(random.integers(7)):
                    case 0 | 1:
                        for id_ in some:
                            arena.write([id_], np.full(BLOCK, step % 251, np.uint8), timeout_s=0.02)
                            expected[int(id_)] = step % 251
                    case 2:
                        for id_ in known:
                            arena.discard([id_])
                            del expected[int(id_)]
                    case 3:
                        arena.prefetch(some, arena.tiers[random.integers(2)])
                    case 4:
                        arena.demote(some, arena.tiers[random.integers(1, 3)])
                    case 5:
                        arena.give_back(arena.tiers[random.integers(2)])
                    case _:
                        with arena.acquire(known, timeout_s=0.02) as held:
                            for block, id_ in zip(held, known, strict=True):
                                assert (block == expected[int(id_)]).all()
        drawer.short = 0
        arena.wait(range(14))
        assert bool(arena.fenced) == bool(seed % 2)
        assert sum(arena.moves().used) == len(expected)
        full = []
        for id_, value in expected.items():
            try:
                assert (arena.read([id_], timeout_s=0.05 if arena.fenced else 30) == value).all()
            except (NoRoom, Busy):  # memory is full, and the fenced tier takes nothing in exchange
                full.append(id_)
        assert not full or "drawer" in arena.fenced
        for id_ in set(expected) - set(full):
            arena.discard([id_])
        for id_ in full:
            assert (arena.read([id_]) == expected[id_]).all()
            arena.discard([id_])
