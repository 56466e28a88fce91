# SPDX-License-Identifier: Apache-2.0
"""The gaps between a program's copies, in which others are made step by step."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import TypeAlias

Aside: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Within what it returns, one short step is made of what gives way to the program."""

_LATEST = 8
_REST_S = 0.1
"""What is longer is no gap: the program rests."""

_REST_TIMES = 4.0
"""So is what is so many times longer than the latest gaps."""


class Gaps:
    """Foretells from the latest gaps, and from the latest steps, whether one more step fits.

    One thread at a time copies, and one makes steps.

    Args:
        now_s: a clock that does not go back.
    """

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._has_ended = threading.Event()
        self._end_s: float | None = 0.0
        """Of the program's last copy; None while one is under way."""
        self._gaps: tuple[float, ...] = ()
        self._steps: tuple[float, ...] = ()

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Is where the program copies."""
        if self._end_s is not None and (gap_s := self._now_s() - self._end_s) < _REST_S:
            self._gaps = (*self._gaps, gap_s)[-_LATEST:]
        self._end_s = None
        try:
            yield
        finally:
            self._end_s = self._now_s()
            self._has_ended.set()

    @contextmanager
    def step(self, until_s: float) -> Iterator[None]:
        """Is where a step is made: in a gap, unless none was found until then."""
        self._wait(until_s)
        begin_s = self._now_s()
        try:
            yield
        finally:
            self._steps = (*self._steps, self._now_s() - begin_s)[-_LATEST:]

    def _wait(self, until_s: float) -> None:
        while (now_s := self._now_s()) < until_s and not self._fits(now_s):
            self._has_ended.clear()
            if self._has_ended.wait(min(until_s, self._rest_at_s()) - now_s):
                return  # a gap begins now

    def _fits(self, now_s: float) -> bool:
        end_s = self._end_s
        if end_s is None:
            return False
        foretold_s = min(self._gaps, default=0.0) - max(self._steps, default=0.0)
        return now_s <= end_s + foretold_s or now_s >= self._rest_at_s()

    def _rest_at_s(self) -> float:
        """Returns from when on the program is taken to rest."""
        end_s = self._end_s
        if end_s is None:
            return float("inf")
        return end_s + min(_REST_S, _REST_TIMES * max(self._gaps, default=0.0))
