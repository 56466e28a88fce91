# SPDX-License-Identifier: Apache-2.0
"""Blocks in slots of tiers, and the threads that move them: the shim's arena, typed.

Ids are contiguous arrays of int64. Nothing here is done block by block; no call holds the GIL.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierd.errors import NotFound
from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib

if TYPE_CHECKING:
    from tierd.kernel._shim import Batch as ShimBatch
    from tierd.kernel._shim import Pointer

BATCH = lib.TIERD_BATCH
BLOCK_UNIT = lib.TIERD_BLOCK_UNIT
MAX_TIERS = lib.TIERD_TIERS
MAX_MOVERS = lib.TIERD_MOVERS
NOWHERE = lib.TIERD_NOWHERE
MEMORY = lib.TIERD_MEMORY
"""In place of a tier's number: whichever the CPU reaches."""

Ids: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]
Done: TypeAlias = tuple[int, int]
"""How many blocks it was done to, from the first on, and the errno of the next; 0 where none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What the movers have done, in blocks: `busy`, `no_room` and `failed` stayed where they were.

    `queued` wait now; `used` are the slots in use now, of each tier.
    """

    moved: int
    busy: int
    no_room: int
    failed: int
    queued: int
    used: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Blocks to be copied to (`is_store`) or from the `slots` of a tier without addresses."""

    tier: int
    is_store: bool
    slots: Ids
    shim: ShimBatch


def no_such_block(ids: Ids, blocks: int) -> NotFound:
    """Names the first id that is out of range."""
    wrong = ids[(ids < 0) | (ids >= blocks)][0]
    return NotFound(f"there is no block {wrong}", hint=f"they are numbered from 0 to {blocks - 1}")


def sums_of(data: Bytes) -> NDArray[np.uint64]:
    """Returns a sum of each block, never 0; of shape (blocks, bytes), a multiple of 32 each."""
    sums = np.empty(len(data), np.uint64)
    lib.tierd_sum_blocks(
        ffi.from_buffer("uint8_t[]", data),
        data.shape[1],
        len(data),
        ffi.from_buffer("uint64_t[]", sums, require_writable=True),
    )
    return sums


class Blocks:
    """An arena of blocks, none of which is anywhere yet.

    Args:
        block_bytes: of each, a multiple of BLOCK_UNIT.
        counts: of u4, accesses of each block; shared.
        places: of u1, the tier of each block; shared.
        sums: sum each block that is written, and check it when it is read or moved.

    Raises:
        OSError: EINVAL or ENOMEM.
        NotFound: of each call, where an id is out of range. It does nothing then.
    """

    def __init__(
        self, block_bytes: int, counts: NDArray[np.uint32], places: Bytes, *, sums: bool
    ) -> None:
        self._counts = ffi.from_buffer("uint32_t[]", counts, require_writable=True)
        self._places = ffi.from_buffer("uint8_t[]", places, require_writable=True)
        self._memories: list[Pointer] = []
        self._tiers = 0
        opened = ffi.new("struct tierd_arena **")
        flags = lib.TIERD_SUMS if sums else 0
        result = lib.tierd_open_arena(
            block_bytes, len(counts), flags, self._counts, self._places, opened
        )
        check(result, "arena")
        # Freed with the last reference: a call that is under way has one.
        self._arena = ffi.gc(opened[0], lib.tierd_close_arena)

    def add_tier(self, memory: Bytes | None, slots: int, spare: int, device: int = 0) -> int:
        """Adds the next slower tier; returns its number.

        Args:
            memory: its slots, if the CPU reaches them.
            slots: how many.
            spare: so many of them are left to the movers.
            device: where they begin for a device, if that alone reaches them.
        """
        address = ffi.NULL
        if memory is not None:
            address = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
            self._memories.append(address)
        number = check(lib.tierd_add_tier(self._arena, address, device, slots, spare), "tier")
        self._tiers = number + 1
        return number

    def _checked(self, result: int, ids: Ids) -> int:
        if result == -errno.EINVAL:
            raise no_such_block(ids, len(self._counts))
        return check(result, "arena")

    def touch(self, ids: Ids) -> None:
        pointer = ffi.from_buffer("int64_t[]", ids)
        self._checked(lib.tierd_touch_blocks(self._arena, pointer, len(ids)), ids)

    def pin(
        self, ids: Ids, addresses: NDArray[np.uint64], *, write: bool, on: int = MEMORY
    ) -> Done:
        why = ffi.new("int32_t *")
        pinned = lib.tierd_pin_blocks(
            self._arena,
            ffi.from_buffer("int64_t[]", ids),
            len(ids),
            lib.TIERD_WRITE if write else lib.TIERD_READ,
            on,
            ffi.from_buffer("void *[]", addresses, require_writable=True),
            why,
        )
        return self._checked(pinned, ids), -why[0]

    def unpin(self, ids: Ids, *, write: bool) -> None:
        mode = lib.TIERD_WRITE if write else lib.TIERD_READ
        pointer = ffi.from_buffer("int64_t[]", ids)
        self._checked(lib.tierd_unpin_blocks(self._arena, pointer, len(ids), mode), ids)

    def read(self, ids: Ids, into: Bytes) -> Done:
        why, pointer = ffi.new("int32_t *"), ffi.from_buffer("int64_t[]", ids)
        bytes_ = ffi.from_buffer("uint8_t[]", into, require_writable=True)
        read = lib.tierd_read_blocks(self._arena, pointer, len(ids), bytes_, why)
        return self._checked(read, ids), -why[0]

    def write(self, ids: Ids, data: Bytes) -> Done:
        why, pointer = ffi.new("int32_t *"), ffi.from_buffer("int64_t[]", ids)
        bytes_ = ffi.from_buffer("uint8_t[]", data)
        written = lib.tierd_write_blocks(self._arena, pointer, len(ids), bytes_, why)
        return self._checked(written, ids), -why[0]

    def drop(self, ids: Ids) -> Done:
        why, pointer = ffi.new("int32_t *"), ffi.from_buffer("int64_t[]", ids)
        dropped = lib.tierd_drop_blocks(self._arena, pointer, len(ids), why)
        return self._checked(dropped, ids), -why[0]

    def want(self, ids: Ids, tier: int, *, urgent: bool = False, absent: bool = False) -> int:
        """Queues blocks for a tier; `absent` leaves out those that have an address already."""
        flags = (lib.TIERD_URGENT if urgent else 0) | (lib.TIERD_ABSENT if absent else 0)
        pointer = ffi.from_buffer("int64_t[]", ids)
        wanted = lib.tierd_want_blocks(self._arena, pointer, len(ids), tier, flags)
        return self._checked(wanted, ids)

    def wait(self, ids: Ids, timeout_s: float) -> NDArray[np.int32] | None:
        """Returns the errno of each block's last move, or None when they have not ended in time."""
        outcomes = np.zeros(len(ids), np.int32)
        result = lib.tierd_await_blocks(
            self._arena,
            ffi.from_buffer("int64_t[]", ids),
            len(ids),
            int(timeout_s * 1e9),
            ffi.from_buffer("int32_t[]", outcomes, require_writable=True),
        )
        if result == -errno.ETIMEDOUT:
            return None
        self._checked(result, ids)
        return -outcomes

    def evict(self, count: int) -> int:
        """Has so many blocks be on their way from memory to slower tiers; returns how many are."""
        return lib.tierd_evict_blocks(self._arena, count)

    def next_batch(self, mover: int, bounce: Bytes) -> Batch | None:
        """Moves blocks until there is a batch to be copied, or until stop(): then None.

        Args:
            mover: from 1, this thread's alone.
            bounce: shape (blocks, block bytes), what is to be stored, or where to load to.
        """
        shim = ffi.new("struct tierd_batch *")
        address = ffi.from_buffer("uint8_t[]", bounce, require_writable=True)
        if not check(lib.tierd_run_moves(self._arena, mover, len(bounce), address, shim), "moves"):
            return None
        slots = np.frombuffer(ffi.buffer(shim.slots), np.int64, count=shim.count).copy()
        return Batch(tier=shim.tier, is_store=bool(shim.is_store), slots=slots, shim=shim)

    def check(self, batch: Batch, bounce: Bytes) -> int:
        """Returns how many blocks of a load are not what was stored; they will stay there.

        Those that mark_lost() has named are not among them.
        """
        return lib.tierd_check_batch(self._arena, batch.shim, ffi.from_buffer("uint8_t[]", bounce))

    def mark_lost(self, batch: Batch, slots: Ids) -> None:
        """Has blocks of a load stay where they are, with EBADMSG: they are gone."""
        for row in np.flatnonzero(np.isin(batch.slots, slots)).tolist():
            batch.shim.is_bad[row] = 1  # type: ignore[index]

    def settle(self, batch: Batch, bounce: Bytes, *, why_not: int = 0) -> None:
        """Ends a batch, and wakes who waits for its blocks; with an errno none has moved."""
        address = ffi.from_buffer("uint8_t[]", bounce)
        lib.tierd_settle_batch(self._arena, batch.shim, -why_not, address)

    def close_tier(self, tier: int) -> None:
        """Lets no more blocks go there."""
        lib.tierd_close_tier(self._arena, tier)

    def lend(self, tier: int) -> Ids:
        """Takes free slots of a tier that have memory, until end_lending(); none where none is."""
        slots = np.empty(BATCH, np.int64)
        pointer = ffi.from_buffer("int64_t[]", slots, require_writable=True)
        lent = check(lib.tierd_lend_slots(self._arena, tier, len(slots), pointer), "slots")
        return slots[:lent]

    def end_lending(self, tier: int, slots: Ids, *, are_empty: bool) -> None:
        """Lets slots be used again; with memory that comes with the use where they are empty."""
        pointer = ffi.from_buffer("int64_t[]", slots)
        lib.tierd_end_lending(self._arena, tier, pointer, len(slots), int(are_empty))

    def moves(self) -> Moves:
        told: Any = ffi.new("struct tierd_moves *")
        lib.tierd_tell_moves(self._arena, told)
        return Moves(
            moved=told.moved,
            busy=told.busy,
            no_room=told.no_room,
            failed=told.failed,
            queued=told.queued,
            used=tuple(told.used)[: self._tiers],
        )

    def stop(self) -> None:
        """Has every next_batch() return None, now and from now on."""
        lib.tierd_stop_moves(self._arena)
