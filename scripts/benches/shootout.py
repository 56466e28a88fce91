# SPDX-License-Identifier: Apache-2.0
"""Tierd, in three ways, the kernel's own tiering, damo's, none at all, and memory all fast.

Each in turn with each load, in a slow-node guest, whose slow node is as fast as the other: what
counts is which accesses went to the fast node, not how fast they were, and throughput can only be
lost. A load begins on the slow node, with an empty page cache and its contender at work; its
programs tell each second where their accesses went. Then the contender ends, and the same programs
go on with none at work, which tells what it has cost them: by the instructions that their CPU runs,
of which it has fewer while another one takes its turn. `moved` is what the kernel counts of pages
migrated, whoever's they are, but not by compaction, within a node.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain, product
from queue import SimpleQueue
from typing import TypeVar

from guests.boot import boot
from guests.errors import CommandFailed, EmulatorFault
from guests.guest import REPOSITORY, Guest
from guests.kernels import Kernel
from guests.tiering import DEMOTION, PAGE_KIB, room_kib, tunables
from guests.tiering import FOLDER as GUEST_FOLDER
from guests.topology import slow_node
from guests.workloads import Hotset, Sample
from matplotlib.figure import Figure as Picture

from benches._contenders import CONTENDERS, Contender, by_nobody
from benches._costs import Computed, Costs, count_moves, held_pages
from benches._loads import LOAD, PLACED, Load, loads, make_database
from benches._room import leaving
from benches._runs import Pace, Run, least_pages, second
from benches.figure import Figure

FOLDER = REPOSITORY / ".out" / "shootout"
SECONDS = 120
BARE_SECONDS = 10
FIRST_SAMPLE_S = 300
LOOP = """
import time
while True:
    end = time.monotonic() + 0.003
    while time.monotonic() < end:
        pass
    time.sleep(0.007)
"""
"""Keeps a CPU busy for three tenths of the time, in pieces as short as a round's."""

LEAST_OF_NOTHING = 0.97
"""Of the accesses a second with nothing at all at work."""
RIVALS = ("kernel", "damo", "nothing")

PARTS = (*(load.name for load in loads(SECONDS)), *(one.name for one in CONTENDERS))

Cell = tuple[Load, Contender]


