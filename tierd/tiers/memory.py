# SPDX-License-Identifier: Apache-2.0
"""Tiers of memory that the CPU addresses: DRAM, and CXL memory that is online as nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierd.kernel.placed import give_back, place
from tierd.model import PAGE_BYTES, NodeId, TierKind
from tierd.tiers.plugin import Facts, Health


@dataclass(frozen=True, slots=True)
class MemorySpace:
    memory: NDArray[np.uint8]
    """Shape (slots, block bytes)."""
    nodes: Sequence[NodeId] = ()

    @property
    def slots(self) -> int:
        return len(self.memory)

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        self.memory[slots] = data
        return len(slots)

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        into[:] = self.memory[slots]
        return len(slots)

    def can_give_back(self) -> bool:
        return not self.memory.shape[1] % PAGE_BYTES

    def give_back(self, slots: NDArray[np.int64]) -> None:
        give_back(self.memory, slots, self.nodes)

    def free(self) -> None:
        """Nothing: the memory goes with the last array that shows it."""


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """Memory of nodes; of any, without.

    What is reserved is there at once: it is touched, locked as far as allowed, and with nodes
    bound to them, an equal part to each.
    """

    facts: Facts
    nodes: Sequence[NodeId] = field(default=())

    def health(self) -> Health:
        return Health.GOOD

    def reserve(self, block_bytes: int, slots: int) -> MemorySpace:
        memory = place(block_bytes * slots, self.nodes)
        return MemorySpace(memory.reshape(slots, block_bytes), self.nodes)


def dram(capacity_bytes: int, nodes: Sequence[int] = (), name: str = "dram") -> MemoryTier:
    return _tier(name, TierKind.DRAM, capacity_bytes, nodes)


def cxl(capacity_bytes: int, nodes: Sequence[int] = (), name: str = "cxl") -> MemoryTier:
    return _tier(name, TierKind.CXL, capacity_bytes, nodes)


def _tier(name: str, kind: TierKind, capacity_bytes: int, nodes: Sequence[int]) -> MemoryTier:
    facts = Facts(name=name, kind=kind, capacity_bytes=capacity_bytes)
    return MemoryTier(facts, tuple(NodeId(node) for node in nodes))
