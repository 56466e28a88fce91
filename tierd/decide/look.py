# SPDX-License-Identifier: Apache-2.0
"""How the kernel is to look for pages to promote, and what it is to take for hot."""

import math
from dataclasses import dataclass
from enum import Enum, auto

FIRST_LOOK, HELD_UP_MOST, MOST = 0.7, 3.0, 4.0
"""In shares of the time within which the kernel takes what is accessed for hot: what counts in a
first look until samples tell, what promotions that take a program long add to it at most, and the
most in all."""
HOT, RARE, LATE = 0.5, 2.0, 1.5
"""Likewise, once samples tell: what counts where what has to rise is accessed within that, when it
is accessed rarely, and what counts then, as the next look comes seconds later."""
ROUND_S = 0.5
"""So long tierd may be busy with a round, and not see what promotions take."""
HALVED_MOST = 3
"""So often at most is that time halved for a later look."""
ANEW_MIB = 128
"""So much at most is looked at in a period that is as short as it takes: half of what is by
default, in half of the time, so that programs pay as much."""


class Pace(Enum):
    """How soon after a look the kernel is to begin the next one.

    While it looks `OFTEN` or `ANEW` it adapts what counts as hot, as it is not to in a first look.
    """

    BY_ITSELF = auto()
    """After the period that it comes to, up to a minute of a program's CPU time."""
    SOON = auto()
    """So too, but after a first look in half the time: a task takes over its period for the next
    look when it has faults of one."""
    OFTEN = auto()
    """As soon as it does by itself at the most."""
    ANEW = auto()
    """At once, by periods as short as it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How the kernel is to look for what it promotes.

    A first look finds what is accessed all the time at once, and lukewarm pages ever after; where
    samples tell, what counts as hot goes by them. But where a promotion takes long, hot pages are
    accessed late since others rise. While it goes on the kernel is not to look often, which has it
    adapt what counts as hot: that is set here.

    Later ones are for pages of which samples tell how hot they are, and find as many lukewarm ones
    for each second that counts. Of mappings that no thread accesses the kernel looks at one in each
    period, before it begins anew: where there are forty, once in forty periods.

    Args:
        first: whether tierd's own samples tell nothing yet of what it looks at.
        pace: how soon the next one is to begin.
        held_up_s: how long promotions of a first look have kept a program from its own code.
        held_up_share: of the last fraction of a second.
        seen_s: within so much of that what a first look is for is accessed, once samples tell.
        within_s: within so long what a later look is for is accessed.
    """

    first: bool = False
    pace: Pace = Pace.OFTEN
    held_up_s: float = 0.0
    held_up_share: float = 0.0
    seen_s: float = math.inf
    within_s: float = math.inf

    def periods_ms(self, set_ms: tuple[int, int], least_ms: int) -> tuple[int, int]:
        """Returns how often it is to look, the shortest and the longest period of CPU time.

        Args:
            set_ms: the same two by themselves.
            least_ms: the shortest one that it takes.
        """
        shortest_ms, longest_ms = set_ms
        at_once_ms = min(shortest_ms, least_ms)
        return {
            Pace.BY_ITSELF: (shortest_ms, longest_ms),
            Pace.SOON: (shortest_ms // 2, longest_ms),
            Pace.OFTEN: (shortest_ms, shortest_ms),
            Pace.ANEW: (at_once_ms, at_once_ms),
        }[self.pace]

    def mib_at_a_time(self, set_mib: int) -> int:
        """Returns how much of a program's memory it is to look at in each period.

        Args:
            set_mib: the same by itself.
        """
        return min(set_mib, ANEW_MIB) if self.pace is Pace.ANEW else set_mib

    @property
    def adapts(self) -> bool:
        """Whether the kernel adapts what counts as hot meanwhile."""
        return self.pace in (Pace.OFTEN, Pace.ANEW)

    def hot_ms(self, set_ms: int) -> int:
        """Returns how soon after it was unmapped memory is to be accessed to be hot.

        Of a later look half of it: the kernel goes up to twice what it is told where it finds
        little (kernel/sched/fair.c: numa_promotion_adjust_threshold).

        Args:
            set_ms: what the kernel takes for that by itself.
        """
        if self.first or math.isinf(self.within_s):
            more_ms = min(1000 * self.held_up_s, HELD_UP_MOST * set_ms)
            return math.ceil(min(self._own_ms(set_ms) + more_ms, MOST * set_ms))
        halves = (set_ms >> halved for halved in range(HALVED_MOST, 0, -1))
        return next((half for half in halves if half >= 500 * self.within_s), set_ms)

    def _own_ms(self, set_ms: int) -> float:
        """How much of that time a program has for its own code in a first look.

        Less than by itself only once promotions were seen, and not by what they may take unseen.
        """
        if self.first:
            return FIRST_LOOK * set_ms
        seen_ms = 1000 * self.seen_s
        if seen_ms <= HOT * set_ms and self.held_up_s:
            return min(HOT * set_ms + 1000 * ROUND_S * self.held_up_share, set_ms)
        is_rare = RARE * set_ms < seen_ms < math.inf
        return LATE * set_ms if is_rare else set_ms
