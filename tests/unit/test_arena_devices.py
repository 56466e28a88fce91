# SPDX-License-Identifier: Apache-2.0
"""Arenas with a tier that a device alone reaches: held there, moved by copies, never read torn."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.drawer import Drawer
from tierd.arena import Arena, Held, Lookahead
from tierd.errors import Busy, NoRoom, TierdError, TierFailed
from tierd.model import TierKind
from tierd.tiers import DeviceMemory, Facts, Tier
from tierd.tiers.fence import Fence
from tierd.tiers.memory import cxl, dram

BLOCK = 4096
FAST, MEMORY, SLOW = 4, 8, 16
BASE = 0x7F00_0000_0000_0000
"""No address of a process: whoever follows it ends."""


@dataclass
class Card(Drawer):
    """Its device is the test, which reaches the slots by what the arena gives as addresses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device = DeviceMemory(address=BASE, number=3)
        self.adopted: list[NDArray[np.uint8]] = []

    @property
    def facts(self) -> Facts:
        return Facts(name="card", kind=TierKind.HBM, capacity_bytes=self.slots * self.block_bytes)

    def adopt(self, buffer: NDArray[np.uint8]) -> None:
        self.adopted.append(buffer)

    def at(self, held: Held, number: int) -> NDArray[np.uint8]:
        slot, rest = divmod(int(held.addresses[number]) - BASE, self.block_bytes)
        assert rest == 0
        found: NDArray[np.uint8] = self.kept[slot]
        return found


def some_blocks(count: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK), dtype=np.uint8)


@pytest.fixture
def card() -> Card:
    return Card(FAST, BLOCK)


@pytest.fixture
def drawer() -> Drawer:
    return Drawer(SLOW, BLOCK)


@pytest.fixture
def arena(card: Card, drawer: Drawer) -> Iterator[Arena]:
    tiers: list[Tier] = [card, dram(MEMORY * BLOCK), drawer]
    with Arena(BLOCK, tiers, checksums=True, deadline_s=60) as arena:
        yield arena
    assert card.freed


def test_blocks_are_brought_to_the_card_and_held_there(arena: Arena, card: Card) -> None:
    data = some_blocks(4)
    arena.write(range(4), data)
    assert (arena.places(range(4)) == 1).all()
    with arena.acquire([2, 0], on="card") as held:
        assert (card.at(held, 0) == data[2]).all()
        assert (card.at(held, 1) == data[0]).all()
        assert arena.places(range(4)).tolist() == [0, 1, 0, 1]
        arena.demote([0, 2])
        assert arena.wait([0, 2]).tolist() == [errno.EBUSY] * 2
    assert arena.counts(range(4)).tolist() == [2, 1, 2, 1]
    assert (arena.read(range(4)) == data).all()


def test_a_view_of_a_block_on_a_card_is_refused(arena: Arena) -> None:
    arena.write([1], some_blocks(1))
    with arena.acquire([1], on="card") as held:
        with pytest.raises(TierdError, match="block 1 is on card, which the CPU does not") as why:
            held[0]
        assert "on_device" in str(why.value.hint)
        block = held.on_device(0)
        assert block.__cuda_array_interface__["data"] == (int(held.addresses[0]), True)
        assert (block.size_bytes, block.device) == (BLOCK, 3)
    with pytest.raises(TierdError, match="block 1 is not held"):
        held.on_device(0)
    with arena.acquire([1]) as here, pytest.raises(TierdError, match="on no device"):
        here.on_device(0)


def test_what_a_device_has_written_is_read(arena: Arena, card: Card) -> None:
    """Its sum is not known then, and not held against what it was before."""
    arena.write([1], some_blocks(1))
    for value in (5, 6):
        with arena.acquire([1], write=True, on="card") as held:
            assert not held.on_device(0).__cuda_array_interface__["data"][1]
            card.at(held, 0)[:] = value
        assert (arena.read([1]) == value).all()
        assert arena.places([1])[0] == 1
        with arena.acquire([1]) as here:  # from here on it has one
            assert (here[0] == value).all()
    assert arena.fenced == {}


def test_a_new_block_on_a_card_is_of_zeros(arena: Arena, card: Card) -> None:
    card.kept[:] = 9
    with arena.acquire([5, 6], write=True, on="card") as held:
        assert not card.at(held, 0).any()
        card.at(held, 1)[:] = 1
    assert not arena.read([5]).any()
    assert (arena.read([6]) == 1).all()


def test_what_is_used_least_makes_way_on_a_full_card(arena: Arena, card: Card) -> None:
    data = some_blocks(8)
    arena.write(range(8), data)
    for first in (0, 4, 0, 2, 6):
        ids = np.arange(first, first + 2)
        with arena.acquire(ids, on="card") as held:
            assert all((card.at(held, i) == data[id_]).all() for i, id_ in enumerate(ids))
    assert (arena.read(range(8)) == data).all()


