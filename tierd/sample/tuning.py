# SPDX-License-Identifier: Apache-2.0
"""How finely a kdamond looks, so that all of them stay within their share of a core.

A kdamond's work grows with its regions and with how often it samples. Thrift is by how many times
that work is to be less than configured: 1 is as configured. Half of it, as factors go, comes from
longer intervals and half from fewer regions.

A process is divided into as many regions as it has MiB, or a few, within what is configured. DAMON
joins neighbours whose counts differ by a tenth of the most at most, and of memory that is accessed
at random now and then many differ by more: ever smaller regions would tell of chance alone.

Where the kernel can tune the intervals (intervals_goal), it does so between those and twice those.
It aims at a share of accesses over all that it watches, which for a process includes what isn't
mapped: DAMON leaves out the two largest gaps alone. In a guest a third one, of 512 MiB beside a
buffer of 64, thinned 12 % of accesses to 2 %, and the kernel, free to do so, stretched 20 ms to
110 ms, where a page touched four times a second looks as hot as one touched a hundred times.
"""

import math
from dataclasses import dataclass

from tierd.config import DamonConfig
from tierd.kernel.damon import Goal, Setup

STRETCH = 5
"""Intervals grow to at most so many times the configured ones, regions shrink to that share."""
MOST_THRIFT = float(STRETCH**2)

AIM = 0.8
"""The share of the budget that a change aims at: room, so that it isn't exceeded again at once."""
SLACK = 0.6
"""Below this share of the budget thrift is given up, a little at a time."""
STEP_UP, STEP_DOWN = 2.0, 1.25
CALM = 2.0
"""The least thrift while nothing happens."""

REGION_BYTES, REGROWN = 1 << 20, 1.25
"""So much memory for a region; regions become more or fewer with it by this factor."""
FEW_REGIONS, FEW_OF_LEAST = 400, 4
"""So many at any rate, and so many times the fewest: DAMON cuts none while they are more than half
of the most, and joins none that leave fewer than the fewest."""

GOAL_ACCESS_BP, GOAL_AGGREGATIONS = 400, 3
"""What DAMON's own users in the kernel take: 4 % of the most accesses that could be seen."""
GOAL_STRETCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a target is watched now. `cpu_percent` is of a core, None before it was measured."""

    sample_us: int
    aggregation_us: int
    max_regions: int
    thrift: float
    cpu_percent: float | None


def next_thrift(thrift: float, *, used: float, budget: float) -> float:
    """Returns the thrift to go on with.

    Args:
        thrift: the present one.
        used: CPU time of the kdamond, in any unit.
        budget: what it may use, in the same unit.
    """
    if SLACK * budget <= used <= budget:
        return thrift
    factor = min(STEP_UP, max(1 / STEP_DOWN, used / (AIM * budget)))
    return min(MOST_THRIFT, max(1.0, thrift * factor))


def is_regrown(setup: Setup, wanted: Setup) -> bool:
    """Tells whether a process has grown or shrunk so much that it is to have other regions."""
    few, many = sorted((setup.max_regions, wanted.max_regions))
    return many > REGROWN * few


def setup(
    config: DamonConfig, *, thrift: float, resident_bytes: int, has_goal: bool, mark_us: int
) -> Setup:
    """Returns what to write for a thrift.

    Args:
        config: the configured intervals and regions.
        thrift: from 1 to MOST_THRIFT.
        resident_bytes: what the process has.
        has_goal: the kernel can tune the intervals.
        mark_us: the update interval, by which the slot is known as ours.
    """
    stretch = math.sqrt(thrift)
    sample_us = round(config.sample_us * stretch)
    few_regions = max(FEW_OF_LEAST * config.min_regions, FEW_REGIONS)
    most_regions = min(config.max_regions, max(few_regions, resident_bytes // REGION_BYTES))
    goal = Goal(
        access_bp=GOAL_ACCESS_BP,
        aggregations=GOAL_AGGREGATIONS,
        min_sample_us=sample_us,
        max_sample_us=GOAL_STRETCH * sample_us,
    )
    return Setup(
        sample_us=sample_us,
        aggregation_us=round(config.aggregation_us * stretch),
        update_us=mark_us,
        min_regions=config.min_regions,
        max_regions=max(config.min_regions, round(most_regions / stretch)),
        goal=goal if has_goal else None,
    )
