# SPDX-License-Identifier: Apache-2.0
"""What it costs to be asked and to follow the machine: the API's latency, forks, start, memory.

On the host it is the daemon of the footprint benchmark, at rest. In an emulated guest it is a whole
`tierd run` whose target's hot window moves on all the time; emulated instructions take many times
as long, so those figures have no bound.
"""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from guests.boot import boot
from guests.guest import REPOSITORY, Guest
from guests.kernels import Kernel
from guests.tiering import FOLDER, WITHIN_S, counter, tierd, until, within
from guests.topology import slow_node
from guests.workloads import hotset

from benches._control_inside import latency_ms
from benches.figure import Figure
from benches.footprint import build as build_holder
from benches.footprint import cpu_percent_of, daemon, held_memory, wait_for_rounds
from tierd.api.sockets import MONITOR

FORKS = REPOSITORY / ".out" / "benches" / "fork_at_pace"
PER_S, FORK_S = 1000, 30
ASKED = 300
"""Requests a round of the latency."""

ROUNDS = 5
MOST_MS, MOST_MIB, MOST_PERCENT, MOST_START_S = 50.0, 96, 5.0, 5.0
RULE = """
[conflicts]
numa_balancing = "take_over"
[migrate]
budget_mbps = 16
[[target]]
command = "hotset"
"""
SCRIPTS = {"PYTHONPATH": f"{REPOSITORY}/scripts"}


def run() -> list[Figure]:
    subprocess.run([REPOSITORY / "scripts" / "setup", "vm"], check=True)
    return [*on_host(), *in_guest()]


def on_host() -> list[Figure]:
    """A daemon at rest, asked, and beside short-lived processes."""
    build()
    starts = [start_s() for _ in range(ROUNDS)]
    with held_memory(), daemon() as (process, folder):
        wait_for_rounds(process, folder, 5)
        latency = [latencies_ms(folder / MONITOR, "/v1/status") for _ in range(ROUNDS)]
        scraped = [latencies_ms(folder / MONITOR, "/metrics") for _ in range(ROUNDS)]
        rest_percent = [cpu_percent_of(process, FORK_S / ROUNDS) for _ in range(ROUNDS)]
        made_per_s, fork_percent = beside_forks(process)
        resident_mib = process.memory_info().rss / (1 << 20)
    return [
        *quantiles("idle: status", latency, MOST_MS),
        *quantiles("idle: metrics", scraped, MOST_MS),
        Figure.of_rounds("short-lived processes", [made_per_s], "/s", at_least=0.95 * PER_S),
        Figure.of_rounds("CPU beside them", [fork_percent], "% core", at_most=MOST_PERCENT),
        Figure.of_rounds("CPU without them", rest_percent, "% core"),
        Figure.of_rounds("resident memory with the API", [resident_mib], "MiB", at_most=MOST_MIB),
        Figure.of_rounds("from start to the first round", starts, "s", at_most=MOST_START_S),
    ]


def build() -> None:
    """Compiles what the benchmark runs."""
    build_holder()
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]
    source = Path(__file__).with_name("fork_at_pace.c")
    subprocess.run(["gcc", *flags, source, "-o", FORKS], check=True)


def start_s() -> float:
    """Seconds from the start of a daemon to the end of its first round."""
    with held_memory():
        begin_s = time.monotonic()
        with daemon() as (process, folder):
            wait_for_rounds(process, folder, 1)
            return time.monotonic() - begin_s


def beside_forks(process: psutil.Process) -> tuple[float, float]:
    """Returns how many processes were made a second, and the daemon's CPU time meanwhile."""
    command = [str(FORKS), str(PER_S), str(FORK_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forks:
        percent = cpu_percent_of(process, FORK_S - 1)
        made, _ = forks.communicate()
    assert forks.returncode == 0
    return float(made), percent


def latencies_ms(path: Path, asked: str) -> list[float]:
    """Milliseconds of each of many requests."""
    return [latency_ms(str(path), asked) for _ in range(ASKED)]


def quantiles(name: str, rounds: list[list[float]], most_ms: float | None) -> list[Figure]:
    """The median and the 99th percentile, of each round."""
    return [
        Figure.of_rounds(
            f"{name}, {label}",
            [float(np.percentile(round_, percent)) for round_ in rounds],
            "ms",
            at_most=most_ms,
        )
        for label, percent in (("p50", 50), ("p99", 99))
    ]


RESERVE = """
cd /sys/fs/cgroup
echo +memory > cgroup.subtree_control
for group in tierd client; do
    mkdir $group
    echo 96M > $group/memory.min
    echo 0 > $group/memory.swap.max
done
"""
"""What the unit reserves; as much for who asks, or its own swapping would be measured."""


def in_guest() -> list[Figure]:
    """A daemon that migrates all the time, asked from inside the guest, then short of memory."""
    with boot(slow_node(), Kernel.LATEST) as guest:
        guest.run(["sh", "-e", "-c", RESERVE])
        migrating, moved = while_it_migrates(guest)
        short, waited_percent = while_memory_is_short(guest)
    return [
        *quantiles("emulated, migrating: status", migrating, None),
        Figure.of_rounds("pages moved meanwhile", [float(moved)], "pages"),
        *quantiles("emulated, short of memory: status", short, None),
        Figure.of_rounds("tasks waited for memory", [waited_percent], "% of the time"),
    ]


def while_it_migrates(guest: Guest) -> tuple[list[list[float]], int]:
    """Returns milliseconds of requests, and the pages moved meanwhile."""
    with following(guest, "--move-every", "8"):
        before = counter(guest, "pgmigrate_success")
        latencies = asked_inside(guest)
        moved = counter(guest, "pgmigrate_success") - before
    assert moved > 0, "nothing migrated meanwhile"
    return latencies, moved


def while_memory_is_short(guest: Guest) -> tuple[list[list[float]], float]:
    """Returns milliseconds of requests, and how long tasks waited for memory before, in percent."""
    with following(guest):
        hog = guest.start(["python", "-m", "benches._short_of_memory"], env=SCRIPTS)
        try:
            waited_percent = float(hog.readline(WITHIN_S))
            return asked_inside(guest), waited_percent
        finally:
            hog.signal(signal.SIGKILL)
            hog.wait()


@contextmanager
def following(guest: Guest, *options: str) -> Iterator[None]:
    """Runs a hotset, and a tierd that has begun to move its pages."""
    sizes = ("--mib", "256", "--hot-mib", "64", "--share", "90", "--node", "1")
    with (
        hotset(guest, *sizes, *options) as load,
        tierd(guest, settings=RULE, cgroup="tierd") as running,
    ):
        until(load, running, lambda: bool(running.moved))
        yield


def asked_inside(guest: Guest) -> list[list[float]]:
    """Milliseconds of each request, round by round, asked by a program in the guest."""
    inside = ["python", "-m", "benches._control_inside", f"{FOLDER}/run/{MONITOR}"]
    done = guest.run(within("client", inside), env=SCRIPTS, timeout=400)
    found: list[list[float]] = json.loads(done.stdout)
    return found
