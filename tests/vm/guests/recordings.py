# SPDX-License-Identifier: Apache-2.0
"""A recording of a hot window that moves, and what its program measured meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from guests.guest import Guest
from guests.tiering import FOLDER, ballast, tierd
from guests.workloads import hotset

WINDOW_MIB, BUFFER_MIB, FREE_MIB, SHARE = 64, 256, 90, 98
RECORDING = f"{FOLDER}/window.tierd"

RULE = """
[[target]]
command = "hotset"
[policy]
latency_gap_ns = 4000.0  # an emulated CPU makes a twentieth of the accesses, and moves take longer
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A second of the program: when it ended, by CLOCK_MONOTONIC, and its hits in fast memory."""

    at_s: float
    hit_ratio: float
    ops_per_s: float


def record(guest: Guest, path: Path, seconds: float) -> list[Measured]:
    """Records tierd in a guest, a window moving half-way; `path` is the recording, on the host.

    The seconds count from when tierd is up, which takes half a minute where the host is slow.
    """
    options = ("--mib", f"{BUFFER_MIB}", "--hot-mib", f"{WINDOW_MIB}", "--share", f"{SHARE}")
    with hotset(guest, *options, "--node", "1") as load:
        first = load.sample()
        begun_s = guest.uptime_s() - first.t
        guest.run(["rm", "-f", RECORDING])  # of another try
        with tierd(guest, "--record", RECORDING, settings=RULE) as running:
            running.wait_until_up()
            load.skip_to(guest.uptime_s() - begun_s)
            samples = list(load.samples(seconds / 2))
            with ballast(guest, FREE_MIB - WINDOW_MIB):
                load.move_window()
                samples += load.samples(seconds / 2)
        path.write_bytes(guest.read(RECORDING))
    return [
        Measured(at_s=begun_s + s.t, hit_ratio=s.hit_ratio, ops_per_s=s.ops_per_s) for s in samples
    ]


def mean_hit_ratio(measured: Sequence[Measured], begun_s: float, ended_s: float) -> float:
    """The share of all accesses between two instants that went to fast memory."""
    during = [second for second in measured if begun_s + 1 <= second.at_s <= ended_s]
    accesses = sum(second.ops_per_s for second in during)
    return sum(second.hit_ratio * second.ops_per_s for second in during) / accesses
