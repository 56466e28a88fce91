# SPDX-License-Identifier: Apache-2.0
"""The tier of a card's memory: by the kit, in an arena, and when the card fails."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import tierd.tiers
from tests.card.conftest import Fake
from tierd.arena import Arena, Held, Lookahead
from tierd.errors import NoRoom, NotFound, TierdError, TierFailed
from tierd.kernel import cuda
from tierd.tiers import Health, Tier
from tierd.tiers.hbm import HbmTier, hbm
from tierd.tiers.kit import TierContract
from tierd.tiers.memory import cxl, dram

BLOCK = 64 << 10
GRANULE = 2 << 20
CARD, MEMORY = 16, 24
ECC, LOST, OUT_OF_MEMORY = 214, 46, 2


def some_blocks(count: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK), dtype=np.uint8)


class TestHbm(TierContract):
    def make(self) -> Tier:
        return hbm(4 << 20)


class TestOddBlocks(TierContract):
    """Blocks that lie over the bounds of granules."""

    block_bytes = 64 * 9973

    def make(self) -> Tier:
        return hbm(7 * self.block_bytes)


def small_arena(**options: float) -> Arena:
    tiers: list[Tier] = [hbm(CARD * BLOCK), dram(MEMORY * BLOCK), cxl(MEMORY * BLOCK)]
    return Arena(BLOCK, tiers, checksums=True, **options)  # type: ignore[arg-type]


def on_card(held: Held) -> NDArray[np.uint8]:
    """What the card has, by copies that are not the tier's."""
    context = cuda.Context(0)
    stream = cuda.Stream(context)
    found = np.empty((len(held), BLOCK), np.uint8)
    for i, address in enumerate(held.addresses.tolist()):
        stream.copy_out(found[i].ctypes.data, address, BLOCK)
    stream.wait()
    stream.close()
    context.close()
    return found


def write_on_card(held: Held, data: NDArray[np.uint8]) -> None:
    context = cuda.Context(0)
    stream = cuda.Stream(context)
    for block, address in zip(data, held.addresses.tolist(), strict=True):
        stream.copy_in(address, block.ctypes.data, BLOCK)
    stream.wait()
    stream.close()
    context.close()


def test_blocks_are_used_on_the_card() -> None:
    data = some_blocks(40)
    with small_arena() as arena:
        arena.write(range(40), data)
        for first in (0, 8, 24, 0, 32):
            ids = np.arange(first, first + 8)
            with arena.acquire(ids, on="hbm") as held:
                assert (on_card(held) == data[ids]).all()
        with arena.acquire([3, 4], write=True, on="hbm") as held:
            data[3:5] = some_blocks(2, seed=2)
            write_on_card(held, data[3:5])
        with arena.acquire([50], write=True, on="hbm") as held:
            assert not on_card(held).any()
        assert (arena.read(range(40)) == data).all()
        assert arena.fenced == {}


def test_what_a_card_is_told_of_a_block() -> None:
    with small_arena() as arena:
        arena.write([1], some_blocks(1))
        with arena.acquire([1], on="hbm") as held:
            told = held.on_device(0).__cuda_array_interface__
            assert told["data"] == (int(held.addresses[0]), True)
            assert told["shape"] == (BLOCK,)


def test_addresses_stay() -> None:
    """A slot's address is that of the range all along, whatever comes and goes."""
    with small_arena() as arena:
        arena.write(range(40), some_blocks(40))
        seen = set()
        for round_ in range(6):
            with arena.acquire(np.arange(8) + 5 * round_, on="hbm") as held:
                seen |= set(held.addresses.tolist())
        first = min(seen)
        assert all((address - first) % BLOCK == 0 for address in seen)
        assert max(seen) < first + CARD * BLOCK


def test_looking_ahead() -> None:
    data = some_blocks(40)
    with small_arena() as arena:
        arena.write(range(40), data)
        ahead = Lookahead(arena, range(40), repeats=True)
        for _ in range(3):
            for held in ahead:
                assert (on_card(held) == data[held.ids]).all()
        assert arena.fenced == {}


def test_a_card_by_its_names() -> None:
    card = cuda.cards()[0]
    domain, _, rest = card.pci.partition(":")
    for name in (0, card.uuid, card.pci, card.pci.upper(), f"0000{domain}:{rest}"):
        assert cuda.find(name) == card
    for name in (99, "GPU-0", "0000:ff:1f.7", "hbm", ""):
        with pytest.raises(NotFound, match="there is no card") as refused:
            cuda.find(name)
        assert card.name in str(refused.value.hint)
    tier = tierd.tiers.load("hbm", {"capacity_bytes": GRANULE, "device": card.uuid, "name": "b"})
    assert isinstance(tier, HbmTier)
    assert (tier.card, tier.facts.name, tier.health()) == (card, "b", Health.GOOD)


