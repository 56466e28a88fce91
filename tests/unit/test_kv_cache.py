# SPDX-License-Identifier: Apache-2.0
"""KV caches: each session has what was appended to it, whoever shares its blocks."""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from tests.unit.drawer import Drawer
from tierd.arena import Arena
from tierd.errors import Busy, NoRoom, NotFound, TierdError
from tierd.tiers import Tier
from tierd.tiers.memory import cxl, dram
from tierd.uses import KvCache, KvShape

SHAPE = KvShape(layers=2, kv_heads=1, head_dims=4, block_tokens=2)
BLOCK = SHAPE.block_bytes


def kv_of(tokens: list[int], begin: int, shape: KvShape = SHAPE) -> NDArray[np.uint16]:
    """What a model would have for the tokens from a place on: it depends on all before, too."""
    layers, _, _, heads, dims = shape.of_block
    sums = [zlib.crc32(bytes(tokens[: at + 1])) for at in range(begin, len(tokens))]
    each = np.arange(layers * 2 * heads * dims).reshape(layers, 2, 1, heads, dims)
    return (each + np.array(sums, np.int64)[:, None, None]).astype(np.uint16)


def told(cache: KvCache, session: int) -> NDArray[Any]:
    return np.stack([cache.gather(session, layer) for layer in range(cache.shape.layers)])


def begun(cache: KvCache, tokens: list[int]) -> int:
    """A session that has all of its prompt."""
    session = cache.open(tokens)
    there = cache.length(session)
    cache.append(session, tokens[there:], kv_of(tokens, there, cache.shape))
    return session


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(BLOCK, [dram(6 * BLOCK), cxl(8 * BLOCK)], checksums=True) as arena:
        yield arena


def test_llama_3_8b_has_blocks_of_2_mib() -> None:
    assert KvShape(layers=32, kv_heads=8, head_dims=128).block_bytes == 2 << 20


