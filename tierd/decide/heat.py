# SPDX-License-Identifier: Apache-2.0
"""Heat: how often each byte of a target is accessed, whatever way DAMON cut it into regions.

DAMON checks one page of a region every sampling interval and cuts the regions anew after every
aggregation (Documentation/mm/damon/design.rst, "Adaptive Regions Adjustment"), so counts of two
aggregations belong to different ranges. A target's heat is therefore a function over its address
space, kept as pieces (model.PIECE): a snapshot's regions are laid over the pieces, both are cut at
each other's edges, and every part's averages take in the new rate. Neighbours that have become
alike are joined again.

Where single pages were looked at (a zoomed snapshot), pieces are cut between hot and cold pages.
From then on a region's rate is that of its pages together, and is divided among them as it was
found to be, until that is too long ago.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierd.bulk import NEVER, PIECE, Accesses
from tierd.model import MAX_TIERS, PAGE_BYTES, Policy

PAGES_OF_HUGE = 512
"""Base pages that share an accessed bit where a huge page is mapped, of 2 MiB."""
ALWAYS = 0.95
"""Share of the ceiling from which memory is accessed in nearly every interval."""
COLD_PER_PAGE_S = 1 / 60
"""Pages accessed less often than once a minute are alike: cold."""

BINS_PER_OCTAVE = 2
ZOOM_KEPT_S = 600.0
"""For so long a look at single pages tells how a region's accesses are divided."""

SURELY_SEEN = 3.0
"""Of so many accesses on average one at least is made, but once in twenty times."""

PIECES_PER_REGION = 4
PIECES_AT_LEAST = 64

Ranges = NDArray[np.void]
"""A structured array with fields `start` and `end`, sorted and disjoint."""


def rates(accesses: Accesses) -> NDArray[np.float32]:
    """Returns each region's accesses per byte and second.

    DAMON sees whether a page was accessed in a sampling interval, not how often. If accesses come
    at random at rate r, an interval T sees one with probability 1 - exp(-r T), so r is
    -log(1 - share) / T. A region seen in every interval is given half an interval missed.
    """
    return rate_of(accesses.regions["nr_accesses"], accesses)


def rate_of(count: ArrayLike, accesses: Accesses) -> NDArray[np.float32]:
    """Returns the accesses per byte and second of pages with such counts; see rates()."""
    most = accesses.max_accesses
    share = np.minimum(np.asarray(count) / most, 1 - 1 / (2 * most))
    return np.asarray(-np.log1p(-share) / accesses.sample_s / PAGE_BYTES, np.float32)


def ceiling(accesses: Accesses) -> float:
    """Returns the rate of a region that was seen in every interval; its true one may be higher."""
    return math.log(2 * accesses.max_accesses) / accesses.sample_s / PAGE_BYTES


def score(pieces: NDArray[np.void]) -> NDArray[np.float32]:
    """Returns the heat that pieces are ranked by: the mean of the short and the long average.

    The short one lets a new hot set in within seconds, the long one keeps a hot set through a
    pause of seconds.
    """
    return np.asarray((pieces["short"] + pieces["long"]) / 2, np.float32)


def assured(pieces: NDArray[np.void], policy: Policy) -> NDArray[np.float32]:
    """Returns the heat that pieces have beyond doubt: their score less twice its deviation.

    A region's count is one page looked at per interval, so a score of r accesses per second comes
    from some r x 2 x short_s events in its short half (an exponential average over a time constant
    weighs like a plain one over twice that), and the long half adds next to no noise: it deviates
    by half of what a short average does. Two accidental hits on a cold region then don't make it
    worth a move.
    """
    return beyond_doubt(score(pieces), policy, deviations=1)


def beyond_doubt(
    rate: NDArray[np.float32], policy: Policy, *, deviations: float
) -> NDArray[np.float32]:
    """Returns rates less so many deviations of a short average of that rate."""
    per_page_s = rate * PAGE_BYTES
    deviation = np.sqrt(per_page_s / (2 * policy.short_s))
    least = np.maximum(per_page_s - deviations * deviation, 0) / PAGE_BYTES
    return np.asarray(least, np.float32)


