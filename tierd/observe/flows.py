# SPDX-License-Identifier: Apache-2.0
"""What was moved, and what was not and why, summed up since the daemon started."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from tierd.bulk import Plan, Report
from tierd.model import PAGE_BYTES, Kept, Outcome, Tier

OTHERS = "others"
"""The tenant of what has no cgroup of its own."""
MOST_TENANTS = 500
"""The flows of so many tenants are told apart; those that come later are `OTHERS` together."""

FORGET = 0.9
IDLE_FORGET = 0.99
MOST_REPORTS = 32
PRIOR_PAGES = 1024
"""The guess counts for so many: one or two first rounds don't outweigh it."""
LEAST_PAGES = 256
"""Of fewer pages the fixed cost of a call, such as draining every CPU's LRU caches, is too much."""

LEAST_COST_NS, MOST_COST_NS = 1.0, 10_000_000.0

QUIET = frozenset({Outcome.MOVED, Outcome.RESIDENT, Outcome.ABSENT, Outcome.LATER})
"""Outcomes that need no explanation."""


class Direction(StrEnum):
    PROMOTION = "promotion"
    DEMOTION = "demotion"
    LEVEL = "level"
    """From one node of a tier to another, as when one of them is drained."""

    @classmethod
    def between(cls, source: Tier, destination: Tier) -> "Direction":
        if source.rank == destination.rank:
            return cls.LEVEL
        return cls.PROMOTION if destination.rank < source.rank else cls.DEMOTION


class Flow(NamedTuple):
    """Whose pages went, or should have gone, from which tier to which, and what became of them."""

    tenant: str
    source: str
    destination: str
    direction: Direction
    outcome: Outcome


@dataclass(slots=True)
class Flows:
    """Running totals over reports. Pages are base pages."""

    pages: Counter[Flow] = field(default_factory=Counter)
    kept: Mapping[Kept, int] = field(default_factory=dict)
    """Hot bytes that the last plan left in a slower tier."""

    tenants: set[str] = field(default_factory=set)

    def add(self, report: Report, tiers: Sequence[Tier], tenants: Sequence[str]) -> None:
        """Adds what became of a plan.

        Args:
            report: the plan and its outcomes.
            tiers: what the ranks in the plan stand for.
            tenants: whose memory it was, in the order of the plan's pids.
        """
        moves = report.plan.moves
        kinds, kind = np.unique(moves[["target", "source", "destination"]], return_inverse=True)
        for index, (target, source, destination) in enumerate(kinds.tolist()):
            counts = report.pages[kind == index].sum(axis=0)
            left, reached = tiers[source], tiers[destination]
            tenant, direction = self._tenant(tenants[target]), Direction.between(left, reached)
            for outcome in map(Outcome, np.flatnonzero(counts).tolist()):
                flow = Flow(tenant, left.name, reached.name, direction, outcome)
                self.pages[flow] += int(counts[outcome])

    @property
    def moved(self) -> Mapping[tuple[str, str], int]:
        """Pages moved, by the names of the tiers."""
        total: Counter[tuple[str, str]] = Counter()
        for flow, count in self.pages.items():
            if flow.outcome is Outcome.MOVED:
                total[flow.source, flow.destination] += count
        return total

    @property
    def refused(self) -> Mapping[Outcome, int]:
        """Pages that were not moved, by what needs an explanation."""
        total: Counter[Outcome] = Counter()
        for flow, count in self.pages.items():
            if flow.outcome not in QUIET:
                total[flow.outcome] += count
        return total

    def note(self, plan: Plan) -> None:
        self.kept = plan.kept

    def _tenant(self, name: str) -> str:
        if name not in self.tenants and len(self.tenants) >= MOST_TENANTS:
            return OTHERS
        self.tenants.add(name)
        return name


@dataclass(slots=True)
class MoveCost:
    """What moving a page costs here, learnt from the reports.

    The median of the pages that were moved lately, begun with the configured guess: a round whose
    moves waited for a CPU, ten times as long as others, tells nothing. It is drawn back to the
    guess while next to nothing moves: a figure spoilt for longer must not shut out moves for good.
    """

    prior_ns: float
    lately: list[tuple[float, float]] = field(default_factory=list)
    """Of the last reports how many pages each still counts for, and what one took, in ns."""
    last_ns: float = 0.0
    """What a page took in the last round, 0 where next to nothing moved."""

    def add(self, report: Report) -> None:
        moved = report.moved_pages
        if moved < LEAST_PAGES:
            return self.idle()
        self._forget(FORGET)
        self.last_ns = report.busy_ns / moved
        self.lately = [*self.lately[1 - MOST_REPORTS :], (moved, self.last_ns)]
        return None

    def idle(self) -> None:
        """Notes a round in which next to nothing moved."""
        self.last_ns = 0.0
        self._forget(IDLE_FORGET)

    @property
    def page_ns(self) -> float:
        cheapest = sorted([(PRIOR_PAGES, self.prior_ns), *self.lately], key=itemgetter(1))
        pages = list(accumulate(pages for pages, _ in cheapest))
        _, median = cheapest[bisect_left(pages, pages[-1] / 2)]
        return min(max(median, LEAST_COST_NS), MOST_COST_NS)

    def _forget(self, share: float) -> None:
        self.lately = [(share * pages, page_ns) for pages, page_ns in self.lately]


def summary(report: Report, tiers: Sequence[Tier]) -> str:
    """Returns a line for the log, such as "moved 64.0 MiB cxl to dram; 12 pages busy"."""
    flows = Flows()
    flows.add(report, tiers, [""] * len(report.plan.pids))
    parts = [
        f"moved {count * PAGE_BYTES / (1 << 20):.1f} MiB {source} to {destination}"
        for (source, destination), count in flows.moved.items()
    ]
    parts += [f"{count} pages {outcome.label}" for outcome, count in flows.refused.items()]
    return "; ".join(parts)
