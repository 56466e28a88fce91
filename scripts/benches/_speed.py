# SPDX-License-Identifier: Apache-2.0
"""How fast the CPU of a load computes: the host's doing, and not to be taken for a contender's.

An emulated CPU is as fast as its host lets it be, which changes by a half within minutes, and where
CPUs take turns as the other one lets it: far more than any contender costs. See steps.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from guests.workloads import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Taken so far by the programs of a load, and the CPU time that they took."""

    count: int
    cpu_ns: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """What all programs tell."""
        return cls(
            count=sum(sample.steps for sample in samples),
            cpu_ns=sum(sample.steps_ns for sample in samples),
        )

    def per_s(self, since: Self) -> float:
        """Returns how many were taken in a second of CPU time."""
        return (self.count - since.count) / (self.cpu_ns - since.cpu_ns) * 1e9
