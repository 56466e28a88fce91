# SPDX-License-Identifier: Apache-2.0
"""From which heat on memory is worth a move.

A move must pay back its cost within a horizon. How hot the hottest bytes really are, sampling
cannot tell; so a byte near that ceiling is worth a move whatever the move costs.

A region's heat is the mean of its pages. Only towards the ceiling most of them must be hot.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Floats
from tierd.decide.heat import assured, score
from tierd.model import PAGE_BYTES, Policy

Gaps = TypeVar("Gaps", float, Floats)
"""One, or an array of them."""

NEAR_CEILING = 0.25
"""Share of the samples' ceiling from which a piece counts as hot beyond measure."""


def worthwhile(policy: Policy, gap_ns: float) -> float:
    """Returns the heat, in accesses per byte and second, from which one move pays back."""
    return policy.payback * policy.move_cost_ns / (gap_ns * policy.horizon_s) / PAGE_BYTES


def both_ways(policy: Policy, gap_ns: Gaps) -> Gaps:
    """Returns the accesses per byte that win back a move up by such gaps, and the way down."""
    return 2 * policy.move_cost_ns / gap_ns / PAGE_BYTES


def warm_from(policy: Policy, gap_ns: float) -> float:
    """Returns the heat from which memory is worth a move into room that nobody else needs."""
    longer = max(policy.room_horizon_s / policy.horizon_s, 1.0)
    return worthwhile(policy, gap_ns) / longer


def is_hot(
    pieces: NDArray[np.void], ceiling: float, policy: Policy, gaps_ns: Sequence[float] = ()
) -> NDArray[np.bool_]:
    """Tells the pieces worth a move to a faster tier; see hot_from()."""
    return np.asarray(assured(pieces, policy) >= hot_from(ceiling, policy, gaps_ns), np.bool_)


def hot_from(ceiling: float, policy: Policy, gaps_ns: Sequence[float] = ()) -> float:
    """Returns the heat from which memory is worth a move up by the widest gap.

    Args:
        ceiling: the heat above which samples cannot tell memory apart.
        policy: what a move costs, and has to win back.
        gaps_ns: of a plan; the configured gap where there are none.
    """
    gap_ns = max(gaps_ns, default=policy.latency_gap_ns)
    return min(worthwhile(policy, gap_ns), NEAR_CEILING * ceiling)


def is_unsure(pieces: NDArray[np.void], sure: float) -> NDArray[np.bool_]:
    """Tells the pieces of several pages that, by neither average, have had such a heat."""
    is_one = pieces["end"] - pieces["start"] <= PAGE_BYTES
    return np.asarray((np.maximum(score(pieces), pieces["short"]) < sure) & ~is_one, np.bool_)
