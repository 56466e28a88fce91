# SPDX-License-Identifier: Apache-2.0
"""The steps where there are several tenants, each of which has its share of each tier."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Floats
from tierd.decide.heat import COLD_PER_PAGE_S
from tierd.decide.shares import by_class, by_weight, divide
from tierd.decide.steps import Steps
from tierd.decide.stock import Stock, in_proportion, up_to
from tierd.model import PAGE_BYTES, Kept

SLACK = 0.01
"""Of a tier: for less than this nobody has to make way because of shares by weight."""


class SharedSteps(Steps):
    """Heat decides within a tenant, and between them their shares do."""

    full = Kept.SHARE

    def _fill_hot(self, rank: int, rising: Stock) -> None:
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
        sinking = self._reclaim(rank, self._sinking(rank), has, share, lacking)
        room = max(self.free[rank], 0.0)
        first = in_proportion(room, due)
        left = max(room - first.sum(), 0.0)
        allowed = first + by_class(left, gain - due, self.class_, in_proportion)
        mine = [
            (self._of_tenant(rising, tenant), self._of_tenant(sinking, tenant), float(room))
            for tenant, room in enumerate(allowed)
        ]
        wanted = np.array([self._wanted(rank, *stocks).sum() for stocks in mine])
        budgets = self._budgets(wanted, allowed)
        for tenant in np.argsort(gain / self.weight, kind="stable"):
            up, down, room = mine[tenant]
            if len(up.piece):
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

    def _shares(self, rank: int, rising: Stock, has: Floats) -> Floats:
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
        self, rank: int, sinking: Stock, has: Floats, share: Floats, lacking: float
    ) -> Stock:
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
        taken = np.maximum(taken, up_to(more, lacking))
        most = self.budget_bytes / 2
        taken = up_to(taken, min(self._below(rank), most))
        self._demote(sinking, taken, rank, spare=most - taken.sum())
        left = np.maximum(has - share - self._by_tenant(self.tenant[sinking.piece], taken), 0.0)
        left = np.minimum(left, self.elsewhere.leaves[:, rank])
        self.owed.append(in_proportion(max(lacking - taken.sum(), 0.0), left))
        return replace(sinking, size=sinking.size - taken)

    def _beyond(self, rank: int, sinking: Stock, size: Floats) -> Floats:
        """Returns how much of each makes way for each tenant to have so many bytes less.

        What was moved lately is waited for: hotter memory does not go in its place, as it does in
        that of what was refused.
        """
        stock = self._on(rank, ~(self.held & self.refused | self.pinned))
        taken = np.zeros(len(self.held))
        taken[stock.piece] = self._coldest(stock, size)
        return taken[sinking.piece]

    def _over(self, rank: int, sinking: Stock, has: Floats, share: Floats) -> Floats:
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

    def _coldest(self, sinking: Stock, size: Floats) -> Floats:
        """Returns how much to take of each to have so many bytes of each tenant's coldest."""
        taken, owner = np.zeros(len(sinking.size)), self.tenant[sinking.piece]
        for tenant in np.flatnonzero(size):
            mine = owner == tenant
            taken[mine] = up_to(sinking.size[mine], size[tenant])
        return taken

    def _by_tenant(self, tenant: NDArray[np.intp], size: Floats) -> Floats:
        return np.asarray(np.bincount(tenant, size, len(self.tenants)), np.float64)


def _gains(rises: Floats, has: Floats, share: Floats, guaranteed: Floats) -> tuple[Floats, Floats]:
    """Returns how much of what would rise each tenant's share has room for, and its guarantee."""
    gain = np.minimum(rises, np.maximum(share - has, 0.0))
    return gain, np.minimum(gain, np.maximum(guaranteed - has, 0.0))
