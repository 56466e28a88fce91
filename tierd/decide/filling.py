# SPDX-License-Identifier: Apache-2.0
"""How much the kernel may still take up where there was room in the fastest tier.

To have others make way for what it takes up costs two moves for each page, and finds none that are
much hotter. So where there was room when a target came, the kernel fills that alone: what is
demoted for it makes no new room.
"""

import math
from dataclasses import dataclass, replace

from tierd.model import PAGE_BYTES, KernelMoves, Rank, TierRoom

LEAST_ROOM, LEAST_LEFT = 0.5, 0.1
"""This share of the headroom is not worth a look, which has every page below fault once more; and
this one not the rest of a look that goes on."""
MUCH_ROOM = 2.0
"""So many times the headroom are worth a look as soon as can be."""

NO_ROOM = TierRoom(rank=Rank(0), capacity_bytes=0, free_bytes=0, headroom_bytes=0, latency_ns=None)


@dataclass(frozen=True, slots=True)
class Filling:
    """The room of the fastest tier, and what is left of it for the kernel.

    `room` is as it was seen, less what has been promoted since then, and `cold_bytes` may make way
    there besides, as samples have it. `left_bytes` are what the kernel has not filled yet of the
    room there was when the last target came, None where there was none; until anybody `made_way`
    for what it takes up, page cache that has become inactive since counts too, as what a program
    has read to begin. `look_bytes` are those that the look has taken up that goes on now.
    """

    room: TierRoom = NO_ROOM
    cold_bytes: float = 0.0
    left_bytes: int | None = None
    made_way: bool = False
    look_bytes: int = 0

    @property
    def has_much_room(self) -> bool:
        """Whether much is left that is free, so that nothing has to make way for a look's pages."""
        if self.left_bytes is None:
            return False
        free_bytes = min(self.left_bytes, self.room.free_bytes)
        return free_bytes > MUCH_ROOM * self.room.headroom_bytes

    @property
    def unused_bytes(self) -> int:
        """What nobody uses now, page cache that is inactive among it."""
        return self.room.free_bytes + self.room.cache_bytes

    def fillable_bytes(self, *, with_cold: bool) -> float:
        """What the kernel may fill, infinite where there was no room.

        Of what would have to make way only what exceeds the headroom counts: kswapd, once it is
        woken, makes about so much room, of hot pages too where it finds no more that is cold.

        Args:
            with_cold: whether what is cold is to make way for it, so far as samples tell.
        """
        if self.left_bytes is None:
            return math.inf
        free_bytes = min(self.left_bytes, self.room.free_bytes)
        cache_bytes = min(self.left_bytes - free_bytes, self.room.cache_bytes)
        others_bytes = cache_bytes + (self.cold_bytes if with_cold else 0.0)
        return free_bytes + max(others_bytes - self.room.headroom_bytes, 0.0)

    @property
    def look_pages(self) -> float:
        """What a look may take up once samples tell; the kernel counts what it has so far."""
        return (self.fillable_bytes(with_cold=True) + self.look_bytes) / PAGE_BYTES

    def is_full(self, *, knows: bool, displaces: bool) -> bool:
        """Whether next to nothing of the room is left.

        Args:
            knows: whether samples tell of all targets.
            displaces: whether others make way for what the kernel takes up. That is enough where
                there was no room. Where there was, what is cold is room no more: the kernel does
                not know that it is, and has others make way as well.
        """
        if self.left_bytes is None:
            return displaces
        least = LEAST_LEFT if self.look_bytes else LEAST_ROOM
        least_bytes = least * self.room.headroom_bytes
        if knows:
            return self.fillable_bytes(with_cold=not displaces) <= least_bytes
        return displaces and self.room.free_bytes <= least_bytes

    def with_room(self, room: TierRoom, cold_bytes: float | None) -> "Filling":
        """Returns it with the room as it is seen now, and what may make way, if that is told."""
        cold = self.cold_bytes if cold_bytes is None else cold_bytes
        seen = replace(self, room=room, cold_bytes=cold)
        if self.left_bytes is None or self.made_way:
            return seen
        became_bytes = min(
            seen.room.cache_bytes - self.room.cache_bytes, seen.unused_bytes - self.unused_bytes
        )
        return replace(seen, left_bytes=self.left_bytes + max(became_bytes, 0))

    def once_moved(self, room: TierRoom) -> "Filling":
        """Returns it with the room as tierd has left it by its own moves, which is no more."""
        seen = replace(self, room=room)
        if self.left_bytes is None:
            return seen
        taken_bytes = max(self.unused_bytes - seen.unused_bytes, 0)
        return replace(seen, left_bytes=max(self.left_bytes - taken_bytes, 0))

    def between_looks(self) -> "Filling":
        """Returns it once a look is over."""
        return replace(self, look_bytes=0)

    def in_later_turn(self) -> "Filling":
        """Returns it for a turn that no target has come for: it may have others make way."""
        return replace(self, left_bytes=None)

    def begun(self, taken: KernelMoves) -> "Filling":
        """Returns it as it is when a target has come, or while there is none.

        Args:
            taken: what the kernel has done meanwhile, maybe for this target alone.
        """
        demoted_bytes = min(taken.demoted, taken.promoted) * PAGE_BYTES
        had_bytes = self.unused_bytes - demoted_bytes + taken.promoted * PAGE_BYTES
        has_room = had_bytes > self.room.headroom_bytes
        return replace(
            self,
            left_bytes=max(self.unused_bytes - demoted_bytes, 0) if has_room else None,
            made_way=demoted_bytes > 0,
            look_bytes=self.look_bytes if taken.promoted else 0,
        )

    def after(self, step: KernelMoves) -> "Filling":
        """Returns it after a step of what the kernel does; one without promotions ends a look."""
        promoted_bytes = step.promoted * PAGE_BYTES
        look_bytes = self.look_bytes + promoted_bytes if promoted_bytes else 0
        if self.left_bytes is None:
            return replace(self, look_bytes=look_bytes)
        free_bytes = max(self.room.free_bytes - promoted_bytes, 0)
        return replace(
            self,
            room=replace(self.room, free_bytes=free_bytes),
            left_bytes=max(self.left_bytes - promoted_bytes, 0),
            made_way=self.made_way or step.demoted > 0,
            look_bytes=look_bytes,
        )
