# SPDX-License-Identifier: Apache-2.0
"""A program on a host of its own, whose blocks are on donors; it does what it is told by lines.

borrower.py CA CERT KEY DONOR...

write SEED   replaces all blocks
rewrite      replaces them again and again, and answers nothing any more
read         reads them, and tells whether each is as it was last written, or why not
status       tells of its copies, and of donors that are lost or slow
"""

import json
import sys
from dataclasses import asdict

import numpy as np

from tierd.arena import Arena
from tierd.errors import TierdError
from tierd.tiers.memory import dram
from tierd.tiers.rdma import rdma

BLOCK, BLOCKS, FAST = 64 << 10, 100, 16


def main(ca: str, cert: str, key: str, *donors: str) -> None:
    size = (BLOCKS + 8) * BLOCK
    tier = rdma(donors, size, ca=ca, cert=cert, key=key, heal_mbps=256)
    ids, data = np.arange(BLOCKS), np.zeros((BLOCKS, BLOCK), np.uint8)
    with Arena(BLOCK, [dram(FAST * BLOCK), tier], blocks=BLOCKS) as arena:
        for line in sys.stdin:
            what, _, rest = line.strip().partition(" ")
            told: object
            while what == "rewrite":
                arena.write(ids, data)
            if what == "write":
                random = np.random.default_rng(int(rest))
                data = random.integers(0, 256, data.shape, dtype=np.uint8)
                arena.write(ids, data)
                told = "written"
            elif what == "read":
                told = verdict(arena, data)
            else:
                [space] = tier.spaces
                told = {
                    **asdict(space.copies),
                    "failures": space.failures,
                    "slow": space.slow,
                    "fenced": arena.fenced,
                }
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


def verdict(arena: Arena, data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    """Reads block by block, so that one that is lost does not hide a wrong one."""
    lost = 0
    for number in range(BLOCKS):
        try:
            if (arena.read([number])[0] != data[number]).any():
                return "wrong"
        except TierdError:
            lost += 1
    return f"{lost} lost" if lost else "right"


if __name__ == "__main__":
    main(*sys.argv[1:])
