# SPDX-License-Identifier: Apache-2.0
"""A plan over a million regions, and what it costs more than one over ten thousand.

The regions are those of benches.round: a fifth of the memory is hot, in runs, on its way to a fast
tier that holds a quarter. Planning is measured alone, and beside it the whole of a round's
deciding: folding a snapshot in, planning, settling.
"""

import math
import time
from dataclasses import replace

from benches.figure import Figure
from benches.round import Rounds
from tierd.bulk import Target
from tierd.decide.below import below, is_spare
from tierd.decide.heat import ceiling
from tierd.decide.placement import plan
from tierd.model import Pid

FEW, MANY = 10_000, 1_000_000
MOST_MS = 150
MOST_TIMES = MANY / FEW * math.log(MANY) / math.log(FEW)
"""Of n log n."""

TURNS = 9


def run() -> list[Figure]:
    few, many = Rounds.warm(FEW, moving=True), Rounds.warm(MANY, moving=True)
    turns = [(plan_ms(few), plan_ms(many)) for _ in range(TURNS)]
    name = f"{MANY:,} regions, {len(many.pieces):,} pieces"
    return [
        Figure.of_rounds(f"{name}: a plan", [ms for _, ms in turns], "ms", at_most=MOST_MS),
        Figure.of_rounds(
            f"a plan costs, of one over {FEW:,} regions,",
            [large / small for small, large in turns],
            "times",
            at_most=MOST_TIMES,
        ),
        Figure.of_rounds(
            "telling what goes below, beside the kernel",
            [below_ms(many) for _ in range(TURNS)],
            "ms",
        ),
        Figure.of_rounds(
            "all of a round's deciding", [many.round().cpu_ms for _ in range(TURNS)], "ms"
        ),
    ]


def plan_ms(rounds: Rounds) -> float:
    """CPU time of a plan."""
    target = target_of(rounds)
    rooms, budget_bytes = rounds.rooms(), rounds.budget_bytes()
    begin_s = time.process_time()
    target = replace(target, spare=is_spare(target.pieces))
    plan([target], rooms, rounds.policy, now_s=rounds.now_s, budget_bytes=budget_bytes)
    return (time.process_time() - begin_s) * 1e3


def below_ms(rounds: Rounds) -> float:
    """CPU time of what a plan costs more where the kernel may rest."""
    begin_s = time.process_time()
    below(rounds.pieces)
    return (time.process_time() - begin_s) * 1e3


def target_of(rounds: Rounds) -> Target:
    return Target(pid=Pid(1), pieces=rounds.pieces, ceiling=ceiling(rounds.sample()))
