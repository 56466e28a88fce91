# SPDX-License-Identifier: Apache-2.0
"""What was moved, and what was not and why, summed up since the daemon started."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tierd.model import PAGE_BYTES, Kept, Outcome, Plan, Rank, Report

FORGET = 0.9
IDLE_FORGET = 0.99
PRIOR_PAGES = 256
LEAST_PAGES = 256
"""Of fewer pages the fixed cost of a call, such as draining every CPU's LRU caches, is too much."""

MOST_COST_NS = 10_000_000.0

QUIET = frozenset({Outcome.MOVED, Outcome.RESIDENT, Outcome.ABSENT, Outcome.LATER})
"""Outcomes that need no explanation."""


@dataclass(slots=True)
class Flows:
    """Running totals over reports. Pages are base pages."""

    moved: Counter[tuple[Rank, Rank]] = field(default_factory=Counter)
    refused: Counter[Outcome] = field(default_factory=Counter)
    kept: Mapping[Kept, int] = field(default_factory=dict)
    """Hot bytes that the last plan left in a slower tier."""

    def add(self, report: Report) -> None:
        moves, pages = report.plan.moves, report.pages
        for source, destination in np.unique(moves[["source", "destination"]]).tolist():
            pair = (moves["source"] == source) & (moves["destination"] == destination)
            self.moved[Rank(source), Rank(destination)] += int(pages[pair, Outcome.MOVED].sum())
        for outcome in Outcome:
            if outcome not in QUIET:
                self.refused[outcome] += int(pages[:, outcome].sum())

    def note(self, plan: Plan) -> None:
        self.kept = plan.kept


@dataclass(slots=True)
class MoveCost:
    """What moving a page costs here, learnt from the reports.

    An average over pages that forgets, begun with the configured guess, and drawn back to it while
    next to nothing moves: a figure spoilt by one bad round must not shut out moves for good.
    """

    prior_ns: float
    pages: float = 0.0
    busy_ns: float = 0.0
    seen_pages: int = 0

    def add(self, report: Report) -> None:
        moved = report.moved_pages
        self.seen_pages += moved
        if moved < LEAST_PAGES:
            return self.idle()
        self.pages = FORGET * self.pages + moved
        self.busy_ns = FORGET * self.busy_ns + report.busy_ns
        return None

    def idle(self) -> None:
        """Notes a round in which next to nothing moved."""
        self.pages *= IDLE_FORGET
        self.busy_ns *= IDLE_FORGET

    @property
    def page_ns(self) -> float:
        total_ns = self.busy_ns + PRIOR_PAGES * self.prior_ns
        return min(total_ns / (self.pages + PRIOR_PAGES), MOST_COST_NS)


def summary(report: Report, names: Mapping[Rank, str]) -> str:
    """Returns a line for the log, such as "moved 64.0 MiB cxl to dram; 12 pages busy"."""
    flows = Flows()
    flows.add(report)
    parts = [
        f"moved {count * PAGE_BYTES / (1 << 20):.1f} MiB {names[source]} to {names[destination]}"
        for (source, destination), count in flows.moved.items()
        if count
    ]
    parts += [f"{count} pages {o.label}" for o, count in flows.refused.items() if count]
    return "; ".join(parts)
