# SPDX-License-Identifier: Apache-2.0
"""The guard: where moves up don't pay, or the machine is short of memory, it holds them back.

Of each target it looks at what was moved lately. What had to make way before its moves were won
back was better left alone, and so was what turned cold at its new place, by the share of its moves
that was not won back. Where that is too much of it, nothing of the target is moved up for a while,
which doubles each time. It still makes way for others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Flags, Floats
from tierd.decide.heat import score
from tierd.decide.settle import MOST_TIMES
from tierd.decide.worth import both_ways, hot_from, warm_from
from tierd.model import PAGE_BYTES, Policy

LEAST_BYTES = 512 * PAGE_BYTES
"""Less than so much that was moved lately is no evidence."""

FEW_OF_HOT, CHEAP_SHARE = 0.5, 0.005
"""Nor are moves of less than this share of what is hot in faster tiers already, at less than this
share of the time: most of that came there by other means, and they are its edges."""

EASY_SHARE = 0.5
"""Waiting for memory is no matter below this share of stall_percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What the guard has found of a target. Moves before `since_s` have been judged."""

    strikes: int = 0
    since_s: float = -np.inf
    rests_until_s: float = -np.inf

    def rests(self, now_s: float) -> bool:
        """Tells whether nothing of the target is to be moved up."""
        return now_s < self.rests_until_s


def judge(
    guard: Guard,
    pieces: NDArray[np.void],
    ceiling: float,
    policy: Policy,
    *,
    now_s: float,
    gaps_ns: Sequence[float] = (),
) -> Guard:
    """Returns what is known with the target's pieces as they are now; see regret()."""
    if guard.rests(now_s):
        return guard
    if guard.strikes and now_s - guard.rests_until_s > policy.retry_most_s:
        guard = replace(guard, strikes=0)
    regrets = regret(guard, pieces, ceiling, policy, now_s=now_s, gaps_ns=gaps_ns)
    if regrets * 100 <= policy.regret_percent:
        return guard
    rest_s = min(policy.horizon_s * 2.0**guard.strikes, policy.retry_most_s)
    strikes = min(guard.strikes + 1, MOST_TIMES)
    return Guard(strikes=strikes, since_s=now_s, rests_until_s=now_s + rest_s)


def regret(
    guard: Guard,
    pieces: NDArray[np.void],
    ceiling: float,
    policy: Policy,
    *,
    now_s: float,
    gaps_ns: Sequence[float] = (),
) -> float:
    """Returns how much of what was moved lately was better left alone: 0 to 1.

    Args:
        guard: what has been judged before.
        pieces: the target's (dtype PIECE).
        ceiling: the heat above which its samples cannot tell pieces apart.
        policy: what a move costs, and has to win back.
        now_s: the instant that `held_until_s` is compared with.
        gaps_ns: those of the last plan: what was worth a move over one of them is not cold there.
            Empty before the first one.
    """
    judged_s = policy.dwell_s + policy.horizon_s
    since_s = max(guard.since_s, now_s - judged_s - policy.horizon_s)
    lately = (pieces["rose"] != 0) & (pieces["moved_s"] > since_s)
    if not lately.any():
        return 0.0
    moved = pieces.take(np.flatnonzero(lately))
    size = (moved["end"] - moved["start"]) * moved["resident"].sum(axis=1)
    moved_bytes = float(size.sum())
    if moved_bytes < LEAST_BYTES:
        return 0.0
    gaps_ns = gaps_ns or (policy.latency_gap_ns,)
    swung = (moved["rose"] < 0) & (moved["swings"] > 0)
    has_rested = moved["held_until_s"] <= now_s
    cold = _is_cold(moved, ceiling, policy, gaps_ns)
    unused = (moved["rose"] > 0) & has_rested & cold
    better_left = np.where(unused, _owing(moved, policy, gaps_ns), swung)
    is_judged = moved["moved_s"] > now_s - judged_s
    regretted_bytes = float((size * better_left)[is_judged].sum())
    cost_s = moved_bytes / PAGE_BYTES * policy.move_cost_ns * 1e-9
    is_cheap = cost_s < CHEAP_SHARE * (judged_s + policy.horizon_s)
    if regretted_bytes and is_cheap:  # all pieces are looked at only where that matters
        hot_bytes = _hot_bytes(pieces, ceiling, policy, gaps_ns)
        if moved_bytes < FEW_OF_HOT * hot_bytes:
            return 0.0
    return regretted_bytes / moved_bytes


def _owing(pieces: NDArray[np.void], policy: Policy, gaps_ns: Sequence[float]) -> Floats:
    """Returns the share of what their moves cost that was not won back; 0 to 1."""
    cost = both_ways(policy, np.cumsum(gaps_ns[::-1])[::-1])[_rank(pieces, gaps_ns)]
    owed = np.minimum(pieces["owed"], cost)
    share: Floats = np.divide(owed, cost, out=np.zeros(len(pieces)), where=cost > 0)
    return share


def _hot_bytes(
    pieces: NDArray[np.void], ceiling: float, policy: Policy, gaps_ns: Sequence[float]
) -> float:
    """Returns how much of them is in a tier that is not the slowest, and not cold there."""
    faster = pieces["resident"][:, : len(gaps_ns)].sum(axis=1)
    size = (pieces["end"] - pieces["start"]) * faster
    return float(size[~_is_cold(pieces, ceiling, policy, gaps_ns)].sum())


def _is_cold(
    pieces: NDArray[np.void], ceiling: float, policy: Policy, gaps_ns: Sequence[float]
) -> Flags:
    """Tells which are not worth the tier that most of them is in, by far."""
    worth = np.array(
        [min(hot_from(ceiling, policy, [gap]), warm_from(policy, gap)) for gap in gaps_ns]
    )
    return np.asarray(score(pieces) * policy.hysteresis < worth[_rank(pieces, gaps_ns)])


def _rank(pieces: NDArray[np.void], gaps_ns: Sequence[float]) -> NDArray[np.intp]:
    """Returns the tier that most of each is in, and of the slowest the one above."""
    return np.asarray(np.minimum(pieces["resident"].argmax(axis=1), len(gaps_ns) - 1), np.intp)


def promotable(stall_percent: float | None, policy: Policy) -> float:
    """Returns which share of the budget may be used to move up, 0 to 1.

    Args:
        stall_percent: how much of the time tasks waited for memory lately, None where the kernel
            doesn't tell.
        policy: `stall_percent` is from where on nothing is moved up.
    """
    if stall_percent is None:
        return 1.0
    easy = EASY_SHARE * policy.stall_percent
    return float(np.clip(1 - (stall_percent - easy) / (policy.stall_percent - easy), 0, 1))
