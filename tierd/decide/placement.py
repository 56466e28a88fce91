# SPDX-License-Identifier: Apache-2.0
"""Placement: which bytes to move between tiers, so that the hottest lie in the fastest.

Tiers are taken in neighbouring steps, from the fastest down. At each step the bytes below it that
are worth a move, hottest first, meet the bytes on it, coldest first. A byte moves up where there
is room, or where it is hotter by a margin than the byte that makes way for it. What need not move
stays: cold bytes in fast memory are left there until somebody needs the room.

What rises is taken at the heat it has beyond doubt, and still has now; what makes way at the heat
it seems to have. The margin between them has two parts. A move must pay back its cost within a
horizon (both moves' cost, where one makes way for the other); and a byte must be `hysteresis` times
as hot as the one it displaces, so that near-equals don't swap places. How hot the hottest bytes
really are, sampling cannot tell; so a byte near that ceiling is worth a move whatever the move
costs.

Where not all that rises finds room, what is about to be looked at page by page waits for that,
unless it is clearly hotter than what is left out: its best pages rise then, and need not make way
for each other.

Room beyond what hot bytes have taken lately is for warm ones: nobody makes way for these, so that
they have longer to pay back their moves, and need not be hot beyond doubt.

Where the kernel promotes single pages meanwhile, of which faults tell it, a piece that lies on
several tiers has been sorted by it. Its pages are then taken to be of all heats from none to twice
the mean, the hottest of them in the fastest tier: what is a mixture to a region's average stays as
the kernel has sorted it, and what is alike throughout is moved as ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tierd.decide.heat import COLD_PER_PAGE_S, assured, concatenate, score, warmth
from tierd.decide.latency import Way, loaded_gap_ns
from tierd.decide.shares import by_class, by_weight, divide
from tierd.model import (
    KEPT_CODE,
    MAX_TIERS,
    MOVE,
    PAGE_BYTES,
    PIECE,
    Flags,
    Kept,
    Pid,
    Plan,
    Policy,
    Target,
    Tenant,
    TierRoom,
)

Floats = NDArray[np.float64]

NEAR_CEILING = 0.25
"""Share of the samples' ceiling from which a piece counts as hot beyond measure."""

WAITING = (Kept.BUDGET, Kept.NO_ROOM, Kept.SHARE, Kept.LOOK)
"""Why hot bytes are left where they are that may be moved later."""

EVERYBODY = Tenant(name="")
"""The tenant of everybody where there are no others."""

SLACK = 0.01
"""Of a tier: for less than this nobody has to make way because of shares by weight."""

HEADROOM_LOW = 0.5
"""Cold bytes are demoted once free memory falls below this share of the headroom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What tenants have besides targets' pages, and want to have: bytes by tenant and tier.

    Of what they have, `leaves` can be left to others, and of that `idle` has not been used for
    long; of what they want, `rises` would come to a tier if there were room.
    """

    has: Floats
    wants: Floats
    leaves: Floats
    idle: Floats
    rises: Floats


_NOTHING = Target(pid=Pid(0), pieces=np.zeros(0, PIECE), ceiling=np.inf)
"""In place of targets where there are none, but tenants with something elsewhere."""


def nothing_elsewhere(tenants: int) -> Elsewhere:
    has, wants, leaves, idle, rises = np.zeros((5, tenants, MAX_TIERS))
    return Elsewhere(has=has, wants=wants, leaves=leaves, idle=idle, rises=rises)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stock:
    """Bytes of pieces on tiers: row k is the part of piece `piece[k]` that lies on `tier[k]`."""

    piece: NDArray[np.intp]
    tier: NDArray[np.intp]
    size: Floats
    heat: Floats
    margin: Floats

    def take(self, index: NDArray[np.intp]) -> "_Stock":
        return _Stock(
            piece=self.piece[index],
            tier=self.tier[index],
            size=self.size[index],
            heat=self.heat[index],
            margin=self.margin[index],
        )


