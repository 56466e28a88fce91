# SPDX-License-Identifier: Apache-2.0
"""What commands take before they do anything, and Python alone, in turn."""

import os
import subprocess
import sys
from pathlib import Path

from benches.figure import Figure

ROUNDS = 15
COMMANDS = {
    "tierctl status": ("tierctl", "status", "--help"),
    "tierctl pin": ("tierctl", "pin", "--help"),
    "tierctl, with all of its commands,": ("tierctl", "--help"),
    "tierd run": ("tierd", "run", "--help"),
}


def run() -> list[Figure]:
    beside = Path(sys.executable).parent
    python = [sys.executable, "-c", "pass"]
    commands = [[str(beside / program), *others] for program, *others in COMMANDS.values()]
    for command in (python, *commands):
        cpu_s(command)  # now all that it reads is in memory
    rounds = [(cpu_s(python), *map(cpu_s, commands)) for _ in range(ROUNDS)]
    own, *each = zip(*rounds, strict=True)
    return [
        figure
        for name, taken in zip(COMMANDS, each, strict=True)
        for figure in (
            Figure.of_rounds(
                f"{name} takes as much as Python alone",
                [command / alone for command, alone in zip(taken, own, strict=True)],
                "times",
            ),
            Figure.of_rounds(f"{name} takes", [seconds * 1e3 for seconds in taken], "ms of CPU"),
        )
    ]


def cpu_s(command: list[str]) -> float:
    """Returns the time of CPUs that a command has taken, in seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime
