# SPDX-License-Identifier: Apache-2.0
"""Steps from tier to tier: what is hot rises, hottest first, and what is cold makes way for it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Floats
from tierd.decide.heat import assured, score, warmth
from tierd.decide.lately import newly_cold, newly_hot
from tierd.decide.latency import Way, loaded_gap_ns
from tierd.decide.shares import Elsewhere
from tierd.decide.stock import Batch, Stock, up_to
from tierd.decide.worth import NEAR_CEILING, both_ways, warm_from, worthwhile
from tierd.model import KEPT_CODE, PAGE_BYTES, Kept, Policy, Tenant, TierRoom

WAITING = (Kept.BUDGET, Kept.NO_ROOM, Kept.SHARE, Kept.LOOK, Kept.SORTS)
"""Why hot bytes are left where they are that may be moved later."""

HEADROOM_LOW = 0.5
"""Cold bytes are demoted once free memory falls below this share of the headroom."""


class Steps:
    """The state that goes from one step to the next: bytes not yet planned, room, budget.

    Everybody competes by heat; where there are several tenants, sharing.SharedSteps stands in.
    """

    full = Kept.NO_ROOM
    """Why hot bytes stay where they are that find no room."""

    def __init__(
        self,
        *,
        pieces: NDArray[np.void],
        ceiling: Floats,
        pinned: NDArray[np.bool_],
        awaits_look: NDArray[np.bool_],
        unsorted: NDArray[np.bool_],
        fills: NDArray[np.bool_],
        spare: NDArray[np.bool_],
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
        self.short, self.long = (np.ascontiguousarray(pieces[name]) for name in ("short", "long"))
        # What was hot and made way when it cooled doesn't come back for the sake of its past.
        self.lasting = np.where(pinned, np.inf, np.minimum(self.assured, self.short))
        self.pieces, self.now_s = pieces, now_s
        self.times = times_the_mean(self.bytes) if sorted_by_kernel else None
        self.ceiling = ceiling
        self.pinned = pinned
        self.awaits_look = awaits_look
        self.unsorted = unsorted & ~pinned
        self.fills = fills & self.unsorted
        self.spare = spare & ~pinned
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
        self.free = np.array([float(room.spare_bytes) for room in rooms])
        self.in_turn = HEADROOM_LOW * np.array([float(room.headroom_bytes) for room in rooms])
        """Bytes of its headroom that each tier may lend until as many have left it."""
        self.lacks = np.zeros(len(rooms) - 1)
        self.left = np.zeros(len(rooms))
        """Bytes that are promoted from each tier, whose room nothing was sent to yet."""
        self.policy = policy
        self.budget_bytes, self.rising_bytes = budget_bytes, rising_bytes
        self.promotions: list[Batch] = []
        self.demotions: list[Batch] = []
        self.kept = dict.fromkeys(Kept, 0.0)
        self.kept_codes = np.zeros(len(pieces), np.uint8)

    def leave_out(self, fixed: NDArray[np.bool_]) -> None:
        """Has these pieces neither rise nor make way."""
        hot = np.flatnonzero(fixed & (self.lasting >= self._margin(0, self.ceiling)))
        self._keep(Kept.PINNED, hot, self.bytes[hot, 1:].sum(axis=1))
        self.bytes[fixed] = 0.0

    def fill(self, rank: int) -> None:
        """Plans the moves between tier `rank` and those below it."""
        before = float(self.rising_bytes)
        self._fill_hot(rank, self._rising(rank))
        self._fill_idle(rank)
        self._fill_room(rank, before - self.rising_bytes)

    def _fill_hot(self, rank: int, rising: Stock) -> None:
        """Plans the moves of what is hot: all compete by heat."""
        shortfall = self._shortfall(rank)
        room = max(float(self.free[rank]), 0.0) - shortfall
        budgets = (self.budget_bytes, self.rising_bytes)
        self.owed.append(np.zeros(1))
        if len(rising.piece) or shortfall > 0:  # else nothing makes way
            sinking = self._sinking(rank)
            self._fill(rank, rising, sinking, room=room, shortfall=shortfall, budgets=budgets)

    def _fill_idle(self, rank: int) -> None:
        """Has hot bytes that wait for the kernel take room that is free; nothing makes way."""
        room = float(self.free[rank])
        if room < PAGE_BYTES or not self.fills.any():
            return
        waits = self._free_to_rise(rank, self.fills, self.lasting)
        waits = _hottest_first(waits.take(np.flatnonzero(waits.heat >= waits.margin)))
        rises = up_to(waits.size, min(room, self.budget_bytes, self.rising_bytes))
        self.kept[Kept.SORTS] -= rises.sum()
        self.kept_codes[waits.piece[waits.size - rises < PAGE_BYTES]] = 0
        self._promote(waits, rises, rank)

    def _fill_room(self, rank: int, promoted: float) -> None:
        """Has warm bytes take room that hot ones leave.

        As much is kept for what becomes hot next as has risen lately and is still hot. Until there
        is more than that, nothing has to make way for warm bytes either.

        Args:
            rank: the tier.
            promoted: bytes that are moved there now.
        """
        if self.policy.room_horizon_s <= self.policy.horizon_s:
            return
        if any(self.kept[why] >= PAGE_BYTES for why in WAITING):
            return
        reserve = promoted + self._risen(rank) + float(self.elsewhere.rises[:, rank].sum())
        room = float(self.free[rank]) - reserve
        if room < 0:
            return
        warm = self._warm(rank)
        self.lacks[rank] += max(warm.size.sum() - room, 0.0)
        wanted = up_to(warm.size, room)
        rises = up_to(wanted, min(self.budget_bytes, self.rising_bytes))
        self._keep(Kept.BUDGET, warm.piece, wanted - rises)
        self._promote(warm, rises, rank)

    def _risen(self, rank: int) -> float:
        """Bytes on the tier that have risen within a horizon, and are hot.

        When the kernel took them up isn't known; beside it all that are hot count among them.
        """
        is_hot = self.heat >= self._margin(rank, self.ceiling)
        if self.times is not None:
            return float(self.bytes[is_hot, rank].sum())
        since_s = self.now_s - self.policy.horizon_s
        lately = (self.pieces["rose"] > 0) & (self.pieces["moved_s"] > since_s)
        return float(self.bytes[is_hot & lately, rank].sum())

    def _warm(self, rank: int) -> Stock:
        """Bytes below the tier that are worth a move where there is room, warmest first."""
        heat = warmth(self.short, self.long, self.policy)
        stock = self._free_to_rise(rank, ~(self.unsorted | self.pinned), heat)
        is_warm = stock.heat >= warm_from(self.policy, self.gap_ns(rank))
        return _hottest_first(stock.take(np.flatnonzero(is_warm)))

    def _free_to_rise(self, rank: int, these: NDArray[np.bool_], heat: Floats) -> Stock:
        """Bytes of these pieces below the tier that may take room there.

        That counts for no share of a tenant; one that has a maximum gets none.
        """
        may_rise = these & ~(self.held | self.rests)
        if len(self.tenants) > 1:
            may_rise &= np.isinf(self._of_tier("maximum_bytes", rank, np.inf))[self.tenant]
        piece, column = np.nonzero(self.bytes[:, rank + 1 :] >= PAGE_BYTES)
        free_to = np.flatnonzero(may_rise[piece])
        piece, tier = piece[free_to], column[free_to] + rank + 1
        stock = self._stock_of(piece, tier, rank, heat[piece])
        return stock.take(np.flatnonzero(~self._is_closed(stock, rank)))

    def _wanted(self, rank: int, rising: Stock, sinking: Stock, room: float) -> Floats:
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
        return up_to(rising.size, room + np.minimum(makes_way, self._below(rank)))

    def _fill(
        self,
        rank: int,
        rising: Stock,
        sinking: Stock,
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
        promoted = up_to(may_rise, min(_affordable(budget, room), rising_budget))
        promoted = self._with_ripples(rank, rising, promoted, room=room, budget=budget)
        evicted = max(promoted.sum() - room if wanted.any() else 0.0, shortfall)
        if not wanted.any():
            sinking = sinking.take(np.flatnonzero(sinking.heat < sinking.margin))
        demoted = up_to(sinking.size, min(evicted, below, budget - promoted.sum()))

        self._owe_idle(rank, rising, float((rising.size - wanted).sum()))
        self._note_lack(rank, rising, wanted, sinking, room)
        self._keep(Kept.BUDGET, rising.piece, may_rise - promoted)
        self._keep(self.full, rising.piece, rising.size - wanted)
        self._promote(rising, promoted, rank)
        self._demote(sinking, demoted, rank, spare=budget - promoted.sum() - demoted.sum())

    def _without_awaiting(self, rising: Stock, wanted: Floats) -> Floats:
        """Returns how much of what is worth moving up need not be looked at first."""
        if not self.awaits_look.any():
            return wanted
        left_out = rising.heat[rising.size - wanted >= PAGE_BYTES]
        clear = self.policy.hysteresis * left_out.max(initial=0.0)
        waits = self.awaits_look[rising.piece] & (rising.heat < clear)
        self._keep(Kept.LOOK, rising.piece, wanted * waits)
        return np.where(waits, 0.0, wanted)

    def _note_lack(
        self, rank: int, rising: Stock, wanted: Floats, sinking: Stock, room: float
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

    def _owe_idle(self, rank: int, rising: Stock, lacking: float) -> None:
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
        self, rank: int, rising: Stock, promoted: Floats, *, room: float, budget: float
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
        return promoted if moved <= budget else up_to(promoted, up * budget / moved)

    def _room_in_turn(self, rank: int, leaves: float) -> float:
        """Returns how many bytes can be sent to a tier that so many leave afterwards."""
        return float(self.free[rank] + min(leaves, self.in_turn[rank]))

    def _below(self, rank: int) -> float:
        """Bytes that the slower tiers can take."""
        return float(np.maximum(self.free[rank + 1 :], 0).sum())

    def _of_tier(self, what: str, rank: int, otherwise: float = 0.0) -> Floats:
        """Returns what each tenant has been promised of a tier."""
        return np.array([getattr(t, what).get(rank, otherwise) for t in self.tenants], np.float64)

    def _of_tenant(self, stock: Stock, tenant: int) -> Stock:
        return stock.take(np.flatnonzero(self.tenant[stock.piece] == tenant))

    def _rising(self, rank: int) -> Stock:
        """Bytes below the tier that are worth a move up, hottest first."""
        piece, column = np.nonzero(self.bytes[:, rank + 1 :] >= PAGE_BYTES)
        new, newly = newly_hot(self.short, self.long, self._paid(rank), self.policy)
        heat = self.lasting.copy()
        heat[new] = np.maximum(heat[new], newly)
        stock = self._stock_of(piece, column + rank + 1, rank, heat[piece])
        stock = stock.take(np.flatnonzero(stock.heat >= stock.margin))
        rests, held, swings = (flags[stock.piece] for flags in (self.rests, self.held, self.swings))
        held &= ~(self.rises_on[stock.piece] & (stock.tier == self.fastest[stock.piece]))
        closed, unsorted = self._is_closed(stock, rank), self.unsorted[stock.piece]
        spare = self.spare[stock.piece] & (rank == 0)
        may_rise = np.ones(len(stock.piece), np.bool_)
        for why, flags in (
            (Kept.RESTS, rests),
            (Kept.LOADED, closed),
            (Kept.SPARE, spare),
            (Kept.SORTS, unsorted),
            (Kept.SWINGS, held & swings),
            (Kept.HELD, held),
        ):
            kept = may_rise & flags
            if kept.any():
                self._keep(why, stock.piece[kept], stock.size[kept])
                may_rise = may_rise & ~flags
        return _hottest_first(stock.take(np.flatnonzero(may_rise)))

    def _is_closed(self, stock: Stock, rank: int) -> NDArray[np.bool_]:
        """Tells what nothing but a pin moves up to the tier now, from where it lies."""
        closed = np.zeros(len(stock.piece), np.bool_)
        for upper, lower in self.closed:
            closed |= (upper == rank) & (stock.tier == lower)
        return closed & ~self.pinned[stock.piece]

    def _sinking(self, rank: int) -> Stock:
        """Bytes on the tier that may make way, coldest first."""
        return self._on(rank, ~(self.held | self.pinned))

    def _on(self, rank: int, these: NDArray[np.bool_]) -> Stock:
        """Bytes of these pieces on the tier, coldest first."""
        piece = np.flatnonzero(these & (self.bytes[:, rank] >= PAGE_BYTES))
        short, long, heat = self.short[piece], self.long[piece], self.heat[piece]
        idle, makes_way = newly_cold(short, long, self._paid(rank), self.policy)
        heat[idle] = np.minimum(heat[idle], makes_way)
        stock = self._stock_of(piece, np.full(len(piece), rank), rank, heat)
        return stock.take(np.argsort(stock.heat, kind="stable"))

    def _stock_of(
        self, piece: NDArray[np.intp], tier: NDArray[np.intp], rank: int, heat: Floats
    ) -> Stock:
        """Bytes of pieces on tiers, with the heat from which tier `rank` is worth it."""
        if self.times is not None:
            heat = heat * self.times[piece, tier]
        return Stock(
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

    def _paid(self, rank: int) -> float:
        """Accesses per byte of tier `rank` that win back a move there and one down again."""
        return self.policy.payback * both_ways(self.policy, self.gap_ns(rank))

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

    def _promote(self, rising: Stock, size: Floats, rank: int) -> None:
        self.promotions.append(Batch(rising, size, np.full(len(size), rank)))
        self._spend(rising, size)
        self.rising_bytes -= size.sum()
        self.free[rank] -= size.sum()
        self.left += np.bincount(rising.tier, size, len(self.rooms))

    def _demote(self, sinking: Stock, size: Floats, rank: int, *, spare: float) -> None:
        """Sends what makes way down, the hottest of it to the next tier.

        Args:
            sinking: what may make way.
            size: how much of each does.
            rank: the tier.
            spare: bytes that may make way for it further down.
        """
        if not size.any():
            return
        going = replace(sinking, size=size).take(np.flatnonzero(size))
        for tenant in np.unique(self.tenant[going.piece]):
            mine = _hottest_first(self._of_tenant(going, tenant))
            for lower in range(rank + 1, len(self.rooms)):
                before = len(self.demotions)
                sent = self._receive(lower, mine, tenant, spare)
                spare -= sum(batch.size.sum() for batch in self.demotions[before:])
                self.demotions.insert(before, Batch(mine, sent, np.full(len(sent), lower)))
                self._spend(mine, sent)
                mine = replace(mine, size=mine.size - sent)

    def _receive(self, rank: int, coming: Stock, tenant: int, spare: float) -> Floats:
        """Returns how much of what comes from above a tier takes.

        What lies there and is clearly colder, of the same tenant, makes way: otherwise what comes
        would pass it on the way down, to come back and change places with it.
        """
        room = max(self._room_in_turn(rank, self.left[rank]), 0.0)
        if rank == len(self.rooms) - 1:
            sent, further = up_to(coming.size, room), 0.0
        else:
            mine = self.tenant == tenant
            colder = self._on(rank, mine & ~(self.held | self.pinned))
            margin = self._margin(rank, self.ceiling[coming.piece])
            fits = self._wanted(rank, replace(coming, margin=margin), colder, room)
            sent = up_to(fits, room + spare)
            goes_on = up_to(colder.size, sent.sum() - room)
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

    def _spend(self, stock: Stock, size: Floats) -> None:
        self.bytes[stock.piece, stock.tier] -= size
        self.budget_bytes -= size.sum()


def _hottest_first(stock: Stock) -> Stock:
    return stock.take(np.argsort(-stock.heat, kind="stable"))


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


def _affordable(budget_bytes: float, room_bytes: float) -> float:
    """Returns how much may be promoted where each byte beyond the room costs a demotion too."""
    if budget_bytes <= room_bytes:
        return budget_bytes
    return max((budget_bytes + room_bytes) / 2, 0.0)
