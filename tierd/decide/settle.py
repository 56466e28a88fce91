# SPDX-License-Identifier: Apache-2.0
"""Settling: what a round's report teaches about where pieces lie and when to try them again.

What was moved rests for a while, so that it cannot swing back at once. What was refused is tried
again after a time that doubles with every refusal in a row: pinned, shared or locked pages cost a
few attempts an hour, not a few a second. What was moved up and soon makes way again, before its
accesses have won back what both moves cost, rests likewise, ever longer.
"""

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import PIECE, Plan, Report
from tierd.decide.heat import concatenate, overlay
from tierd.decide.worth import both_ways
from tierd.model import PAGE_BYTES, Outcome, Policy

REFUSED = [outcome for outcome in Outcome if outcome.is_refusal]
MOST_TIMES = 15
"""What doubles a rest is counted up to here; retry_most_s is reached before."""

SETTLED_SHARE = 0.5
"""A walk in which more than this share of the pages was refused counts as refused."""


def settle(
    pieces: NDArray[np.void], report: Report, target: int, policy: Policy, *, now_s: float
) -> NDArray[np.void]:
    """Returns the target's pieces as they are after the moves.

    Args:
        pieces: dtype PIECE, the ones the plan was made from.
        report: what became of the plan.
        target: index of the target in the plan.
        policy: gives the resting times.
        now_s: the instant that they count from.
    """
    moves = report.plan.moves
    mine = (moves["target"] == target) & (report.reached > moves["start"])
    if not mine.any():
        return pieces
    near = _overlapping(pieces, moves["start"][mine], report.reached[mine])
    parts = pieces.take(np.flatnonzero(near))
    for source, destination in np.unique(moves[mine][["source", "destination"]]):
        these = np.flatnonzero(
            mine & (moves["source"] == source) & (moves["destination"] == destination)
        )
        these = these[np.argsort(moves["start"][these])]
        parts = _settle_pair(parts, report, these, policy, now_s)
    return _in_place_of(pieces, near, parts)


def unsettle(pieces: NDArray[np.void]) -> NDArray[np.void]:
    """Returns the pieces with their heat alone: where they lie is to be looked at again.

    That is for when the tiers are others than before. What was refused may not be any more.
    """
    pieces = pieces.copy()
    for name in ("resident", "refusals", "rose", "owed", "swings", "huge"):
        pieces[name] = 0
    for name in ("probed_s", "held_until_s", "moved_s"):
        pieces[name] = -np.inf
    return pieces


def _settle_pair(
    pieces: NDArray[np.void],
    report: Report,
    these: NDArray[np.intp],
    policy: Policy,
    now_s: float,
) -> NDArray[np.void]:
    """Settles moves of one source and destination; their ranges are disjoint and sorted."""
    moves = report.plan.moves[these]
    walked = np.zeros(len(these), [("start", "u8"), ("end", "u8")])
    walked["start"], walked["end"] = moves["start"], report.reached[these]
    start, end, (piece_at, walk_at) = overlay(pieces, walked)
    inside = piece_at >= 0
    parts = pieces.take(piece_at[inside])
    parts["start"], parts["end"] = start[inside], end[inside]

    hit = np.flatnonzero(walk_at[inside] >= 0)
    walk = walk_at[inside][hit]
    touched = parts.take(hit)
    pages = report.pages[these][walk]
    moved, refused = pages[:, Outcome.MOVED], pages[:, REFUSED].sum(axis=1)
    length = (walked["end"] - walked["start"])[walk]
    _relocate(touched, moves[walk], moved * PAGE_BYTES / length, refused * PAGE_BYTES / length)
    _note_moves(touched, moves[walk], moved > 0, _cost(report.plan, moves[walk], policy), now_s)
    _rest(touched, moved, refused, policy, now_s)
    touched["probed_s"] = now_s
    parts[hit] = touched
    return parts


def _overlapping(
    pieces: NDArray[np.void], start: NDArray[np.uint64], end: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Tells the pieces that overlap with any of some ranges."""
    first = np.searchsorted(pieces["end"], start, "right")
    behind = np.searchsorted(pieces["start"], end, "left")
    begun, ended = (np.bincount(at, minlength=len(pieces) + 1) for at in (first, behind))
    return np.asarray(np.cumsum(begun - ended)[:-1] > 0, np.bool_)


def _in_place_of(
    pieces: NDArray[np.void], old: NDArray[np.bool_], parts: NDArray[np.void]
) -> NDArray[np.void]:
    """Returns the pieces with parts, which are sorted like them, in place of the old ones."""
    rows = np.r_[np.flatnonzero(~old), len(pieces) + np.arange(len(parts))]
    both = concatenate([pieces, parts])
    order = np.argsort(both["start"][rows], kind="stable")
    return np.asarray(both.take(rows[order]), PIECE)


def _relocate(
    pieces: NDArray[np.void],
    moves: NDArray[np.void],
    moved: NDArray[np.float64],
    refused: NDArray[np.float64],
) -> None:
    """Sets the shares of source and destination; the walk saw every page of the source."""
    row = np.arange(len(pieces))
    resident = pieces["resident"]
    resident[row, moves["source"]] = refused
    arrived = resident[row, moves["destination"]] + moved
    resident[row, moves["destination"]] = np.minimum(arrived, 1.0)


def _cost(plan: Plan, moves: NDArray[np.void], policy: Policy) -> NDArray[np.float64]:
    """Returns the accesses per byte that win back moves up and their way down; 0 of moves down."""
    height_ns = np.r_[0.0, np.cumsum(plan.gaps_ns)]
    gap_ns = height_ns[moves["source"]] - height_ns[moves["destination"]]
    up = gap_ns > 0
    return np.where(up, both_ways(policy, np.where(up, gap_ns, 1)), 0)


def _note_moves(
    pieces: NDArray[np.void],
    moves: NDArray[np.void],
    moved: NDArray[np.bool_],
    cost: NDArray[np.float64],
    now_s: float,
) -> None:
    up = moves["destination"] < moves["source"]
    back = moved & ~up & (pieces["rose"] > 0)
    swings = np.minimum(pieces["swings"] + 1, MOST_TIMES) * (pieces["owed"] > 0)
    pieces["swings"] = np.where(back, swings, pieces["swings"])
    pieces["owed"] = np.where(moved, (pieces["owed"] + cost) * up, pieces["owed"])
    pieces["rose"] = np.where(moved, np.where(up, 1, -1), pieces["rose"])
    pieces["moved_s"] = np.where(moved, now_s, pieces["moved_s"])


def _rest(
    pieces: NDArray[np.void],
    moved: NDArray[np.int64],
    refused: NDArray[np.int64],
    policy: Policy,
    now_s: float,
) -> None:
    turned_down = refused > SETTLED_SHARE * (moved + refused)
    refusals = np.where(turned_down, np.minimum(pieces["refusals"] + 1, MOST_TIMES), 0)
    swings = np.where((moved > 0) & (pieces["rose"] < 0), pieces["swings"], 0)
    times = np.maximum(refusals, swings)
    wait_s = np.minimum(policy.retry_s * 2.0 ** (times - 1.0), policy.retry_most_s)
    dwell_s = np.where(moved > 0, policy.dwell_s, 0.0)
    rest_s = np.where(times > 0, np.maximum(wait_s, dwell_s), dwell_s)
    pieces["refusals"] = refusals
    pieces["held_until_s"] = np.maximum(pieces["held_until_s"], now_s + rest_s)