def test_every_tier_is_full(arena: Arena, card: Card) -> None:
    """Blocks that change places go by way of the movers' slots."""
    data = some_blocks(arena.blocks)
    ids = np.arange(arena.blocks)
    for id_ in ids:
        arena.write([id_], data[id_])
        if id_ < FAST:
            arena.prefetch([id_], "card")
            arena.wait([id_])
    assert arena.moves().used == (FAST, MEMORY - 2, SLOW - 2)
    for id_ in np.random.default_rng(3).permutation(ids):
        with arena.acquire([id_], on="card") as held:
            assert (card.at(held, 0) == data[id_]).all()
    assert (arena.read(ids) == data).all()


def test_from_one_tier_without_addresses_to_another(arena: Arena, card: Card) -> None:
    """By way of memory, there and back."""
    data = some_blocks(3)
    arena.write(range(3), data)
    arena.demote(range(3))
    assert not arena.wait(range(3)).any()
    arena.prefetch(range(3), "card")
    assert not arena.wait(range(3)).any()
    assert (arena.places(range(3)) == 0).all()
    with arena.acquire(range(3), on="card") as held:
        assert all((card.at(held, i) == data[i]).all() for i in range(3))
    arena.demote(range(3), "drawer")
    assert not arena.wait(range(3)).any()
    assert (arena.places(range(3)) == 2).all()
    assert (arena.read(range(3)) == data).all()


def test_more_than_a_card_has(arena: Arena) -> None:
    arena.write(range(5), some_blocks(5))
    with pytest.raises(NoRoom, match="5 blocks are to be held, card has room for 4"):
        arena.acquire(range(5), on="card")
    with arena.acquire(range(4), on="card"), pytest.raises(NoRoom, match="block 4"):
        arena.acquire([4], on="card", timeout_s=0.05)
    with arena.acquire([4], on="card"):
        pass


def test_tiers_to_be_held_on(arena: Arena) -> None:
    data = some_blocks(1)
    arena.write([1], data)
    with pytest.raises(TierdError, match="blocks on drawer have no addresses"):
        arena.acquire([1], on="drawer")
    arena.prefetch([1], "card")
    arena.wait([1])
    with arena.acquire([1], on="dram") as held:
        assert (held[0] == data[0]).all()
    assert arena.on_devices == ("card",)


def test_readers_and_writers_on_a_card(arena: Arena) -> None:
    arena.write([1], some_blocks(1))
    with arena.acquire([1], on="card"), arena.acquire([1], on="card"):
        for busy in (
            lambda: arena.acquire([1], write=True, on="card", timeout_s=0),
            lambda: arena.read([1], timeout_s=0),
            lambda: arena.discard([1], timeout_s=0),
        ):
            with pytest.raises(Busy, match="block 1"):
                busy()
    arena.discard([1])
    assert arena.moves().used == (0, 0, 0)


def during_load(arena: Arena, card: Card, happens: Callable[[], object]) -> int:
    """Returns the errno of block 1's way off the card, if something happens on it."""
    card.on_load = lambda: (happens(), None)[1]
    arena.demote([1], "dram")
    outcome = int(arena.wait([1])[0])
    card.on_load = lambda: None
    return outcome


def test_a_block_that_a_device_writes_while_it_moves(arena: Arena, card: Card) -> None:
    arena.write([1], some_blocks(1))
    arena.prefetch([1])
    arena.wait([1])

    def write() -> None:
        with arena.acquire([1], write=True, on="card", timeout_s=0) as held:
            card.at(held, 0)[:] = 7

    assert during_load(arena, card, write) == errno.EBUSY
    assert arena.places([1])[0] == 0
    assert (arena.read([1]) == 7).all()
    assert arena.fenced == {}


def test_a_card_that_fails(arena: Arena, card: Card) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "device lost")

    data = some_blocks(2)
    arena.write([1, 2], data)
    arena.acquire([1], on="card").release()
    card.on_store = fail
    with pytest.raises(TierFailed, match="block 2 is to be on card: card: store: OSError"):
        arena.acquire([2], on="card")
    with pytest.raises(TierFailed, match="tier card is fenced"):
        arena.acquire([1], on="card")
    assert (arena.read([1, 2]) == data).all()


def test_movers_tell_of_their_buffers(arena: Arena, card: Card) -> None:
    arena.write([1], some_blocks(1))
    arena.acquire([1], on="card").release()
    assert 1 <= len(card.adopted) <= 2
    assert all(buffer.shape[1] == BLOCK for buffer in card.adopted)


@pytest.mark.parametrize(
    "device",
    [
        (1, 2),
        DeviceMemory(address=0, number=0),
        DeviceMemory(address=1 << 64, number=0),
        DeviceMemory(address="7", number=0),  # type: ignore[arg-type]
    ],
)
def test_a_card_that_lies_about_its_addresses(card: Card, device: object) -> None:
    card.device = device  # type: ignore[assignment]
    with pytest.raises(TierFailed, match="no memory of a device alone"):
        Fence(card).reserve(BLOCK)
    card.device = DeviceMemory(address=BASE, number=0)
    card.memory = dram(FAST * BLOCK).reserve(BLOCK, FAST).memory
    with pytest.raises(TierFailed, match="no memory of a device alone"):
        Fence(card).reserve(BLOCK)


