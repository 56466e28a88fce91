# SPDX-License-Identifier: Apache-2.0
"""An arena's blocks, its movers driven by hand."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from tierd.kernel.arena import Batch, Blocks, Bytes

BLOCK = 4096
MEMORY, DRAWER = 0, 1


def carry(blocks: Blocks, batch: Batch, bounce: Bytes, drawer: Bytes) -> None:
    """Copies a batch to or from a drawer, and ends it."""
    data = bounce[: len(batch.slots)]
    if batch.is_store:
        drawer[batch.slots] = data
    else:
        data[:] = drawer[batch.slots]
    blocks.settle(batch, bounce)


def next_batch(blocks: Blocks, mover: int, bounce: Bytes) -> Batch:
    batch = blocks.next_batch(mover, bounce)
    assert batch is not None
    return batch


def test_waiting_ends_when_all_rest_at_one_moment() -> None:
    """A block that rests when the waiting begins has to make way for the one that is awaited."""
    blocks = Blocks(BLOCK, np.zeros(3, np.uint32), np.full(3, 255, np.uint8), sums=False)
    memory, drawer = np.zeros(2 * BLOCK, np.uint8), np.zeros((4, BLOCK), np.uint8)
    blocks.add_tier(memory, slots=2, spare=0)
    blocks.add_tier(None, slots=4, spare=0)
    bounce, bounce_2 = np.zeros((2, 4, BLOCK), np.uint8)
    wanted = np.array([0])
    blocks.write(wanted, np.zeros((1, BLOCK), np.uint8))
    assert blocks.want(wanted, DRAWER) == 1
    carry(blocks, next_batch(blocks, 1, bounce), bounce, drawer)
    for other in (1, 2):
        blocks.write(np.array([other]), np.full((1, BLOCK), other, np.uint8))
    assert blocks.want(wanted, MEMORY) == 1

    with ThreadPoolExecutor(1) as threads:
        begins = threading.Event()

        def wait_for_all() -> object:
            begins.set()
            return blocks.wait(np.arange(3), 60)

        ended = threads.submit(wait_for_all)
        begins.wait()
        wait([ended], 0.1)  # by now it has found the others at rest
        makes_way = next_batch(blocks, 1, bounce)
        assert makes_way.is_store
        stays = 3 - int(bounce[0, 0])
        assert blocks.drop(np.array([stays])) == (1, 0)
        carry(blocks, next_batch(blocks, 2, bounce_2), bounce_2, drawer)
        assert not wait([ended], 0.2).done
        carry(blocks, makes_way, bounce, drawer)
        assert ended.result() is not None
    assert blocks.moves().used == (1, 1)
