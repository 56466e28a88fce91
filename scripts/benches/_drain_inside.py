# SPDX-License-Identifier: Apache-2.0
"""The guest's half of the drain's benchmark: the mover and a drain take the same pages off a node.

Usage: python -m benches._drain_inside MOVE_LOOP FAST SLOW
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from benches._mover_inside import PAGES, Bench, bench
from tierd.cli import control
from tierd.config import Config
from tierd.discover.topology import discover
from tierd.kernel.free import FreeMemory
from tierd.model import PAGE_BYTES, NodeId
from tierd.service import make_mover

ROUNDS = 5


def tierctl(*words: str) -> int:
    """Does what a command of tierctl cxl does; returns the nanoseconds."""
    begin = time.monotonic_ns()
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        control.main(["cxl", *words], prog_name="tierctl", standalone_mode=False)
    return time.monotonic_ns() - begin


def one_round(case: Bench) -> tuple[int, int]:
    """Returns the nanoseconds of the mover and of the drain, whose memory is made again then."""
    by_mover = case.by_mover(case.fast)
    case.by_mover(case.slow)
    by_drain = tierctl("drain")
    tierctl("create")
    case.by_mover(case.slow)
    return by_mover, by_drain


def main() -> None:
    loop, fast, slow = Path(sys.argv[1]), NodeId(int(sys.argv[2])), NodeId(int(sys.argv[3]))
    with FreeMemory() as free:
        mover = make_mover(Config(), discover(), free)
        with bench(mover, free, loop, fast, slow, 1) as case:
            case.by_loop(slow, PAGES)
            rounds = [one_round(case) for _ in range(ROUNDS)]
    print(json.dumps({"bytes": PAGES * PAGE_BYTES, "rounds": rounds}))


if __name__ == "__main__":
    main()