def test_looking_ahead_holds_on_the_card(arena: Arena, card: Card) -> None:
    data = some_blocks(12)
    arena.write(range(12), data)
    ahead = Lookahead(arena, range(12), repeats=True)
    for _ in range(3):
        for held in ahead:
            assert (card.at(held, 0) == data[held.ids[0]]).all()
    foresight = ahead.foresight
    assert foresight.ready + foresight.late == 36
    assert arena.fenced == {}


def test_nothing_is_torn_on_a_card() -> None:
    """A device that writes, a program that writes and reads, and movers, at the same blocks."""
    blocks, words = 18, BLOCK // 8
    card = Card(6, BLOCK)
    tiers: list[Tier] = [card, dram(6 * BLOCK), cxl(6 * BLOCK), Drawer(8, BLOCK)]
    until = time.process_time() + 2
    wrong: list[str] = []
    done = dict.fromkeys(["device", "program", "reader", "mover"], 0)

    def device(random: np.random.Generator) -> None:
        ids = random.permutation(blocks)[:2]
        with shared.acquire(ids, write=True, on="card") as held:
            for i in range(2):
                block = card.at(held, i).view(np.uint64)
                assert (block == block[0]).all(), f"{ids} torn on the card"
                block[: words // 2] += 1
                block[words // 2 :] += 1

    def program(random: np.random.Generator) -> None:
        with shared.acquire(random.permutation(blocks)[:1], write=True) as held:
            held[0].view(np.uint64)[:] += 1

    def reader(random: np.random.Generator) -> None:
        found = shared.read(random.permutation(blocks)[:3]).view(np.uint64)
        assert (found == found[:, :1]).all(), "torn"

    def mover(random: np.random.Generator) -> None:
        ids = random.permutation(blocks)[:6]
        shared.prefetch(ids[:3])
        shared.demote(ids[3:], shared.tiers[random.integers(1, 4)])
        shared.wait(ids)

    def repeat(work: Callable[[np.random.Generator], None]) -> None:
        random = np.random.default_rng(len(work.__name__))
        try:
            while time.process_time() < until:
                work(random)
                done[work.__name__] += 1
        except Exception as error:  # noqa: BLE001  # it is told below
            wrong.append(repr(error))

    with Arena(BLOCK, tiers, blocks=blocks, checksums=True) as shared:
        shared.write(range(blocks), np.zeros((blocks, words), np.uint64))
        threads = [
            threading.Thread(target=repeat, args=(work,))
            for work in (device, program, reader, mover)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        shared.wait(range(blocks))
        assert sum(shared.moves().used) == blocks
        total = int(shared.read(range(blocks)).view(np.uint64)[:, 0].sum())
        assert total == 2 * done["device"] + done["program"], "a write is missing"
        assert shared.fenced == {}
    assert min(done.values()) > 10


@pytest.mark.parametrize("seed", range(6))
def test_any_calls_in_any_order(seed: int) -> None:
    """Against a dictionary, on four tiers, of which the card fails half-way with odd seeds."""
    random = np.random.default_rng(seed)
    card = Card(3, BLOCK)
    expected: dict[int, int] = {}
    tiers: list[Tier] = [card, dram(5 * BLOCK), cxl(5 * BLOCK), Drawer(8, BLOCK)]
    with Arena(BLOCK, tiers, blocks=14, checksums=bool(seed % 3), deadline_s=60) as arena:
        for step in range(400):
            if step == 200:
                card.short = seed % 2
            some = random.permutation(14)[: random.integers(1, 4)]
            known = np.array([id_ for id_ in some if id_ in expected], np.int64)
            value = step % 251
            with suppress(NoRoom, TierFailed, Busy):  # at the latest after 50 ms
                match int(random.integers(7)):
                    case 0:
                        for id_ in some:
                            arena.write([id_], np.full(BLOCK, value, np.uint8), timeout_s=0.05)
                            expected[int(id_)] = value
                    case 1:
                        for id_ in known:
                            arena.discard([id_], timeout_s=0.05)
                            del expected[int(id_)]
                    case 2:
                        arena.prefetch(some, arena.tiers[random.integers(3)])
                    case 3:
                        arena.demote(some, arena.tiers[random.integers(1, 4)])
                    case 4 if len(known):
                        ids = known[:1]
                        with arena.acquire(ids, write=True, on="card", timeout_s=0.05) as held:
                            card.at(held, 0)[:] = value
                            expected[int(ids[0])] = value
                    case 5:
                        with arena.acquire(known, on="card", timeout_s=0.05) as held:
                            for i, id_ in enumerate(known):
                                assert (card.at(held, i) == expected[int(id_)]).all()
                    case _:
                        found = arena.read(known, timeout_s=0.05)
                        for block, id_ in zip(found, known, strict=True):
                            assert (block == expected[int(id_)]).all()
        card.short = 0
        arena.wait(range(14))
        assert set(arena.fenced) == ({"card"} if seed % 2 else set())
        assert sum(arena.moves().used) == len(expected)
        for id_, last in expected.items():
            assert (arena.read([id_]) == last).all()
