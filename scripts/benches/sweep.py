# SPDX-License-Identifier: Apache-2.0
"""A sweep over layers twice as many as the fast tier has room for, with and without prefetch.

The far tier is memory without addresses, so that a layer has to be copied to be used, as on a
GPU or from a disk. The work on a layer takes as long as its copies, out and in, when it is fetched
on demand. All layers in the fast tier, with prefetch and without, take turns, round by round.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import numpy as np
from sweeps.far import Far
from sweeps.layers import AnyWork, Sweep, ahead, on_demand, seconds_of, some_layers

from benches.figure import Figure
from tierd.arena import Arena, Held, Lookahead
from tierd.tiers.memory import dram

LAYERS, FAST, LAYER_BYTES = 64, 32, 2 << 20
FAR_BYTES_PER_S = 1 << 30
LEAST = 0.95
MOST_US = 25
ROUNDS, CALLS = 15, 2_000


def run() -> list[Figure]:
    layers = some_layers(LAYERS, LAYER_BYTES)
    simulated = partial(Far, bytes_per_s=FAR_BYTES_PER_S)
    memory, slower = Sweep(layers, FAST), Sweep(layers, FAST, simulated)
    return [
        *shares(memory, memory.work_for, "far: memory", LEAST),
        *shares(slower, slower.work_for, "far: 1 GiB/s, simulated", LEAST),
        overhead(),
    ]


def shares(
    sweep: Sweep, work_for: Callable[[float], AnyWork], name: str, least: float | None
) -> list[Figure]:
    """Layers a second with prefetch and without, of those with all fast.

    Args:
        sweep: with the tiers.
        work_for: makes work of so many seconds.
        name: of the figures.
        least: of those with prefetch.
    """
    copies_s = sweep.copies_s()
    work = work_for(copies_s)
    with sweep.arena(is_all_fast=True) as fast, sweep.arena() as told, sweep.arena() as untold:
        lookahead = Lookahead(told, range(LAYERS), repeats=True)
        ways = [closing(on_demand(fast)), closing(ahead(lookahead)), closing(on_demand(untold))]
        with ways[0] as all_fast, ways[1] as foreseen, ways[2] as fetched:
            steps = (all_fast, foreseen, fetched)
            for way in steps:
                seconds_of(way, work, LAYERS)
            before = lookahead.foresight
            rounds = [[seconds_of(way, work, LAYERS) for way in steps] for _ in range(ROUNDS)]
        after = lookahead.foresight
    best, with_s, without_s = np.array(rounds).T
    late = (after.late - before.late) / (LAYERS * ROUNDS)
    return [
        Figure.of_rounds(
            f"{name}; with prefetch, of all-fast", list(best / with_s), "", at_least=least
        ),
        Figure.of_rounds(f"{name}; without prefetch", list(best / without_s), ""),
        Figure.of_rounds(f"{name}; late with prefetch", [late], ""),
        Figure.of_rounds(f"{name}; copies of a layer", [copies_s * 1e3], "ms"),
    ]


def overhead() -> Figure:
    """What looking ahead adds to acquiring one block, where there is nothing to fetch."""
    with Arena(64, [dram(64 * FAST)]) as arena:
        arena.write(np.arange(FAST), np.zeros((FAST, 64), np.uint8))
        lookahead = Lookahead(arena, range(FAST), repeats=True)
        added = []
        for _ in range(ROUNDS):
            plain_s, ahead_s = (calls(way) for way in (on_demand(arena), ahead(lookahead)))
            added.append((ahead_s - plain_s) * 1e6)
    return Figure.of_rounds("looking ahead: a step", added, "us", at_most=MOST_US)


def calls(steps: Iterator[Held]) -> float:
    begin_s = time.perf_counter()
    for _ in zip(range(CALLS), steps, strict=False):
        pass
    return (time.perf_counter() - begin_s) / CALLS
