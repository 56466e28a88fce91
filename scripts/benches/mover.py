# SPDX-License-Identifier: Apache-2.0
"""The mover beside a C loop over move_pages(2) at its best batch size, in a guest of each kernel.

The guest is emulated, so only the ratio says something; the times are told with it.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from guests.boot import boot
from guests.guest import REPOSITORY
from guests.kernels import Kernel
from guests.topology import slow_node

from benches.figure import Figure

LOOP = REPOSITORY / ".out" / "benches" / "move_loop"
TIMEOUT_S = 900


def run() -> list[Figure]:
    subprocess.run([REPOSITORY / "scripts" / "setup", "vm"], check=True)
    build()
    return [figure for kernel in Kernel for figure in on(kernel)]


def build() -> None:
    """Compiles the C loop on the host; guests see it where it is."""
    LOOP.parent.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("move_loop.c")
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, source, "-o", LOOP], check=True)


def on(kernel: Kernel) -> list[Figure]:
    """Boots a guest and measures in it."""
    with boot(slow_node(), kernel) as guest:
        nodes = [str(guest.facts.fast[0]), str(guest.facts.slow[0])]
        done = guest.run(
            ["python", "-m", "benches._mover_inside", LOOP, *nodes],
            env={"PYTHONPATH": f"{REPOSITORY}/scripts"},
            timeout=TIMEOUT_S,
        )
    told = json.loads(done.stdout)
    return [
        figure
        for name, case in told["cases"].items()
        for figure in figures(f"{kernel} {name}", case, told["pages"])
    ]


def figures(name: str, case: dict[str, Any], pages: int) -> list[Figure]:
    """The ratio in each round, and the times of both."""
    loop, mover = zip(*case["rounds"], strict=True)
    return [
        Figure.of_rounds(
            f"{name}: speed of the C loop",
            [theirs / ours for theirs, ours in case["rounds"]],
            "times",
            at_least=0.9,
        ),
        Figure.of_rounds(f"{name}: mover", [ns / pages / 1e3 for ns in mover], "us/page"),
        Figure.of_rounds(
            f"{name}: loop in batches of {case['best']}",
            [ns / pages / 1e3 for ns in loop],
            "us/page",
        ),
    ]
