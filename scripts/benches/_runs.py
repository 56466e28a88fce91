# SPDX-License-Identifier: Apache-2.0
"""A load under a contender: what it did each second, and what that comes to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from guests.workloads import Sample

ARRIVED = 0.95

STAYS_SECONDS = 5
"""For so long at least: in a first second whose faults take all of it, few accesses say much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """A second of all programs of a load."""

    t: float
    """Of the program whose seconds take longest, with what it tells after each."""
    window: int
    ops_per_s: tuple[float, ...]
    """Of each program."""
    hit_ratio: float
    """The share of all accesses that went to fast memory."""
    hot_ratio: float
    """The share that went to hot memory, and so the least that a good placement hits."""

    @property
    def has_arrived(self) -> bool:
        return self.hit_ratio >= ARRIVED * self.hot_ratio


def second(samples: Sequence[Sample]) -> Second:
    """What each program tells of a second, taken together."""
    total = sum(sample.ops_per_s for sample in samples)
    return Second(
        t=min(sample.t for sample in samples),
        window=sum(sample.window for sample in samples),
        ops_per_s=tuple(sample.ops_per_s for sample in samples),
        hit_ratio=sum(s.hit_ratio * s.ops_per_s for s in samples) / total,
        hot_ratio=sum(s.hot_ratio * s.ops_per_s for s in samples) / total,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast programs went for some seconds, and their CPU."""

    ops_per_s: tuple[float, ...]
    """Of each program."""
    instructions_per_s: float
    """Of the CPU while it had a task, whosever they were."""


def at_speed(instructions_per_s: float, alone: Pace, busy: Pace) -> tuple[float, ...]:
    """Returns the accesses a second of each program on a CPU of that speed.

    Emulated CPUs take turns, so that one is slower while another is busy, by far more than any
    contender costs. Accesses go with its instructions, less those that each second takes whatever
    its CPU does (ticks, reports), so that these are told from two speeds.

    Args:
        instructions_per_s: the speed.
        alone: how fast they go by themselves.
        busy: and while another CPU is busy.
    """
    slower = alone.instructions_per_s - busy.instructions_per_s
    lost = (alone.instructions_per_s - instructions_per_s) / slower if slower else 0.0
    pairs = zip(alone.ops_per_s, busy.ops_per_s, strict=True)
    return tuple(ops - lost * (ops - less) for ops, less in pairs)


def least_pages(
    first: Sequence[Sample], last: Sequence[Sample], came_pages: int, room_pages: int
) -> int:
    """Pages that have to be moved to have each hot window in fast memory, and all it holds now.

    What was there before makes way where there is no room: hot windows, and page cache.

    Args:
        first: what the programs told at first.
        last: and in the end.
        came_pages: what they have in fast memory now, and had not before.
        room_pages: how much of them there was room for when they had started.
    """
    windows = [1 + end.window - start.window for start, end in zip(first, last, strict=True)]
    hot = sum(end.hot_pages * count for end, count in zip(last, windows, strict=True))
    most = max(hot, came_pages)
    return most + max(0, most - room_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A load under a contender, and right afterwards with nothing at work."""

    load: str
    contender: str
    seconds: tuple[Second, ...]
    pace: Pace
    alone: Pace
    """With nothing at work afterwards,"""
    busy: Pace
    """and with nothing but a loop on another CPU."""
    moved_pages: int
    least_pages: int
    cpu_percent: float

    @property
    def hit_ratio(self) -> float:
        return statistics.mean(second.hit_ratio for second in self.seconds)

    @property
    def throughput(self) -> float:
        """Its accesses a second, of those with nothing at work on a CPU that is as fast.

        Of the program that fares worst.
        """
        nothings = at_speed(self.pace.instructions_per_s, self.alone, self.busy)
        pairs = zip(self.pace.ops_per_s, nothings, strict=True)
        return min(own / bare for own, bare in pairs)

    @property
    def moved_times(self) -> float:
        """What was moved, of the least."""
        return self.moved_pages / self.least_pages

    @property
    def arrived_s(self) -> float:
        """Seconds until the hits were there to stay, the mean of the windows, in tenths.

        A window in which they never were counts with its length. By some thousandths seconds are
        too long, as a program looks at its clock now and then.
        """
        mean = statistics.mean(
            (of_it[-1] if there is None else there).t - of_it[0].t
            for of_it, there in self._arrivals()
        )
        return round(mean, 1)

    @property
    def has_arrived(self) -> bool:
        """Whether they were there in each window."""
        return all(there is not None for _, there in self._arrivals())

    def _arrivals(self) -> Iterator[tuple[list[Second], Second | None]]:
        """Yields each window's seconds, and the one in which the hits were there to stay."""
        for window in sorted({second.window for second in self.seconds}):
            of_it = [second for second in self.seconds if second.window == window]
            yield of_it, _arrival(of_it)


def _arrival(seconds: Sequence[Second]) -> Second | None:
    """Returns the first second that has the hits, as it and those after it have on average."""
    for number, first in enumerate(seconds):
        then = seconds[number : number + STAYS_SECONDS]
        hits, hot = sum(s.hit_ratio for s in then), sum(s.hot_ratio for s in then)
        if first.has_arrived and hits >= ARRIVED * hot:
            return first
    return None
