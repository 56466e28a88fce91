# SPDX-License-Identifier: Apache-2.0
"""An arena's blocks as pieces, so that placement decides on them as on a process's memory.

Blocks need not be neighbours to be alike: all on one tier whose heat is the same to half an octave
are one piece. So however many blocks there are, and however their heat is scattered, there are a
few hundred pieces at most. A piece's addresses are no more than its size.

Counts are exact, and an access is of a whole block: of each of its pages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import NEVER, PIECE
from tierd.decide.heat import COLD_PER_PAGE_S
from tierd.model import MAX_TIERS, PAGE_BYTES, Policy

NOWHERE = 255
"""The place of a block that is on no tier."""

_BINS = 1 << 9
_HELD = MAX_TIERS * _BINS
_NO_GROUP = 2 * _HELD
_HALF_OCTAVE = 22
"""Less so many of its lower bits a float has its exponent left, and a bit of its fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Blocks that are alike: `pieces` (dtype PIECE), the group of each piece, and of each block."""

    pieces: NDArray[np.void]
    group: NDArray[np.intp]
    of_block: NDArray[np.uint16]


def take_in(
    average: NDArray[np.float32],
    counted: NDArray[np.uint32],
    seconds: float,
    time_constant_s: float,
    block_bytes: int,
) -> None:
    """Takes the accesses of so many seconds into an average, per byte and second, in place."""
    weight = -math.expm1(-seconds / time_constant_s)
    unit = min(block_bytes, PAGE_BYTES)
    average *= np.float32(1 - weight)
    average += counted.astype(np.float32) * np.float32(weight / seconds / unit)


def groups(
    short: NDArray[np.float32],
    long: NDArray[np.float32],
    places: NDArray[np.uint8],
    held: NDArray[np.bool_],
    block_bytes: int,
) -> Groups:
    """Divides blocks by where they are, how hot, and whether they are not to be moved now.

    Args:
        short: averages of each block, as of take_in().
        long: likewise.
        places: the tier of each, or NOWHERE.
        held: what is not to be moved now.
        block_bytes: of each.
    """
    heat = (short + long) / 2
    heat[heat * np.float32(PAGE_BYTES) < COLD_PER_PAGE_S] = 0
    key = (heat.view(np.uint32) >> np.uint32(_HALF_OCTAVE)).astype(np.uint16)
    key += places.astype(np.uint16) * np.uint16(_BINS) + held * np.uint16(_HELD)
    key[places >= MAX_TIERS] = _NO_GROUP
    count = np.bincount(key, minlength=_NO_GROUP + 1)[:_NO_GROUP]
    group = np.flatnonzero(count)
    pieces = np.zeros(len(group), PIECE)
    for name in NEVER:
        pieces[name] = -np.inf
    pieces["end"] = np.cumsum(count[group]) * block_bytes
    pieces["start"][1:] = pieces["end"][:-1]
    for name, average in (("short", short), ("long", long)):
        pieces[name] = np.bincount(key, average, _NO_GROUP)[group] / count[group]
    pieces["resident"][np.arange(len(group)), group % _HELD // _BINS] = 1
    pieces["held_until_s"][group >= _HELD] = np.inf
    return Groups(pieces=pieces, group=group, of_block=key)


def commands(
    moves: NDArray[np.void], found: Groups, free_slots: Sequence[int], block_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Returns which blocks are to go to which tier, those that make way before those that rise.

    Only as many are sent down as there are slots free: for more, which have to change places with
    what rises, the arena itself finds who makes way.

    Args:
        moves: of a plan of these pieces alone (dtype MOVE), in its order.
        found: the pieces, and which blocks they are of.
        free_slots: of each tier.
        block_bytes: of each block.
    """
    left, taken = list(free_slots), np.zeros(len(found.of_block), np.bool_)
    ids: list[NDArray[np.int64]] = []
    tiers: list[NDArray[np.uint8]] = []
    index = np.searchsorted(found.pieces["start"], moves["start"])
    for group, move in zip(found.group[index], moves, strict=True):
        most = round(float(move["bytes"]) / block_bytes)
        if (tier := int(move["destination"])) > move["source"]:
            most = min(most, left[tier])
            left[tier] -= most
        these = np.flatnonzero((found.of_block == group) & ~taken)[:most]
        taken[these] = True
        ids.append(these.astype(np.int64))
        tiers.append(np.full(len(these), tier, np.uint8))
    if not ids:
        return np.zeros(0, np.int64), np.zeros(0, np.uint8)
    return np.concatenate(ids), np.concatenate(tiers)


def copied(before: NDArray[np.uint8], after: NDArray[np.uint8], tiers: int) -> NDArray[np.int64]:
    """Returns how many blocks have left each tier or come to it, going by where they were and are.

    A block that was given up meanwhile was not copied. What came and went again is not seen.
    """
    moved = (before != after) & (after != NOWHERE)
    both = np.concatenate([before[moved], after[moved]])
    return np.bincount(both, minlength=NOWHERE + 1)[:tiers].astype(np.int64)


def retry_s(tries: NDArray[np.uint8], policy: Policy) -> NDArray[np.float64]:
    """Returns how long blocks rest that did not come to where they were sent so many times."""
    wait_s = policy.retry_s * 2.0 ** (tries.astype(np.float64) - 1)
    return np.asarray(np.minimum(wait_s, policy.retry_most_s), np.float64)
