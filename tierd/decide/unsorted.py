# SPDX-License-Identifier: Apache-2.0
"""Whether there is something for the kernel to sort: accesses that go below the fastest tier.

The kernel finds single pages by faults, which cost the program, and takes up whatever was accessed
within a second, as long as there is room. So it is to do that only where it matters: from when a
target is new until few of its accesses go below, and again where many have for a while in which
regions alone were moved.

Its first look at a new target finds the hot pages, and goes on to lukewarm ones. A second one would
come a second later, and find more of these, before anything is known of the target by samples: so
it waits for them. Once they tell, it may go on for longer by what its promotions take the target,
or it would end before it has found what has to rise. Before that it may so for the first few pages.
Where it is at one of several that lacks nothing, it rests.

While there is no target the kernel sorts too, since its first look at one that comes begins before
it is seen. But every other program pays for that, so it does for some minutes only.

A later look is for the hot pages alone that samples tell of: as many as have to rise until few
accesses go below, since a look finds the hottest first, and such as are as hot. Where there was
room when the target came, they are no more than what is left of it, and a first look ends before it
is full (filling.py).

Once it has filled the fastest tier, it takes up what is accessed for what was not lately, and goes
on so for ever where more is warm than finds room. So it rests then too, and has another turn ever
later, but soon where more accesses go below than when its last one ended.

The hot pages of a new target the kernel tells apart within its first passes over it. If regions
were moved by their means meanwhile, they would take the room that those pages need; so what may
have few of them is left to the kernel in its turns. In a tier that it has filled it is left to it
for good: of regions that are alike those make way that chance has shown as cold, and with them the
hot pages that lie there. But the kernel may not look for minutes, and room that is free then is for
regions after a while. And what a look has mostly taken up, where it has not filled the tier, rises
by regions at once.

Huge pages are told of by the heat of single ones (heat.of_single_pages()), so they are as mixtures,
unless they are accessed all the time.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Flags, Target
from tierd.decide.alike import is_like_looked_at
from tierd.decide.below import FEW, below, lacking, least_heat
from tierd.decide.filling import Filling
from tierd.decide.heat import SURELY_SEEN, score
from tierd.decide.look import Look, Pace
from tierd.decide.worth import NEAR_CEILING, is_unsure
from tierd.model import PAGE_BYTES, KernelMoves, Pid, TierRoom

MANY = 0.05
"""Share of a target's accesses below at which the kernel begins to sort; at FEW it stops."""
YOUNG_S = 1.5
"""So old a target has to be: the first samples come after a second, and tell little, the next ones
after another, or a little less."""
PATIENCE_S = 10.0
"""For so long many of them have to go below: a hot set that moves is moved by regions first."""
RESTS_S, RESTS_MOST_S = 240.0, 600.0
"""For so long it rests after a turn that has filled the tier, twice as long after the next one.

A turn has cost programs two seconds of their accesses, which is to be less than 1 % of the time."""
LOOK_OVER = 0.1
"""A look of the kernel's is over once fewer of its faults than this share are for hot pages."""
STRAY = 50
"""Fewer faults than this in a round are none of a look, which unmaps memory by megabytes."""
WAITS_MOST_S = 3.0
"""For so long the next one waits for a target's samples."""
IDLE = 0.5
"""A look rests for the round where more than this share of what it takes up is of targets that lack
next to none: the kernel looks at one program at a time, and of such a one finds lukewarm pages."""
SERVED_MOST = 16
"""So many of those are told of at most, which takes a tenth of a millisecond each."""
DISPLACES = 0.5
"""The tier is full where more than this share of what the kernel takes up displaces others."""
IN_PART, MOSTLY = 0.02, 0.7
"""Of what is in the fastest tier with more than the one share the kernel has sorted some, and with
the other one or more it is hot throughout, its other pages accessed late."""
WORSE = 0.1
"""By so much more of the accesses below it rests no longer than PATIENCE_S, once it is as much for
WORSE_S: of few samples a round may tell of as much by chance."""
WORSE_S = 3.0
SETTLES_S = 10.0
"""So long samples of a new target find ever more of what goes below."""
FIRST_BYTES = 64 << 20
"""So much it may take up before samples tell, however long promotions take."""
NOBODY_S = 300.0
"""For so long it sorts where no target is, or none that accesses anything."""
FIRST_S = 60.0
"""So old a target has to be for regions of which few pages may be hot to take free room. By then
the kernel looks no more often than it does by itself, since every program pays for that.

The longest period of the kernel's looks by itself (numa_balancing/scan_period_max_ms). But of
mappings that a program does not access it looks at one in each, before it begins again."""

PROMOTION, PROMOTION_LEAST_NS = 2.0, 100_000.0
"""So many times what moving a page takes, a fault does that has it promoted, and so long at least:
5 µs on a server, but 100 where CPUs are emulated, and what moves take is not known at first."""

