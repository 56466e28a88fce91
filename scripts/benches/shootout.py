# SPDX-License-Identifier: Apache-2.0
"""Tierd beside the kernel's own tiering, damo's, none at all, and memory that is all fast.

Each in turn with each load, in one slow-node guest, whose slow node is as fast as the other: what
counts is which accesses went to the fast node, not how fast they were. A load begins on the slow
node; its program tells each second where its accesses went. `moved` is the kernel's count of pages
that were migrated, `CPU` that of tierd and of the kernel's threads of memory; what the kernel does
in the program's faults shows in its accesses a second alone.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from guests.boot import boot
from guests.guest import REPOSITORY, Guest
from guests.kernels import Kernel
from guests.tiering import ballast, counter
from guests.topology import slow_node
from guests.workloads import Sample, hotset

from benches._contenders import CONTENDERS, Contender, cpu_s
from benches.figure import Figure
from tierd.cli.pictures import new_figure, save_figure

FOLDER = REPOSITORY / ".out" / "shootout"
SECONDS = 90
ARRIVED = 0.95
LEAST_OF_NOTHING = 0.97
"""Of the accesses a second that nothing at all has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A hotset, and what fast memory there is for it, some 19 MiB of headroom among that."""

    name: str
    options: str
    free_mib: int


LOADS = (
    Load(name="window", options="--mib 256 --hot-mib 64 --share 98 --move-every 30", free_mib=120),
    Load(name="zipf", options="--mib 192 --hot-mib 48 --zipf 0.99", free_mib=80),
    Load(name="sparse", options="--mib 128 --hot-mib 48 --share 98 --stride", free_mib=80),
    Load(name="scan", options="--mib 256 --hot-mib 48 --share 90 --sweep", free_mib=80),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A load under a contender."""

    load: str
    contender: str
    samples: Sequence[Sample]
    moved_pages: int
    cpu_percent: float

    @property
    def hit_ratio(self) -> float:
        return statistics.mean(sample.hit_ratio for sample in self.samples)

    @property
    def ops_per_s(self) -> float:
        return statistics.mean(sample.ops_per_s for sample in self.samples)

    @property
    def arrived_s(self) -> float:
        """Seconds until the hot pages were fast, the median of the windows; inf for never."""
        windows = sorted({sample.window for sample in self.samples})
        return statistics.median(map(self._arrived_s, windows))

    def _arrived_s(self, window: int) -> float:
        of_it = [sample for sample in self.samples if sample.window == window]
        there = (s.t - of_it[0].t for s in of_it if s.hot_share >= ARRIVED)
        return next(there, math.inf)


def run() -> list[Figure]:
    subprocess.run([REPOSITORY / "scripts" / "setup", "vm"], check=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with boot(slow_node(), Kernel.LATEST) as guest:
        runs = [tried(guest, load, contender) for load in LOADS for contender in CONTENDERS]
    (FOLDER / "runs.json").write_text(json.dumps([asdict(run) for run in runs]) + "\n")
    figures = []
    for load in LOADS:
        of_load = {run.contender: run for run in runs if run.load == load.name}
        draw(load, list(of_load.values()))
        figures += compare(load, of_load)
    return figures


def tried(guest: Guest, load: Load, contender: Contender) -> Run:
    """Runs a load, and shows how it went."""
    node = "0" if contender.has_all_fast else "1"
    with ExitStack() as stack:
        stack.enter_context(contender.placing(guest))
        if not contender.has_all_fast:
            stack.enter_context(ballast(guest, 0, load.free_mib))
        program = stack.enter_context(hotset(guest, *load.options.split(), "--node", node))
        program.sample(timeout=300)
        before = counter(guest, "pgmigrate_success"), cpu_s(guest)
        samples = list(program.samples(SECONDS))
        moved = counter(guest, "pgmigrate_success") - before[0]
        percent = (cpu_s(guest) - before[1]) / (samples[-1].t - samples[0].t) * 100
    done = Run(
        load=load.name,
        contender=contender.name,
        samples=samples,
        moved_pages=moved,
        cpu_percent=percent,
    )
    print(
        f"{load.name:8} {contender.name:8} hits {done.hit_ratio:6.1%}  "
        f"95 % after {done.arrived_s:5.1f} s  {done.ops_per_s:8,.0f} accesses/s  "
        f"moved {moved:7,} pages  CPU {percent:4.1f} %",
        flush=True,
    )
    return done


def compare(load: Load, runs: dict[str, Run]) -> list[Figure]:
    """Tierd against the best of the others."""
    own, nothing = runs["tierd"], runs["nothing"]
    others = [runs[name] for name in ("nothing", "kernel", "damo")]
    hits = own.hit_ratio - max(other.hit_ratio for other in others)
    figures = [
        Figure.of_rounds(
            f"{load.name}: hits beyond the best of the others", [hits * 100], "points", at_least=0
        ),
        Figure.of_rounds(
            f"{load.name}: accesses a second, of those with nothing at all",
            [own.ops_per_s / nothing.ops_per_s],
            "times",
            at_least=LEAST_OF_NOTHING,
        ),
        Figure.of_rounds(f"{load.name}: pages moved", [float(own.moved_pages)], "pages"),
    ]
    soonest = min(other.arrived_s for other in others)
    return [
        *figures,
        Figure.of_rounds(
            f"{load.name}: until 95 % of the hot pages are fast",
            [own.arrived_s],
            "s",
            at_most=soonest,
        ),
    ]


def draw(load: Load, runs: Sequence[Run]) -> None:
    """Draws the share of accesses that went to fast memory, over time."""
    figure, axes = new_figure()
    for run in runs:
        begun_s = run.samples[0].t
        axes.plot(
            [sample.t - begun_s for sample in run.samples],
            [sample.hit_ratio * 100 for sample in run.samples],
            label=run.contender,
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("% of the accesses in fast memory")
    axes.set_ylim(0, 102)
    axes.set_title(f"{load.name}: hotset {load.options}", fontsize="medium")
    axes.legend()
    save_figure(figure, FOLDER / f"{load.name}.png")
