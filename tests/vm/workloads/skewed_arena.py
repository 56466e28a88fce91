# SPDX-License-Identifier: Apache-2.0
"""Uses few of an arena's blocks, which are on the slow node.

Arguments: the daemon's socket, and how many MiB the arena has of the fast node. Each second it
prints how many of these there are, and how many are in the fast tier.
"""

import sys
import time

import numpy as np

from tierd.arena import Arena
from tierd.tiers.memory import cxl, dram

BLOCK_BYTES, HOT = 64 << 10, 64

fast_bytes = int(sys.argv[2]) << 20
blocks = fast_bytes // BLOCK_BYTES + 3 * HOT
tiers = [dram(fast_bytes, nodes=[0]), cxl(2 * fast_bytes, nodes=[1])]
with Arena(BLOCK_BYTES, tiers, blocks=blocks, daemon=sys.argv[1], name="skewed") as arena:
    ids = np.arange(blocks)
    arena.write(ids, np.ones((blocks, BLOCK_BYTES), np.uint8))
    hot, random = ids[-HOT:], np.random.default_rng(1)
    while True:
        print(HOT, np.count_nonzero(arena.places(hot) == 0), flush=True)
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            # Few at a time: what is held all the time cannot be moved.
            with arena.acquire(random.choice(hot, 4, replace=False)) as held:
                assert held[0][0] == 1