def plan(
    targets: Sequence[Target],
    rooms: Sequence[TierRoom],
    policy: Policy,
    *,
    now_s: float,
    budget_bytes: int,
    promotable: float = 1.0,
    closed: frozenset[Way] = frozenset(),
    tenants: Sequence[Tenant] = (EVERYBODY,),
    sorted_by_kernel: bool = False,
    elsewhere: Elsewhere | None = None,
) -> Plan:
    """Returns the moves worth making now.

    Args:
        targets: processes with fresh samples; the others' memory is not to be moved.
        rooms: the tiers, by rank.
        policy: margins and costs; `move_cost_ns` is what moving a page was found to cost.
        now_s: the instant that `held_until_s` is compared with.
        budget_bytes: at most so many bytes are moved, both directions together.
        promotable: share of the budget that may be used to move up.
        closed: the ways up that nothing goes but what is pinned.
        tenants: whose the targets are; of one alone, heat decides everything.
        sorted_by_kernel: whether the kernel promotes single pages, and keeps some room for that.
        elsewhere: what counts for the tenants' shares besides, and is placed by others.
    """
    if not targets and elsewhere is not None:
        targets = [_NOTHING]
    lengths = [len(t.pieces) for t in targets]
    if (not sum(lengths) and elsewhere is None) or len(rooms) < 2:
        return Plan(
            pids=tuple(target.pid for target in targets),
            moves=np.zeros(0, MOVE),
            kept_codes=np.zeros(sum(lengths), np.uint8),
        )
    pieces = concatenate([target.pieces for target in targets])
    owner = np.repeat(np.arange(len(targets)), lengths)
    ceiling = np.repeat([t.ceiling for t in targets], lengths)
    step = _Steps(
        pieces=pieces,
        ceiling=ceiling,
        pinned=_by_piece([t.pinned for t in targets], lengths),
        awaits_look=_by_piece([t.awaits_look for t in targets], lengths),
        rests=np.repeat([t.rests for t in targets], lengths),
        tenant=np.repeat([t.tenant for t in targets], lengths),
        tenants=tenants,
        rooms=rooms,
        closed=closed,
        policy=policy,
        now_s=now_s,
        budget_bytes=float(budget_bytes),
        rising_bytes=budget_bytes * promotable,
        sorted_by_kernel=sorted_by_kernel,
        elsewhere=nothing_elsewhere(len(tenants)) if elsewhere is None else elsewhere,
    )
    if any(np.any(t.fixed) for t in targets):
        step.leave_out(_by_piece([t.fixed for t in targets], lengths))
    for rank in range(len(rooms) - 1):
        step.fill(rank)
    return Plan(
        pids=tuple(target.pid for target in targets),
        moves=_moves(pieces, owner, step.demotions[::-1] + step.promotions),
        gaps_ns=tuple(map(step.gap_ns, range(len(rooms) - 1))),
        shares=np.array(step.shares).reshape(-1, len(tenants)).T,
        owed=np.array(step.owed).reshape(-1, len(tenants)).T,
        lacks=tuple(map(int, step.lacks)),
        kept={why: int(size) for why, size in step.kept.items() if size >= PAGE_BYTES},
        kept_codes=step.kept_codes,
    )


def _by_piece(flags: Sequence[Flags], lengths: Sequence[int]) -> NDArray[np.bool_]:
    """Returns the targets' flags as one for each piece."""
    each = [np.broadcast_to(flag, n) for flag, n in zip(flags, lengths, strict=True)]
    return np.concatenate(each)


def worthwhile(policy: Policy, gap_ns: float) -> float:
    """Returns the heat, in accesses per byte and second, from which one move pays back."""
    return policy.payback * policy.move_cost_ns / (gap_ns * policy.horizon_s) / PAGE_BYTES


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


