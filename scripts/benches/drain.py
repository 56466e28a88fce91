# SPDX-License-Identifier: Apache-2.0
"""What tierctl cxl drain takes off a node a second, beside the mover, in a guest of each kernel.

A drain begins and ends with looking at all of the machine, and takes the region apart. The guest is
emulated, so only the ratio says something; the times are told with it.
"""

import json
import subprocess

from guests.boot import boot
from guests.guest import REPOSITORY
from guests.kernels import Kernel
from guests.topology import Emulator, cxl

from benches.figure import Figure
from benches.mover import LOOP, build

TIMEOUT_S = 900


def run() -> list[Figure]:
    subprocess.run([REPOSITORY / "scripts" / "setup", "vm"], check=True)
    build()
    return [figure for kernel in Kernel for figure in on(kernel)]


def on(kernel: Kernel) -> list[Figure]:
    """Boots a guest and measures in it."""
    with boot(cxl(512, emulator=Emulator.FAST), kernel) as guest:
        nodes = [str(guest.facts.fast[0]), str(guest.facts.slow[0])]
        done = guest.run(
            ["python", "-m", "benches._drain_inside", LOOP, *nodes],
            env={"PYTHONPATH": f"{REPOSITORY}/scripts"},
            timeout=TIMEOUT_S,
        )
    told = json.loads(done.stdout)
    mover, drain = zip(*told["rounds"], strict=True)
    return [
        Figure.of_rounds(
            f"{kernel}: a drain's speed, of the mover's",
            [ours / theirs for ours, theirs in told["rounds"]],
            "times",
        ),
        Figure.of_rounds(
            f"{kernel}: drained", [told["bytes"] / ns * 1e9 / 2**20 for ns in drain], "MiB/s"
        ),
        Figure.of_rounds(
            f"{kernel}: moved", [told["bytes"] / ns * 1e9 / 2**20 for ns in mover], "MiB/s"
        ),
    ]
