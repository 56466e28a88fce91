# SPDX-License-Identifier: Apache-2.0
"""An arena's calls, and its moves beside memcpy of the same blocks.

Ids are drawn at random from a million blocks, whose words and counts are more than a core's caches
hold. What is moved goes from the first node with memory to the last and back, in turn with as many
threads of memcpy as there are movers, in the same order.
"""

import ctypes
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benches.figure import Figure
from tierd.arena import Arena
from tierd.kernel import text
from tierd.kernel.placed import place
from tierd.model import NodeId
from tierd.tiers.memory import cxl, dram

SOURCE = Path(__file__).parent / "copy_blocks.c"
BLOCKS, BATCH = 1 << 20, 1_000
MOST_TOUCH_NS = 30
MOST_ACQUIRE_US, MOST_ACQUIRE_NS = 5, 20
LEAST_OF_MEMCPY = 0.8
MOVED_BYTES = 256 << 20
SIZES = (64 << 10, 2 << 20)
ROUNDS, CALLS = 15, 200


def run() -> list[Figure]:
    return [*calls(), *(figure for size in SIZES for figure in moves(size))]


def calls() -> list[Figure]:
    """What a batch of a thousand costs."""
    random = np.random.default_rng(1)
    with Arena(64, [dram(64 * BLOCKS)]) as arena:
        arena.write(np.arange(BLOCKS), np.zeros((BLOCKS, 64), np.uint8))
        batches = [random.integers(0, BLOCKS, BATCH) for _ in range(CALLS)]
        ones = [batch[:1] for batch in batches]
        touches = [seconds(arena.touch, batches) / BATCH * 1e9 for _ in range(ROUNDS)]
        held = [acquire(arena, batches) for _ in range(ROUNDS)]
        single = [acquire(arena, ones)[0] * 1e6 for _ in range(ROUNDS)]
    bound_us = MOST_ACQUIRE_US + MOST_ACQUIRE_NS * BATCH / 1e3
    name = f"{BATCH:,} of {BLOCKS:,} blocks"
    return [
        Figure.of_rounds(f"touch, {name}: an id", touches, "ns", at_most=MOST_TOUCH_NS),
        Figure.of_rounds(f"acquire, {name}", [s * 1e6 for s, _ in held], "us", at_most=bound_us),
        Figure.of_rounds("acquire, one block", single, "us", at_most=MOST_ACQUIRE_US + 0.02),
        Figure.of_rounds(f"release, {name}", [s * 1e6 for _, s in held], "us"),
    ]


def seconds(call: Callable[[NDArray[np.int64]], object], batches: list[NDArray[np.int64]]) -> float:
    """What a call takes."""
    begin_s = time.perf_counter()
    for batch in batches:
        call(batch)
    return (time.perf_counter() - begin_s) / len(batches)


def acquire(arena: Arena, batches: list[NDArray[np.int64]]) -> tuple[float, float]:
    """What acquiring takes, and what releasing."""
    begin_s = time.perf_counter()
    held = [arena.acquire(batch) for batch in batches]
    between_s = time.perf_counter()
    for each in held:
        each.release()
    end_s = time.perf_counter()
    return (between_s - begin_s) / len(batches), (end_s - between_s) / len(batches)


def moves(block_bytes: int) -> list[Figure]:
    """What movers copy, of what memcpy does."""
    blocks, movers = MOVED_BYTES // block_bytes, len(os.sched_getaffinity(0))
    order = np.random.default_rng(1).permutation(blocks)
    near, far = [nodes()[0]], [nodes()[-1]]
    spare_bytes = movers * block_bytes
    tiers = [dram(MOVED_BYTES, near), cxl(MOVED_BYTES + spare_bytes, far)]
    memories = place(MOVED_BYTES, near), place(MOVED_BYTES, far)
    own, memcpy = [], []
    with Arena(block_bytes, tiers, blocks=blocks, movers=movers) as arena:
        arena.write(np.arange(blocks), memories[0])
        copy = copier()
        for _ in range(ROUNDS):
            memcpy.append(
                sum(copy(*ways, order, block_bytes, movers) for ways in (memories, memories[::-1]))
            )
            own.append(there_and_back(arena, order))
    shares = [theirs / ours for theirs, ours in zip(memcpy, own, strict=True)]
    size = f"blocks of {block_bytes >> 10} KiB"
    speeds = [2 * MOVED_BYTES / s / (1 << 30) for s in own]
    return [
        Figure.of_rounds(f"moves, {size}: of memcpy's speed", shares, "", at_least=LEAST_OF_MEMCPY),
        Figure.of_rounds(f"moves, {size}", speeds, "GiB/s"),
    ]


def there_and_back(arena: Arena, order: NDArray[np.int64]) -> float:
    begin_s = time.perf_counter()
    for move in (arena.demote, arena.prefetch):
        assert move(order) == len(order)
        assert not arena.wait(order).any()
    return time.perf_counter() - begin_s


def copier() -> Callable[..., float]:
    """Returns what copies blocks from a memory to another by threads, and tells the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/copy_blocks.so"
        flags = ["-O2", "-shared", "-fPIC"]
        subprocess.run(["gcc", *flags, "-o", library, SOURCE], check=True)
        loop = ctypes.CDLL(library).copy_blocks

    def copy(
        source: NDArray[np.uint8],
        to: NDArray[np.uint8],
        order: NDArray[np.int64],
        block_bytes: int,
        threads: int,
    ) -> float:
        def work(part: NDArray[np.int64]) -> None:
            addresses = [ctypes.c_void_p(array.ctypes.data) for array in (to, source, part)]
            loop(*addresses, ctypes.c_size_t(len(part)), ctypes.c_size_t(block_bytes))

        parts = [order[first::threads].copy() for first in range(threads)]
        workers = [threading.Thread(target=work, args=(part,)) for part in parts]
        begin_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - begin_s

    return copy


def nodes() -> list[NodeId]:
    """Those with memory."""
    ids = text.parse_ids(Path("/sys/devices/system/node/has_memory").read_text())
    return [NodeId(node) for node in ids]
