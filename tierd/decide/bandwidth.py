# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of far tiers: how fast each arena may copy to and from its tiers of a kind.

It is divided as memory is (decide.shares): by weight among the tenants that want it, each up to its
maximum, and within a tenant equally among its arenas. What nobody wants is divided by weight on top
of that, so that a limit is in nobody's way while there is bandwidth, and all of it is given out.

What an arena wants is only seen by what it has copied. Who was held back by its limit may want any
amount; who was not wants what it uses, and some more. Rates are in MiB a second, arrays have a row
for each arena's tier, or for each tenant.
"""

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Floats
from tierd.decide.shares import by_weight

HELD_BACK = 0.9
"""Who has used so much of its limit wants more than it was given."""

SPARE = 1.2
"""Who was not held back has what it used so many times, which then is not near its limit."""

FADES = 0.5
"""Of what was wanted so much is still wanted a round later: where a block is more than what there
is in a round, some rounds see none."""

IDLE = 0.05
"""So much of it all is kept for those that want nothing, together: they can begin at once."""

LEAST_MBPS = 1.0
"""Each keeps so much at least, where there is enough."""


def wanted(
    used: Floats, limit: Floats, before: Floats, most: Floats, is_more: NDArray[np.bool_]
) -> Floats:
    """Returns how much each arena wants, from a little to `most`.

    Args:
        used: what was copied since the last round, as far as it was seen.
        limit: what they had to keep to meanwhile; inf for none.
        before: what they wanted in the last round.
        most: what each could have at all, above 0; inf for no bound.
        is_more: of which more was copied than was seen.
    """
    least = np.minimum(np.maximum(most * IDLE / len(most), LEAST_MBPS), most / len(most))
    is_held_back = is_more | (used >= HELD_BACK * limit)
    now = np.where(is_held_back, most, used * SPARE)
    return np.asarray(np.clip(np.maximum(now, before * FADES), least, most), np.float64)


def divide(total: float, *, wanted: Floats, maximum: Floats, weight: Floats) -> Floats:
    """Returns each one's part: all of the total, as far as the maxima let it be given.

    Args:
        total: inf for no bound; then each has its maximum.
        wanted: finite, or no more than the maximum is given for it.
        maximum: inf for none.
        weight: above 0.
    """
    if np.isinf(total):
        return maximum.copy()
    most = np.minimum(maximum, total)
    given = by_weight(total, np.minimum(wanted, most), weight)
    rest = max(total - float(given.sum()), 0.0)
    return given + by_weight(rest, most - given, weight)


def by_tenant(
    total: float,
    *,
    tenant: NDArray[np.intp],
    wanted: Floats,
    maximum: Floats,
    weight: Floats,
) -> Floats:
    """Returns each arena's part of a total.

    Args:
        total: inf for no bound.
        tenant: whose each arena is.
        wanted: by each arena.
        maximum: of each tenant, inf for none.
        weight: of each tenant.
    """
    here = np.unique(tenant)
    wants = np.bincount(tenant, wanted, len(weight))[here].astype(np.float64)
    given = divide(total, wanted=wants, maximum=maximum[here], weight=weight[here])
    parts = np.zeros(len(tenant))
    for whose, part in zip(here, given, strict=True):
        own = tenant == whose
        none, equal = np.full(own.sum(), np.inf), np.ones(own.sum())
        parts[own] = divide(part, wanted=wanted[own], maximum=none, weight=equal)
    return parts