class _Steps:
    """The state that goes from one step to the next: bytes not yet planned, room, budget."""

    def __init__(
        self,
        *,
        pieces: NDArray[np.void],
        ceiling: Floats,
        pinned: NDArray[np.bool_],
        awaits_look: NDArray[np.bool_],
        rests: NDArray[np.bool_],
        tenant: NDArray[np.intp],
        tenants: Sequence[Tenant],
        rooms: Sequence[TierRoom],
        closed: frozenset[Way],
        policy: Policy,
        now_s: float,
        budget_bytes: float,
        rising_bytes: float,
        sorted_by_kernel: bool,
        elsewhere: Elsewhere,
    ) -> None:
        length = (pieces["end"] - pieces["start"]).astype(np.float64)
        self.bytes = length[:, None] * pieces["resident"][:, : len(rooms)]
        self.heat = np.where(pinned, np.inf, score(pieces))
        self.assured = np.where(pinned, np.inf, assured(pieces, policy))
        # What was hot and made way when it cooled doesn't come back for the sake of its past.
        self.lasting = np.where(pinned, np.inf, np.minimum(self.assured, pieces["short"]))
        self.pieces, self.now_s = pieces, now_s
        self.times = times_the_mean(self.bytes) if sorted_by_kernel else None
        self.ceiling = ceiling
        self.pinned = pinned
        self.awaits_look = awaits_look
        self.rests = rests & ~pinned
        self.tenant, self.tenants, self.elsewhere = tenant, tenants, elsewhere
        self.weight = np.array([each.weight for each in tenants])
        self.class_ = np.array([each.class_.rank for each in tenants])
        self.shares: list[Floats] = []
        self.owed: list[Floats] = []
        self.held = pieces["held_until_s"] > now_s
        self.refused, self.swings = pieces["refusals"] > 0, pieces["swings"] > 0
        # What has just risen may rise on; what others of its pages were refused is not among that.
        self.rises_on = (pieces["rose"] > 0) & ~self.refused & ~self.swings
        self.fastest = (self.bytes >= PAGE_BYTES).argmax(axis=1)
        self.rooms, self.closed = rooms, closed
        self.free = np.array([float(room.free_bytes - room.headroom_bytes) for room in rooms])
        self.in_turn = HEADROOM_LOW * np.array([float(room.headroom_bytes) for room in rooms])
        """Bytes of its headroom that each tier may lend until as many have left it."""
        self.lacks = np.zeros(len(rooms) - 1)
        self.left = np.zeros(len(rooms))
        """Bytes that are promoted from each tier, whose room nothing was sent to yet."""
        self.policy = policy
        self.budget_bytes, self.rising_bytes = budget_bytes, rising_bytes
        self.promotions: list[_Batch] = []
        self.demotions: list[_Batch] = []
        self.kept = dict.fromkeys(Kept, 0.0)
        self.kept_codes = np.zeros(len(pieces), np.uint8)

    def leave_out(self, fixed: NDArray[np.bool_]) -> None:
        """Has these pieces neither rise nor make way."""
        hot = np.flatnonzero(fixed & (self.lasting >= self._margin(0, self.ceiling)))
        self._keep(Kept.PINNED, hot, self.bytes[hot, 1:].sum(axis=1))
        self.bytes[fixed] = 0.0

    def fill(self, rank: int) -> None:
        """Plans the moves between tier `rank` and those below it."""
        rising, sinking = self._rising(rank), self._sinking(rank)
        before = float(self.rising_bytes)
        if len(self.tenants) == 1:
            shortfall = self._shortfall(rank)
            room = max(float(self.free[rank]), 0.0) - shortfall
            budgets = (self.budget_bytes, self.rising_bytes)
            self.owed.append(np.zeros(1))
            self._fill(rank, rising, sinking, room=room, shortfall=shortfall, budgets=budgets)
        else:
            self._fill_shares(rank, rising, sinking)
        self._fill_room(rank, before - self.rising_bytes)

    def _fill_room(self, rank: int, promoted: float) -> None:
        """Has warm bytes take room that hot ones leave.

        As much is kept for what becomes hot next as has risen lately and is still hot.

        Args:
            rank: the tier.
            promoted: bytes that are moved there now.
        """
        if self.policy.room_horizon_s <= self.policy.horizon_s:
            return
        if any(self.kept[why] >= PAGE_BYTES for why in WAITING):
            return
        reserve = promoted + self._risen(rank) + float(self.elsewhere.rises[:, rank].sum())
        room = max(float(self.free[rank]) - reserve, 0.0)
        warm = self._warm(rank)
        self.lacks[rank] += max(warm.size.sum() - room, 0.0)
        wanted = _up_to(warm.size, room)
        rises = _up_to(wanted, min(self.budget_bytes, self.rising_bytes))
        self._keep(Kept.BUDGET, warm.piece, wanted - rises)
        self._promote(warm, rises, rank)

    def _risen(self, rank: int) -> float:
        """Bytes on the tier that have risen within a horizon, and are hot."""
        is_hot = self.heat >= self._margin(rank, self.ceiling)
        since_s = self.now_s - self.policy.horizon_s
        lately = (self.pieces["rose"] > 0) & (self.pieces["moved_s"] > since_s)
        return float(self.bytes[is_hot & lately, rank].sum())

    def _warm(self, rank: int) -> _Stock:
        """Bytes below the tier that are worth a move where there is room, warmest first."""
        may_rise = ~(self.held | self.rests | self.pinned)
        if len(self.tenants) > 1:
            may_rise &= np.isinf(self._of_tier("maximum_bytes", rank, np.inf))[self.tenant]
        piece, column = np.nonzero(self.bytes[:, rank + 1 :] >= PAGE_BYTES)
        free_to = np.flatnonzero(may_rise[piece])
        piece, tier = piece[free_to], column[free_to] + rank + 1
        heat = warmth(self.pieces["short"][piece], self.pieces["long"][piece], self.policy)
        stock = self._stock_of(piece, tier, rank, heat)
        is_warm = stock.heat >= warm_from(self.policy, self.gap_ns(rank))
        stock = stock.take(np.flatnonzero(is_warm & ~self._is_closed(stock, rank)))
        return stock.take(np.argsort(-stock.heat, kind="stable"))

    def _wanted(self, rank: int, rising: _Stock, sinking: _Stock, room: float) -> Floats:
        """Returns how much of each is worth moving up, however large the budgets are.

        Args:
            rank: the tier.
            rising: what is to be moved up, hottest first.
            sinking: what may make way for it, coldest first.
            room: bytes that they may have more of the tier; below 0, that they have too many.
        """
        displaced = np.cumsum(sinking.size)
        yields_to = np.minimum(
            rising.heat / self.policy.hysteresis, rising.heat - 2 * rising.margin
        )
        victims = np.searchsorted(sinking.heat, yields_to, "right")
        makes_way = np.where(victims > 0, displaced[victims - 1], 0.0) if len(displaced) else 0.0
        return _up_to(rising.size, room + np.minimum(makes_way, self._below(rank)))

    def _fill(
        self,
        rank: int,
        rising: _Stock,
        sinking: _Stock,
        *,
        room: float,
        shortfall: float,
        budgets: Sequence[float] | Floats,
    ) -> None:
        """Plans the moves of those who compete by heat.

        Args:
            rank: the tier.
            rising: what is to be moved up, hottest first.
            sinking: what may make way for it, coldest first.
            room: as _wanted() takes it.
            shortfall: bytes that have to go where they are cold.
            budgets: bytes that may be moved, and that may be moved up.
        """
        below, (budget, rising_budget) = self._below(rank), budgets
        wanted = self._wanted(rank, rising, sinking, room)
        may_rise = self._without_awaiting(rising, wanted)
        promoted = _up_to(may_rise, min(_affordable(budget, room), rising_budget))
        promoted = self._with_ripples(rank, rising, promoted, room=room, budget=budget)
        evicted = max(promoted.sum() - room if wanted.any() else 0.0, shortfall)
        if not wanted.any():
            sinking = sinking.take(np.flatnonzero(sinking.heat < sinking.margin))
        demoted = _up_to(sinking.size, min(evicted, below, budget - promoted.sum()))

        self._owe_idle(rank, rising, float((rising.size - wanted).sum()))
        self._note_lack(rank, rising, wanted, sinking, room)
        self._keep(Kept.BUDGET, rising.piece, may_rise - promoted)
        full = Kept.NO_ROOM if len(self.tenants) == 1 else Kept.SHARE
        self._keep(full, rising.piece, rising.size - wanted)
        self._promote(rising, promoted, rank)
        self._demote(sinking, demoted, rank, spare=budget - promoted.sum() - demoted.sum())

    def _without_awaiting(self, rising: _Stock, wanted: Floats) -> Floats:
        """Returns how much of what is worth moving up need not be looked at first."""
        if not self.awaits_look.any():
            return wanted
        left_out = rising.heat[rising.size - wanted >= PAGE_BYTES]
        clear = self.policy.hysteresis * left_out.max(initial=0.0)
        waits = self.awaits_look[rising.piece] & (rising.heat < clear)
        self._keep(Kept.LOOK, rising.piece, wanted * waits)
        return np.where(waits, 0.0, wanted)

    def _note_lack(
        self, rank: int, rising: _Stock, wanted: Floats, sinking: _Stock, room: float
    ) -> None:
        """Adds how much more room hot memory had a use for, of who has no maximum.

        That is what finds none, and what makes way though it is hot too.
        """
        if len(self.tenants) > 1 and len(rising.piece):
            tenant = self.tenants[self.tenant[rising.piece[0]]]
            if rank in tenant.maximum_bytes:
                return
        cold = sinking.size[sinking.heat < sinking.margin].sum()
        self.lacks[rank] += (rising.size - wanted).sum() + max(wanted.sum() - room - cold, 0.0)

    def _owe_idle(self, rank: int, rising: _Stock, lacking: float) -> None:
        """Has what a tenant has elsewhere, and does not use, make way for its own.

        Args:
            rank: the tier.
            rising: one tenant's, to be moved up.
            lacking: bytes of it that find no room.
        """
        if lacking < PAGE_BYTES:
            return
        tenant = self.tenant[rising.piece[0]]
        owed, idle = self.owed[rank], self.elsewhere.idle[tenant, rank]
        owed[tenant] = max(owed[tenant], min(lacking, self.rising_bytes, idle))

    def _with_ripples(
        self, rank: int, rising: _Stock, promoted: Floats, *, room: float, budget: float
    ) -> Floats:
        """Returns how much is promoted where what makes way may have others make way for it.

        Args:
            rank: the tier.
            rising: what is to be moved up.
            promoted: how much of each, were it not for that.
            room: as _wanted() takes it.
            budget: bytes that may be moved.
        """
        lower = rank + 1
        if lower == len(self.rooms) - 1:
            return promoted
        up, leaves = promoted.sum(), promoted[rising.tier == lower].sum()
        down = max(up - room, 0.0)
        further = max(down - max(self._room_in_turn(lower, leaves), 0.0), 0.0)
        moved = up + down + further
        return promoted if moved <= budget else _up_to(promoted, up * budget / moved)

    def _room_in_turn(self, rank: int, leaves: float) -> float:
        """Returns how many bytes can be sent to a tier that so many leave afterwards."""
        return float(self.free[rank] + min(leaves, self.in_turn[rank]))

    def _below(self, rank: int) -> float:
        """Bytes that the slower tiers can take."""
        return float(np.maximum(self.free[rank + 1 :], 0).sum())

    def _fill_shares(self, rank: int, rising: _Stock, sinking: _Stock) -> None:
        """Plans the moves of several tenants: each keeps to its share, and within that to heat.

        Who has more than its share makes way first, as far as others lack room for theirs. The
        budgets are divided by weight alone, or a class could keep the others' guarantees from being
        made good.
        """
        has = self._by_tenant(self.tenant, self.bytes[:, rank]) + self.elsewhere.has[:, rank]
        share = self._shares(rank, rising, has)
        self.shares.append(share)
        guaranteed = self._of_tier("guaranteed_bytes", rank)
        rises = self._by_tenant(self.tenant[rising.piece], rising.size)
        uses = has - self.elsewhere.idle[:, rank]
        gain, due = _gains(rises, uses, share, guaranteed)
        all_gain, all_due = _gains(rises + self.elsewhere.rises[:, rank], uses, share, guaranteed)
        tier_bytes = float(has.sum() + self.free[rank])
        lacking = self._lacking(rank, float(all_gain.sum()), float(all_due.sum()), tier_bytes)
        sinking = self._reclaim(rank, sinking, has, share, lacking)
        room = max(self.free[rank], 0.0)
        first = _in_proportion(room, due)
        left = max(room - first.sum(), 0.0)
        allowed = first + by_class(left, gain - due, self.class_, _in_proportion)
        mine = [
            (self._of_tenant(rising, tenant), self._of_tenant(sinking, tenant), float(room))
            for tenant, room in enumerate(allowed)
        ]
        wanted = np.array([self._wanted(rank, *stocks).sum() for stocks in mine])
        budgets = self._budgets(wanted, allowed)
        for tenant in np.argsort(gain / self.weight, kind="stable"):
            up, down, room = mine[tenant]
            left = np.minimum(budgets[tenant], (self.budget_bytes, self.rising_bytes))
            self._fill(rank, up, down, room=room, shortfall=0.0, budgets=left)

    def _budgets(self, wanted: Floats, room: Floats) -> Floats:
        """Divides the budgets by weight; what one doesn't need is the others'.

        Args:
            wanted: bytes that each tenant would move up.
            room: of these, what nothing has to make way for.

        Returns:
            a row for each: bytes that it may move, and that it may move up.
        """
        moved = wanted + np.maximum(wanted - room, 0.0)
        needs = ((self.budget_bytes, moved), (self.rising_bytes, wanted))
        parts = [(budget, by_weight(budget, need, self.weight)) for budget, need in needs]
        return np.stack([part + max(budget - part.sum(), 0.0) for budget, part in parts], axis=1)

    def _shares(self, rank: int, rising: _Stock, has: Floats) -> Floats:
        """Divides the tier's bytes between the tenants."""
        here = self.bytes[:, rank]
        below = self._by_tenant(self.tenant[rising.piece], rising.size)
        used = self._by_tenant(self.tenant, here * (self.heat * PAGE_BYTES >= COLD_PER_PAGE_S))
        hot = self._by_tenant(self.tenant, here * self._stays(rank))
        return divide(
            float(max(has.sum() + self.free[rank], 0.0)),
            guaranteed=self._of_tier("guaranteed_bytes", rank),
            maximum=self._of_tier("maximum_bytes", rank, np.inf),
            weight=self.weight,
            used=used + below + self.elsewhere.wants[:, rank],
            wanted=hot + below + self.elsewhere.wants[:, rank],
            class_=self.class_,
        )

    def _stays(self, rank: int) -> NDArray[np.bool_]:
        """Tells the pieces that a tenant wants on the tier, until they are clearly cold."""
        margin = self._margin(rank, self.ceiling)
        return np.asarray(self.heat * self.policy.hysteresis >= margin, np.bool_)

    def _lacking(self, rank: int, gain: float, due: float, tier_bytes: float) -> float:
        """Returns how many bytes others have to make way for.

        Args:
            rank: the tier.
            gain: bytes that tenants lack of their shares.
            due: of these, what they were guaranteed.
            tier_bytes: what all tenants may have.
        """
        room = max(self.free[rank], 0.0)
        lacking = max(min(gain, self.rising_bytes) - room, self._shortfall(rank))
        if lacking < SLACK * tier_bytes:
            lacking = max(min(due, self.rising_bytes) - room, 0.0)
        return float(lacking)

    def _reclaim(
        self, rank: int, sinking: _Stock, has: Floats, share: Floats, lacking: float
    ) -> _Stock:
        """Demotes what is beyond maxima, and of who has more than its share what others lack.

        The last class makes way before the others, and within each the coldest bytes.

        What they have elsewhere makes way for what is lacking then.

        Returns:
            what may make way still.
        """
        if np.ptp(self.class_):
            class_ = self.class_[self.tenant[sinking.piece]]
            sinking = sinking.take(np.argsort(-class_, kind="stable"))
        beyond = np.maximum(has - self._of_tier("maximum_bytes", rank, np.inf), 0.0)
        over = self._over(rank, sinking, has, share)
        taken = self._beyond(rank, sinking, beyond)
        more = self._coldest(sinking, over)
        taken = np.maximum(taken, _up_to(more, lacking))
        most = self.budget_bytes / 2
        taken = _up_to(taken, min(self._below(rank), most))
        self._demote(sinking, taken, rank, spare=most - taken.sum())
        left = np.maximum(has - share - self._by_tenant(self.tenant[sinking.piece], taken), 0.0)
        left = np.minimum(left, self.elsewhere.leaves[:, rank])
        self.owed.append(_in_proportion(max(lacking - taken.sum(), 0.0), left))
        return replace(sinking, size=sinking.size - taken)

    def _beyond(self, rank: int, sinking: _Stock, size: Floats) -> Floats:
        """Returns how much of each makes way for each tenant to have so many bytes less.

        What was moved lately is waited for: hotter memory does not go in its place, as it does in
        that of what was refused.
        """
        stock = self._on(rank, ~(self.held & self.refused | self.pinned))
        taken = np.zeros(len(self.held))
        taken[stock.piece] = self._coldest(stock, size)
        return taken[sinking.piece]

    def _over(self, rank: int, sinking: _Stock, has: Floats, share: Floats) -> Floats:
        """Returns how much each has beyond its share, of what may make way.

        What is wanted goes only where that alone is more than the share: it does not make way in
        place of cold memory that is held.
        """
        stays, owner = self._stays(rank), self.tenant[sinking.piece]
        unwanted = self._by_tenant(owner, sinking.size * ~stays[sinking.piece])
        wanted = self._by_tenant(self.tenant, self.bytes[:, rank] * stays)
        wanted += np.minimum(self.elsewhere.has, self.elsewhere.wants)[:, rank]
        over = np.maximum(has - share, 0.0)
        return np.minimum(over, unwanted + np.maximum(wanted - share, 0.0))

    def _coldest(self, sinking: _Stock, size: Floats) -> Floats:
        """Returns how much to take of each to have so many bytes of each tenant's coldest."""
        taken, owner = np.zeros(len(sinking.size)), self.tenant[sinking.piece]
        for tenant in np.flatnonzero(size):
            mine = owner == tenant
            taken[mine] = _up_to(sinking.size[mine], size[tenant])
        return taken

    def _of_tier(self, what: str, rank: int, otherwise: float = 0.0) -> Floats:
        """Returns what each tenant has been promised of a tier."""
        return np.array([getattr(t, what).get(rank, otherwise) for t in self.tenants], np.float64)

    def _by_tenant(self, tenant: NDArray[np.intp], size: Floats) -> Floats:
        return np.asarray(np.bincount(tenant, size, len(self.tenants)), np.float64)

    def _of_tenant(self, stock: _Stock, tenant: int) -> _Stock:
        return stock.take(np.flatnonzero(self.tenant[stock.piece] == tenant))

    def _rising(self, rank: int) -> _Stock:
        """Bytes below the tier that are worth a move up, hottest first."""
        piece, column = np.nonzero(self.bytes[:, rank + 1 :] >= PAGE_BYTES)
        stock = self._stock_of(piece, column + rank + 1, rank, self.lasting[piece])
        hot = stock.heat >= stock.margin
        rests, held, swings = (flags[stock.piece] for flags in (self.rests, self.held, self.swings))
        held &= ~(self.rises_on[stock.piece] & (stock.tier == self.fastest[stock.piece]))
        closed = self._is_closed(stock, rank)
        may_rise = hot & ~rests & ~closed
        for why, kept in (
            (Kept.RESTS, hot & rests),
            (Kept.LOADED, hot & ~rests & closed),
            (Kept.HELD, may_rise & held & ~swings),
            (Kept.SWINGS, may_rise & held & swings),
        ):
            self._keep(why, stock.piece[kept], stock.size[kept])
        stock = stock.take(np.flatnonzero(may_rise & ~held))
        return stock.take(np.argsort(-stock.heat, kind="stable"))

    def _is_closed(self, stock: _Stock, rank: int) -> NDArray[np.bool_]:
        """Tells what nothing but a pin moves up to the tier now, from where it lies."""
        sources = [lower for upper, lower in self.closed if upper == rank]
        return np.isin(stock.tier, sources) & ~self.pinned[stock.piece]

    def _sinking(self, rank: int) -> _Stock:
        """Bytes on the tier that may make way, coldest first."""
        return self._on(rank, ~(self.held | self.pinned))

    def _on(self, rank: int, these: NDArray[np.bool_]) -> _Stock:
        """Bytes of these pieces on the tier, coldest first."""
        piece = np.flatnonzero(these & (self.bytes[:, rank] >= PAGE_BYTES))
        stock = self._stock_of(piece, np.full(len(piece), rank), rank, self.heat[piece])
        return stock.take(np.argsort(stock.heat, kind="stable"))

    def _stock_of(
        self, piece: NDArray[np.intp], tier: NDArray[np.intp], rank: int, heat: Floats
    ) -> _Stock:
        """Bytes of pieces on tiers, with the heat from which tier `rank` is worth it."""
        if self.times is not None:
            heat = heat * self.times[piece, tier]
        return _Stock(
            piece=piece,
            tier=tier,
            size=self.bytes[piece, tier],
            heat=heat,
            margin=self._margin(rank, self.ceiling[piece]),
        )

    def _margin(self, rank: int, ceiling: Floats) -> Floats:
        """Heat from which tier `rank` is worth a move, of pieces with these ceilings."""
        gain_from = worthwhile(self.policy, self.gap_ns(rank))
        return np.asarray(np.minimum(gain_from, NEAR_CEILING * ceiling), np.float64)

    def gap_ns(self, rank: int) -> float:
        """Latency saved by an access that finds its page one tier up, or the configured guess.

        Of a closed way it is the gap without load, so that what waits for it counts as hot.
        """
        upper, lower = self.rooms[rank], self.rooms[rank + 1]
        is_closed = (upper.rank, lower.rank) in self.closed
        if not is_closed and (loaded_ns := loaded_gap_ns(upper, lower)) is not None:
            return loaded_ns
        if upper.latency_ns is None or lower.latency_ns is None:
            return self.policy.latency_gap_ns
        gap_ns = float(lower.latency_ns - upper.latency_ns)
        return gap_ns if gap_ns > 0 else self.policy.latency_gap_ns

    def _shortfall(self, rank: int) -> float:
        """Bytes to free so that new allocations find room, 0 while enough is left.

        The kernel frees what its own promotions want, by pages.
        """
        if self.times is not None:
            return 0.0
        headroom = self.rooms[rank].headroom_bytes
        missing = -self.free[rank]
        return float(missing) if missing > (1 - HEADROOM_LOW) * headroom else 0.0

    def _promote(self, rising: _Stock, size: Floats, rank: int) -> None:
        self.promotions.append(_Batch(rising, size, np.full(len(size), rank)))
        self._spend(rising, size)
        self.rising_bytes -= size.sum()
        self.free[rank] -= size.sum()
        self.left += np.bincount(rising.tier, size, len(self.rooms))

    def _demote(self, sinking: _Stock, size: Floats, rank: int, *, spare: float) -> None:
        """Sends what makes way down, the hottest of it to the next tier.

        Args:
            sinking: what may make way.
            size: how much of each does.
            rank: the tier.
            spare: bytes that may make way for it further down.
        """
        going = replace(sinking, size=size).take(np.flatnonzero(size))
        for tenant in np.unique(self.tenant[going.piece]):
            mine = self._of_tenant(going, tenant)
            mine = mine.take(np.argsort(-mine.heat, kind="stable"))
            for lower in range(rank + 1, len(self.rooms)):
                before = len(self.demotions)
                sent = self._receive(lower, mine, tenant, spare)
                spare -= sum(batch.size.sum() for batch in self.demotions[before:])
                self.demotions.insert(before, _Batch(mine, sent, np.full(len(sent), lower)))
                self._spend(mine, sent)
                mine = replace(mine, size=mine.size - sent)

    def _receive(self, rank: int, coming: _Stock, tenant: int, spare: float) -> Floats:
        """Returns how much of what comes from above a tier takes.

        What lies there and is clearly colder, of the same tenant, makes way: otherwise what comes
        would pass it on the way down, to come back and change places with it.
        """
        room = max(self._room_in_turn(rank, self.left[rank]), 0.0)
        if rank == len(self.rooms) - 1:
            sent, further = _up_to(coming.size, room), 0.0
        else:
            mine = self.tenant == tenant
            colder = self._on(rank, mine & ~(self.held | self.pinned))
            margin = self._margin(rank, self.ceiling[coming.piece])
            fits = self._wanted(rank, replace(coming, margin=margin), colder, room)
            sent = _up_to(fits, room + spare)
            goes_on = _up_to(colder.size, sent.sum() - room)
            self._demote(colder, goes_on, rank, spare=spare - goes_on.sum())
            further = goes_on.sum()
        in_turn = max(sent.sum() - further - max(self.free[rank], 0.0), 0.0)
        self.left[rank] -= in_turn
        self.in_turn[rank] -= in_turn
        self.free[rank] -= sent.sum() - further - in_turn
        return sent

    def _keep(self, why: Kept, piece: NDArray[np.intp], size: Floats) -> None:
        """Notes how many of the pieces' hot bytes are left where they are."""
        self.kept[why] += size.sum()
        self.kept_codes[piece[size >= PAGE_BYTES]] = KEPT_CODE[why]

    def _spend(self, stock: _Stock, size: Floats) -> None:
        self.bytes[stock.piece, stock.tier] -= size
        self.budget_bytes -= size.sum()


