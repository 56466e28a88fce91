# SPDX-License-Identifier: Apache-2.0
"""What the daemon costs at rest: CPU time and resident memory of a `tierd run` with one target.

It is fed with snapshots of a steady hot set, recorded in a guest and played at their own pace, of a
process that has memory at the recorded addresses, so that its look at mappings and pages is real.
DAMON and the reading of its ring are left out, and nothing is to be moved; _footprint_daemon tells
how. As root, as tierd itself.

Beside it stand the figures of a whole `tierd run` in an emulated guest, with DAMON and a program
whose hot set is in fast memory. Emulated instructions take many times as long, so they have no
bound.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from guests.boot import boot
from guests.damon import cpu_ticks
from guests.guest import REPOSITORY, Guest
from guests.kernels import Kernel
from guests.tiering import tierd
from guests.topology import slow_node
from guests.workloads import hotset

from benches.figure import Figure
from tests.unit.replay import BUFFER
from tierd.errors import TierdError
from tierd.model import PAGE_BYTES
from tierd.observe import status

HOLDER = REPOSITORY / ".out" / "benches" / "hold_at"
SETTLE_ROUNDS = 20
WINDOWS, WINDOW_S = 6, 15.0
START_S = 30.0
MOST_MIB, MOST_PERCENT = 64, 1.0
RULE = """
[discover]
min_mib = 0.0
[[target]]
command = "hold_at"
"""
"""By its name, so that the process connector and what it imports are counted."""

GUEST_TICKS = 100  # USER_HZ
GUEST_SETTLE_S, GUEST_START_S = 40, 150
GUEST_RULE = """
[[target]]
command = "hotset"
"""


def run() -> list[Figure]:
    subprocess.run([REPOSITORY / "scripts" / "setup", "vm"], check=True)
    return [*on_host(), *in_guest()]


def on_host() -> list[Figure]:
    """The daemon fed with a recording."""
    build()
    cpu_percent, resident_mib = [], []
    with held_memory(), daemon() as (process, folder):
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
def held_memory() -> Iterator[None]:
    """A process with the recorded program's buffer."""
    command = [str(HOLDER), str(BUFFER.start), str(len(BUFFER))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield


@contextmanager
def daemon() -> Iterator[tuple[psutil.Process, Path]]:
    """The daemon, and the folder that its status is in."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "tierd.toml"
        config.write_text(f'[daemon]\nstate_dir = "{folder}"\nruntime_dir = "{folder}"\n{RULE}')
        options = ["run", "--config", str(config)]
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


def in_guest() -> list[Figure]:
    """The whole daemon, beside a program whose 64 hot MiB of 256 are where they belong."""
    options = ("--mib", "256", "--hot-mib", "64", "--share", "90", "--node", "0")
    with (
        boot(slow_node(), Kernel.LATEST) as guest,
        hotset(guest, *options),
        tierd(guest, settings=GUEST_RULE) as running,
    ):
        until_s = time.monotonic() + GUEST_START_S
        while running.status is None and time.monotonic() < until_s:
            time.sleep(1)
        time.sleep(GUEST_SETTLE_S)
        cpu_percent, resident_mib = [], []
        for _ in range(WINDOWS):
            cpu_percent.append(guest_cpu_percent(guest, running.pid, WINDOW_S))
            resident_mib.append(guest_resident_mib(guest, running.pid))
        account = running.status
    assert account is not None
    assert account["targets"][0]["hot"]["dram"] > 0, "the hot set was not found"
    return [
        Figure.of_rounds("CPU at rest, in an emulated guest", cpu_percent, "% core"),
        Figure.of_rounds("resident memory, in an emulated guest", resident_mib, "MiB"),
    ]


def guest_cpu_percent(guest: Guest, pid: int, seconds: float) -> float:
    """As cpu_percent_of(), by the guest's own clock."""
    begin, begin_s = guest_cpu_s(guest, pid)
    time.sleep(seconds)
    end, end_s = guest_cpu_s(guest, pid)
    return 100 * (end - begin) / (end_s - begin_s)


def guest_cpu_s(guest: Guest, pid: int) -> tuple[float, float]:
    """User and system time, and the guest's uptime."""
    uptime_s = guest.uptime_s()
    return cpu_ticks(guest, pid) / GUEST_TICKS, uptime_s


def guest_resident_mib(guest: Guest, pid: int) -> float:
    return int(guest.read(f"/proc/{pid}/statm").split()[1]) * PAGE_BYTES / (1 << 20)