def warmth(
    short: NDArray[np.float32], long: NDArray[np.float32], policy: Policy
) -> NDArray[np.float64]:
    """Returns the heat that pieces of these averages have had for long, and may still have.

    What was not hit lately may be as warm as that allows; see at_most().
    """
    return np.minimum(long.astype(np.float64), at_most(short, policy))


def at_most(short: NDArray[np.float32], policy: Policy) -> NDArray[np.float64]:
    """Returns the heat that pieces of such a short average may have, though none was seen."""
    return short.astype(np.float64) + SURELY_SEEN / (2 * policy.short_s) / PAGE_BYTES


def of_single_pages(pieces: NDArray[np.void], ceiling: float) -> NDArray[np.void]:
    """Returns pieces whose heat is that of each page on average, also where they are huge.

    DAMON sees one accessed bit of a huge page, so its rate is that of all of its pages together.
    One that is accessed in nearly every interval may be as hot throughout, and is left as it is.

    Args:
        pieces: dtype PIECE.
        ceiling: of their rates.
    """
    most = np.maximum(score(pieces), pieces["short"])
    divided = np.flatnonzero(pieces["huge"] & (most < ALWAYS * ceiling))
    if not len(divided):
        return pieces
    pieces = pieces.copy()
    for name in ("short", "long"):
        pieces[name][divided] /= PAGES_OF_HUGE
    return pieces


def fold(
    pieces: NDArray[np.void], seen: Sequence[Accesses], mapped: Ranges, policy: Policy
) -> NDArray[np.void]:
    """Returns the pieces with snapshots taken in, limited to the mapped ranges.

    Args:
        pieces: dtype PIECE, sorted and disjoint; empty at first.
        seen: complete snapshots, not zoomed ones, in order; at least one.
        mapped: the target's mappings. What lies outside of them, or of the regions of the last
            snapshot, is forgotten. What others have no region of was not accessed by then.
        policy: gives the time constants of the averages.
    """
    layers = [accesses.regions for accesses in seen]
    start, end, (piece_at, mapped_at, *regions_at) = overlay(pieces, mapped, *layers)
    known = (regions_at[-1] >= 0) & (mapped_at >= 0)
    parts = cut(pieces, start[known], end[known], piece_at[known])
    now_s = seen[-1].at_s
    _forget_zoom(parts, now_s)
    zoomed = is_zoomed(parts)
    size = (parts["end"] - parts["start"]).astype(np.float64)
    for accesses, regions in zip(seen, regions_at, strict=True):
        # Index -1, of parts without a region, is that of one more, without an access.
        region_at = regions[known] % (len(accesses.regions) + 1)
        rate = np.append(rates(accesses), np.float32(0))[region_at]
        if zoomed.any():
            rate = divided(parts, rate, region_at, size)
        _average(parts, rate, accesses.aggregation_s, policy)
    _forget_moves(parts, now_s, policy)
    most = max(PIECES_AT_LEAST, PIECES_PER_REGION * len(layers[-1]))
    return coalesce(parts, now_s, most=most + int(zoomed.sum()))


def _average(
    pieces: NDArray[np.void], rate: NDArray[np.float32], time_s: float, policy: Policy
) -> None:
    """Takes in a rate that was seen for so long."""
    for name, time_constant_s in (("short", policy.short_s), ("long", policy.long_s)):
        weight = -math.expm1(-time_s / time_constant_s)
        pieces[name] += np.float32(weight) * (rate - pieces[name])
    pieces["owed"] = np.maximum(pieces["owed"] - rate * np.float32(time_s), 0)


