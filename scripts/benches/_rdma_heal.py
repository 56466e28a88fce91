# SPDX-License-Identifier: Apache-2.0
"""What was on a donor that is killed is copied again, while a program reads.

In each round one of three donors is killed, and a new one comes in its place. Reads while blocks
are copied again are held against those from the same two donors after it. There is a bound for a
program that works as long as it reads; one that does nothing else, and its donors, leave no CPU of
two to what is copied again, which is told without one.
"""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from sweeps.donors import DonorProcess

from benches.figure import Figure
from tierd.kernel.placed import place
from tierd.remote.space import RemoteSpace
from tierd.remote.wire import Keys
from tierd.tiers.rdma import rdma

DONORS, ROUNDS, HEALING_S = 3, 3, 4
HEAL_MBPS = 64.0
BLOCK_BYTES = 1 << 20
LEAST_OF_BUDGET, MOST_SLOWER = 0.8, 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a program reads: so many blocks at once, and then it works as long as that took."""

    name: str
    blocks: int
    works: bool
    has_bound: bool


READINGS = (
    Reading(name="4 MiB, and work between", blocks=4, works=True, has_bound=True),
    Reading(name="1 MiB, and work between", blocks=1, works=True, has_bound=True),
    Reading(name="4 MiB, and nothing else", blocks=4, works=False, has_bound=False),
    Reading(name="1 MiB, and nothing else", blocks=1, works=False, has_bound=False),
)


def measure(keys: Keys, seconds: int) -> list[Figure]:
    return [figure for reading in READINGS for figure in _of(keys, seconds, reading)]


def _of(keys: Keys, seconds: int, reading: Reading) -> list[Figure]:
    blocks = round(seconds * HEAL_MBPS * DONORS / 2)
    with ExitStack() as stack:
        donors = [DonorProcess(keys, 2 * blocks) for _ in range(DONORS)]
        stack.callback(_end, donors)
        tier = rdma(
            [donor.address for donor in donors],
            blocks << 20,
            ca=keys.ca,
            cert=keys.cert,
            key=keys.key,
            heal_mbps=HEAL_MBPS,
        )
        space = tier.reserve(BLOCK_BYTES, blocks)
        stack.callback(space.free)
        _fill(space, blocks)
        rounds = []
        for number in range(ROUNDS):
            rounds.append(_round(space, donors[number % DONORS], reading))
            port = donors[number % DONORS].port
            donors[number % DONORS].end()
            donors[number % DONORS] = DonorProcess(keys, 2 * blocks, port=port)
            _until(lambda: len(space.donors) == DONORS)
    rates, during, after = zip(*rounds, strict=True)
    slower = [a / b for a, b in zip(during, after, strict=True)]
    what = f"copied again beside reads of {reading.name}"
    most = MOST_SLOWER if reading.has_bound else None
    return [
        Figure.of_rounds(
            f"{what}: of its budget",
            [rate / HEAL_MBPS for rate in rates],
            "",
            at_least=LEAST_OF_BUDGET,
        ),
        Figure.of_rounds(f"{what}: their p99, of that after", slower, "", at_most=most),
        Figure.of_rounds(f"{what}: their p99 after", [each * 1e6 for each in after], "us"),
    ]


def _end(donors: list[DonorProcess]) -> None:
    for donor in donors:
        donor.end()


def _round(space: RemoteSpace, donor: DonorProcess, reading: Reading) -> tuple[float, float, float]:
    """Kills a donor; returns MiB/s that are copied, and the p99 of reads while and after that."""
    before = space.copies.copied_again
    donor.send(signal.SIGKILL)
    _until(lambda: space.copies.copied_again > before)
    first, begin_s = space.copies.copied_again, time.monotonic()
    during = _reads(space, reading, lambda: space.copies.thin == 0)
    mbps = (space.copies.copied_again - first) / (time.monotonic() - begin_s)
    until_s = 2 * time.monotonic() - begin_s
    return mbps, during, _reads(space, reading, lambda: time.monotonic() >= until_s)


def _reads(space: RemoteSpace, reading: Reading, is_over: Callable[[], bool]) -> float:
    """Returns what reads take at p99, in seconds."""
    count = reading.blocks
    random, took = np.random.default_rng(1), []
    into = place(count * BLOCK_BYTES).reshape(count, BLOCK_BYTES)
    while not is_over():
        for _ in range(50):
            slots = random.permutation(space.slots)[:count]
            begin_s = time.perf_counter()
            space.load(slots, into)
            took.append(time.perf_counter() - begin_s)
            if reading.works:
                time.sleep(took[-1])  # as a device would, and the CPUs wait
    return float(np.quantile(took, 0.99))


def _fill(space: RemoteSpace, blocks: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, (4, BLOCK_BYTES), dtype=np.uint8)
    for first in range(0, blocks, len(data)):
        slots = np.arange(first, min(first + len(data), blocks))
        space.store(slots, data[: len(slots)])


def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.01)
