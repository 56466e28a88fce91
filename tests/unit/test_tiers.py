# SPDX-License-Identifier: Apache-2.0
"""The built-in tiers by the kit, what the kit finds, and tiers by name."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import tierd.tiers
from tests.unit.drawer import Drawer, failing
from tierd.errors import NotFound, TierdError, TierFailed
from tierd.model import TierKind
from tierd.tiers import Tier
from tierd.tiers.fence import Fence
from tierd.tiers.kit import TierContract
from tierd.tiers.memory import cxl, dram

NODE = int(Path("/sys/devices/system/node/has_memory").read_text().partition("-")[0])


class TestDram(TierContract):
    def make(self) -> Tier:
        return dram(1 << 20)


class TestBoundToANode(TierContract):
    def make(self) -> Tier:
        return cxl(1 << 20, nodes=[NODE])


class TestDrawer(TierContract):
    def make(self) -> Tier:
        return AnySize(256, self.block_bytes)


class AnySize(Drawer):
    """As the kit asks for other sizes than an arena does."""

    def reserve(self, block_bytes: int, slots: int) -> Drawer:
        return Drawer(slots, block_bytes)


class Shrinks(AnySize):
    """Says that it has more than it has."""

    def reserve(self, block_bytes: int, slots: int) -> Drawer:
        return Drawer(max(1, slots - 1), block_bytes)


class Keeps(AnySize):
    """Keeps the caller's array instead of a copy."""

    def reserve(self, block_bytes: int, slots: int) -> Drawer:
        return Keeping(slots, block_bytes)


class Keeping(Drawer):
    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        self.given = getattr(self, "given", {}) | {int(s): data[i] for i, s in enumerate(slots)}
        return len(slots)

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        for i, slot in enumerate(slots):
            into[i] = self.given[int(slot)]
        return len(slots)


@pytest.mark.parametrize(
    ("tier", "found"),
    [
        (Shrinks, "test_what_is_freed_can_be_had_again"),
        (Keeps, "test_it_does_not_keep_what_it_is_given"),
    ],
)
def test_the_kit_finds_a_tier_that_is_wrong(tier: type[Drawer], found: str) -> None:
    class Wrong(TierContract):
        def make(self) -> Tier:
            return tier(16, self.block_bytes)

    assert found in failing(Wrong())


def test_built_in_tiers_are_found_by_name() -> None:
    tier = tierd.tiers.load("cxl", {"capacity_bytes": 1 << 20, "nodes": [0], "name": "far"})
    assert (tier.facts.name, tier.facts.kind) == ("far", TierKind.CXL)
    with pytest.raises(NotFound, match="no plugin for a tier 'tape'") as refused:
        tierd.tiers.load("tape", {})
    assert "dram" in str(refused.value.hint)
    with pytest.raises(TierdError, match=r"'dram' \(tierd.tiers.memory:dram\): TypeError"):
        tierd.tiers.load("dram", {"size": 1})


def test_memory_of_a_node_that_is_not_there() -> None:
    fence = Fence(cxl(1 << 20, nodes=[1023]))
    with pytest.raises(TierFailed, match=r"tier cxl: reserve: OSError: .*memory of node 1023"):
        fence.reserve(4096)
    fence.free()
