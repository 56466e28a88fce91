# SPDX-License-Identifier: Apache-2.0
"""tierd in a guest, and the figures that tests hold it to."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from guests.errors import CommandFailed
from guests.guest import Completed, Guest, Process
from guests.workloads import Hotset

FOLDER = "/run/tierd-test"
DAMON_STAT = "/sys/module/damon_stat/parameters/enabled"
LISTS = "/proc/sys/vm/percpu_pagelist_high_fraction"
MIN_FREE = "/proc/sys/vm/min_free_kbytes"
DEMOTION = "/sys/kernel/mm/numa/demotion_enabled"

SETTINGS = f"""
[daemon]
state_dir = "{FOLDER}/state"
runtime_dir = "{FOLDER}/run"
[damon]
cpu_percent = 50.0  # an emulated CPU is slow, and kdamond's share of it large
take_over = true
"""
"""What every test in a guest sets."""

PAGE_KIB = 4

RING = "/sys/kernel/tracing/instances/ballast"
BARE, LEFT_OVER_KIB = 0.97, 2 << 10
"""The share of a ring's memory that its size tells, and what may be left over."""

WITHIN_S = 180
"""Until something must be seen: tierd alone takes half a minute to start where all is emulated."""


class Tierd:
    """A tierd that runs in a guest."""

    def __init__(self, guest: Guest, process: Process) -> None:
        self.guest = guest
        self.process = process
        self.pid = process.pid

    @property
    def status(self) -> Mapping[str, Any] | None:
        """What it has published last, None before the first round."""
        with suppress(FileNotFoundError):
            found: Mapping[str, Any] = json.loads(self.guest.read(f"{FOLDER}/run/status.json"))
            return found
        return None

    @property
    def moved(self) -> dict[tuple[str, str], int]:
        """Pages that it says it has moved, by the tiers' names."""
        status = self.status or {"moved": []}
        return {(flow["from"], flow["to"]): flow["pages"] for flow in status["moved"]}

    def wait_until_up(self) -> None:
        """Waits for its first round."""
        self.wait_until(lambda: (self.status or {}).get("pid") == self.pid)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits for what it is to publish."""
        deadline = time.monotonic() + WITHIN_S
        while not holds():
            assert time.monotonic() < deadline, f"{self.status} {self.process.stderr}"
            time.sleep(0.5)

    def stop(self) -> Completed:
        self.process.signal(signal.SIGTERM)
        return self.process.wait()


@contextmanager
def tierd(
    guest: Guest,
    *options: str,
    settings: str = "",
    cgroup: str | None = None,
    node: int | None = None,
) -> Iterator[Tierd]:
    """Runs tierd with SETTINGS and more of them, in a cgroup and with a node's memory if given.

    Raises:
        CommandFailed: it ended with another exit status than 0.
    """
    process = start_tierd(guest, *options, settings=settings, cgroup=cgroup, node=node)
    running = Tierd(guest, process)
    try:
        yield running
    finally:
        done = running.stop()
    if done.rc != 0:
        raise CommandFailed(f"tierd ended with {done.rc}: {done.stderr}")


def start_tierd(
    guest: Guest,
    *options: str,
    settings: str = "",
    cgroup: str | None = None,
    node: int | None = None,
) -> Process:
    """Starts tierd and leaves its end to the caller."""
    guest.run(["mkdir", "-p", FOLDER])
    guest.write(f"{FOLDER}/tierd.toml", (SETTINGS + settings).encode())
    command = ["tierd", "run", "--config", f"{FOLDER}/tierd.toml", *options]
    if node is not None:
        command = ["numactl", f"--membind={node}", *command]
    return guest.start(command if cgroup is None else within(cgroup, command))


def within(cgroup: str, command: Sequence[str]) -> list[str]:
    """A command that runs in a cgroup, all that it reads and maps accounted to it."""
    enter = 'echo $$ > "/sys/fs/cgroup/$0/cgroup.procs" && exec "$@"'
    return ["sh", "-c", enter, cgroup, *command]


def tell(guest: Guest, *command: str) -> None:
    """Has the running tierd told something by tierctl."""
    guest.run(["tierctl", *command, "--config", f"{FOLDER}/tierd.toml"])


def until(load: Hotset, running: Tierd, holds: Callable[[], bool]) -> None:
    """Waits, by the workload's clock, until it holds."""
    for _ in load.samples(WITHIN_S):
        if holds():
            return
    raise AssertionError(f"{running.status} {running.process.stderr}")


