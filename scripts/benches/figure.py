# SPDX-License-Identifier: Apache-2.0
"""What a benchmark yields."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


class NotHere(Exception):
    """What a bench needs is not in this machine: what, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured value, with the range of its rounds and the bound it is held to.

    A figure without a bound is told for its own sake, and always holds.
    """

    name: str
    value: float
    unit: str
    lowest: float
    highest: float
    at_least: float | None = None
    at_most: float | None = None

    @classmethod
    def of_rounds(
        cls,
        name: str,
        rounds: Sequence[float],
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> Self:
        """The median of several rounds."""
        return cls(
            name=name,
            value=statistics.median(rounds),
            unit=unit,
            lowest=min(rounds),
            highest=max(rounds),
            at_least=at_least,
            at_most=at_most,
        )

    @property
    def bound(self) -> str | None:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return None if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def holds(self) -> bool:
        if self.at_least is not None and self.value < self.at_least:
            return False
        return self.at_most is None or self.value <= self.at_most
