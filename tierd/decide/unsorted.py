# SPDX-License-Identifier: Apache-2.0
"""Whether there is something for the kernel to sort: accesses that go below the fastest tier.

The kernel finds single pages by faults, which cost the program, and takes up whatever was accessed
within a second, as long as there is room. So it is to do that only where it matters: from when a
target is new until few of its accesses go below, and again where many have for a while in which
regions alone were moved.

How often the hottest pages are accessed counts for no more than that of others: what a program
accesses all the time, its code and its tables, would hide that all its data are below.

The hot pages of a new target the kernel tells apart within its first passes over it. If regions
were moved by their means meanwhile, they would take the room that those pages need; so what may
have few of them is left to the kernel at first.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierd.decide.worth import NEAR_CEILING, is_unsure
from tierd.model import Flags, Floats, Pid, Target

HOTTEST = 0.1
"""This share of a target's memory counts as hot as the coldest of it."""
FEW, MANY = 0.03, 0.05
"""Shares of a target's accesses below: the kernel stops sorting at one, and begins at the other."""
YOUNG_S = 5.0
"""So old a target has to be: by its first samples most of its memory is not known yet."""
PATIENCE_S = 10.0
"""For so long many of them have to go below: a hot set that moves is moved by regions first."""
FIRST_S = 60.0
"""So old a target has to be for regions to be moved of which few pages may be hot.

The longest period of the kernel's own looks (numa_balancing/scan_period_max_ms)."""

_LESS_BITS = 15
"""Of a float32, that a bin of the histogram leaves out: 8 of its 23 bits of precision are left."""


@dataclass(frozen=True, slots=True)
class Sorting:
    """Whether the kernel is to sort, since when it may have to, and when which target came."""

    is_due: bool = True
    since_s: float = math.inf
    came_s: Mapping[Pid, float] = field(default_factory=dict)

    def after(
        self, targets: Sequence[Target], watched: Collection[Pid], *, now_s: float
    ) -> "Sorting":
        """Returns what becomes of it.

        Args:
            targets: those with fresh samples. Where there are none, nothing is known to be sorted.
            watched: all that there are.
            now_s: the instant.
        """
        known = (self.came_s.keys() | {target.pid for target in targets}) & set(watched)
        came_s = {pid: self.came_s.get(pid, now_s) for pid in known}
        share = max(map(below, targets), default=1.0)
        since_s = min(self.since_s, now_s) if share > MANY else math.inf
        is_young = now_s - max(came_s.values(), default=-math.inf) < YOUNG_S
        is_unsorted = share > FEW if self.is_due else now_s - since_s >= PATIENCE_S
        return Sorting(is_young or is_unsorted, since_s, came_s)

    def leaves(self, target: Target, *, now_s: float) -> Flags:
        """Tells which pieces are left to the kernel, none of a target that is FIRST_S old.

        Args:
            target: one that after() was told of.
            now_s: the instant.
        """
        if not self.is_due or now_s - self.came_s[target.pid] >= FIRST_S:
            return False
        return is_unsure(target.pieces, NEAR_CEILING * target.ceiling)


def below(target: Target) -> float:
    """Returns the share of a target's accesses that go below the fastest tier now, 0 to 1.

    Of a piece on several tiers the hottest pages are taken to be in the fastest, as
    steps.times_the_mean() has it: with the share `f` there, `(1 - f)^2` of its accesses go below.
    """
    pieces = target.pieces
    present = pieces["resident"].sum(axis=1, dtype=np.float64)
    size = (pieces["end"] - pieces["start"]) * present
    accesses = size * _bounded(pieces["short"], size)
    total = float(accesses.sum())
    share = 1 - pieces["resident"][:, 0] / np.maximum(present, np.finfo(np.float64).tiny)
    return float(accesses @ share**2) / total if total else 0.0


def _bounded(heat: NDArray[np.float32], size: Floats) -> NDArray[np.float32]:
    """Returns the heat, none of it beyond that which only the hottest memory has.

    That is told to half a percent, from a histogram: floats from 0 on are ordered as their bits.
    """
    if not len(heat):
        return heat
    bins = np.ascontiguousarray(heat).view(np.uint32) >> _LESS_BITS
    hotter = np.cumsum(np.bincount(bins, size)[::-1])
    coldest = len(hotter) - 1 - np.searchsorted(hotter, HOTTEST * hotter[-1])
    return np.asarray(np.minimum(heat, heat[bins == coldest].min()), np.float32)