def at_rest(load: Hotset, running: Tierd) -> tuple[int, int]:
    """Pages migrated as the kernel counts them and as tierd does, once two rounds moved none.

    tierd tells a round's moves at its end, so that in between it is behind the kernel.
    """
    since, rounds = None, 0
    for _ in load.samples(WITHIN_S):
        status = running.status or {"rounds": 0}
        now = counter(running.guest, "pgmigrate_success"), sum(running.moved.values())
        if now != since:
            since, rounds = now, status["rounds"]
        elif status["rounds"] >= rounds + 2:
            return now
    raise AssertionError(f"no rest: {running.status} {running.process.stderr}")


def room_kib(guest: Guest, node: int) -> int:
    """What a node can take before the kernel reclaims, what CPUs keep aside among it.

    That is dozens of MiB once many pages have been freed, and in no count of free memory.
    """
    zones = guest.read("/proc/zoneinfo").decode().split("Node ")
    mine = "".join(zone for zone in zones if zone.startswith(f"{node}, zone"))
    high, aside = (
        sum(map(int, re.findall(rf"^ +{what} +(\d+)$", mine, re.MULTILINE)))
        for what in ("high", "count:")
    )
    return node_kib(guest, node, "MemFree") + (aside - high) * PAGE_KIB


def node_kib(guest: Guest, node: int, what: str) -> int:
    """What a node's meminfo says."""
    meminfo = guest.read(f"/sys/devices/system/node/node{node}/meminfo").decode()
    found = re.search(rf"{what}:\s+(\d+) kB", meminfo)
    assert found, meminfo
    return int(found[1])


def counter(guest: Guest, name: str) -> int:
    """A counter of /proc/vmstat."""
    lines = guest.read("/proc/vmstat").decode().splitlines()
    return int(dict(line.split() for line in lines)[name])


@contextmanager
def ballast(guest: Guest, leave_mib: int) -> Iterator[None]:
    """Fills the CPUs' node with the kernel's own memory until it has room for so much more.

    A ring buffer for tracing is in pages that nothing moves or reclaims; locked memory is moved by
    DAMON's schemes, and huge pages are too few in a node that was in use.

    What is started later takes of that: tierd and what it reads of the guest's root, some 60 MiB.
    The kernel keeps 65 MiB of a node of 1 GiB free, for huge pages; meanwhile it keeps as small a
    part of it as it does of a server's memory.
    """
    leave_kib, cpu_kib = leave_mib * 1024, 0
    with server_reserves(guest):
        guest.run(["mkdir", RING])
        try:
            # What the pages are listed in takes memory too, which is known by what is left.
            while (left_kib := room_kib(guest, guest.facts.fast[0])) > leave_kib + LEFT_OVER_KIB:
                cpu_kib += int((left_kib - leave_kib) * BARE) // guest.topology.cpus
                guest.write(f"{RING}/buffer_size_kb", b"%d" % cpu_kib)
            yield
        finally:
            guest.run(["rmdir", RING])


@contextmanager
def server_reserves(guest: Guest) -> Iterator[None]:
    """Has the kernel keep free what it would without huge pages: 2 MiB of each GiB.

    CPUs keep half a percent aside at most, as before Linux 6.7, in place of an eighth.
    """
    with tunables(guest, {MIN_FREE: "4096", LISTS: "200"}):
        yield


@contextmanager
def tunables(guest: Guest, values: Mapping[str, str]) -> Iterator[None]:
    """Sets files of the kernel's for as long as the context lasts."""
    before = {path: guest.read(path) for path in values}
    for path, value in values.items():
        guest.write(path, value.encode())
    try:
        yield
    finally:
        for path, content in before.items():
            guest.write(path, content)
