# SPDX-License-Identifier: Apache-2.0
"""Replays what was recorded in a guest: how fast, and how near to what the program measured.

A hot window of 64 MiB in a buffer of 256 MiB, which moves half-way, in the slow-node guest with
room for a window and a half. The replay is of the policy that was recorded, on the host.
"""

import subprocess
import tempfile
import time
from pathlib import Path

from guests.boot import boot
from guests.guest import REPOSITORY
from guests.kernels import Kernel
from guests.recordings import mean_hit_ratio, record
from guests.topology import slow_node

from benches.figure import Figure
from tierd.observe.moments import Recording, load
from tierd.replay import configured, replay

SECONDS, ROUNDS = 120, 15
LEAST_TIMES, MOST_POINTS = 1000, 3


def run() -> list[Figure]:
    subprocess.run([REPOSITORY / "scripts" / "setup", "vm"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "window.tierd"
        with boot(slow_node(), Kernel.LATEST) as guest:
            measured = record(guest, path, SECONDS)
        recording, stored_bytes = load(path), path.stat().st_size
    truth = mean_hit_ratio(measured, recording.begun_s, recording.ended_s)
    predicted = replay(recording, configured(recording)).hit_ratio
    return [
        Figure.of_rounds(
            f"{recording.seconds:.0f} s of a guest: real time is",
            [recording.seconds / replay_s(recording) for _ in range(ROUNDS)],
            "times",
            at_least=LEAST_TIMES,
        ),
        Figure.of_rounds("hits in fast memory, measured", [100 * truth], "%"),
        Figure.of_rounds("hits in fast memory, predicted", [100 * predicted], "%"),
        Figure.of_rounds(
            "predicted less measured", [100 * abs(predicted - truth)], "points", at_most=MOST_POINTS
        ),
        Figure.of_rounds("the recording takes", [stored_bytes / recording.seconds / 1024], "KiB/s"),
    ]


def replay_s(recording: Recording) -> float:
    """How long one replay takes."""
    begin_s = time.perf_counter()
    replay(recording, configured(recording))
    return time.perf_counter() - begin_s
