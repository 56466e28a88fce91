# SPDX-License-Identifier: Apache-2.0
"""How many of a target's accesses go below the fastest tier, and for which memory that matters.

How often the hottest pages are accessed counts for no more than that of others: what a program
accesses all the time, its code and its tables, would hide that all its data are below.
"""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Flags, Floats
from tierd.decide.heat import score
from tierd.decide.worth import hot_from
from tierd.model import Policy

HOTTEST = 0.1
"""This share of a target's memory counts as hot as the coldest of it."""
FEW = 0.03
"""This share of a target's accesses is few."""
LUKEWARM = 1 / 16
"""And so are those of a page below this share of what the page of an access has on average."""
HALF, NEARLY_ALL = 0.5, 0.95
"""These shares of the accesses of what has to rise, hottest first."""

_LESS_BITS = 18
"""Of a float32, that a bin of a histogram leaves out: 5 of its 23 bits of precision are left."""
_ROWS = 8192
"""So many pieces the cache of a CPU holds."""

Singles: TypeAlias = NDArray[np.float32]


class Lacking(NamedTuple):
    """Memory of a target that has to rise until few of its accesses go below."""

    bytes: float
    heat: float
    """From which on it has half of the accesses of all of it; infinite where there is none."""


class _Bins(NamedTuple):
    """Memory by its heat, which is told to three percent: floats from 0 on are as their bits."""

    of_piece: NDArray[np.uint32]
    heat: Floats
    """Of each bin, none beyond that of the coldest of the hottest memory."""
    accesses: Floats
    """In a second."""


def below(pieces: NDArray[np.void]) -> float | None:
    """Returns the share of a target's accesses that go below the fastest tier now, 0 to 1.

    It is None where there are no accesses, or to less than a tenth of its memory alone.

    Those count among them of which it is not known where they go. Of a piece on several tiers the
    hottest pages are taken to be in the fastest, as steps.times_the_mean() has it: with the share
    `f` there, `(1 - f)^2` of its accesses go below.
    """
    bins, present, lies_below = _sorted(pieces, itemgetter("short"))
    total = float(bins.accesses.sum())
    if not total:
        return None
    share = np.divide(lies_below, np.maximum(present, 1), dtype=np.float32)
    return float((_by_bin(bins, lies_below * share) * bins.heat).sum()) / total


def lacking(pieces: NDArray[np.void]) -> Lacking:
    """Returns what of a target has to rise until few of its accesses go below."""
    heat, has_to = _has_to_rise(pieces, score)
    return Lacking(bytes=float(has_to.sum()), heat=_heat_of(HALF, heat, has_to))


def least_heat(pieces: NDArray[np.void]) -> float:
    """Returns the heat from which on what of a target has to rise has nearly all of its accesses.

    Of what has been accessed for a second or two, of which the long average tells less than there
    is, it is that of the short one. It is infinite where nothing has to rise.
    """
    return _heat_of(NEARLY_ALL, *_has_to_rise(pieces, _now_or_for_long))


def _now_or_for_long(pieces: NDArray[np.void]) -> Singles:
    return np.asarray(np.maximum(score(pieces), pieces["short"]), np.float32)


def _has_to_rise(
    pieces: NDArray[np.void], heat: Callable[[NDArray[np.void]], Singles]
) -> tuple[Floats, Floats]:
    """Returns bins of heat, and the bytes of each that are not among the few below."""
    bins, _, lies_below = _sorted(pieces, heat)
    below_bytes = _by_bin(bins, lies_below)
    return bins.heat, np.where(_few(bins, below_bytes), 0.0, below_bytes)


def _heat_of(share: float, heat: Floats, size: Floats) -> float:
    """Returns the heat from which on memory has that share of its accesses; infinite of none."""
    no_hotter = np.cumsum(size * heat)
    if not len(no_hotter) or not no_hotter[-1]:
        return math.inf
    return float(heat[np.searchsorted(no_hotter, (1 - share) * no_hotter[-1])])


def cold_bytes(pieces: NDArray[np.void], ceiling: float, policy: Policy) -> float:
    """Returns how much of a target is in the fastest tier and too cold for it.

    Of a piece with the share `f` there, whose accesses may all go to that, it is `1 / f` times as
    hot as the piece at most. What is worth a move to that tier is not cold there; see hot_from().
    """
    shares = pieces["resident"][:, 0]
    is_cold = score(pieces) * policy.hysteresis < shares * hot_from(ceiling, policy)
    return float(((pieces["end"] - pieces["start"]) * shares)[is_cold].sum())


def is_spare(pieces: NDArray[np.void]) -> Flags:
    """Tells which pieces of a target gain next to nothing in the fastest tier.

    All of them that are not there have few of its accesses together, and each of their pages is
    accessed far less often than those that have most: of memory that is alike none is spare.
    """
    bins, _, lies_below = _sorted(pieces, score)
    total = float(bins.accesses.sum())
    if not total:
        return False
    mean = float((bins.accesses * bins.heat).sum()) / total
    is_few = _few(bins, _by_bin(bins, lies_below))
    return np.asarray((is_few & (bins.heat < LUKEWARM * mean))[bins.of_piece], np.bool_)


def _sorted(
    pieces: NDArray[np.void], heat: Callable[[NDArray[np.void]], Singles]
) -> tuple[_Bins, Singles, Singles]:
    """Returns a target's memory by its heat, each piece's bytes, and those that are below.

    Some thousands at a time, since for each field all of a row is read.
    """
    heats, presents, belows = (np.empty(len(pieces), np.float32) for _ in range(3))
    for begin in range(0, len(pieces), _ROWS):
        rows = slice(begin, begin + _ROWS)
        part = pieces[rows]
        resident = part["resident"]
        present = np.einsum("ij->i", resident)  # a fifth of the time that sum() takes
        present[np.isinf(part["probed_s"])] = 1.0
        size = (part["end"] - part["start"]).astype(np.float32)
        heats[rows], presents[rows] = heat(part), size * present
        belows[rows] = size * (present - resident[:, 0])
    return _bins(heats, presents), presents, belows


def _bins(heat: Singles, size: Singles) -> _Bins:
    """Sorts memory by its heat."""
    of_piece = np.asarray(np.ascontiguousarray(heat).view(np.uint32) >> _LESS_BITS, np.uint32)
    bytes_ = np.bincount(of_piece, size)
    least = (np.arange(len(bytes_), dtype=np.uint32) << _LESS_BITS).view(np.float32)
    if len(least):
        hotter = np.cumsum(bytes_[::-1])
        coldest = len(least) - 1 - np.searchsorted(hotter, HOTTEST * hotter[-1])
        least = np.minimum(least, least[coldest])
    bounded = least.astype(np.float64)
    return _Bins(of_piece, bounded, bytes_ * bounded)


def _by_bin(bins: _Bins, size: Singles) -> Floats:
    """Returns the bytes of each bin."""
    return np.asarray(np.bincount(bins.of_piece, size, len(bins.heat)), np.float64)


def _few(bins: _Bins, below_bytes: Floats) -> NDArray[np.bool_]:
    """Tells the bins that have few accesses below, together with all that are no hotter."""
    no_hotter = np.cumsum(below_bytes * bins.heat)
    return np.asarray(no_hotter <= FEW * bins.accesses.sum(), np.bool_)
