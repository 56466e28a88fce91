# SPDX-License-Identifier: Apache-2.0
"""A tier without addresses whose faults are chosen by the test, and the kit on any tier."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierd.errors import TierdError
from tierd.model import TierKind
from tierd.tiers.kit import TierContract
from tierd.tiers.plugin import Facts, Health


def nothing(*_: object) -> None:
    pass


@dataclass
class Drawer:
    """Is its own space. `on_store` and `on_load` run before each copy; it tells `short` fewer."""

    slots: int
    block_bytes: int
    memory: NDArray[np.uint8] | None = None
    on_store: Callable[[], None] = nothing
    on_load: Callable[[], None] = nothing
    after_load: Callable[[NDArray[np.int64], NDArray[np.uint8]], None] = nothing
    short: int = 0
    spoils: bool = False
    state: Health = Health.GOOD
    freed: bool = False
    calls: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.kept = np.zeros((self.slots, self.block_bytes), np.uint8)

    @property
    def facts(self) -> Facts:
        size = self.slots * self.block_bytes
        return Facts(name="drawer", kind=TierKind.SWAP, capacity_bytes=size)

    def health(self) -> Health:
        return self.state

    def reserve(self, block_bytes: int, slots: int) -> "Drawer":
        assert (block_bytes, slots) == (self.block_bytes, self.slots)
        return self

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        assert self.busy.acquire(blocking=False), "two calls at the same time"
        try:
            self.calls += 1
            self.on_store()
            self.kept[slots] = data
            return len(slots) - self.short
        finally:
            self.busy.release()

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        assert self.busy.acquire(blocking=False), "two calls at the same time"
        try:
            self.calls += 1
            self.on_load()
            into[:] = self.kept[slots]
            self.after_load(slots, into)
            if self.spoils:
                into[0, 0] ^= 1
            return len(slots) - self.short
        finally:
            self.busy.release()

    def free(self) -> None:
        self.freed = True


def failing(contract: TierContract) -> list[str]:
    """Which of the kit's tests a tier fails."""
    failed = []
    for name in [name for name in dir(TierContract) if name.startswith("test_")]:
        try:
            getattr(contract, name)()
        except (AssertionError, TierdError):
            failed.append(name)
    return failed
