# SPDX-License-Identifier: Apache-2.0
"""The guest's half of the mover's benchmark: tierd's mover and the C loop move the same pages.

Both take the pages from the slow node to the fast one and back, in turn.
Usage: python -m benches._mover_inside MOVE_LOOP FAST SLOW
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tierd.bulk import MOVE, Plan, rank_nodes
from tierd.config import Config
from tierd.discover.topology import discover
from tierd.kernel.free import FreeMemory
from tierd.migrate.mover import Mover
from tierd.model import PAGE_BYTES, NodeId, Pid
from tierd.service import make_mover

PAGES = 65536
"""What the default budget lets be moved in a round."""

STEPS = {"contiguous": 1, "scattered": 4}
BATCHES = (1024, 4096, 16384, 65536)
ROUNDS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A process whose every STEPth page is present, and two ways of moving it."""

    loop: Path
    fast: NodeId
    slow: NodeId
    mover: Mover
    free: FreeMemory
    pid: Pid
    start: int
    step: int

    def by_loop(self, node: NodeId, batch: int) -> int:
        """Moves all pages with the C loop; returns the nanoseconds."""
        words = ["move", self.pid, node, self.start, self.step, PAGES, batch]
        done = subprocess.run(
            [self.loop, *map(str, words)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    def by_mover(self, node: NodeId) -> int:
        """Moves all pages with tierd's mover; returns the nanoseconds.

        As in a round of the daemon, the watermarks have just been read, and a plan was made.
        """
        self.free.rooms()
        plan = self._plan(node)
        begin = time.monotonic_ns()
        report = self.mover.run(plan, deadline_s=time.monotonic() + 600)
        end = time.monotonic_ns()
        assert report.moved_pages == PAGES, report.pages
        return end - begin

    def _plan(self, node: NodeId) -> Plan:
        source = self.slow if node == self.fast else self.fast
        rank_of_node = rank_nodes(self.mover.topology)
        moves = np.zeros(1, MOVE)
        moves["source"], moves["destination"] = rank_of_node[[source, node]]
        moves["start"] = self.start
        moves["end"] = self.start + PAGES * self.step * PAGE_BYTES
        moves["bytes"] = PAGES * PAGE_BYTES
        return Plan(pids=(self.pid,), moves=moves)

    def there_and_back(self, batch: int | None) -> int:
        """Moves all pages to the fast node and back: by the loop in such batches, or the mover."""
        move = self.by_mover if batch is None else partial(self.by_loop, batch=batch)
        return move(self.fast) + move(self.slow)


@contextmanager
def bench(
    mover: Mover, free: FreeMemory, loop: Path, fast: NodeId, slow: NodeId, step: int
) -> Iterator[Bench]:
    """Starts the process to be moved, and ends it."""
    command = [str(loop), "hold", str(PAGES), str(step)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Bench(
            loop=loop,
            fast=fast,
            slow=slow,
            mover=mover,
            free=free,
            pid=Pid(process.pid),
            start=int(process.stdout.readline()),
            step=step,
        )


def measure(case: Bench) -> dict[str, object]:
    """Finds the loop's best batch, then measures both in turn. Nanoseconds, there and back."""
    case.by_loop(case.slow, max(BATCHES))
    case.there_and_back(None)
    sweep = {batch: min(case.there_and_back(batch) for _ in range(2)) for batch in BATCHES}
    best = min(sweep, key=lambda batch: sweep[batch])
    rounds = [(case.there_and_back(best), case.there_and_back(None)) for _ in range(ROUNDS)]
    return {"sweep": sweep, "best": best, "rounds": rounds}


def main() -> None:
    loop, fast, slow = Path(sys.argv[1]), NodeId(int(sys.argv[2])), NodeId(int(sys.argv[3]))
    results = {}
    with FreeMemory() as free:
        mover = make_mover(Config(), discover(), free)
        for name, step in STEPS.items():
            with bench(mover, free, loop, fast, slow, step) as case:
                results[name] = measure(case)
    print(json.dumps({"pages": 2 * PAGES, "cases": results}))


if __name__ == "__main__":
    main()
