# SPDX-License-Identifier: Apache-2.0
"""A tier of a card's own memory: blocks at addresses of the card that stay, by CUDA's driver.

Needs `tierd[gpu]`, NVIDIA's driver, and a card.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierd.errors import NoRoom, TierdError
from tierd.kernel import nvml
from tierd.kernel.cuda import Card, Context, CudaError, Range, Stream, find, pin, unpin
from tierd.model import TierKind
from tierd.tiers.plugin import DeviceMemory, Facts, Health

RESERVE_BYTES = 1 << 30
"""Left to others by default: to a context, some 500 MiB, and to what the program has beside it."""

_LOOK_EVERY_S = 1.0
"""NVML is asked no more often, as each batch asks for the tier's health."""


class HbmTier:
    """Memory of one card."""

    def __init__(self, card: Card, facts: Facts) -> None:
        self.card = card
        self.facts = facts
        self._failure: str | None = None
        self._look_at_s = 0.0

    def health(self) -> Health:
        """FAILED for good once the card is lost, which CUDA's or NVML's driver says."""
        if self._failure is None and time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_EVERY_S
            if nvml.is_lost(self.card.pci):
                self._failure = "NVML says that it is lost"
        return Health.GOOD if self._failure is None else Health.FAILED

    def reserve(self, block_bytes: int, slots: int) -> "HbmSpace":
        """Maps the memory of so many blocks, or of as many as the card has room for.

        Raises:
            NoRoom: it has no room for one.
            CudaError: the driver refuses.
        """
        with self.noting_loss():
            return HbmSpace(self, block_bytes, slots)

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Remembers an error that means the loss of the card."""
        try:
            yield
        except CudaError as error:
            if error.is_lost:
                self._failure = str(error)
            raise


class HbmSpace:
    """Slots one after the other. Each call returns when the card has done its copies.

    Copies that never end keep a call for ever, since the buffer is the card's until then: it is the
    caller that has a deadline (tierd.tiers.fence).
    """

    memory: None = None

    def __init__(self, tier: HbmTier, block_bytes: int, slots: int) -> None:
        self._tier = tier
        self._block_bytes = block_bytes
        self._pinned: list[NDArray[np.uint8]] = []
        with ExitStack() as undo:
            self._context = Context(tier.card.number)
            undo.callback(self._context.close)
            # Before all else may be taken: a stream has memory of the card, too.
            self._in = Stream(self._context)
            undo.callback(self._in.close)
            self._out = Stream(self._context)
            undo.callback(self._out.close)
            self._range = Range(self._context, block_bytes * slots)
            undo.callback(self._range.free)
            self.slots = self._range.size_bytes // block_bytes
            if self.slots == 0:
                raise NoRoom(f"card {tier.card.number} has no room for a block of {block_bytes}")
            undo.pop_all()
        self.device = DeviceMemory(address=self._range.address, number=tier.card.number)

    def adopt(self, buffer: NDArray[np.uint8]) -> None:
        try:
            with self._tier.noting_loss():
                pin(self._context, buffer)
        except CudaError as error:
            if error.is_lost:
                raise
            return  # copies from memory that is not pinned are slower, and as right
        self._pinned.append(buffer)

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        host = data.ctypes.data
        return self._copy(
            slots, self._in, lambda at, offset, size: self._in.copy_in(at, host + offset, size)
        )

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        host = into.ctypes.data
        return self._copy(
            slots, self._out, lambda at, offset, size: self._out.copy_out(host + offset, at, size)
        )

    def _copy(
        self, slots: NDArray[np.int64], stream: Stream, begin: Callable[[int, int, int], None]
    ) -> int:
        with self._tier.noting_loss():
            try:
                for first, end in _runs(slots):
                    at = self.device.address + int(slots[first]) * self._block_bytes
                    size = (end - first) * self._block_bytes
                    begin(at, first * self._block_bytes, size)
            finally:
                stream.wait()  # also when a later one could not be begun
        return len(slots)

    def free(self) -> None:
        """Gives the memory back, when the card has done all that was asked of it.

        Raises:
            CudaError: the driver did not take all of it; the first such error.
        """
        calls: list[Callable[[], None]] = [
            self._context.synchronize,
            self._in.close,
            self._out.close,
            *(lambda memory=memory: unpin(self._context, memory) for memory in self._pinned),
            self._range.free,
            self._context.close,
        ]
        errors = []
        for call in calls:
            try:
                with self._tier.noting_loss():
                    call()
            except CudaError as error:
                errors.append(error)
        self._pinned = []
        if errors:
            raise errors[0]


def _runs(slots: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Returns from where to where in `slots` each is one more than the last: one copy will do."""
    if len(slots) == 0:
        return []
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    ends = [0, *cuts.tolist(), len(slots)]
    return list(pairwise(ends))


def hbm(
    capacity_bytes: int | None = None,
    device: int | str = 0,
    reserve_bytes: int = RESERVE_BYTES,
    name: str = "hbm",
) -> HbmTier:
    """Makes a tier of a card's memory.

    Args:
        capacity_bytes: how much; by default what is free now, less `reserve_bytes`.
        device: CUDA's number of the card, its UUID ("GPU-..."), or its PCI address.
        reserve_bytes: left to others.
        name: of the tier.

    Raises:
        NotFound: there is no such card, or none at all.
        NoRoom: nothing is left for it.
        TierdError: there are no bindings of CUDA, or no driver.
    """
    card = find(device)
    if capacity_bytes is None:
        capacity_bytes = _free_bytes(card) - reserve_bytes
    if capacity_bytes <= 0:
        raise NoRoom(
            f"card {card.number} ({card.name}) has nothing left beside {reserve_bytes} in reserve",
            hint="`nvidia-smi` tells who has its memory; or give capacity_bytes",
        )
    facts = Facts(name=name, kind=TierKind.HBM, capacity_bytes=capacity_bytes)
    return HbmTier(card, facts)


def _free_bytes(card: Card) -> int:
    """What is free, in whole granules."""
    context = Context(card.number)
    try:
        granule = context.granule_bytes()
        told, free = nvml.free_bytes(card.pci), context.free_bytes()
        if told is not None:  # of all of the card, where CUDA may have an instance of it (MIG)
            free = min(free, told)
        return free // granule * granule
    except CudaError as error:
        raise TierdError(f"card {card.number} ({card.name}): {error}", hint=error.hint) from error
    finally:
        context.close()
