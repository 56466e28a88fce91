# SPDX-License-Identifier: Apache-2.0
"""A plan over a million pieces, and what it costs more than one over ten thousand.

The pieces are those of benches.round: a fifth of the memory is hot, in runs, on its way to a fast
tier that holds a quarter. Planning alone: folding and settling cost likewise for each region, and
are in benches.round.
"""

import time

import numpy as np

from benches.figure import Figure
from benches.round import Rounds
from tierd.decide.heat import ceiling
from tierd.decide.placement import plan
from tierd.model import Target

FEW, MANY = 10_000, 1_000_000
MOST_MS = 150
MOST_TIMES = MANY / FEW * np.log(MANY) / np.log(FEW)
"""Of n log n."""

TURNS = 9


def run() -> list[Figure]:
    few, many = prepared(FEW), prepared(MANY)
    turns = [(plan_ms(*few), plan_ms(*many)) for _ in range(TURNS)]
    return [
        Figure.of_rounds(
            f"{len(many[1].pieces):,} pieces: CPU time",
            [ms for _, ms in turns],
            "ms",
            at_most=MOST_MS,
        ),
        Figure.of_rounds(
            f"that of {len(few[1].pieces):,} is",
            [ms for ms, _ in turns],
            "ms",
        ),
        Figure.of_rounds(
            "so many times less",
            [large / small for small, large in turns],
            "times",
            at_most=MOST_TIMES,
        ),
    ]


def prepared(regions: int) -> tuple[Rounds, Target]:
    """A process on its way, and itself as a target."""
    rounds = Rounds.warm(regions, moving=True)
    return rounds, Target(pid=rounds.pid, pieces=rounds.pieces, ceiling=ceiling(rounds.sample()))


def plan_ms(rounds: Rounds, target: Target) -> float:
    """CPU time of a plan."""
    rooms, budget_bytes = rounds.rooms(), rounds.budget_bytes()
    begin_s = time.process_time()
    plan([target], rooms, rounds.policy, now_s=rounds.now_s, budget_bytes=budget_bytes)
    return (time.process_time() - begin_s) * 1e3