@dataclass(frozen=True, slots=True, kw_only=False)
class _Batch:
    stock: _Stock
    size: Floats
    destination: NDArray[np.intp]


def _up_to(size: Floats, limit: "Floats | float") -> Floats:
    """Returns how much of each size is taken, in order, while the sum stays within the limit."""
    before = np.cumsum(size) - size
    taken = np.clip(limit - before, 0.0, size)
    return np.asarray(np.where(taken >= PAGE_BYTES, taken, 0.0), np.float64)


def times_the_mean(size: Floats) -> Floats:
    """Returns how many times as hot as its piece each part of it is, the hottest being the fastest.

    The pages' heats are spread evenly from none to twice the mean, so a part that begins after the
    share `a` of the hottest pages, and ends with the share `b`, has `2 - a - b` times the mean.

    Args:
        size: bytes by piece and tier.
    """
    end = np.cumsum(size / np.maximum(size.sum(axis=1, keepdims=True), 1.0), axis=1)
    begin = np.concatenate([np.zeros((len(size), 1)), end[:, :-1]], axis=1)
    return np.asarray(2 - begin - end, np.float64)


def _gains(rises: Floats, has: Floats, share: Floats, guaranteed: Floats) -> tuple[Floats, Floats]:
    """Returns how much of what would rise each tenant's share has room for, and its guarantee."""
    gain = np.minimum(rises, np.maximum(share - has, 0.0))
    return gain, np.minimum(gain, np.maximum(guaranteed - has, 0.0))