def run(
    only: Collection[str] = (), seconds: int = SECONDS, rounds: int = 1, jobs: int | None = None
) -> list[Figure]:
    """Tries all loads and contenders, or those of them that are named, so many times in turn.

    As many at once as there are jobs, or CPUs: a guest's time goes by what it runs, whatever else
    its host does.
    """
    subprocess.run([REPOSITORY / "scripts" / "setup", "vm"], check=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    make_database()
    wanted, contenders = named(loads(seconds), only), named(CONTENDERS, only)
    runs = list[Run]()
    cells = [*product(wanted, contenders)]
    order = [(load.name, contender.name) for load, contender in cells]
    for run in all_tried(cells * rounds, seconds, jobs or len(os.sched_getaffinity(0))):
        print(row(run), file=sys.stderr, flush=True)
        runs.append(run)
        runs.sort(key=lambda run: order.index((run.load, run.contender)))
        keep(wanted, runs)
    print("\n".join([HEAD, *map(row, runs)]), flush=True)
    return [figure for load in wanted for figure in compare(load, by_contender(load, runs))]


Part = TypeVar("Part", Load, Contender)


def named(parts: Iterable[Part], only: Collection[str]) -> list[Part]:
    """Those that are named, or all where none is."""
    every = list(parts)
    return [part for part in every if part.name in only] or every


def by_contender(load: Load, runs: Iterable[Run]) -> Mapping[str, list[Run]]:
    """Returns each contender's rounds of a load."""
    found = defaultdict(list)
    for run in runs:
        if run.load == load.name:
            found[run.contender].append(run)
    return found


def all_tried(cells: Iterable[Cell], seconds: int, jobs: int = 1) -> Iterator[Run]:
    """Runs so many of them side by side, the rest in turn. See tried_in_turn for what may fail."""
    left, done = deque(cells), SimpleQueue[Run | None]()

    def work() -> None:
        try:
            for run in tried_in_turn(left, seconds):
                done.put(run)
        finally:
            left.clear()
            done.put(None)

    with ThreadPoolExecutor(jobs) as pool:
        workers = [pool.submit(work) for _ in range(jobs)]
        try:
            for _ in workers:
                yield from iter(done.get, None)
        finally:
            left.clear()
    for worker in workers:
        worker.result()


def tried_in_turn(left: deque[Cell], seconds: int) -> Iterator[Run]:
    """Runs what is left one after the other, in a new guest from where something has failed on.

    One that fails twice under another contender is left out, as where the guest lacks memory by it.

    Raises:
        EmulatorFault: the emulator failed with the same one twice (docs/decisions/0033).
        CommandFailed: a command or a program did, under one of ours.
    """
    cell, failed = taken(left), None
    while cell:
        try:
            with boot(slow_node(by_words=True, counted=True), Kernel.LATEST) as guest:
                count_moves(guest)
                while cell:
                    yield tried(guest, *cell, seconds)
                    cell, failed = taken(left), None
        except (EmulatorFault, CommandFailed) as error:
            assert cell is not None
            is_emulators = isinstance(error, EmulatorFault)
            if not is_emulators and cell[1].is_ours:
                raise
            if failed != cell:
                failed = cell
                tell(*cell, f"{error}: again, in another guest")
            elif is_emulators:
                raise
            else:
                tell(*cell, f"{error}: it is left out")
                cell = taken(left)


def taken(left: deque[Cell]) -> Cell | None:
    """Takes the next one from what others take from too."""
    try:
        return left.popleft()
    except IndexError:
        return None


def tell(load: Load, contender: Contender, what: str) -> None:
    print(f"{load.name}, {contender.name}: {what}", file=sys.stderr, flush=True)


def tried(guest: Guest, load: Load, contender: Contender, seconds: int) -> Run:
    """Runs a load for so many seconds of its own time.

    The kernel may demote all the while, whoever is at work. Without swap, and with a slow node that
    is movable alone, it would kill for what it needs in a fast node that is full to the brim.
    """
    node = guest.facts.fast[0] if contender.has_all_fast else guest.facts.slow[0]
    groups = [f"/sys/fs/cgroup/{group}" for group in (LOAD, *PLACED)]
    guest.run(["mkdir", "-p", GUEST_FOLDER, *groups])
    guest.run(["sh", "-c", "sync; echo 3 > /proc/sys/vm/drop_caches"])
    with ExitStack() as stack:
        stack.enter_context(tunables(guest, {DEMOTION: "true"}))
        with contender.placing(guest):
            if not contender.has_all_fast:
                stack.enter_context(leaving(guest, load.free_mib))
            programs = load.programs(guest, node, stack)
            held, before = held_pages(guest), Costs.of(guest)
            room_pages = room_kib(guest, guest.facts.fast[0]) // PAGE_KIB + held
            for program in programs:
                program.sample(timeout=FIRST_SAMPLE_S)
            samples, pace = measured(guest, programs, seconds)
            moved_pages, cpu_percent = Costs.of(guest).since(before)
            came_pages = held_pages(guest) - held
        with by_nobody(guest):
            alone = pace_from_now(guest, programs)
            with looping(guest):
                busy = pace_from_now(guest, programs)
    return Run(
        load=load.name,
        contender=contender.name,
        seconds=tuple(map(second, samples)),
        pace=pace,
        alone=alone,
        busy=busy,
        moved_pages=moved_pages,
        least_pages=least_pages(samples[0], samples[-1], came_pages, room_pages),
        cpu_percent=cpu_percent,
    )


def measured(
    guest: Guest, programs: Sequence[Hotset], seconds: int
) -> tuple[list[list[Sample]], Pace]:
    """The samples of all programs, and how fast they go."""
    before = Computed.of(guest)
    samples = sampled(programs, seconds)
    speed = Computed.of(guest).per_s(before)
    each = zip(*samples, strict=True)
    means = (statistics.mean(sample.ops_per_s for sample in told) for told in each)
    return samples, Pace(ops_per_s=tuple(means), instructions_per_s=speed)


def pace_from_now(guest: Guest, programs: Sequence[Hotset]) -> Pace:
    """How fast all programs go from their next second on."""
    for program in programs:
        program.catch_up()
    return measured(guest, programs, BARE_SECONDS)[1]


@contextmanager
def looping(guest: Guest) -> Iterator[None]:
    """Keeps a CPU of the guest busy that is not the load's, as a contender does."""
    loop = guest.start(["taskset", "-c", "0", "python3", "-c", LOOP])
    try:
        yield
    finally:
        loop.signal(signal.SIGKILL)
        loop.wait()


def sampled(programs: Sequence[Hotset], seconds: int) -> list[list[Sample]]:
    """The samples of all programs, those of a second together.

    A second takes longer of who has more to tell: of others one is passed over now and then, or
    what they tell would be of ever longer ago.
    """
    first = last = [program.latest() for program in programs]
    samples = [first]
    while min(end.t - start.t for start, end in zip(first, last, strict=True)) < seconds:
        last = [program.latest() for program in programs]
        samples.append(last)
    return samples


def compare(load: Load, runs: Mapping[str, Sequence[Run]]) -> list[Figure]:
    """Each tierd against the best of the others that ran, by the medians of their rounds."""
    ours = [contender.name for contender in CONTENDERS if contender.is_ours]
    others = [runs[name] for name in RIVALS if name in runs]
    if not others:
        return []
    return [
        figure
        for name in ours
        if name in runs
        for figure in (*placing(load, runs[name], others), *costs(load, runs[name]))
    ]


def placing(load: Load, own: Sequence[Run], others: Sequence[Sequence[Run]]) -> list[Figure]:
    """How well and how soon memory was placed."""
    what = f"{load.name}, {own[0].contender}"
    best = max(statistics.median(run.hit_ratio for run in other) for other in others)
    soonest_s = min(statistics.median(run.arrived_s for run in other) for other in others)
    all_others = ", ".join(other[0].contender for other in others)
    return [
        Figure.of_rounds(f"{what}: hits in fast memory", [run.hit_ratio * 100 for run in own], "%"),
        Figure.of_rounds(
            f"{what}: hits beyond the best of {all_others}",
            [(run.hit_ratio - best) * 100 for run in own],
            "points",
            at_least=0,
        ),
        Figure.of_rounds(
            f"{what}: until 95 % of the hits of the hot set",
            [run.arrived_s for run in own],
            "s",
            at_most=soonest_s,
        ),
    ]


def costs(load: Load, own: Sequence[Run]) -> list[Figure]:
    """What that took."""
    what = f"{load.name}, {own[0].contender}"
    return [
        Figure.of_rounds(
            f"{what}: accesses a second, of those with nothing at all",
            [run.throughput for run in own],
            "times",
            at_least=LEAST_OF_NOTHING,
        ),
        Figure.of_rounds(
            f"{what}: pages moved, of the least",
            [run.moved_times for run in own],
            "times",
            at_most=load.most_moved,
        ),
        Figure.of_rounds(
            f"{what}: CPU beside the load's", [run.cpu_percent for run in own], "% core"
        ),
    ]


HEAD = (
    "| load | contender | hits | until 95 % | accesses/s | of nothing's "
    "| pages moved | of the least | CPU |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def row(run: Run) -> str:
    """A line of the table."""
    arrived = f"{run.arrived_s:.1f} s" if run.has_arrived else "never"
    accesses = " + ".join(f"{ops:,.0f}" for ops in run.pace.ops_per_s)
    return (
        f"| {run.load} | {run.contender} | {run.hit_ratio:.1%} | {arrived} | {accesses} "
        f"| {run.throughput:.2f} "
        f"| {run.moved_pages:,} | {run.moved_times:.2f} | {run.cpu_percent:.0f} % |"
    )


def keep(wanted: Sequence[Load], runs: Sequence[Run]) -> None:
    """Leaves every second of every run, and a picture, in case a later one fails."""
    (FOLDER / "runs.json").write_text(json.dumps([asdict(run) for run in runs]) + "\n")
    draw(wanted, runs)


def draw(wanted: Sequence[Load], runs: Sequence[Run]) -> None:
    """Draws the share of accesses that went to fast memory, over time, a panel for each load."""
    rows = (len(wanted) + 1) // 2
    picture = Picture(figsize=(10, 2.8 * rows + 0.4), layout="constrained")
    panels = picture.subplots(rows, 2, squeeze=False).flat
    color = {contender.name: f"C{index}" for index, contender in enumerate(CONTENDERS)}
    lines = {}
    for load, panel in zip(wanted, panels, strict=False):
        for run in chain.from_iterable(by_contender(load, runs).values()):
            times = [second.t - run.seconds[0].t for second in run.seconds]
            hits = [second.hit_ratio * 100 for second in run.seconds]
            (lines[run.contender],) = panel.plot(times, hits, color=color[run.contender])
        panel.set_ylim(0, 102)
        panel.set_title(f"{load.name}: {load.told}", fontsize="x-small")
    picture.supxlabel("seconds", fontsize="small")
    picture.supylabel("% of the accesses in fast memory", fontsize="small")
    picture.legend(
        lines.values(),
        lines.keys(),
        ncols=len(lines),
        loc="outside upper center",
    )
    for panel in picture.axes[len(wanted) :]:
        panel.remove()
    picture.savefig(FOLDER / "hits.png", dpi=80)
