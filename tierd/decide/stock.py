# SPDX-License-Identifier: Apache-2.0
"""Bytes of pieces on tiers, and how they are counted out."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Floats
from tierd.model import PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Bytes of pieces on tiers: row k is the part of piece `piece[k]` that lies on `tier[k]`."""

    piece: NDArray[np.intp]
    tier: NDArray[np.intp]
    size: Floats
    heat: Floats
    margin: Floats

    def take(self, index: NDArray[np.intp]) -> "Stock":
        return Stock(
            piece=self.piece[index],
            tier=self.tier[index],
            size=self.size[index],
            heat=self.heat[index],
            margin=self.margin[index],
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """How many bytes of each row of a stock go to which tier."""

    stock: Stock
    size: Floats
    destination: NDArray[np.intp]


def up_to(size: Floats, limit: "Floats | float") -> Floats:
    """Returns how much of each size is taken, in order, while the sum stays within the limit."""
    before = np.cumsum(size) - size
    taken = np.clip(limit - before, 0.0, size)
    return np.asarray(np.where(taken >= PAGE_BYTES, taken, 0.0), np.float64)


def in_proportion(limit: float, size: Floats) -> Floats:
    """Returns the sizes, all cut by the same factor where their sum is beyond the limit."""
    total = float(size.sum())
    return size * (limit / total) if total > limit else size
