# SPDX-License-Identifier: Apache-2.0
"""The loads of the shootout: programs that share one CPU, whose memory begins on the node given.

Each tells every second what it did and where its accesses went. Those whose memory is to be placed
run in the cgroups of PLACED, and all of a load below LOAD.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from guests.guest import REPOSITORY, Guest, Process
from guests.tiering import FOLDER, within
from guests.workloads import Hotset, build, hotset_command, reporting

LOAD = "load"
PLACED = (f"{LOAD}/one", f"{LOAD}/other")

KEYS, HOT_KEYS, EXPONENT = 24_000, 6_000, 0.99
VALUE_BYTES = 4090
"""With redis' header a page, so that each read is of one page."""
SOCKET = f"{FOLDER}/redis.sock"

LATE_S = 4
"""By when the first second is told that counts."""

SCAN = "tests/vm/workloads/sqlite_scan.py"
DATABASE_MIB = 96
ON_HOST = REPOSITORY / ".out" / "shootout" / "scan.db"
IN_GUEST = f"{FOLDER}/scan.db"

Programs = Callable[[Guest, int, ExitStack], list[Hotset]]
"""Starts them in a guest, with memory on a node, until the stack is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Programs, and what fast memory there is for them, tierd's headroom of 5 MiB among that."""

    name: str
    told: str
    programs: Programs
    free_mib: int
    most_moved: float | None = None
    """Times the least that has to be moved."""


def loads(seconds: int) -> tuple[Load, ...]:
    """All of them, with windows that move half-way, and not once more where reports begin late."""
    moving = f"--move-every {seconds // 2 + LATE_S}"
    return (
        Load(
            name="window",
            told="64 MiB of 256 take 98 %, and others do half-way; room for 120",
            programs=_hotsets(f"--mib 256 --hot-mib 64 --share 98 {moving}"),
            free_mib=120,
            most_moved=1.3,
        ),
        Load(
            name="zipf",
            told="192 MiB by Zipf's law, exponent 0.99, 48 MiB count as hot; room for 80",
            programs=_hotsets("--mib 192 --hot-mib 48 --zipf 0.99"),
            free_mib=80,
            most_moved=1.1,
        ),
        Load(
            name="sparse",
            told="every second page of 96 MiB of 128 takes 98 %; room for 80",
            programs=_hotsets("--mib 128 --hot-mib 48 --share 98 --stride"),
            free_mib=80,
        ),
        Load(
            name="scan",
            told="48 MiB take 90 %, the rest goes through 256 from start to end; room for 80",
            programs=_hotsets("--mib 256 --hot-mib 48 --share 90 --sweep"),
            free_mib=80,
        ),
        Load(
            name="tenants",
            told="24 MiB of 96 take 98 %; beside it 32 of 160, others half-way; room for 88",
            programs=_hotsets(
                "--mib 96 --hot-mib 24 --share 98", f"--mib 160 --hot-mib 32 --share 98 {moving}"
            ),
            free_mib=88,
            most_moved=1.3,
        ),
        Load(
            name="redis",
            told="94 MiB of values read by Zipf's law, 23 MiB count as hot; room for 60",
            programs=_redis,
            free_mib=60,
            most_moved=1.1,
        ),
        Load(
            name="database",
            told="32 MiB of 96 take 95 %; beside it SQLite scans 98 MiB; room for 60",
            programs=_cache_and_scan,
            free_mib=60,
        ),
    )


def make_database() -> None:
    """Writes on the host what the guest's SQLite scans."""
    ON_HOST.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, SCAN, "--make", str(ON_HOST), f"{DATABASE_MIB}"]
    subprocess.run(command, check=True, cwd=REPOSITORY)


def _hotsets(*options: str) -> Programs:
    """A hotset with each of these options, in cgroups of their own."""

    def start(guest: Guest, node: int, stack: ExitStack) -> list[Hotset]:
        commands = [
            within(group, [*hotset_command(guest), "--node", f"{node}", *words.split()])
            for group, words in zip(PLACED, options, strict=False)
        ]
        return [stack.enter_context(reporting(guest, command)) for command in commands]

    return start


def _redis(guest: Guest, node: int, stack: ExitStack) -> list[Hotset]:
    """A client that reads keys by Zipf's law, its server filled."""
    server = stack.enter_context(_server(guest))
    with _limited_to(guest, node):
        fill = ["debug", "populate", f"{KEYS}", "key", f"{VALUE_BYTES}"]
        guest.run(["redis-cli", "-s", SOCKET, *fill], timeout=120)
    reads = [SOCKET, server.pid, KEYS, VALUE_BYTES, EXPONENT, HOT_KEYS, guest.facts.fast[0]]
    client = [*on_last_cpu(guest), str(build("redis_reads")), *map(str, reads)]
    return [stack.enter_context(reporting(guest, within(LOAD, client)))]


@contextmanager
def _limited_to(guest: Guest, node: int) -> Iterator[None]:
    """Has what is placed get memory of a node alone within the context.

    A memory policy would last, and the kernel's balancing leaves alone what has one.
    """
    parents = [f"/sys/fs/cgroup{parent}/cgroup.subtree_control" for parent in ("", f"/{LOAD}")]
    for parent in parents:
        guest.write(parent, b"+cpuset")
    for group in PLACED:
        guest.write(f"/sys/fs/cgroup/{group}/cpuset.mems", f"{node}".encode())
    try:
        yield
    finally:
        for parent in reversed(parents):
            guest.write(parent, b"-cpuset")


@contextmanager
def _server(guest: Guest) -> Iterator[Process]:
    options = ["--port", "0", "--unixsocket", SOCKET, "--save", "", "--dir", FOLDER]
    debug = ["--enable-debug-command", "yes"]
    server = guest.start(within(PLACED[0], [*on_last_cpu(guest), "redis-server", *options, *debug]))
    try:
        while "eady to accept" not in server.readline():
            pass
        yield server
    finally:
        server.signal(signal.SIGTERM)
        server.wait()


def _cache_and_scan(guest: Guest, node: int, stack: ExitStack) -> list[Hotset]:
    """A cache, and a scan of a database whose file is in memory, mapped."""
    guest.run(["numactl", f"--preferred={node}", "cp", ON_HOST, IN_GUEST], timeout=300)
    stack.callback(guest.run, ["rm", IN_GUEST])
    scan = [*on_last_cpu(guest), "python3", SCAN, IN_GUEST, f"{guest.facts.fast[0]}"]
    caches = _hotsets("--mib 96 --hot-mib 32 --share 95")(guest, node, stack)
    return [*caches, stack.enter_context(reporting(guest, within(PLACED[1], scan)))]


def on_last_cpu(guest: Guest) -> list[str]:
    """What a command begins with to run where the programs of a load do."""
    return ["taskset", "-c", f"{guest.topology.cpus - 1}"]
