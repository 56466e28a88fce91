# SPDX-License-Identifier: Apache-2.0
"""What loads from each tier take under the present load, and what that means for moves up.

A tier that is the fastest on paper need not be under load: where its bandwidth is used up, a load
waits for others, and memory that is slower on paper answers sooner. To move still more into it
makes that worse. Colloid (SOSP 2024) balances the loaded latencies of tiers; of that, tierd has the
half that does no harm: while a tier answers no sooner than a slower one, nothing is moved up from
there to it.

The CPUs tell in cycles of their own, of a clock that varies. So nothing here is in nanoseconds but
what is a ratio of cycles times a latency that was told in nanoseconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import NodeMap
from tierd.model import Rank, Tier, TierRoom

FADE_S = 10.0
"""Loads count for less with this time constant."""
LEAST_LOADS = 400.0
"""So many tell a mean to 4 %, where single loads differ by as much as they take."""
MOST_CYCLES = 1 << 16
"""What took longer waited for something else than memory."""

STOP = 1.0
"""Moves up end where the faster tier takes so many times what the slower one does."""
GO_ON = 0.9
"""They go on below this; it is two deviations away from STOP, so that chance changes nothing."""

LEAST_GAP_NS = 1.0

Way = tuple[Rank, Rank]
"""A way up: the faster tier, and the slower one that memory comes from."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latencies:
    """Faded sums of loads and of the cycles they took, by node id."""

    at_s: float = -math.inf
    loads: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    cycles: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def loads_of(self, tier: Tier) -> float:
        """Returns how many loads are known of a tier."""
        return float(self.loads[self._nodes(tier)].sum())

    def cycles_of(self, tier: Tier) -> float | None:
        """Returns what a load from a tier takes; None where too few are known."""
        loads = self.loads_of(tier)
        if loads < LEAST_LOADS:
            return None
        return float(self.cycles[self._nodes(tier)].sum() / loads)

    def _nodes(self, tier: Tier) -> list[int]:
        return [node for node in tier.nodes if node < len(self.loads)]


def take_in(
    known: Latencies, loads: NDArray[np.void], places: NodeMap, *, now_s: float
) -> Latencies:
    """Returns what is known with some loads (dtype LOAD) more.

    Args:
        known: before.
        loads: those of physical memory that no node has are left out.
        places: which node has which memory.
        now_s: the instant that they count from.
    """
    if not len(loads) and not len(known.loads):
        return known
    nodes = places.at(loads["address"])
    counts = (nodes >= 0) & (loads["cycles"] > 0) & (loads["cycles"] < MOST_CYCLES)
    nodes, cycles = nodes[counts], loads["cycles"][counts]
    length = max(len(known.loads), int(nodes.max(initial=-1)) + 1)
    fade = math.exp((known.at_s - now_s) / FADE_S)
    return Latencies(
        at_s=now_s,
        loads=_added(known.loads * fade, np.bincount(nodes, minlength=length)),
        cycles=_added(known.cycles * fade, np.bincount(nodes, cycles, length)),
    )


def _added(before: NDArray[np.float64], new: NDArray[np.float64 | np.intp]) -> NDArray[np.float64]:
    total = new.astype(np.float64)
    total[: len(before)] += before
    return total


def closed(before: frozenset[Way], cycles: Sequence[float | None]) -> frozenset[Way]:
    """Returns the ways up that don't pay under the present load.

    Args:
        before: those that didn't, when it was last asked.
        cycles: what loads from each tier take, by rank; a way of one that is unknown is open.
    """
    ranks = map(Rank, range(len(cycles)))
    return frozenset(
        (upper, lower)
        for upper, lower in combinations(ranks, 2)
        if _is_slower(cycles[upper], cycles[lower], GO_ON if (upper, lower) in before else STOP)
    )


def _is_slower(upper: float | None, lower: float | None, times: float) -> bool:
    return upper is not None and lower is not None and upper >= times * lower


def loaded_gap_ns(upper: TierRoom, lower: TierRoom) -> float | None:
    """Returns what an access to the slower of two tiers costs more under load, at the least.

    Each latency that was told in nanoseconds is one without load, so times the ratio it gives a
    bound from below; the higher one is exact where only one of the tiers is under load.

    Returns:
        None where the ratio is not known, or neither latency.
    """
    if upper.loaded_cycles is None or lower.loaded_cycles is None:
        return None
    ratio = lower.loaded_cycles / upper.loaded_cycles
    bounds = []
    if upper.latency_ns is not None:
        bounds.append(upper.latency_ns * (ratio - 1))
    if lower.latency_ns is not None:
        bounds.append(lower.latency_ns * (1 - 1 / ratio))
    return max([*bounds, LEAST_GAP_NS]) if bounds else None