def _in_proportion(limit: float, size: Floats) -> Floats:
    """Returns the sizes, all cut by the same factor where their sum is beyond the limit."""
    total = float(size.sum())
    return size * (limit / total) if total > limit else size


def _affordable(budget_bytes: float, room_bytes: float) -> float:
    """Returns how much may be promoted where each byte beyond the room costs a demotion too."""
    if budget_bytes <= room_bytes:
        return budget_bytes
    return max((budget_bytes + room_bytes) / 2, 0.0)


def _moves(
    pieces: NDArray[np.void], owner: NDArray[np.intp], batches: Sequence[_Batch]
) -> NDArray[np.void]:
    """Returns the batches as moves, one for all that goes the same way of a piece."""
    if not batches:
        return np.zeros(0, MOVE)
    piece, tier, destination, size, heat = (
        np.concatenate(column)
        for column in zip(
            *((b.stock.piece, b.stock.tier, b.destination, b.size, b.stock.heat) for b in batches),
            strict=True,
        )
    )
    made = np.flatnonzero(size)
    same = (piece[made] * MAX_TIERS + tier[made]) * MAX_TIERS + destination[made]
    _, first, which = np.unique(same, return_index=True, return_inverse=True)
    row = made[first]
    moves = np.zeros(len(row), MOVE)
    moves["target"] = owner[piece[row]]
    moves["source"], moves["destination"] = tier[row], destination[row]
    moves["start"], moves["end"] = pieces["start"][piece[row]], pieces["end"][piece[row]]
    moves["bytes"] = np.bincount(which, size[made], len(row))
    moves["gain"] = heat[row]
    return moves[np.argsort(first)]
