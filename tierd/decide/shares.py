# SPDX-License-Identifier: Apache-2.0
"""Shares: how many bytes of a tier each tenant may have now.

What is guaranteed comes first, as far as the tenant uses it. What is left goes to one class after
the other, and within each is divided by weight among those that want more, each up to its maximum;
what one doesn't want is the others'. So a share is a limit only while somebody else wants the
memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tierd.bulk import Floats
from tierd.model import MAX_TIERS


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


def nothing_elsewhere(tenants: int) -> Elsewhere:
    """Returns that of so many tenants who have nothing elsewhere."""
    has, wants, leaves, idle, rises = np.zeros((5, tenants, MAX_TIERS))
    return Elsewhere(has=has, wants=wants, leaves=leaves, idle=idle, rises=rises)


def divide(
    capacity: float,
    *,
    guaranteed: Floats,
    maximum: Floats,
    weight: Floats,
    used: Floats,
    wanted: Floats,
    class_: ArrayLike = 0,
) -> Floats:
    """Returns each tenant's share of a tier in bytes; together they have `capacity` at most.

    Args:
        capacity: what all of them together may have.
        guaranteed: where these are more than the capacity, all are cut by the same factor.
        maximum: at least what is guaranteed; inf for no limit.
        weight: above 0.
        used: what of the tenant's memory is used at all, however seldom: a guarantee protects that.
        wanted: what of it is hot enough for the tier.
        class_: lower ones have all they want before others have any of what isn't guaranteed.
    """
    share = np.minimum(guaranteed, np.maximum(used, wanted))
    total = share.sum()
    if total > capacity:
        return np.asarray(share * (capacity / total), np.float64)
    missing = np.maximum(np.minimum(wanted, maximum) - share, 0.0)
    return share + by_class(
        capacity - total, missing, class_, lambda rest, of_class: by_weight(rest, of_class, weight)
    )


def by_class(
    rest: float,
    missing: Floats,
    class_: ArrayLike,
    divide: Callable[[float, Floats], Floats],
) -> Floats:
    """Divides a rest, each class having what those before it leave.

    Args:
        rest: what there is.
        missing: what each may be given at most.
        class_: lower ones come first.
        divide: divides a rest within a class; of the others nothing is missing then.
    """
    given = np.zeros(len(missing))
    for each in np.unique(class_):
        left = max(rest - given.sum(), 0.0)
        given += divide(left, np.where(np.equal(class_, each), missing, 0.0))
    return given


def by_weight(rest: float, missing: Floats, weight: Floats) -> Floats:
    """Divides a rest by weight, nobody getting more than is missing: water filling.

    Filled up one after the other, by what each misses for its weight: once the next one's part of
    what is left would not fill it, all others get just their parts.
    """
    given = np.zeros(len(missing))
    order = np.argsort(missing / weight)
    for at, tenant in enumerate(order):
        part = rest * weight[tenant] / weight[order[at:]].sum()
        given[tenant] = min(missing[tenant], part)
        rest -= given[tenant]
    return given
