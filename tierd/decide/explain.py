# SPDX-License-Identifier: Apache-2.0
"""Why memory lies where it does, as far as the last plan and the samples tell."""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tierd.decide.worth import is_hot
from tierd.model import KEPT_CODE, MAX_TIERS, PAGE_BYTES, Policy


class Why(StrEnum):
    FASTEST = "it is in the fastest tier"
    UNSEEN = "where it lies was not looked at yet"
    COLD = "it is too cold to win back the cost of a move"
    RISING = "it is hot, and next to be moved up"


REASONS: tuple[str, ...] = (*map(str, Why), *map(str, KEPT_CODE))
"""What explain() indexes."""


def explain(
    pieces: NDArray[np.void], ceiling: float, policy: Policy, gaps_ns: Sequence[float] = ()
) -> NDArray[np.intp]:
    """Tells of each piece why no more of it is in the fastest tier, as an index into REASONS.

    Args:
        pieces: dtype PIECE, as the last plan has left them.
        ceiling: the heat above which the samples cannot tell pieces apart.
        policy: what a move must win back.
        gaps_ns: those of the last plan; the configured gap where there are none.
    """
    size = (pieces["end"] - pieces["start"]).astype(np.float64)
    below = size * pieces["resident"][:, 1:MAX_TIERS].sum(axis=1)
    kept = pieces["kept"].astype(np.intp)
    cases = [
        (~np.isfinite(pieces["probed_s"]), Why.UNSEEN),
        (below < PAGE_BYTES, Why.FASTEST),
        ((kept == 0) & ~is_hot(pieces, ceiling, policy, gaps_ns), Why.COLD),
    ]
    names = list(Why)
    hot = np.where(kept > 0, len(names) - 1 + kept, names.index(Why.RISING))
    return np.select([case for case, _ in cases], [names.index(why) for _, why in cases], hot)
