# SPDX-License-Identifier: Apache-2.0
"""What the daemon costs at rest: CPU time and resident memory of a `tierd run` with one target.

It is fed with snapshots of a steady hot set, recorded in a guest and played at their own pace, of a
process that has memory at the recorded addresses, so that its look at mappings and pages is real.
DAMON and the reading of its ring are left out, and nothing is to be moved; _footprint_daemon tells
how. As root, as tierd itself.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from guests.guest import REPOSITORY

from benches.figure import Figure
from tests.unit.replay import BUFFER
from tierd.errors import TierdError
from tierd.observe import status

HOLDER = REPOSITORY / ".out" / "benches" / "hold_at"
SETTLE_ROUNDS = 20
WINDOWS, WINDOW_S = 6, 15.0
START_S = 30.0
MOST_MIB, MOST_PERCENT = 64, 1.0


def run() -> list[Figure]:
    build()
    cpu_percent, resident_mib = [], []
    with held_memory() as pid, daemon(pid) as (process, folder):
        begun = wait_for_rounds(process, folder, SETTLE_ROUNDS)
        for _ in range(WINDOWS):
            cpu_percent.append(cpu_percent_of(process, WINDOW_S))
            resident_mib.append(process.memory_info().rss / (1 << 20))
        ended = status.read(folder)
    assert ended["rounds"] - begun >= 0.9 * WINDOWS * WINDOW_S
    assert ended["targets"][0]["hot"]["dram"] > 0, "the recorded hot set was not found"
    assert not ended["moved"]
    return [
        Figure.of_rounds(
            "CPU at rest, snapshots replayed", cpu_percent, "% core", at_most=MOST_PERCENT
        ),
        Figure.of_rounds("resident memory with one target", resident_mib, "MiB", at_most=MOST_MIB),
    ]


def build() -> None:
    """Compiles the process that holds memory."""
    HOLDER.parent.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("hold_at.c")
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, source, "-o", HOLDER], check=True)


@contextmanager
def held_memory() -> Iterator[int]:
    """A process with the recorded program's buffer; its pid."""
    command = [str(HOLDER), str(BUFFER.start), str(len(BUFFER))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid


@contextmanager
def daemon(target: int) -> Iterator[tuple[psutil.Process, Path]]:
    """The daemon, and the folder that its status is in."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "tierd.toml"
        config.write_text(f'[daemon]\nstate_dir = "{folder}"\nruntime_dir = "{folder}"\n')
        options = ["run", "--config", str(config), "--pid", str(target)]
        with subprocess.Popen(
            [sys.executable, "-m", "benches._footprint_daemon", *options]
        ) as process:
            try:
                yield psutil.Process(process.pid), folder
            finally:
                process.terminate()
        assert process.returncode == 0, "it does not end as it should on SIGTERM"


def wait_for_rounds(process: psutil.Process, folder: Path, rounds: int) -> int:
    """Waits until the daemon has made so many rounds; returns how many it has made."""
    end_s = time.monotonic() + START_S + rounds
    while time.monotonic() < end_s and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.2)
        try:
            made = int(status.read(folder)["rounds"])
        except TierdError:
            continue
        if made >= rounds:
            return made
    raise TierdError(f"the daemon has not made {rounds} rounds")


def cpu_percent_of(process: psutil.Process, seconds: float) -> float:
    """User and system time of all threads, in percent of one core."""
    begin, begin_s = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    end, end_s = process.cpu_times(), time.monotonic()
    used_s = end.user + end.system - begin.user - begin.system
    return 100 * used_s / (end_s - begin_s)
