# SPDX-License-Identifier: Apache-2.0
"""Settling: what a round's report teaches about where pieces lie and when to try them again.

What was moved rests for a while, so that it cannot swing back at once. What was refused is tried
again after a time that doubles with every refusal in a row: pinned, shared or locked pages cost a
few attempts an hour, not a few a second.
"""

import numpy as np
from numpy.typing import NDArray

from tierd.decide.heat import overlay
from tierd.model import PAGE_BYTES, Outcome, Policy, Report

REFUSED = [outcome for outcome in Outcome if outcome.is_refusal]
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
    for source, destination in np.unique(moves[mine][["source", "destination"]]):
        these = np.flatnonzero(
            mine & (moves["source"] == source) & (moves["destination"] == destination)
        )
        these = these[np.argsort(moves["start"][these])]
        pieces = _settle_pair(pieces, report, these, policy, now_s)
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
    _rest(touched, moved, refused, policy, now_s)
    touched["probed_s"] = now_s
    parts[hit] = touched
    return parts


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


def _rest(
    pieces: NDArray[np.void],
    moved: NDArray[np.int64],
    refused: NDArray[np.int64],
    policy: Policy,
    now_s: float,
) -> None:
    turned_down = refused > SETTLED_SHARE * (moved + refused)
    refusals = np.where(turned_down, np.minimum(pieces["refusals"] + 1, 15), 0)
    wait_s = np.minimum(policy.retry_s * 2.0 ** (refusals - 1.0), policy.retry_most_s)
    rest_s = np.where(turned_down, wait_s, np.where(moved > 0, policy.dwell_s, 0.0))
    pieces["refusals"] = refusals
    pieces["held_until_s"] = np.maximum(pieces["held_until_s"], now_s + rest_s)