NOTHING = KernelMoves()


@dataclass(frozen=True, slots=True)
class Sorting:
    """Whether the kernel is to sort, and what that is told from.

    `many_s` is since when many accesses have gone below, `came_s` when each target came, `is_new`
    whether the last one did within FIRST_S, and `alone_s` since when none is there, infinite while
    some are. `left` is the share that went below when the last turn ended with a full tier,
    infinite while it is not known, 0 where it ended with few; `rests_s` is how long the kernel
    rests then, and `worse_s` since when far more than that has gone below. `is_filled` is whether
    it has filled the tier by targets of which some are left, and more than few went below ever
    since. `waits` is whether its next look does, for what samples tell of a new target, for one
    that is not seen yet, or for the next round, and `knows` whether they do; `taken` is what it has
    done since the last round, and `last` in the last step of that. As samples have it
    `lacking_pages` have to rise, infinitely many while they tell nothing, nearly all of them were
    found to be accessed within `seen_s`, and a look for these finds them within `within_s`; few
    accesses of those `served` go below.

    `filling` is what it may fill of the room there was when the last target came, in the first turn
    since, or of what there is while there is none; `looked` is whether a look of that turn is over,
    and `held_up_s` for how long its promotions have kept a target from its own code before that,
    `held_up_share` of the last step alone.
    """

    is_due: bool = True
    many_s: float = math.inf
    left: float = 0.0
    rests_s: float = RESTS_S
    worse_s: float = math.inf
    is_filled: bool = False
    came_s: Mapping[Pid, float] = field(default_factory=dict)
    is_new: bool = False
    alone_s: float = math.inf
    waits: bool = False
    knows: bool = False
    taken: KernelMoves = NOTHING
    last: KernelMoves = NOTHING
    lacking_pages: float = math.inf
    seen_s: float = math.inf
    within_s: float = math.inf
    served: frozenset[Pid] = frozenset()
    filling: Filling = field(default_factory=Filling)
    looked: bool = False
    held_up_s: float = 0.0
    held_up_share: float = 0.0

    @property
    def promotes(self) -> bool:
        """Whether the kernel is to promote right now."""
        return self.is_due and not self.waits

    @property
    def look(self) -> Look | None:
        """How the kernel is to look; None where it is not to promote."""
        if not self.promotes:
            return None
        return Look(
            first=not self.knows,
            pace=self._pace,
            held_up_s=self.held_up_s,
            held_up_share=self.held_up_share,
            seen_s=self.seen_s,
            within_s=self.within_s if self.looked else math.inf,
        )

    @property
    def _pace(self) -> Pace:
        """How soon the next look is to begin; first ones of targets come by themselves."""
        if self.looked and self.is_new and self.filling.has_much_room:
            return Pace.ANEW
        if self.looked or not self.came_s:
            return Pace.OFTEN
        return Pace.SOON if len(self.came_s) > 1 else Pace.BY_ITSELF

    def with_room(self, room: TierRoom, cold_bytes: float | None = None) -> "Sorting":
        """Returns it with what room there is in the fastest tier.

        Args:
            room: of that tier.
            cold_bytes: what may make way there, as samples have it; as it was if None.
        """
        return replace(self, filling=self.filling.with_room(room, cold_bytes))

    def once_taken_up(
        self,
        step: KernelMoves,
        *,
        now_s: float,
        passed_s: float = 0.1,
        held_up_s: float = 0.0,
        idle_pages: int = 0,
    ) -> "Sorting":
        """Returns what becomes of it once the kernel has taken up some more.

        A look is over once there are faults, and no pages among them any more that were accessed
        soon enough after they were unmapped, or no room for another step. The next one waits where
        a target is new, or may be, since the first look at it begins before it is seen; and for a
        round once all has risen that had to, since the kernel's limit begins anew each second, or
        where it is at a target that lacks nothing.

        Args:
            step: what it has done since it was last asked, a fraction of a second ago.
            now_s: the instant.
            passed_s: that fraction.
            held_up_s: for how much of that fraction the kernel had a target, and not its own code.
            idle_pages: how many it has promoted of targets that lack next to none (`served`).
        """
        if not self.is_due:
            return self
        both, taken = _sum(self.last, step), _sum(self.taken, step)
        promoted_bytes = step.promoted * PAGE_BYTES
        filling = self.filling.after(step)
        lacking_pages = self.lacking_pages if promoted_bytes else self._still_lacking()
        fills = promoted_bytes > filling.fillable_bytes(with_cold=self.knows)
        ends = both.candidates < LOOK_OVER * both.faults and taken.faults >= STRAY
        has_risen = self.knows and filling.look_bytes >= lacking_pages * PAGE_BYTES
        is_over = fills or ends or has_risen
        is_idle = step.promoted >= STRAY and idle_pages > IDLE * step.promoted
        may_wait = self._may_wait(now_s) if self.came_s else fills
        waits = self.waits or has_risen or is_idle or (is_over and may_wait)
        looked = self.looked or is_over
        more_s = held_up_s if step.promoted else 0.0
        lasts = not looked and (self.knows or filling.look_bytes < FIRST_BYTES)
        seen = replace(
            self,
            taken=taken,
            last=step,
            waits=waits,
            lacking_pages=lacking_pages,
            filling=filling.between_looks() if waits else filling,
            looked=looked,
            held_up_s=self.held_up_s + more_s if lasts else 0.0,
            held_up_share=more_s / passed_s if lasts and more_s else 0.0,
        )
        return seen._limited()

    def _still_lacking(self) -> float:
        """Returns how many pages have to rise yet where a look pauses, which counts anew then."""
        return max(self.lacking_pages - self.filling.look_bytes / PAGE_BYTES, 0.0)

    def _limited(self) -> "Sorting":
        """Has it take up no more than there is room for, where there was some, in later looks."""
        if not (self.looked and self.knows):
            return self
        return replace(self, lacking_pages=min(self.lacking_pages, self.filling.look_pages))

    def _may_wait(self, now_s: float) -> bool:
        """Whether samples of a target that is new will tell soon what goes below."""
        return not self.knows and any(now_s - at_s < WAITS_MOST_S for at_s in self.came_s.values())

    def after(
        self,
        targets: Sequence[Target],
        watched: Collection[Pid],
        *,
        now_s: float,
    ) -> "Sorting":
        """Returns what becomes of it.

        Args:
            targets: those with fresh samples. Where there are none, nothing is known to be sorted.
            watched: all that there are.
            now_s: the instant.
        """
        came_s = {pid: self.came_s.get(pid, now_s) for pid in watched}
        alone_s = math.inf if came_s else min(self.alone_s, now_s)
        is_new = now_s - max(came_s.values(), default=-math.inf) < FIRST_S
        seen = replace(self, came_s=came_s, is_new=is_new, alone_s=alone_s)
        of_each = [below(target.pieces) for target in targets]
        share = seen._below(of_each, now_s)
        both = zip(targets, of_each, strict=True)
        served = [target.pid for target, its in both if its is not None and its <= MANY]
        seen = replace(
            seen,
            many_s=min(self.many_s, now_s) if share > MANY else math.inf,
            served=frozenset(served[:SERVED_MOST]),
        )
        if came_s.keys() - self.came_s.keys():
            return seen._begun(self.came_s)
        if not came_s:
            return seen._alone(now_s)
        if not self.is_due:
            return seen._rests(share, now_s)
        _, _, promoted, demoted = self.taken
        displaces = demoted > DISPLACES * promoted > 0
        is_full = self.filling.is_full(knows=seen._knows(share, now_s), displaces=displaces)
        seen = replace(seen, waits=self.waits and self._may_wait(now_s), taken=NOTHING)
        return seen._goes_on(share, now_s, is_full=is_full)

    def _alone(self, now_s: float) -> "Sorting":
        """Ends a turn in which no target has come for long; the next one that does begins one."""
        return replace(
            self,
            is_due=self.is_due and now_s - self.alone_s < NOBODY_S,
            filling=self.filling.begun(self.taken),
            waits=False,
            knows=False,
            taken=NOTHING,
        )

    def _begun(self, before: Collection[Pid]) -> "Sorting":
        """Begins a turn for a target that has come.

        Args:
            before: those that were there before.
        """
        any_stays = not self.came_s.keys().isdisjoint(before)
        has_looked = self.waits and not before
        return Sorting(
            many_s=self.many_s,
            came_s=self.came_s,
            is_new=True,
            is_filled=self.is_filled and any_stays,
            filling=self.filling.begun(self.taken),
            waits=has_looked,
            looked=has_looked,
            held_up_s=self.held_up_s if any_stays else 0.0,
        )

    def once_moved(
        self,
        placed: Sequence[NDArray[np.void]],
        *,
        now_s: float,
        room: TierRoom | None = None,
        move_cost_ns: float = 0.0,
    ) -> "Sorting":
        """Returns what becomes of it once regions were moved.

        A turn ends with that, or has fewer pages to find: the kernel's next look would find little
        but lukewarm ones.

        Args:
            placed: the pieces of each of the same targets as they lie now.
            now_s: the instant that after() was told.
            room: of the fastest tier now; None where nothing was moved.
            move_cost_ns: what moving a page takes.
        """
        if not self.is_due:
            return self
        filling = self.filling if room is None else self.filling.once_moved(room)
        share = self._below(list(map(below, placed)), now_s)
        moved = replace(self, filling=filling)._goes_on(share, now_s, is_full=False)
        if not moved.knows:
            return replace(moved, lacking_pages=math.inf, seen_s=math.inf, within_s=math.inf)
        each = list(map(lacking, placed))
        pages = sum(of_it.bytes for of_it in each) / PAGE_BYTES
        seen_s = self.seen_s
        if not self.looked:
            seen_s = min(seen_s, _surely_seen_s(map(least_heat, placed)) or math.inf)
        half_s = _surely_seen_s(of_it.heat for of_it in each)
        return replace(
            moved,
            lacking_pages=pages + filling.look_bytes / PAGE_BYTES,
            seen_s=seen_s,
            within_s=half_s + pages * max(PROMOTION * move_cost_ns, PROMOTION_LEAST_NS) / 1e9,
        )._limited()

    def _goes_on(self, share: float, now_s: float, *, is_full: bool) -> "Sorting":
        """Ends a turn with few accesses below, or once the tier is full.

        Where there are many, and that is known, the kernel's next look waits no more.
        """
        knows = self._knows(share, now_s)
        if share <= FEW and knows:
            return replace(self, is_due=False, waits=False, left=0.0, is_filled=False)
        if not is_full:
            return replace(self, knows=knows, waits=self.waits and not knows)
        rests_s = min(2 * self.rests_s, RESTS_MOST_S) if self.left else RESTS_S
        return replace(
            self,
            is_due=False,
            waits=False,
            is_filled=True,
            many_s=now_s,
            left=share,
            rests_s=rests_s,
        )

    def _below(self, of_each: Sequence[float | None], now_s: float) -> float:
        """Returns the most that go below of any target, infinite while nothing tells.

        A turn does not end with targets that access next to nothing yet, but like one that none
        comes to.

        Args:
            of_each: the share of its accesses that do, of each target with fresh samples.
            now_s: the instant.
        """
        if not of_each:
            return math.inf
        shares = [share for share in of_each if share is not None]
        if shares:
            return max(shares)
        is_new = now_s - max(self.came_s.values(), default=now_s) < NOBODY_S
        return math.inf if self.is_due and not self.knows and is_new else 0.0

    def _knows(self, share: float, now_s: float) -> bool:
        """Whether samples tell of all targets."""
        return share < math.inf and now_s - max(self.came_s.values()) >= YOUNG_S

    def _rests(self, share: float, now_s: float) -> "Sorting":
        """Begins a turn when many accesses have gone below for long enough."""
        left = share if math.isinf(self.left) else self.left
        if left and now_s - max(self.came_s.values()) < SETTLES_S:
            left = max(left, share)
        if share <= FEW:
            return replace(self, left=0.0, worse_s=math.inf, is_filled=False)
        worse_s = min(self.worse_s, now_s) if left and share > left + WORSE else math.inf
        is_worse = not left or now_s - worse_s >= WORSE_S
        if now_s - self.many_s < (PATIENCE_S if is_worse else self.rests_s):
            return replace(self, left=left, worse_s=worse_s)
        return replace(
            self,
            is_due=True,
            filling=self.filling.in_later_turn(),
            left=left,
            worse_s=math.inf,
            lacking_pages=math.inf,
            seen_s=math.inf,
            within_s=math.inf,
        )

    @property
    def tells_alike(self) -> bool:
        """Whether it makes a difference that memory which is left to the kernel is alike."""
        return self.is_due and self.knows and self.looked and not self.is_filled

    def leaves(self, target: Target, *, now_s: float) -> Flags:
        """Tells which pieces are left to the kernel, in a turn and in a tier that it has filled.

        Those whose hot pages it has taken up already have to be hot for longer than by the short
        average: of hundreds some exceed what they are by a third at any time.

        Args:
            target: one of those watched.
            now_s: the instant that after() was told.
        """
        if not (self.is_due or self.is_filled):
            return False
        pieces, sure = target.pieces, NEAR_CEILING * target.ceiling
        risen = pieces["resident"][:, 0]
        left = is_unsure(pieces, sure) | ((risen > IN_PART) & (score(pieces) < sure))
        if not self.looked or self.is_filled:
            return left
        return left & (risen < MOSTLY) & ~is_like_looked_at(pieces, now_s=now_s)

    def fills(self, target: Target, *, now_s: float) -> bool:
        """Tells whether what is left to the kernel may take room that is free meanwhile.

        Args:
            target: one of those watched, as after() was told.
            now_s: the instant.
        """
        return not self.is_filled and now_s - self.came_s[target.pid] >= FIRST_S


def _surely_seen_s(heats: Iterable[float]) -> float:
    """Returns within how long a page of the coldest of these is accessed; 0 of none."""
    return SURELY_SEEN / (min(heats) * PAGE_BYTES)


def _sum(one: KernelMoves, other: KernelMoves) -> KernelMoves:
    return KernelMoves(*map(sum, zip(one, other, strict=True)))