def is_zoomed(pieces: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tells the pieces whose pages were looked at one by one, and are known to be alike."""
    return np.asarray(np.isfinite(pieces["zoomed_s"]), np.bool_)


def divided(
    parts: NDArray[np.void],
    rate: NDArray[np.float32],
    region: NDArray[np.intp],
    size: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Returns each part's rate: its region's, in regions with zoomed parts divided by their scores.

    Args:
        parts: dtype PIECE, each inside of one region, as far as its heat goes.
        rate: their regions' rates.
        region: their regions, in rising order.
        size: their bytes.
    """
    near = np.flatnonzero(np.bincount(region, is_zoomed(parts))[region] > 0)
    heat = score(parts[near]).astype(np.float64)
    mean = means(heat, size[near], region[near])
    divided = rate.copy()
    divided[near] *= np.where(mean > 0, heat / np.where(mean > 0, mean, 1), 1.0)
    return divided


def means(
    values: NDArray[np.float64], size: NDArray[np.float64], group: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Returns for each value the mean of its group, weighted by size."""
    total = np.bincount(group, values * size)
    return np.asarray((total / np.maximum(np.bincount(group, size), 1))[group], np.float64)


def _forget_zoom(pieces: NDArray[np.void], now_s: float) -> None:
    """Takes pages for alike again whose last look was too long ago."""
    old = is_zoomed(pieces) & (pieces["zoomed_s"] < now_s - ZOOM_KEPT_S)
    pieces["zoomed_s"][old] = -np.inf


def overlay(
    *layers: Ranges,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], tuple[NDArray[np.intp], ...]]:
    """Cuts ranges at each other's edges.

    Returns:
        start and end of every part, and for each layer the index of the range that covers it, -1
        where none does.
    """
    edges = np.concatenate([_edges(layer) for layer in layers])
    order = edges.argsort(kind="stable")
    edges = edges[order]
    new = np.ones(len(edges), np.bool_)
    new[1:] = edges[1:] != edges[:-1]
    at = np.empty(len(edges), np.intp)
    at[order] = new.cumsum() - 1
    edges = edges[new]
    covering, done = [], 0
    for layer in layers:
        bounds = at[done : done + 2 * len(layer)]
        covering.append(_covering(bounds, len(edges) - 1))
        done += len(bounds)
    return edges[:-1], edges[1:], tuple(covering)


def _edges(ranges: Ranges) -> NDArray[np.uint64]:
    """Returns start and end of each range, in order."""
    edges = np.empty((len(ranges), 2), np.uint64)
    edges[:, 0], edges[:, 1] = ranges["start"], ranges["end"]
    return edges.ravel()


def _covering(bounds: NDArray[np.intp], parts: int) -> NDArray[np.intp]:
    """Returns the index of the range that covers each part, -1 where none does.

    Args:
        bounds: for each range the first part that it covers, and the first that it does not.
        parts: how many there are.
    """
    index = np.full(len(bounds) + 1, -1, np.intp)
    index[1::2] = np.arange(len(bounds) // 2)
    cuts = np.zeros(len(bounds) + 2, np.intp)
    cuts[1:-1], cuts[-1] = bounds, parts
    return index.repeat(cuts[1:] - cuts[:-1])


def cut(
    pieces: NDArray[np.void],
    start: NDArray[np.uint64],
    end: NDArray[np.uint64],
    piece_at: NDArray[np.intp],
) -> NDArray[np.void]:
    """Returns pieces cut to [start, end); a part that no piece covers knows nothing yet."""
    if piece_at.min(initial=0) < 0:
        unknown = np.zeros(1, PIECE)
        for name in NEVER:
            unknown[name] = -np.inf
        pieces = concatenate([pieces, unknown])
    # Index -1, of parts that no piece covers, takes the last row.
    parts = pieces.take(piece_at, mode="wrap")
    parts["start"], parts["end"] = start, end
    return parts


def concatenate(arrays: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
    """Returns pieces after each other, by whole rows: field by field takes ten times as long.

    One array alone is returned as it is.
    """
    if len(arrays) == 1:
        return arrays[0]
    row = np.dtype(f"V{PIECE.itemsize}")
    return np.concatenate([array.view(row) for array in arrays]).view(PIECE)


def _forget_moves(pieces: NDArray[np.void], now_s: float, policy: Policy) -> None:
    """Forgets what is owed for a move once it has been free to move for a horizon, the rest later.

    The guard compares each move with those of a horizon before it.
    """
    moved = np.flatnonzero(pieces["rose"] | pieces["swings"])
    free_s = now_s - pieces["held_until_s"][moved]
    for name, most_s in (
        ("owed", policy.horizon_s),
        ("rose", 2 * policy.horizon_s),
        ("swings", policy.retry_most_s),
    ):
        pieces[name][moved[free_s > most_s]] = 0


def coalesce(pieces: NDArray[np.void], now_s: float, *, most: int) -> NDArray[np.void]:
    """Joins neighbours that are alike in heat, place and history.

    Alike is: in the same bin of a logarithmic scale of heat, half an octave wide. Where that leaves
    more than `most` pieces, the bins are made wider.
    """
    bins_per_octave = float(BINS_PER_OCTAVE)
    joined = _join(pieces, now_s, bins_per_octave)
    while len(joined) > most and bins_per_octave > 1 / 32:
        bins_per_octave /= 2
        joined = _join(joined, now_s, bins_per_octave)
    return joined


def _join(pieces: NDArray[np.void], now_s: float, bins_per_octave: float) -> NDArray[np.void]:
    if len(pieces) < 2:
        return pieces
    tiers = _used_tiers(pieces)
    likeness = _likeness(pieces, tiers, now_s, bins_per_octave)
    begins = np.ones(len(pieces), np.bool_)
    begins[1:] = pieces["end"][:-1] != pieces["start"][1:]
    begins[1:] |= likeness[1:] != likeness[:-1]
    first = np.flatnonzero(begins)
    if len(first) == len(pieces):
        return pieces
    joined = pieces.take(first)
    joined["end"][:-1], joined["end"][-1] = pieces["end"][first[1:] - 1], pieces["end"][-1]
    weight = (pieces["end"] - pieces["start"]).astype(np.float64)
    total = np.add.reduceat(weight, first)
    for name in ("short", "long", "owed"):
        joined[name] = np.add.reduceat(pieces[name] * weight, first) / total
    for tier in tiers:
        share = pieces["resident"][:, tier]
        joined["resident"][:, tier] = np.add.reduceat(share * weight, first) / total
    joined["probed_s"] = np.minimum.reduceat(pieces["probed_s"], first)
    joined["zoomed_s"] = np.minimum.reduceat(pieces["zoomed_s"], first)
    joined["held_until_s"] = np.maximum.reduceat(pieces["held_until_s"], first)
    return joined


def _likeness(
    pieces: NDArray[np.void], tiers: Sequence[int], now_s: float, bins_per_octave: float
) -> NDArray[np.int64]:
    """Returns one number a piece, equal for pieces that may be joined."""
    per_page_s = np.maximum(score(pieces) * PAGE_BYTES, COLD_PER_PAGE_S)
    heat = np.floor(np.log2(per_page_s / COLD_PER_PAGE_S) * bins_per_octave).astype(np.int64)
    place = np.zeros(len(pieces), np.int64)
    for tier in tiers:
        share = pieces["resident"][:, tier]
        place = 3 * place + (share > 0.02) + (share > 0.98)
    held = pieces["held_until_s"] > now_s
    looked = (np.isfinite(pieces["probed_s"]) * 2 + is_zoomed(pieces)) * 2 + pieces["huge"]
    # Refusals and swings are 0 to 15.
    moves = (pieces["swings"] * 3 + pieces["rose"] + 1) * 2 + (pieces["owed"] > 0)
    history = ((pieces["refusals"] * 2 + held) * 8 + looked) * 96 + moves
    return np.asarray((heat * 3**MAX_TIERS + place) * (256 * 96) + history, np.int64)


def _used_tiers(pieces: NDArray[np.void]) -> list[int]:
    used: list[int] = np.flatnonzero(pieces["resident"].any(axis=0)).tolist()
    return used
