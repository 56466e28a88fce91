# SPDX-License-Identifier: Apache-2.0
"""What a donor of 8 GiB takes of its host beside them: memory, and CPU, at rest and read."""

import time
from contextlib import ExitStack

import numpy as np
import psutil
from sweeps.donors import DonorProcess

from benches.figure import Figure, NotHere
from tierd.kernel.placed import place
from tierd.remote.link import Link
from tierd.remote.wire import Keys

LENT_MIB, BORROWERS, BLOCK_BYTES = 8 << 10, 8, 1 << 20
ROUNDS, REST_S, READ_MIB = 3, 5.0, 4 << 10
MOST_AT_REST_PERCENT, MOST_LENDING_PERCENT = 1.0, 5.0
"""Far less than a thread that does not rest would take."""
SPARE_MIB = 2 << 10


def measure(keys: Keys, _: int) -> list[Figure]:
    free_mib = psutil.virtual_memory().available >> 20
    if free_mib < LENT_MIB + SPARE_MIB:
        raise NotHere(
            f"a donor of {LENT_MIB} MiB needs {LENT_MIB + SPARE_MIB}, {free_mib} are free"
        )
    begin_s = time.monotonic()
    with ExitStack() as stack:
        donor = DonorProcess(keys, LENT_MIB)
        stack.callback(donor.end)
        started_s = time.monotonic() - begin_s
        process = psutil.Process(donor.process.pid)
        alone = beside(process)
        slots = (LENT_MIB << 20) // BLOCK_BYTES // BORROWERS
        links = []
        for _number in range(BORROWERS):
            links.append(Link(donor.address, keys, BLOCK_BYTES, slots, 30.0))
            stack.callback(links[-1].end)
        own = psutil.Process()
        at_rest = [(percent(process), percent(own)) for _ in range(ROUNDS)]
        reading = [cpu_of_reading(process, links) for _ in range(ROUNDS)]
        lent = beside(process)
    name = f"donor of {LENT_MIB >> 10} GiB"
    theirs, ours = zip(*at_rest, strict=True)
    return [
        Figure.of_rounds(f"{name}: from its start until it lends", [started_s], "s"),
        Figure.of_rounds(f"{name}: memory beside, nobody borrows", [alone], "MiB"),
        Figure.of_rounds(f"{name}: memory beside, {BORROWERS} borrowers", [lent], "MiB"),
        Figure.of_rounds(
            f"{name}: CPU at rest, {BORROWERS} borrowers", theirs, "%", at_most=MOST_LENDING_PERCENT
        ),
        Figure.of_rounds(
            f"{BORROWERS} leases: a borrower's CPU at rest", ours, "%", at_most=MOST_AT_REST_PERCENT
        ),
        Figure.of_rounds(f"{name}: CPU for each GiB read", reading, "s"),
    ]


def beside(process: psutil.Process) -> float:
    """What a donor has besides what it lends, in MiB."""
    return float(process.memory_info().rss / (1 << 20) - LENT_MIB)


def percent(process: psutil.Process) -> float:
    before = sum(process.cpu_times()[:2])
    time.sleep(REST_S)
    return float((sum(process.cpu_times()[:2]) - before) / REST_S * 100)


def cpu_of_reading(process: psutil.Process, links: list[Link]) -> float:
    """What a GiB that is read takes of a donor's CPU, in seconds."""
    into = place(4 * BLOCK_BYTES).reshape(4, BLOCK_BYTES)
    before = sum(process.cpu_times()[:2])
    for number in range(READ_MIB // len(into)):
        link = links[number % len(links)]
        first = number * len(into) % (link.slots - len(into))
        link.read(np.arange(first, first + len(into)), into)
    return float((sum(process.cpu_times()[:2]) - before) / (READ_MIB >> 10))