def test_capacity_is_what_is_free() -> None:
    tier = hbm(reserve_bytes=1 << 20)
    context = cuda.Context(0)
    free = context.free_bytes()
    context.close()
    assert 0 < tier.facts.capacity_bytes <= free + (1 << 30)
    with pytest.raises(NoRoom, match="nothing left beside"):
        hbm(reserve_bytes=1 << 60)


def test_a_card_that_has_less() -> None:
    """It says how many slots there are; and refuses where there is none."""
    context = cuda.Context(0)
    free = context.free_bytes()
    context.close()
    block = (free // 4 // GRANULE) * GRANULE
    space = hbm(1 << 60).reserve(block, 8)
    try:
        assert 3 <= space.slots <= 4
        with pytest.raises((NoRoom, cuda.CudaError)):
            hbm(1 << 60).reserve(2 * block, 1)
    finally:
        space.free()


def test_buffers_of_movers_are_pinned(fake: Fake) -> None:
    with small_arena() as arena:
        arena.write([1], some_blocks(1))
        arena.acquire([1], on="hbm").release()
        assert 1 <= fake["pinned"] <= 2
    assert fake["pinned"] == 0


def test_memory_that_cannot_be_pinned(fake: Fake) -> None:
    fake["deny"] = 1
    data = some_blocks(4)
    with small_arena() as arena:
        arena.write(range(4), data)
        with arena.acquire(range(4), on="hbm") as held:
            assert (on_card(held) == data).all()
        assert fake["pinned"] == 0


def test_blocks_that_follow_each_other_are_one_copy(fake: Fake) -> None:
    space = hbm(CARD * BLOCK).reserve(BLOCK, CARD)
    before = fake["copies"]
    space.store(np.array([0, 1, 2, 7, 5, 6, 4]), some_blocks(7))
    assert fake["copies"] - before == 4
    space.free()


def test_a_copy_that_is_not_done_is_waited_for(fake: Fake) -> None:
    """A block is on the card when its copy is, and no sooner; writers go first meanwhile."""
    old, new = some_blocks(2), some_blocks(1, seed=2)
    with small_arena() as arena:
        arena.write([1, 2], old)
        arena.prefetch([1])
        arena.wait([1])
        fake["hold"] = 1
        copies = fake["copies"]
        arena.prefetch([2])
        arena.demote([1], "dram")
        arena.write([2], new)
        assert arena.places([1, 2]).tolist() == [0, 1]
        assert fake["copies"] == copies
        fake["hold"] = 0
        arena.wait([1, 2])
        assert (arena.read([1]) == old[0]).all()
        assert (arena.read([2]) == new).all()


def test_a_copy_that_never_ends(fake: Fake) -> None:
    """The tier is fenced, what it has is out of reach, and all else goes on."""
    data = some_blocks(4)
    with small_arena(deadline_s=0.2) as arena:
        arena.write(range(4), data)
        arena.acquire([1], on="hbm").release()
        fake["hold"] = 1
        with pytest.raises(TierFailed, match=r"block 2 is to be on hbm: .* no answer in 0.2 s"):
            arena.acquire([2], on="hbm")
        with pytest.raises(TierFailed):
            arena.read([1])
        assert (arena.read([0, 2, 3]) == data[[0, 2, 3]]).all()
        arena.demote([2], "cxl")
        assert arena.wait([2])[0] == 0
        fake["hold"] = 0
        until = time.monotonic() + 30
        while True:  # what is late returns, and then its blocks come
            try:
                assert (arena.read([1]) == data[1]).all()
                break
            except TierFailed:
                assert time.monotonic() < until


@pytest.mark.parametrize(("code", "name"), [(ECC, "ECC_UNCORRECTABLE"), (LOST, "UNAVAILABLE")])
def test_a_card_that_is_lost(fake: Fake, code: int, name: str) -> None:
    data = some_blocks(4)
    tier = hbm(CARD * BLOCK)
    with Arena(BLOCK, [tier, dram(MEMORY * BLOCK)]) as arena:
        arena.write(range(4), data)
        arena.acquire([1], on="hbm").release()
        fake["error"] = code
        with pytest.raises(TierFailed, match=f"block 2 is to be on hbm.*{name}"):
            arena.acquire([2], on="hbm")
        assert tier.health() is Health.FAILED
        with pytest.raises(TierFailed, match=name):
            arena.read([1])
        assert (arena.read([0, 2, 3]) == data[[0, 2, 3]]).all()
        fake["error"] = 0
        assert tier.health() is Health.FAILED, "a card that was lost does not come back by itself"


def test_a_card_that_is_lost_while_it_copies(fake: Fake) -> None:
    data = some_blocks(2)
    with small_arena() as arena:
        arena.write([1, 2], data)
        fake["hold"] = 1
        arena.prefetch([1])
        fake["error"] = ECC
        arena.wait([1])
        assert "hbm" in arena.fenced
        assert (arena.read([1, 2]) == data).all()
        fake["error"] = fake["hold"] = 0


def test_nvml_knows_that_it_is_lost(fake: Fake) -> None:
    tier, mark = hbm(GRANULE), Path(os.environ["FAKE_NVML_LOST"])
    assert fake["error"] == 0
    mark.touch()
    try:
        assert tier.health() is Health.FAILED
    finally:
        mark.unlink()


def test_nvml_tells_what_is_free(fake: Fake) -> None:
    free = int(os.environ["FAKE_NVML_FREE"])
    assert fake["cards"] == 1
    assert hbm(reserve_bytes=GRANULE).facts.capacity_bytes == free - GRANULE


def failing_at(fake: Fake, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """From a call of the driver on, all fail."""
    plain: Callable[..., object] = cuda._call

    def broken(name: str, *arguments: object) -> object:
        fake["error"] = code if name == call else 0
        return plain(name, *arguments)

    monkeypatch.setattr(cuda, "_call", broken)


@pytest.mark.parametrize(
    "call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuStreamCreate"]
)
def test_what_could_not_be_made_leaves_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As `nothing_is_left` looks."""
    tier = hbm(3 * GRANULE)
    with monkeypatch.context() as patch:
        failing_at(fake, patch, call, OUT_OF_MEMORY)
        with pytest.raises(TierdError, match=f"{call}|no memory left"):
            tier.reserve(BLOCK, 3 * GRANULE // BLOCK)
    fake["error"] = 0
    space = tier.reserve(BLOCK, 4)
    space.free()


def test_a_tier_is_freed_while_others_have_it() -> None:
    """Two arenas on one card, each with memory of its own."""
    data = some_blocks(4)
    with small_arena() as first:
        first.write(range(4), data)
        first.acquire(range(4), on="hbm").release()
        with small_arena() as second:
            second.write(range(4), data[::-1].copy())
            second.acquire(range(4), on="hbm").release()
        with first.acquire(range(4), on="hbm") as held:
            assert (on_card(held) == data).all()


def test_nothing_is_torn() -> None:
    """The card, the program and movers at the same blocks: writes are whole, and none is lost."""
    blocks = 12
    until = time.process_time() + 2
    wrong: list[str] = []
    done = {"on_card_": 0, "in_memory": 0, "move": 0}

    def on_card_(random: np.random.Generator) -> None:
        with arena.acquire(random.permutation(blocks)[:2], write=True, on="hbm") as held:
            found = on_card(held).view(np.uint64)
            assert (found == found[:, :1]).all(), "torn on the card"
            write_on_card(held, (found + 1).view(np.uint8))

    def in_memory(random: np.random.Generator) -> None:
        with arena.acquire(random.permutation(blocks)[:1], write=True) as held:
            found = held[0].view(np.uint64)
            assert (found == found[0]).all(), "torn in memory"
            found += 1

    def move(random: np.random.Generator) -> None:
        ids = random.permutation(blocks)[:4]
        arena.prefetch(ids[:2])
        arena.demote(ids[2:])
        arena.wait(ids)

    def repeat(work: Callable[[np.random.Generator], None]) -> None:
        random = np.random.default_rng(1)
        try:
            while time.process_time() < until:
                work(random)
                done[work.__name__] += 1
        except Exception as error:  # noqa: BLE001  # it is told below
            wrong.append(repr(error))

    with Arena(BLOCK, [hbm(4 * BLOCK), dram(8 * BLOCK), cxl(8 * BLOCK)], blocks=blocks) as arena:
        arena.write(range(blocks), np.zeros((blocks, BLOCK), np.uint8))
        works = (on_card_, in_memory, move)
        threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        arena.wait(range(blocks))
        assert wrong == []
        total = int(arena.read(range(blocks)).view(np.uint64)[:, 0].sum())
        assert total == 2 * done["on_card_"] + done["in_memory"], "a write is missing"
        assert arena.fenced == {}
    assert min(done.values()) > 5
