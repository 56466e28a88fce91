# SPDX-License-Identifier: Apache-2.0
"""A tier without addresses whose blocks are in memory: as far as its speed is told to be."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.kernel.placed import place
from tierd.model import TierKind
from tierd.tiers import Facts, Health


@dataclass
class FarSpace:
    kept: NDArray[np.uint8]
    bytes_per_s: float | None
    memory: None = None

    @property
    def slots(self) -> int:
        return len(self.kept)

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        begin_s = time.monotonic()
        self.kept[slots] = data
        return self._paced(len(slots), begin_s)

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        begin_s = time.monotonic()
        np.take(self.kept, slots, axis=0, out=into)
        return self._paced(len(slots), begin_s)

    def free(self) -> None:
        """Nothing: the memory goes with the space."""

    def _paced(self, blocks: int, begin_s: float) -> int:
        if self.bytes_per_s is not None:
            until_s = begin_s + blocks * self.kept.shape[1] / self.bytes_per_s
            time.sleep(max(0.0, until_s - time.monotonic()))
        return blocks


class Far:
    """Memory that is copied to and from, by default as fast as that is.

    Args:
        capacity_bytes: of it.
        bytes_per_s: its speed is simulated: each copy is made to last as long.
    """

    def __init__(self, capacity_bytes: int, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self.facts = Facts(
            name="far" if bytes_per_s is None else "far (simulated)",
            kind=TierKind.SWAP,
            capacity_bytes=capacity_bytes,
        )

    def health(self) -> Health:
        return Health.GOOD

    def reserve(self, block_bytes: int, slots: int) -> FarSpace:
        memory = place(block_bytes * slots).reshape(slots, block_bytes)
        return FarSpace(memory, self._bytes_per_s)
