# SPDX-License-Identifier: Apache-2.0
"""A fake sampler, which plays snapshots again at their own pace, and the recording to play.

tests/data/README.md tells what was recorded.
"""

import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tierd.bulk import NO_LOADS, REGION, Accesses
from tierd.model import Pid
from tierd.sample.tuning import Tuning

RECORDING = Path(__file__).parents[1] / "data/hotset-records.npy.xz"
MIB = 1 << 20
BUFFER = range(0x7F97_E740_0000, 0x7F97_E740_0000 + 256 * MIB)
"""The recorded program's buffer, and the part of it that is hot."""
WINDOW = range(BUFFER.start, BUFFER.start + 64 * MIB)


def recorded(path: Path = RECORDING) -> list[Accesses]:
    """Returns the recorded snapshots, with the seconds since the first."""
    with lzma.open(path) as file:
        rows = np.load(file)
    instants, first = np.unique(rows["at_s"], return_index=True)
    return [_snapshot(part, part["at_s"][0] - instants[0]) for part in np.split(rows, first[1:])]


def _snapshot(rows: "np.typing.NDArray[np.void]", at_s: float) -> Accesses:
    regions = np.zeros(len(rows), REGION)
    for name in REGION.names or ():
        regions[name] = rows[name]
    return Accesses(
        pid=Pid(0),
        at_s=float(at_s),
        sample_s=float(rows["sample_us"][0]) / 1e6,
        aggregation_s=float(rows["aggregation_us"][0]) / 1e6,
        regions=regions,
    )


class Replay:
    """A fake: no DAMON, the same snapshots for each watched process, from when it is watched on.

    Args:
        snapshots: oldest first, `at_s` since the first.
        clock: CLOCK_MONOTONIC, or what plays it.
        loop: begin again after the last one, as long after it as it came after the one before.
    """

    way = "replay"
    losses = 0
    zoomed_pages = 0
    sampling = None
    loads = NO_LOADS
    is_calm = can_look = can_zoom = False

    def __init__(
        self, snapshots: Sequence[Accesses], clock: Callable[[], float], *, loop: bool = False
    ) -> None:
        self.snapshots, self.clock = snapshots, clock
        self.tuning: Mapping[Pid, Tuning] = {}
        self.begun_s: dict[Pid, float] = {}
        self._played: dict[Pid, int] = {}
        instants = [accesses.at_s for accesses in snapshots]
        self._lap_s = 2 * instants[-1] - instants[-2] if loop else float("inf")

    def watch(self, pid: Pid) -> None:
        self.begun_s.setdefault(pid, self.clock())
        self._played.setdefault(pid, 0)

    def unwatch(self, pid: Pid) -> None:
        self.begun_s.pop(pid, None)
        self._played.pop(pid, None)

    def zoom(self, pid: Pid, start: int, end: int, *, per_page_s: float) -> bool:
        return False

    def poll(self) -> list[Accesses]:
        now_s, due = self.clock(), []
        for pid in self.begun_s:
            while (accesses := self._next(pid)).at_s <= now_s:
                due.append(accesses)
                self._played[pid] += 1
        return sorted(due, key=lambda accesses: accesses.at_s)

    def _next(self, pid: Pid) -> Accesses:
        lap, index = divmod(self._played[pid], len(self.snapshots))
        accesses = self.snapshots[index]
        lap_s = lap * self._lap_s if lap else 0.0
        return replace(accesses, pid=pid, at_s=self.begun_s[pid] + lap_s + accesses.at_s)

    def gone(self) -> list[Pid]:
        return []

    def filenos(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self.begun_s.clear()
