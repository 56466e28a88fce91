# SPDX-License-Identifier: Apache-2.0
"""What a look at single pages teaches: which of them are hotter than others."""

import math

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Accesses
from tierd.decide.heat import coalesce, cut, means, overlay, rate_of
from tierd.model import Policy

UNEQUAL = 1.5
"""Variance of the pages' counts, in that of one kind, from which they are of more than one."""
NEAR_ALL = 0.9
"""Seen accessed in this share of the intervals a page may be hotter than that can tell."""

_RUN = np.dtype([("start", "u8"), ("end", "u8"), ("rate", "f8"), ("is_bound", "?")])


def magnify(pieces: NDArray[np.void], accesses: Accesses, policy: Policy) -> NDArray[np.void]:
    """Returns the pieces with a zoomed snapshot taken in: cut where pages of two kinds meet.

    A piece's mean moves towards that of its pages that were looked at, as by any snapshot, but not
    down where some of these were hotter than could be seen, and not at all where the snapshot's
    counts are relative. The kinds of pages then divide it as they were seen. Where pages differ by
    no more than by accident, nothing is cut. Where single pages lie is to be looked at anew if they
    didn't all lie in one tier.

    Args:
        pieces: dtype PIECE, sorted and disjoint.
        accesses: zoomed.
        policy: gives the time constants of the averages.
    """
    if not len(pieces):
        return pieces
    runs = _runs(accesses)
    start, end, (piece_at, run_at) = overlay(pieces, runs)
    known = piece_at >= 0
    parts = cut(pieces, start[known], end[known], piece_at[known])
    near = np.flatnonzero(run_at[known] >= 0)
    piece, run = piece_at[known][near], runs[run_at[known][near]]
    looked = parts.take(near)
    size = (looked["end"] - looked["start"]).astype(np.float64)
    mean = means(run["rate"], size, piece)
    is_bound = np.bincount(piece, run["is_bound"])[piece] > 0
    share = np.where(mean > 0, run["rate"] / np.where(mean > 0, mean, 1), 1.0)
    for name, time_constant_s in (("short", policy.short_s), ("long", policy.long_s)):
        weight = 0 if accesses.relative else -math.expm1(-accesses.aggregation_s / time_constant_s)
        change = weight * (mean - looked[name])
        level = looked[name] + np.where(is_bound, np.maximum(change, 0), change)
        looked[name] = level * share
    looked["zoomed_s"] = accesses.at_s
    resident = looked["resident"]
    looked["probed_s"][((resident > 0) & (resident < 1)).any(axis=1)] = -np.inf
    parts[near] = looked
    return coalesce(parts, accesses.at_s, most=len(parts))


def is_unequal(accesses: Accesses) -> bool:
    """Tells whether a zoomed snapshot has found pages of more than one kind."""
    return bool(_bounds(*_counts(accesses), accesses.max_accesses))


def _runs(accesses: Accesses) -> NDArray[np.void]:
    """Joins the regions of a zoomed snapshot to runs of one kind each, dtype _RUN.

    `rate` is the mean of all pages of the kind; `is_bound` tells that it may be higher.
    """
    regions, (count, size) = accesses.regions, _counts(accesses)
    bounds = _bounds(count, size, accesses.max_accesses)
    kind = np.searchsorted(bounds, count)
    begins = np.ones(len(regions), np.bool_)
    begins[1:] = (kind[1:] != kind[:-1]) | (regions["start"][1:] != regions["end"][:-1])
    first = np.flatnonzero(begins)
    runs = np.empty(len(first), _RUN)
    runs["start"] = regions["start"][first]
    runs["end"] = regions["end"][np.r_[first[1:] - 1, -1]]
    mean = np.bincount(kind, count * size) / np.maximum(np.bincount(kind, size), 1)
    most = np.zeros(len(mean))
    np.maximum.at(most, kind, count)
    runs["rate"] = rate_of(mean, accesses)[kind[first]]
    runs["is_bound"] = (most >= NEAR_ALL * accesses.max_accesses)[kind[first]]
    return runs


def _counts(accesses: Accesses) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Returns the regions' counts, and their bytes."""
    regions = accesses.regions
    count = np.minimum(regions["nr_accesses"], accesses.max_accesses).astype(np.intp)
    return count, (regions["end"] - regions["start"]).astype(np.float64)


def _bounds(count: NDArray[np.intp], size: NDArray[np.float64], most: int) -> list[int]:
    """Returns the highest count of each kind of pages but the hottest, the coldest first.

    Of one kind counts vary by accident as in a binomial distribution of `most` trials. Where their
    variance is far above its, there are two at least, which Otsu's method parts: where the means
    of what is below and above differ most. Each of them is then tried likewise.
    """
    found, todo = [], [(0, np.bincount(count, size))]
    while todo:
        first, bytes_of = todo.pop()
        values = first + np.arange(len(bytes_of))
        total, mean = bytes_of.sum(), np.average(values, weights=bytes_of)
        by_accident = mean * (1 - mean / most)
        if np.average((values - mean) ** 2, weights=bytes_of) <= UNEQUAL * by_accident:
            continue
        below = np.cumsum(bytes_of)[:-1]
        gap = np.cumsum(bytes_of * values)[:-1] - below * mean
        last = int(np.argmax(gap**2 / np.maximum(below * (total - below), 1)))
        found.append(first + last)
        todo += [(first, bytes_of[: last + 1]), (first + last + 1, bytes_of[last + 1 :])]
    return sorted(found)
