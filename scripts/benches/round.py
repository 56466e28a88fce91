# SPDX-License-Identifier: Apache-2.0
"""A round's deciding: one snapshot folded in, a plan made, its report settled.

A fifth of the regions is hot, in runs, and stays so; counts are drawn anew each time, and a tenth
of the cuts, as DAMON splits and merges. Pieces are carried from round to round. The process is
measured with the hot set in fast memory, where regions that straddle its edges still move now and
then, and while it is on its way there, a little each round. The pages are not real, so neither
queries nor moves are in the figures.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from benches.figure import Figure
from tierd.bulk import PIECE, REGION, Accesses, Plan, Report, Target
from tierd.decide.below import is_spare
from tierd.decide.heat import ceiling, fold
from tierd.decide.placement import plan
from tierd.decide.settle import settle
from tierd.model import PAGE_BYTES, Outcome, Pid, Policy, Rank, TierRoom

FEW, MANY = 10_000, 100_000
MOST_MS, MOST_TIMES = 5, 12
TURNS, WARM_UP = 25, 40
SMALL_ROUNDS = 5
"""Rounds over FEW regions in a turn, between those over MANY that empty the caches."""

BASE = 0x7F00_0000_0000
PAGES_PER_REGION = 64
HOT_RUN, RUN = 10, 50
SAMPLE_S, SAMPLES = 0.02, 20
MOVED_SHARE = 1 / (4 * TURNS * SMALL_ROUNDS)
"""Of all memory, in a round of a process on its way: the way is longer than the measuring."""


def run() -> list[Figure]:
    return [figure for moving in (False, True) for figure in of_process(moving=moving)]


def of_process(*, moving: bool) -> list[Figure]:
    few, many = Rounds.warm(FEW, moving=moving), Rounds.warm(MANY, moving=moving)
    turns = [(few.turn(SMALL_ROUNDS), many.turn(1)) for _ in range(TURNS)]
    assert not moving or (few.moved and many.moved)
    name = f"{FEW:,} regions, {'moving' if moving else 'at rest'}"
    ratios = [large.cpu_ms / small.cpu_ms for small, large in turns]
    return [
        Figure.of_rounds(
            f"{name}: CPU time", [small.cpu_ms for small, _ in turns], "ms", at_most=MOST_MS
        ),
        Figure.of_rounds(f"{name}: wall time", [small.wall_ms for small, _ in turns], "ms"),
        Figure.of_rounds(f"{name}: CPU time at {MANY:,} is", ratios, "times", at_most=MOST_TIMES),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    cpu_ms: float
    wall_ms: float


class Rounds:
    """One process, and what is known of it from round to round."""

    def __init__(self, regions: int, *, moving: bool) -> None:
        self.pages = regions * PAGES_PER_REGION
        self.rng = np.random.default_rng(regions)
        self.cuts = self.rng.choice(self.pages - 1, regions - 1, replace=False) + 1
        self.moving = moving
        self.policy = Policy()
        self.now_s = 1.0
        self.pieces = np.zeros(0, PIECE)
        self.moved = 0
        self.mapped = np.array(
            [(BASE, BASE + self.pages * PAGE_BYTES)], [("start", "u8"), ("end", "u8")]
        )

    @classmethod
    def warm(cls, regions: int, *, moving: bool) -> Self:
        """Goes round until heat is known, and the hot set is where it is to be found."""
        rounds = cls(regions, moving=False)
        rounds.pieces = fold(rounds.pieces, [rounds.sample()], rounds.mapped, rounds.policy)
        rounds.pieces["resident"][:, 1] = 1.0
        rounds.pieces["probed_s"] = 0.0
        for _ in range(WARM_UP):
            rounds.round()
        if moving:
            rounds.pieces["resident"][:, :2] = 0.0, 1.0
        rounds.moving, rounds.moved = moving, 0
        return rounds

    def turn(self, count: int) -> Cost:
        """The median of so many rounds."""
        costs = [self.round() for _ in range(count)]
        return Cost(
            cpu_ms=statistics.median(cost.cpu_ms for cost in costs),
            wall_ms=statistics.median(cost.wall_ms for cost in costs),
        )

    def round(self) -> Cost:
        """Folds, plans and settles; only that is measured."""
        accesses = self.sample()
        rooms, budget_bytes = self.rooms(), self.budget_bytes()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        self.pieces = fold(self.pieces, [accesses], self.mapped, self.policy)
        target = Target(
            pid=accesses.pid,
            pieces=self.pieces,
            ceiling=ceiling(accesses),
            spare=is_spare(self.pieces),
        )
        made = plan([target], rooms, self.policy, now_s=self.now_s, budget_bytes=budget_bytes)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        report = self.report(made)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        self.pieces = settle(self.pieces, report, 0, self.policy, now_s=self.now_s)
        return Cost(
            cpu_ms=(time.process_time() - cpu_s) * 1e3,
            wall_ms=(time.perf_counter() - wall_s) * 1e3,
        )

    def sample(self) -> Accesses:
        """The next snapshot, one aggregation later."""
        self.now_s += SAMPLES * SAMPLE_S
        drawn = self.rng.choice(len(self.cuts), len(self.cuts) // 10, replace=False)
        self.cuts[drawn] = self.rng.integers(1, self.pages, len(drawn))
        edges = np.unique(np.r_[0, self.cuts, self.pages])
        regions = np.zeros(len(edges) - 1, REGION)
        regions["start"] = BASE + edges[:-1] * PAGE_BYTES
        regions["end"] = BASE + edges[1:] * PAGE_BYTES
        regions["nr_accesses"] = self.counts(edges[:-1])
        return Accesses(
            pid=Pid(1),
            at_s=self.now_s,
            sample_s=SAMPLE_S,
            aggregation_s=SAMPLES * SAMPLE_S,
            regions=regions,
        )

    def counts(self, first_page: NDArray[np.int64]) -> NDArray[np.int64]:
        hot = first_page // PAGES_PER_REGION % RUN < HOT_RUN
        return self.rng.binomial(SAMPLES, np.where(hot, 0.9, 0.03))

    def rooms(self) -> list[TierRoom]:
        """Fast memory that holds a quarter, and slow memory that holds all."""
        length = (self.pieces["end"] - self.pieces["start"]).astype(np.float64)
        # Not as a product of matrices: BLAS's threads go on spinning into what is measured.
        used = (length[:, None] * self.pieces["resident"]).sum(axis=0)
        return [
            TierRoom(
                rank=Rank(rank),
                capacity_bytes=capacity * PAGE_BYTES,
                free_bytes=max(capacity * PAGE_BYTES - int(used[rank]), 0),
                headroom_bytes=0,
                latency_ns=None,
            )
            for rank, capacity in enumerate((self.pages // 4, self.pages))
        ]

    def budget_bytes(self) -> int:
        return int(self.pages * (MOVED_SHARE if self.moving else 1)) * PAGE_BYTES

    def report(self, made: Plan) -> Report:
        """All that was planned has moved."""
        pages = np.zeros((len(made.moves), len(Outcome)), np.int64)
        pages[:, Outcome.MOVED] = made.moves["bytes"] // PAGE_BYTES
        self.moved += int(pages.sum())
        return Report(plan=made, pages=pages, reached=made.moves["end"].copy(), busy_ns=0)
