# SPDX-License-Identifier: Apache-2.0
"""What a tier has to do, as tests: for whoever writes a plugin (docs/plugins.md).

A plugin's own tests have a class of this for pytest::

    class TestMine(TierContract):
        def make(self) -> Tier:
            return mine(capacity_bytes=1 << 20)

The tiers that come with tierd are held to the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tierd.tiers.fence import NAME_BYTES, Fence
from tierd.tiers.plugin import DeviceMemory, Facts, Health, Space, Tier

MOST_SLOTS = 1024
"""So many are tried of a tier that has more: its first, its last, and some in between."""


class TierContract:
    """Tests of a tier; make() gives a new one for each, with room for four blocks at least."""

    block_bytes = 4096

    def make(self) -> Tier:
        raise NotImplementedError("make() returns a tier to be tried")

    def test_it_tells_of_itself(self) -> None:
        tier = self.make()
        facts = tier.facts
        assert isinstance(facts, Facts), "facts are not of tierd.tiers.Facts"
        assert 0 < len(facts.name.encode()) <= NAME_BYTES, "its name is empty or too long"
        assert self.block_bytes % facts.granule_bytes == 0, "block_bytes is no multiple of granule"
        assert facts.capacity_bytes >= 4 * self.block_bytes, "there is no room for four blocks"
        assert tier.health() is Health.GOOD, "a new tier is not good"

    def test_all_of_its_capacity_is_there(self) -> None:
        """Each slot keeps a block of its own."""
        with self.space() as space:
            slots = some(space.slots)
            data = blocks(len(slots), self.block_bytes)
            assert space.store(slots, data) == len(slots), "store() does not say how many it did"
            self.expect(space, slots, data)

    def test_it_has_no_more_slots_than_asked_for(self) -> None:
        space = self.make().reserve(self.block_bytes, 3)
        assert space.slots == 3, "three slots were asked for, and there is room"
        space.free()

    def test_slots_are_in_any_order(self) -> None:
        with self.space() as space:
            slots = some(space.slots)[::-1].copy()
            data = blocks(len(slots), self.block_bytes)
            space.store(slots, data)
            order = np.random.default_rng(1).permutation(len(slots))
            self.expect(space, slots[order], data[order])

    def test_a_slot_is_replaced_alone(self) -> None:
        with self.space() as space:
            slots, data = np.arange(3), blocks(3, self.block_bytes)
            space.store(slots, data)
            data[1] = ~data[1]
            space.store(slots[1:2], data[1:2].copy())
            self.expect(space, slots, data)

    def test_it_does_not_keep_what_it_is_given(self) -> None:
        """The caller uses its arrays again as soon as a call has returned."""
        with self.space() as space:
            slots, data = np.arange(2), blocks(2, self.block_bytes)
            given, given_slots = data.copy(), slots.copy()
            space.store(given_slots, given)
            given[:], given_slots[:] = 0, 3
            self.expect(space, slots, data)

    def test_it_changes_only_what_it_is_to_fill(self) -> None:
        with self.space() as space:
            slots, data = np.arange(2), blocks(2, self.block_bytes)
            space.store(slots, data)
            around = np.full((4, self.block_bytes), 0xA5, np.uint8)
            assert space.load(slots, around[1:3]) == 2, "load() does not say how many it did"
            assert (around[1:3] == data).all(), "what is loaded is not what was stored"
            assert (around[[0, 3]] == 0xA5).all(), "load() has written outside of its array"
            assert (slots == np.arange(2)).all(), "the slots' own array has been changed"

    def test_nothing_is_no_failure(self) -> None:
        with self.space() as space:
            nothing = np.empty((0, self.block_bytes), np.uint8)
            assert space.store(np.arange(0), nothing) == 0
            assert space.load(np.arange(0), nothing) == 0

    def test_memory_is_the_slots(self) -> None:
        """Of a tier with addresses; the others have nothing to show here."""
        with self.space() as space:
            slots, data = np.arange(3), blocks(3, self.block_bytes)
            space.store(slots, data)
            if space.memory is not None:
                assert space.memory.shape == (space.slots, self.block_bytes)
                assert (space.memory[slots] == data).all(), "memory has not what was stored"
                space.memory[2] = 7
                data[2] = 7
                self.expect(space, slots, data)

    def test_a_device_has_addresses_that_stay(self) -> None:
        """Of a tier that a device reaches; the others have nothing to show here."""
        with self.space() as space:
            before: object = getattr(space, "device", None)
            if before is not None:
                assert isinstance(before, DeviceMemory), "device is not of tierd.tiers.DeviceMemory"
                assert space.memory is None, "what the CPU reaches is no device's alone"
                assert before.address % 64 == 0, "its slots are not aligned"
                buffer = blocks(2, self.block_bytes)
                getattr(space, "adopt", len)(buffer)
                space.store(np.arange(2), buffer)
                self.expect(space, np.arange(2), buffer)
                assert getattr(space, "device", None) == before, "its addresses have changed"

    def test_slots_that_were_given_back_are_used_again(self) -> None:
        """Of a tier that can; the others have nothing to show here."""
        with self.space() as space:
            data, slots = blocks(4, self.block_bytes), np.arange(4)
            space.store(slots, data)
            if getattr(space, "can_give_back", bool)():
                getattr(space, "give_back")(slots[1:3])  # noqa: B009
                self.expect(space, slots[[0, 3]], data[[0, 3]])
                space.store(slots[1:3], data[1:3])
                self.expect(space, slots, data)

    def test_what_is_freed_can_be_had_again(self) -> None:
        tier = self.make()
        for _ in range(3):
            space = tier.reserve(self.block_bytes, tier.facts.capacity_bytes // self.block_bytes)
            taken = space.slots
            space.free()
            assert taken == tier.facts.capacity_bytes // self.block_bytes

    def test_it_is_right_behind_the_fence(self) -> None:
        """As an arena has it: from another thread, and within the time that is allowed."""
        fence = Fence(self.make())
        fence.reserve(self.block_bytes)
        slots, data = np.arange(4), blocks(4, self.block_bytes)
        fence.store(slots, data)
        into = np.empty_like(data)
        fence.load(slots, into)
        fence.free()
        assert (into == data).all()
        assert fence.failure is None, fence.failure

    @contextmanager
    def space(self) -> Iterator[Space]:
        """All of a new tier."""
        tier = self.make()
        space = tier.reserve(self.block_bytes, tier.facts.capacity_bytes // self.block_bytes)
        try:
            yield space
        finally:
            space.free()

    def expect(self, space: Space, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        into = np.empty_like(data)
        assert space.load(slots, into) == len(slots), "load() does not say how many it did"
        wrong = slots[(into != data).any(axis=1)]
        assert len(wrong) == 0, f"slots {wrong[:8]} do not have what was stored"


def some(slots: int) -> NDArray[np.int64]:
    """Slots from the first to the last one, evenly."""
    return np.unique(np.linspace(0, slots - 1, min(slots, MOST_SLOTS)).astype(np.int64))


def blocks(count: int, block_bytes: int) -> NDArray[np.uint8]:
    """Blocks no two of which are alike."""
    return np.random.default_rng(count).integers(0, 256, (count, block_bytes), dtype=np.uint8)
