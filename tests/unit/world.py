# SPDX-License-Identifier: Apache-2.0
"""A simulated process on simulated tiers, for the pure parts: pages have true rates and places.

Sampling is what DAMON would see (regions cut at random, counts drawn from the true rates); moving
is perfect, in address order, within capacity.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierd.bulk import PIECE, REGION, Accesses, Plan, Report, Target
from tierd.decide.heat import ceiling, fold
from tierd.decide.latency import Way
from tierd.decide.placement import plan
from tierd.decide.settle import settle
from tierd.model import MAX_TIERS, PAGE_BYTES, Outcome, Pid, Policy, Rank, TierRoom

BASE = 0x7F00_0000_0000
SAMPLE_S, AGGREGATION_S = 0.02, 0.4


def mapped(pages: int) -> NDArray[np.void]:
    ranges = np.zeros(1, [("start", "u8"), ("end", "u8")])
    ranges["start"], ranges["end"] = BASE, BASE + pages * PAGE_BYTES
    return ranges


def snapshot(edges: ArrayLike, counts: ArrayLike, at_s: float = 0.0) -> Accesses:
    """Regions between page numbers `edges`, with their counts."""
    regions = np.zeros(np.size(counts), REGION)
    cut = BASE + np.asarray(edges, np.uint64) * np.uint64(PAGE_BYTES)
    regions["start"], regions["end"], regions["nr_accesses"] = cut[:-1], cut[1:], counts
    return Accesses(
        pid=Pid(1),
        at_s=at_s,
        sample_s=SAMPLE_S,
        aggregation_s=AGGREGATION_S,
        regions=regions,
    )


class World:
    """One process; `rate` is accesses per page and second, `tier` the rank each page lies on."""

    def __init__(
        self,
        rate: NDArray[np.float64],
        tier: NDArray[np.int64],
        capacities: Sequence[int],
        seed: int,
    ) -> None:
        self.rate, self.tier, self.capacities = rate, tier, capacities
        self.rng = np.random.default_rng(seed)
        self.policy = Policy()
        self.now_s = 0.0
        self.pieces = np.zeros(0, PIECE)
        self.moved_pages = 0
        self.closed: frozenset[Way] = frozenset()

    def rooms(self, headroom_pages: int = 0) -> list[TierRoom]:
        used = np.bincount(self.tier, minlength=len(self.capacities))
        return [
            TierRoom(
                rank=Rank(rank),
                capacity_bytes=capacity * PAGE_BYTES,
                free_bytes=int(capacity - used[rank]) * PAGE_BYTES,
                headroom_bytes=headroom_pages * PAGE_BYTES,
                latency_ns=None,
            )
            for rank, capacity in enumerate(self.capacities)
        ]

    def sample(self) -> Accesses:
        pages, rng = len(self.rate), self.rng
        hot_edges = np.flatnonzero(np.diff(self.rate)) + 1
        near = np.clip(hot_edges + rng.integers(-4, 5, len(hot_edges)), 1, pages - 1)
        edges = np.unique(np.r_[0, near, rng.integers(1, pages, 20), pages])
        seen = -np.expm1(-self.rate * SAMPLE_S)
        mean = np.add.reduceat(seen, edges[:-1]) / np.diff(edges)
        counts = rng.binomial(round(AGGREGATION_S / SAMPLE_S), mean)
        return snapshot(edges, counts, self.now_s)

    def probe(self) -> None:
        for piece in self.pieces:
            first, last = ((int(piece[x]) - BASE) // PAGE_BYTES for x in ("start", "end"))
            count = np.bincount(self.tier[first:last], minlength=MAX_TIERS)
            piece["resident"] = count / (last - first)
            piece["probed_s"] = self.now_s

    def round(self, budget_pages: int = 1 << 20) -> Plan:
        self.now_s += AGGREGATION_S
        accesses = self.sample()
        self.pieces = fold(self.pieces, [accesses], mapped(len(self.rate)), self.policy)
        self.probe()
        made = plan(
            [Target(pid=Pid(1), pieces=self.pieces, ceiling=ceiling(accesses))],
            self.rooms(),
            self.policy,
            now_s=self.now_s,
            budget_bytes=budget_pages * PAGE_BYTES,
            closed=self.closed,
        )
        self.pieces["kept"] = made.kept_codes
        self.pieces = settle(self.pieces, self.move(made), 0, self.policy, now_s=self.now_s)
        return made

    def move(self, made: Plan) -> Report:
        pages = np.zeros((len(made.moves), len(Outcome)), np.int64)
        reached = np.zeros(len(made.moves), np.uint64)
        for row, move in enumerate(made.moves):
            first, last = ((int(move[x]) - BASE) // PAGE_BYTES for x in ("start", "end"))
            there = first + np.flatnonzero(self.tier[first:last] == move["source"])
            there = there[: -(-int(move["bytes"]) // PAGE_BYTES)]
            self.tier[there] = move["destination"]
            pages[row, Outcome.MOVED] = len(there)
            full = len(there) * PAGE_BYTES >= move["bytes"] and len(there) > 0
            reached[row] = BASE + (there[-1] + 1) * PAGE_BYTES if full else move["end"]
            self.moved_pages += len(there)
        used = np.bincount(self.tier, minlength=len(self.capacities))
        assert (used <= self.capacities).all(), "a tier was overfilled"
        return Report(plan=made, pages=pages, reached=reached, busy_ns=0)

    def fast_share(self, hot: NDArray[np.bool_]) -> float:
        return float(np.mean(self.tier[hot] == 0))


def window(pages: int, start: int, length: int, *, hot: float, rest: float) -> NDArray[np.float64]:
    rate = np.full(pages, rest)
    rate[start : start + length] = hot
    return rate