def test_sessions_that_begin_alike_share_full_blocks(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    first = begun(cache, [1, 2, 3, 4, 5])
    assert cache.stats.used == 3
    second = cache.open([1, 2, 3, 4, 9])
    assert cache.length(second) == 4
    cache.append(second, [9], kv_of([1, 2, 3, 4, 9], 4))
    assert (told(cache, first) == kv_of([1, 2, 3, 4, 5], 0)).all()
    assert (told(cache, second) == kv_of([1, 2, 3, 4, 9], 0)).all()
    assert (cache.stats.used, cache.stats.reused) == (4, 2)
    assert cache.length(cache.open([3, 4, 5])) == 0, "the same tokens elsewhere are others"


def test_the_last_token_is_left_to_the_model(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    begun(cache, [1, 2, 3, 4])
    assert cache.length(cache.open([1, 2, 3, 4])) == 2
    assert cache.length(cache.open([])) == 0


def test_two_that_compute_the_same_have_it_once(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    sessions = [cache.open([1, 2, 3]) for _ in range(2)]
    for session in sessions:
        cache.append(session, [1, 2], kv_of([1, 2], 0))
    assert cache.stats.used == 1
    assert (told(cache, sessions[1]) == kv_of([1, 2], 0)).all()


def test_a_fork_goes_its_own_way(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    first = begun(cache, [1, 2, 3])
    second = cache.fork(first)
    cache.append(first, [4], kv_of([1, 2, 3, 4], 3))
    cache.append(second, [5], kv_of([1, 2, 3, 5], 3))
    assert (told(cache, first) == kv_of([1, 2, 3, 4], 0)).all()
    assert (told(cache, second) == kv_of([1, 2, 3, 5], 0)).all()
    assert cache.stats.used == 3


def test_another_salt_shares_nothing(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    begun(cache, [1, 2, 3])
    assert cache.length(cache.open([1, 2, 3], salt=b"another")) == 0
    assert cache.length(cache.open([1, 2, 3])) == 2


def test_of_ended_sessions_the_ends_go_first_and_shared_roots_last(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    assert arena.blocks == 12
    for tail in (10, 20):
        cache.close(begun(cache, [1, 2, 3, 4, *range(tail, tail + 5)]))
    assert (cache.stats.kept, cache.stats.free) == (6, 6)
    running = begun(cache, list(range(100, 117)))  # 9 blocks: three have to go
    assert cache.stats.evicted == 3
    assert (told(cache, running) == kv_of(list(range(100, 117)), 0)).all()
    assert cache.length(cache.open([1, 2, 3, 4, *range(10, 16)])) == 4, "the first one's went"
    assert cache.length(cache.open([1, 2, 3, 4, *range(20, 25)])) == 6, "and of the second its end"


def test_nothing_is_changed_where_there_is_no_room(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    tokens = list(range(21))
    first = begun(cache, tokens)
    second = begun(cache, [50])
    before = cache.stats
    with pytest.raises(NoRoom, match="2 open sessions have the other ones"):
        cache.append(second, [51, 52], kv_of([50, 51, 52], 1))
    with pytest.raises(NoRoom):
        cache.fork(second)
    assert cache.stats == before
    assert cache.length(second) == 1
    cache.close(first)
    cache.append(second, [51, 52], kv_of([50, 51, 52], 1))
    assert (told(cache, second) == kv_of([50, 51, 52], 0)).all()


def test_a_session_that_pauses_goes_down_and_comes_back(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE, headroom=0)
    paused, running = begun(cache, [1, 2, 3, 4, 5, 6]), begun(cache, [1, 2, 7, 8])
    every = np.arange(arena.blocks)
    assert cache.pause(paused) == 2
    arena.wait(every)
    with cache.acquire(paused) as held:
        table = held.ids
        shown = cache.view(held[0])
        assert (shown == kv_of([1, 2], 0)).all()
        assert np.from_dlpack(shown).ctypes.data == held.addresses[0]
    assert arena.places(table).tolist() == [0, 1, 1], "what is shared stays"
    assert cache.prefetch(paused)
    arena.wait(every)
    assert (arena.places(table) == 0).all()
    assert (told(cache, running) == kv_of([1, 2, 7, 8], 0)).all()


def test_those_that_wait_do_not_push_out_those_that_run(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE, headroom=0)
    waiting = begun(cache, list(range(8)))
    cache.pause(waiting)
    arena.wait(np.arange(arena.blocks))
    running = begun(cache, list(range(50, 58)))
    before = arena.moves()
    assert not cache.prefetch(waiting), "4 and 4 blocks in a tier of 6"
    assert arena.moves() == before
    cache.close(running)
    assert cache.prefetch(waiting)
    arena.wait(np.arange(arena.blocks))
    with cache.acquire(waiting) as held:
        assert (arena.places(held.ids) == 0).all()


def test_blocks_of_ended_sessions_leave_the_fast_tier_first(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE, headroom=0)
    ended, running = begun(cache, [1, 2, 3, 4, 5, 6]), begun(cache, [11, 12, 13, 14])
    with cache.acquire(ended) as held:
        old = held.ids
    cache.close(ended)
    assert (arena.places(old) == 0).all(), "there is room"
    cache.append(running, [15, 16, 17], kv_of([*range(11, 18)], 4))
    arena.wait(np.arange(arena.blocks))
    assert arena.places(old).tolist() == [0, 0, 1]


@pytest.mark.parametrize("one_layer", [True, False])
def test_a_cache_larger_than_what_has_addresses(one_layer: bool) -> None:
    shape = KvShape(layers=1 if one_layer else 3, kv_heads=2, head_dims=8, dtype=np.float32)
    size, tokens = shape.block_bytes, [at % 251 for at in range(16 * 12 + 3)]
    with Arena(size, [dram(5 * size), Drawer(20, size)]) as arena:
        cache = KvCache(arena, shape)
        session = cache.open(tokens)
        kv = kv_of(tokens, 0, shape).astype(np.float32)
        cache.append(session, tokens, kv)
        assert (told(cache, session) == kv).all()
        with pytest.raises(NoRoom, match="13 blocks are to be held"):
            cache.acquire(session)


def test_what_is_held_past_the_end_of_a_session(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    session = begun(cache, [1])
    held = cache.acquire(session)
    cache.close(session)
    assert cache.stats.free == arena.blocks
    with pytest.raises(Busy):
        arena.write(held.ids, np.zeros(BLOCK, np.uint8), timeout_s=0)
    held.release()
    assert (told(cache, begun(cache, [2, 3])) == kv_of([2, 3], 0)).all()


def test_what_is_wrong_is_named(arena: Arena) -> None:
    cache = KvCache(arena, SHAPE)
    session = begun(cache, [1, 2, 3])
    with pytest.raises(NotFound, match="session 7 is unknown"):
        cache.gather(7, 0)
    with pytest.raises(NotFound, match="no layer 2"):
        cache.gather(session, 2)
    with pytest.raises(TierdError, match=r"kv: uint16 \(2, 2, 1, 1, 4\), not uint16 \(2, 2, 2"):
        cache.append(session, [4, 5], kv_of([1, 2, 3, 4], 3))
    with pytest.raises(TierdError, match="kv: float16") as raised:
        cache.append(session, [4], kv_of([1, 2, 3, 4], 3).view(np.float16))
    assert raised.value.hint is not None
    for tokens in ([-1], [1 << 32]):
        with pytest.raises(TierdError, match="token "):
            cache.open(tokens)
    with pytest.raises(TierdError, match="tokens are whole numbers"):
        cache.open([[1]])
    cache.close(session)
    for call in (cache.close, cache.length, cache.fork, cache.pause, cache.prefetch, cache.acquire):
        with pytest.raises(NotFound, match=f"session {session} is closed"):
            call(session)
    with (
        pytest.raises(TierdError, match="room for 2"),
        Arena(2 * BLOCK, [dram(4 * BLOCK)]) as wide,
    ):
        KvCache(wide, SHAPE)
    with pytest.raises(TierdError, match="headroom"):
        KvCache(arena, SHAPE, headroom=1)
    with pytest.raises(TierdError, match="nothing is to be kept"):
        KvCache(arena, KvShape(layers=0, kv_heads=1, head_dims=1))


class Caches(RuleBasedStateMachine):
    """Against a dict of the tokens of each session."""

    @initialize(far=st.booleans())
    def begin(self, far: bool) -> None:
        slow: Tier = Drawer(6, BLOCK) if far else cxl(6 * BLOCK)
        self.arena = Arena(BLOCK, [dram(5 * BLOCK), slow], checksums=True)
        self.cache = KvCache(self.arena, SHAPE)
        self.model: dict[int, list[int]] = {}

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()

    def used(self) -> int:
        """Blocks that there have to be: each full prefix once, and what is not full."""
        full = {
            tuple(tokens[: at + 2])
            for tokens in self.model.values()
            for at in range(0, len(tokens) - 1, 2)
        }
        return len(full) + sum(len(tokens) % 2 for tokens in self.model.values())

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule(prompt=st.lists(st.integers(0, 2), max_size=9))
    def open(self, prompt: list[int]) -> None:
        shared = 0
        for tokens in self.model.values():
            alike = 0
            while alike + 2 < len(prompt) and (
                tokens[alike : alike + 2] == prompt[alike : alike + 2]
            ):
                alike += 2
            shared = max(shared, alike)
        session = self.cache.open(prompt)
        there = self.cache.length(session)
        assert there % 2 == 0
        assert shared <= there <= max(0, len(prompt) - 1)
        self.model[session] = prompt[:there]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=7))
    def append(self, data: st.DataObject, more: list[int]) -> None:
        session = self.some(data)
        tokens = self.model[session]
        fresh = (len(tokens) + len(more) + 1) // 2 - (len(tokens) + 1) // 2
        kv = kv_of(tokens + more, len(tokens))
        if fresh > self.arena.blocks - self.used():
            with pytest.raises(NoRoom):
                self.cache.append(session, more, kv)
            return
        self.cache.append(session, more, kv)
        self.model[session] = tokens + more

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        session = self.some(data)
        tokens = self.model[session]
        if len(tokens) % 2 > self.arena.blocks - self.used():
            with pytest.raises(NoRoom):
                self.cache.fork(session)
            return
        self.model[self.cache.fork(session)] = tokens

    @precondition(lambda self: self.model)
    @rule(data=st.data(), way=st.sampled_from(["close", "pause", "prefetch"]))
    def leave(self, data: st.DataObject, way: str) -> None:
        session = self.some(data)
        getattr(self.cache, way)(session)
        if way == "close":
            del self.model[session]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def check(self, data: st.DataObject) -> None:
        session = self.some(data)
        assert (told(self.cache, session) == kv_of(self.model[session], 0)).all()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "cache"):
            stats = self.cache.stats
            assert stats.used == self.used()
            assert stats.used + stats.kept + stats.free == self.arena.blocks
            for session, tokens in self.model.items():
                assert self.cache.length(session) == len(tokens)


Caches.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCaches = Caches.TestCase
