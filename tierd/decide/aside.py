# SPDX-License-Identifier: Apache-2.0
"""Room that single CPUs keep aside: a plan counts it for as long as it comes within seconds.

Moves wait for it. Where they do in vain, what has to make way does so for all that is to come;
otherwise they would be planned in each round, and made in none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tierd.bulk import Report
from tierd.model import Outcome, Rank, TierRoom

WAITS_S = 3.0
"""For so long moves wait; the kernel has CPUs give back a part of it each second."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Since when moves to each tier have found no room that was planned with."""

    since_s: Mapping[Rank, float] = field(default_factory=dict)

    def after(self, report: Report, *, now_s: float) -> "Awaited":
        """Returns what becomes of it; who takes most of what it is sent is not waited for."""
        ranks = report.plan.moves["destination"]
        moved, refused = (
            np.bincount(ranks, report.pages[:, outcome])
            for outcome in (Outcome.MOVED, Outcome.NO_ROOM)
        )
        waits = {Rank(rank) for rank in np.flatnonzero(refused > moved).tolist()}
        left = {rank: s for rank, s in self.since_s.items() if rank in waits or rank not in ranks}
        return Awaited(dict.fromkeys(waits, now_s) | left)

    def counted(self, rooms: Sequence[TierRoom], *, now_s: float) -> list[TierRoom]:
        """Returns the rooms that are to be planned with."""
        return [
            replace(room, aside_bytes=0)
            if now_s - self.since_s.get(room.rank, now_s) >= WAITS_S
            else room
            for room in rooms
        ]
