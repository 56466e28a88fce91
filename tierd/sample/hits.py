# SPDX-License-Identifier: Apache-2.0
"""The pages of a target that samples of hardware have hit, and what they tell of a range.

Counts fade over KEPT_S, so that they are of these minutes. Where pages that were hit at all were
hit often, those that were not are the cold ones between them: then the counts are a look at single
pages, as a zoomed snapshot is, for nothing.

An access may weigh more or less than another, as stores do where that is configured. Sums of such
weights vary more by accident than counts do. So a look has them in units of sum(w^2) / sum(w): then
they vary as counts do, and their total is the effective size of the sample, as L. Kish has it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import REGION, Accesses
from tierd.model import PAGE_BYTES, Pid

KEPT_S = 30.0
FORGOTTEN = 0.25
MOST_PAGES = 1 << 18
"""The most pages of a target that are remembered, those hit most often."""

HITS_LEAST = 256
PER_PAGE_LEAST = 4.0
"""So many hits, and so many of each page that was hit, tell hot pages from cold ones."""


class Hits:
    """Faded counts of the pages that were hit; `pages` is sorted.

    `counts` has the sums of the hits' weights, `squares` those of their squares.
    """

    def __init__(self) -> None:
        self.pages = np.zeros(0, np.uint64)
        self.counts, self.squares = np.zeros(0, np.float64), np.zeros(0, np.float64)
        self._at_s = -math.inf

    def take_in(
        self,
        pages: NDArray[np.uint64],
        now_s: float,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        """Takes in samples.

        Args:
            pages: the addresses of pages, each as often as it was hit.
            now_s: when.
            weights: how many accesses each counts for; None for one.
        """
        new = np.ones(len(pages)) if weights is None else weights
        fade = math.exp((self._at_s - now_s) / KEPT_S)
        self._at_s = now_s
        both = np.concatenate([self.pages, pages])
        self.pages, which = np.unique(both, return_inverse=True)
        self.counts, self.squares = (
            np.bincount(which, np.concatenate([old * fade, more]), len(self.pages)).astype(float)
            for old, more in ((self.counts, new), (self.squares, new**2))
        )
        self._keep(self.counts**2 > FORGOTTEN * self.squares)
        if len(self.pages) > MOST_PAGES:
            self._keep(np.sort(np.argpartition(self.counts, -MOST_PAGES)[-MOST_PAGES:]))

    def look(self, pid: Pid, start: int, end: int) -> Accesses | None:
        """Returns what is known of the pages of a range, None where that is too little."""
        first, last = np.searchsorted(self.pages, np.array([start, end], np.uint64))
        pages, counts = self.pages[first:last], self.counts[first:last]
        if not len(pages):
            return None
        counts = counts * (counts.sum() / self.squares[first:last].sum())
        total = counts.sum()
        if total < HITS_LEAST or total < PER_PAGE_LEAST * len(pages):
            return None
        regions = _regions(pages, counts, start, end)
        most = 2 * int(regions["nr_accesses"].max())  # so that no page is near what can be told
        return Accesses(
            pid=pid,
            at_s=self._at_s,
            sample_s=KEPT_S / most,
            aggregation_s=KEPT_S,
            regions=regions,
            zoomed=True,
            relative=True,
        )

    def _keep(self, which: NDArray[np.bool_ | np.intp]) -> None:
        self.pages = self.pages[which]
        self.counts, self.squares = self.counts[which], self.squares[which]


def _regions(
    pages: NDArray[np.uint64], counts: NDArray[np.float64], start: int, end: int
) -> NDArray[np.void]:
    """Returns each page that was hit, and what lies between them, as regions (dtype REGION)."""
    hit, gaps = np.zeros(len(pages), REGION), np.zeros(len(pages) + 1, REGION)
    hit["start"], hit["end"] = pages, pages + np.uint64(PAGE_BYTES)
    hit["nr_accesses"] = np.round(counts)
    gaps["start"][0], gaps["end"][-1] = start, end
    gaps["start"][1:], gaps["end"][:-1] = hit["end"], hit["start"]
    regions = np.concatenate([hit, gaps[gaps["end"] > gaps["start"]]])
    return regions[np.argsort(regions["start"])]
