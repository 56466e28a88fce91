# SPDX-License-Identifier: Apache-2.0
"""What has become hot lately, and what has ceased to be: told before the long average tells.

A hot set that moves leaves memory behind whose long average stays for ten seconds, and goes to
memory whose own has to grow first. By their scores they change places after 3.6 s at the earliest,
however hot both are. It is like renting or buying: once the one has had as many accesses more than
the other as both moves have to win back, they would have paid, and waiting on costs more than to be
wrong (ski rental, which is at most twice as dear as knowing what comes). A pause is not that: what
takes the place of memory that was hot has to be about as hot as that was.
"""

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Floats
from tierd.decide.heat import at_most, beyond_doubt
from tierd.model import Policy

NEW = 3.0
"""Memory is newly hot whose short average is so many times its long one: for 4 s, by default."""


def newly_hot(
    short: NDArray[np.float32], long: NDArray[np.float32], paid: float, policy: Policy
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Returns which memory has become hot lately, and the heat that it has beyond doubt since.

    It is the short average less two deviations, as assured() has of the score, once there have been
    accesses enough to win back its moves.

    Args:
        short: accesses per byte and second, of each piece.
        long: likewise.
        paid: accesses per byte that win back a move up and one down.
        policy: gives the time constants.
    """
    new = np.flatnonzero((short >= np.float32(NEW) * long) & (long >= paid / policy.long_s))
    return new, beyond_doubt(short[new], policy, deviations=2)


def newly_cold(
    short: NDArray[np.float32], long: NDArray[np.float32], paid: float, policy: Policy
) -> tuple[NDArray[np.intp], Floats]:
    """Returns which memory was hot and is idle, and the heat that it makes way with.

    It has been idle for as long as it takes its averages to part. What is to take its place has won
    back both moves in that time, is hotter than it may be now, and about as hot as it was.

    Args:
        short: accesses per byte and second, of each piece.
        long: likewise.
        paid: accesses per byte that win back a move up and one down.
        policy: gives the time constants, and the hysteresis that comes on top.
    """
    may_be = at_most(short, policy)
    idle = np.flatnonzero(long > may_be)
    now, before = may_be[idle], long[idle].astype(np.float64)
    idle_s = np.log(before / now) / (1 / policy.short_s - 1 / policy.long_s)
    won_back = paid / idle_s / policy.hysteresis
    return idle, np.maximum.reduce([now, won_back, before / policy.hysteresis**2])
