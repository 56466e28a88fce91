# SPDX-License-Identifier: Apache-2.0
"""How finely a kdamond looks, so that all of them stay within their share of a core.

A kdamond's work grows with its regions and with how often it samples. Thrift is by how many times
that work is to be less than configured: 1 is as configured. Where the kernel tunes the intervals
(intervals_goal), thrift bounds the regions alone, and else both by its square root.
"""

import math
from dataclasses import dataclass

from tierd.config import DamonConfig
from tierd.kernel.damon import Goal, Setup

STRETCH = 10
"""Intervals grow to at most so many times the configured ones, regions shrink to that share."""

AIM = 0.8
"""The share of the budget that a change aims at: room, so that it isn't exceeded again at once."""
SLACK = 0.6
"""Below this share of the budget thrift is given up, a little at a time."""
STEP_UP, STEP_DOWN = 2.0, 1.25

GOAL_ACCESS_BP, GOAL_AGGREGATIONS = 400, 3
"""What DAMON's own users in the kernel take: 4 % of the most accesses that could be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a target is watched now. `cpu_percent` is of a core, None before it was measured."""

    sample_us: int
    aggregation_us: int
    max_regions: int
    thrift: float
    cpu_percent: float | None


def next_thrift(thrift: float, *, used: float, budget: float, most: float) -> float:
    """Returns the thrift to go on with.

    Args:
        thrift: the present one.
        used: CPU time of the kdamond, in any unit.
        budget: what it may use, in the same unit.
        most: the largest thrift that there is room for.
    """
    if SLACK * budget <= used <= budget:
        return thrift
    factor = min(STEP_UP, max(1 / STEP_DOWN, used / (AIM * budget)))
    return min(most, max(1.0, thrift * factor))


def most_thrift(*, has_goal: bool) -> float:
    return STRETCH if has_goal else STRETCH**2


def setup(
    config: DamonConfig, *, thrift: float, has_goal: bool, mark_us: int, regions_at_most: int
) -> Setup:
    """Returns what to write for a thrift.

    Args:
        config: the configured intervals and regions.
        thrift: 1 and above.
        has_goal: the kernel tunes the intervals, from the configured ones up.
        mark_us: the update interval, by which the slot is known as ours.
        regions_at_most: a bound beside the configured one.
    """
    stretch = 1.0 if has_goal else math.sqrt(thrift)
    regions = min(config.max_regions / thrift * stretch, regions_at_most)
    least = min(config.min_regions, regions_at_most)
    return Setup(
        sample_us=round(config.sample_us * stretch),
        aggregation_us=round(config.aggregation_us * stretch),
        update_us=mark_us,
        min_regions=least,
        max_regions=max(least, round(regions)),
        goal=_goal(config) if has_goal else None,
    )


def _goal(config: DamonConfig) -> Goal:
    return Goal(
        access_bp=GOAL_ACCESS_BP,
        aggregations=GOAL_AGGREGATIONS,
        min_sample_us=config.sample_us,
        max_sample_us=STRETCH * config.sample_us,
    )
