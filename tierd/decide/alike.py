# SPDX-License-Identifier: Apache-2.0
"""Whether memory is hot throughout, told from a few of its pages.

Of a region that is left to the kernel samples tell the mean alone, and the kernel finds its hot
pages by one access of each, soon after a look. Where a program hardly runs meanwhile, since others'
pages rise, it finds few of them, and those that it misses have to wait for its next look, which
costs the program a fault of every page below. So a few adjoining pages are looked at one by one: if
they differ by no more than by accident, they and what adjoins them are placed by their mean, which
does not mislead then.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Target
from tierd.decide.heat import is_zoomed
from tierd.decide.zoom import Doubt, ends_of_runs
from tierd.model import PAGE_BYTES

PAGES = 512
"""So many are looked at, more than regions span: of larger blocks samples tell."""
RUN_PAGES = 2 * PAGES
"""What is smaller is not worth a look."""
PART = 1 / 3
"""Memory of less heat than this share of what was looked at is not like that."""
TELLS_S = 60.0
"""For so long a look tells: what a program accesses may change."""
LEAST_PER_S = 2.0
"""Of pages that are accessed less often a look of a second tells too little."""


def most_promising(targets: Sequence[Target]) -> Doubt | None:
    """Returns the few pages to look at next, None where there is nothing to be learned.

    They are amid memory below the fastest tier that is left to the kernel, from where most accesses
    come.

    Args:
        targets: whose pages may be looked at.
    """
    found = [doubt for target in targets if (doubt := _most_promising(target))]
    return max(found, key=lambda doubt: doubt.accesses_s, default=None)


def _most_promising(target: Target) -> Doubt | None:
    pieces, heat = target.pieces, target.pieces["short"]
    if target.rests or not len(pieces):
        return None
    size = pieces["end"] - pieces["start"]
    lies_below = size * pieces["resident"][:, 1:].sum(axis=1)
    is_known = is_zoomed(pieces) | pieces["huge"] | target.fixed
    is_left = np.asarray(target.unsorted & ~is_known, np.bool_)
    accesses_s = np.where(is_left & (heat * PAGE_BYTES >= LEAST_PER_S), heat * lies_below, 0)
    if not accesses_s.any():
        return None
    first = int(np.argmax(accesses_s))
    run = _like(pieces, first, is_left)
    start, end = int(pieces["start"][run.start]), int(pieces["end"][run.stop - 1])
    pages = (end - start) // PAGE_BYTES
    if pages < RUN_PAGES:
        return None
    begin = start + (pages - PAGES) // 2 * PAGE_BYTES
    return Doubt(
        pid=target.pid,
        start=begin,
        end=begin + PAGES * PAGE_BYTES,
        per_page_s=float(heat[first]) * PAGE_BYTES,
        accesses_s=float(accesses_s[run].sum()),
    )


def is_like_looked_at(pieces: NDArray[np.void], *, now_s: float) -> NDArray[np.bool_]:
    """Tells which pieces are hot throughout, as pages amid them are.

    Of huge pages DAMON sees one accessed bit, so that their pages would always seem alike.

    Args:
        pieces: dtype PIECE, sorted and disjoint.
        now_s: the instant that `zoomed_s` is compared with.
    """
    told = np.zeros(len(pieces), np.bool_)
    is_long = pieces["end"] - pieces["start"] >= PAGES // 2 * PAGE_BYTES
    is_hot = pieces["short"] * PAGE_BYTES >= LEAST_PER_S
    by_pages = ~pieces["huge"]
    is_told = now_s - pieces["zoomed_s"] < TELLS_S
    for one in np.flatnonzero(is_told & is_long & is_hot & by_pages).tolist():
        if not told[one]:
            told[_like(pieces, one, by_pages)] = True
    return told


def _like(pieces: NDArray[np.void], one: int, among: NDArray[np.bool_]) -> slice:
    """Returns the run of pieces around one of these, which are about as hot or more."""
    last = ends_of_runs(pieces, among & (pieces["short"] >= PART * pieces["short"][one]))
    at = int(np.searchsorted(last, one))
    return slice(int(last[at - 1]) + 1 if at else 0, int(last[at]) + 1)
