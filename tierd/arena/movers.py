# SPDX-License-Identifier: Apache-2.0
"""What an arena's threads do with its tiers: moves, and memory that is left to others."""

import errno
from collections.abc import Sequence

from tierd.arena.bandwidth import Bandwidth
from tierd.errors import Busy, Lost, TierFailed
from tierd.kernel.arena import BATCH, Batch, Blocks, Bytes
from tierd.kernel.placed import place
from tierd.tiers.fence import Fence

_BOUNCE_BYTES = 4 << 20
"""A batch for a tier without addresses, at most, unless a single block is larger."""


def give_back(blocks: Blocks, fences: Sequence[Fence], rank: int) -> int:
    """Leaves the memory of a tier's free slots to others; returns of how many.

    Raises:
        TierFailed: the tier did not do it.
    """
    fence, given = fences[rank], 0
    while given < fence.slots * fence.gives_back and len(slots := blocks.lend(rank)):
        try:
            fence.give_back(slots)
        except TierFailed:
            if not fence.has(slots):  # else they may still lose what is in them
                blocks.end_lending(rank, slots, are_empty=False)
            raise
        blocks.end_lending(rank, slots, are_empty=True)
        given += len(slots)
    return given


def move(
    blocks: Blocks,
    fences: Sequence[Fence],
    bandwidths: Sequence[Bandwidth],
    mover: int,
    block_bytes: int,
) -> None:
    """Is a mover, until the arena ends."""
    capacity = min(BATCH, max(1, _BOUNCE_BYTES // block_bytes))
    bounce = _new_bounce(capacity, block_bytes, fences)
    while True:
        at_once = _at_once(bandwidths, capacity, block_bytes)
        batch = blocks.next_batch(mover, bounce[:at_once])
        if batch is None:
            return
        fence, data = fences[batch.tier], bounce[: len(batch.slots)]
        # Before the copy: a plugin's deadline is for the plugin alone.
        if bandwidths[batch.tier].wait(data.nbytes):
            why_not = _copy(blocks, fence, batch, data)
        else:
            why_not = errno.EBUSY
        if not why_not and blocks.check(batch, bounce):
            fence.fail("it gives back other bytes than were stored")
        if fence.failure is not None:
            blocks.close_tier(batch.tier)
        blocks.settle(batch, bounce, why_not=why_not)
        if fence.has(data):
            bounce = _new_bounce(capacity, block_bytes, fences)


def _at_once(bandwidths: Sequence[Bandwidth], capacity: int, block_bytes: int) -> int:
    """Returns how many blocks a batch has at most.

    No more than a burst of the tightest limit: what a program waits for is next, and is not to wait
    for long. Which tier the next batch is for is not known before.
    """
    burst_bytes = min(bandwidth.burst_bytes for bandwidth in bandwidths)
    return max(1, int(min(burst_bytes, capacity * block_bytes)) // block_bytes)


def _copy(blocks: Blocks, fence: Fence, batch: Batch, data: Bytes) -> int:
    """Has a tier store or load a batch; returns 0, or the errno of why none of it was."""
    try:
        (fence.store if batch.is_store else fence.load)(batch.slots, data)
    except Busy:
        return errno.EBUSY
    except Lost as error:
        blocks.mark_lost(batch, error.slots)
    except TierFailed:
        return errno.EIO
    return 0


def _new_bounce(capacity: int, block_bytes: int, fences: Sequence[Fence]) -> Bytes:
    bounce = place(capacity * block_bytes).reshape(capacity, block_bytes)
    for fence in fences:
        fence.adopt(bounce)
    return bounce
