# SPDX-License-Identifier: Apache-2.0
"""Where to look at single pages: the memory whose heat may mislead, the most accessed first.

A region's heat is the mean of its pages. Memory that seems too cold for a move may hide a few hot
pages; memory that is hot, but finds no room, may have cold ones among them, in either tier.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Target
from tierd.decide.heat import is_zoomed, score
from tierd.decide.worth import hot_from, is_unsure
from tierd.model import KEPT_CODE, PAGE_BYTES, Kept, Pid, Policy

HIDDEN = 1 / 512
"""The least share of hot pages that is looked for."""
SURE = 0.5
"""Share of the ceiling from which most pages must be hot."""
AGAIN_S = 300.0
"""Pages that were looked at are not looked at again for so long."""
LEAST_PAGES = 16
"""Of fewer pages nothing is to be told."""
MOST_PAGES = 4096
"""A range counts for no more: so many are what one look is at, or fewer."""
MOST_PIECES = 1 << 15
"""No more is cut once a target has so many pieces: each takes its part of every round."""

LACKS_ROOM = [KEPT_CODE[why] for why in (Kept.NO_ROOM, Kept.SHARE, Kept.LOOK)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A range of a process worth a look at its pages.

    `per_page_s` is the rate of the first of them, as far as known, and `accesses_s` that of all
    that one look may be at.
    """

    pid: Pid
    start: int
    end: int
    per_page_s: float
    accesses_s: float


def most_doubtful(
    targets: Sequence[Target], policy: Policy, *, now_s: float, gaps_ns: Sequence[float] = ()
) -> Doubt | None:
    """Returns what to look at next, None where nothing is in doubt.

    Args:
        targets: with the codes of the last plan in their pieces.
        policy: what a move must win back.
        now_s: the instant that `zoomed_s` is compared with.
        gaps_ns: those of the last plan; the configured gap where there are none.
    """
    hot = [hot_from(target.ceiling, policy, gaps_ns) for target in targets]
    found = [_most_doubtful(*each, now_s) for each in zip(targets, hot, strict=True)]
    return max((doubt for doubt in found if doubt), key=lambda d: d.accesses_s, default=None)


def _most_doubtful(target: Target, hot: float, now_s: float) -> Doubt | None:
    pieces = target.pieces
    is_due, end = _due(target, now_s)
    if target.rests or not is_due.any():
        return None
    length = end - pieces["start"]
    is_worth_it = is_due & _is_doubtful(target, hot)
    accesses_s = np.where(
        is_worth_it, score(pieces) * np.minimum(length, MOST_PAGES * PAGE_BYTES), 0
    )
    if not accesses_s.any():
        return None
    first = int(np.argmax(accesses_s))
    return Doubt(
        pid=target.pid,
        start=int(pieces["start"][first]),
        end=int(end[first]),
        per_page_s=float(score(pieces[first : first + 1])[0]) * PAGE_BYTES,
        accesses_s=float(accesses_s[first]),
    )


def awaits_look(target: Target, *, now_s: float) -> NDArray[np.bool_]:
    """Tells the pieces that are looked at soon if they lack room."""
    is_due, _ = _due(target, now_s)
    return np.asarray(is_due & _is_unsure(target), np.bool_)


def _due(target: Target, now_s: float) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Tells the pieces that may be looked at now, and where what may be with each ends."""
    pieces = target.pieces
    if not 0 < len(pieces) <= MOST_PIECES:
        return np.zeros(len(pieces), np.bool_), pieces["end"]
    is_due = ~is_zoomed(pieces) | (now_s - pieces["zoomed_s"] > AGAIN_S)
    is_due &= np.logical_not(target.fixed)  # whatever its pages are, they stay
    end = _ends(pieces, is_due)
    return is_due & (end - pieces["start"] >= LEAST_PAGES * PAGE_BYTES), end


def _ends(pieces: NDArray[np.void], is_due: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Returns for each piece where the pieces that adjoin it, and are due likewise, end."""
    last = ends_of_runs(pieces, is_due)
    return np.asarray(pieces["end"][last][np.searchsorted(last, np.arange(len(pieces)))])


def ends_of_runs(pieces: NDArray[np.void], flags: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Returns the last piece of each run of pieces that adjoin each other with the same flag.

    Args:
        pieces: dtype PIECE, sorted and disjoint; at least one.
        flags: of each.
    """
    parted = (pieces["start"][1:] != pieces["end"][:-1]) | (flags[1:] != flags[:-1])
    return np.asarray(np.r_[np.flatnonzero(parted), len(pieces) - 1])


def _is_doubtful(target: Target, hot: float) -> NDArray[np.bool_]:
    pieces, heat = target.pieces, score(target.pieces)
    slow = pieces["resident"][:, 1:].sum(axis=1) > 0
    hides_hot = slow & (heat < hot) & (heat >= HIDDEN * hot)
    lacks_room = np.isin(pieces["kept"], LACKS_ROOM)
    makes_way = ~slow & lacks_room.any() & (heat >= hot)
    return np.asarray((hides_hot | lacks_room | makes_way) & _is_unsure(target), np.bool_)


def _is_unsure(target: Target) -> NDArray[np.bool_]:
    return is_unsure(target.pieces, SURE * target.ceiling)
