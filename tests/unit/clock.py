# SPDX-License-Identifier: Apache-2.0
"""A clock that the test drives, and arenas whose limits of bandwidth go by it."""

import pytest

from tierd.arena.bandwidth import Bandwidth


class Clock:
    """Seconds since the test began; those that wait for it look again when it goes on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.bandwidths: list[Bandwidth] = []

    def __call__(self) -> float:
        return self.now_s

    def bandwidth(self) -> Bandwidth:
        self.bandwidths.append(Bandwidth(self))
        return self.bandwidths[-1]

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds
        for bandwidth in self.bandwidths:
            bandwidth.wake()

    def drives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has arenas that are made from now on go by it."""
        monkeypatch.setattr("tierd.arena.arena.Bandwidth", self.bandwidth)
