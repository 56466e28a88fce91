# SPDX-License-Identifier: Apache-2.0
"""Uses few of an arena's blocks, which are on the slow node; argument: the daemon's socket.

Each second it prints how many of these there are, and how many are in the fast tier.
"""

import sys
import time

import numpy as np

from tierd.arena import Arena
from tierd.tiers.memory import cxl, dram

BLOCK_BYTES, BLOCKS, HOT = 64 << 10, 320, 64
FAST_BYTES, SLOW_BYTES = 8 << 20, 16 << 20

tiers = [dram(FAST_BYTES, nodes=[0]), cxl(SLOW_BYTES, nodes=[1])]
with Arena(BLOCK_BYTES, tiers, blocks=BLOCKS, daemon=sys.argv[1], name="skewed") as arena:
    ids = np.arange(BLOCKS)
    arena.write(ids, np.ones((BLOCKS, BLOCK_BYTES), np.uint8))
    hot, random = ids[-HOT:], np.random.default_rng(1)
    while True:
        print(HOT, np.count_nonzero(arena.places(hot) == 0), flush=True)
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            # Few at a time: what is held all the time cannot be moved.
            with arena.acquire(random.choice(hot, 4, replace=False)) as held:
                assert held[0][0] == 1
