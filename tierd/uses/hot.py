# SPDX-License-Identifier: Apache-2.0
"""Keeps those of an arena's blocks in its fastest tier that are used most: no daemon needed.

What is fetched on demand makes others go by a clock, which knows of each block's last use alone. A
count that decays tells a hot block from one that was just used, so that a tail of seldom used ones
(Zipf's law) doesn't push out the head. It is for tiers of memory, whose blocks are used in place.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierd.arena import Arena
from tierd.errors import TierdError
from tierd.uses.rows import Ids, numbers

MARGIN = 1.1
"""So many times as hot as the coldest that is there has to be what takes its place."""

_FAST = 0
_PAIRS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Who is to come to the fastest tier, the hottest first, and who goes, the coldest first."""

    up: Ids
    down: Ids


class KeepHot:
    """Counts by halves, and has the hottest blocks in the fastest tier.

    Args:
        arena: whose blocks. Of its fastest tier what others have there is left to them.
        ids: of the blocks; those that were never written are left out until they are.
        halve_after: accesses of all of them by which what was counted before weighs half. Long
            against the blocks, it finds the order among lukewarm ones; short, it follows a change.
        most_moves: blocks that one step() may bring up.

    Raises:
        TierdError: `halve_after` or `most_moves` is below 1.
        NotFound: a block is out of range.
    """

    def __init__(
        self, arena: Arena, ids: ArrayLike, *, halve_after: float, most_moves: int = 1024
    ) -> None:
        if halve_after < 1 or most_moves < 1:
            raise TierdError(f"halve_after {halve_after}, most_moves {most_moves}: from 1 on")
        self._arena = arena
        self._ids = numbers(ids, arena.blocks, "block")
        self._slots = arena.shared.tiers[_FAST].slots
        self._halve_after, self._most_moves = halve_after, most_moves
        self._before = arena.counts(self._ids)
        self.heat: NDArray[np.float64] = np.zeros(len(self._ids))
        """Of each block its accesses, each the less the longer ago."""

    def step(self) -> int:
        """Takes note of what was used since the last one, and asks for what is to be moved.

        Once in as many accesses as there are blocks is often enough.

        Returns:
            How many blocks are to come up.
        """
        now = self._arena.counts(self._ids)
        fresh = now - self._before  # modulo 2^32, as they are
        self._before = now
        self.heat *= 0.5 ** (float(fresh.sum(dtype=np.uint64)) / self._halve_after)
        self.heat += fresh
        places = self._arena.places(self._ids)
        others = self._used()[_FAST] - int(np.count_nonzero(places == _FAST))
        swap = choose(self.heat, places, self._slots - others, self._most_moves)
        self._ask(swap)
        return len(swap.up)

    def _ask(self, swap: Swap) -> None:
        """Asks for both in turn, so that in tiers that are full one has the other's place."""
        tiers = self._arena.shared.tiers
        free = [tier.slots - used for tier, used in zip(tiers, self._used(), strict=True)]
        below = max(range(1, len(tiers)), key=free.__getitem__, default=_FAST)
        pairs = max(1, min(free[below], _PAIRS))
        for at in range(0, len(swap.up), pairs):
            down = swap.down[at : at + pairs]
            if len(down):
                self._arena.demote(self._ids[down], tiers[below].name)
            self._arena.prefetch(self._ids[swap.up[at : at + pairs]])

    def _used(self) -> tuple[int, ...]:
        return self._arena.moves().used


def choose(heat: NDArray[np.float64], places: NDArray[np.uint8], room: int, most: int) -> Swap:
    """Chooses who changes places: pure.

    Args:
        heat: of each block.
        places: the number of its tier, 255 where it is nowhere.
        room: how many may be in the fastest tier.
        most: how many may come, at most.
    """
    here = np.flatnonzero(places == _FAST)
    there = np.flatnonzero((places != _FAST) & (places != 255) & (heat > 0))
    free = max(0, room - len(here))
    up = there[np.argsort(-heat[there], kind="stable")][:most]
    down = here[np.argsort(heat[here], kind="stable")][: max(0, len(up) - free)]
    rivals = up[free:][: len(down)]
    is_hotter = heat[rivals] > MARGIN * heat[down]
    worth = len(rivals) if is_hotter.all() else int(np.argmin(is_hotter))
    return Swap(up=up[: free + worth], down=down[:worth])
