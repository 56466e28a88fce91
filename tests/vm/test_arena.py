# SPDX-License-Identifier: Apache-2.0
"""An arena on two nodes, steered by the daemon that an operator runs."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from guests.guest import Guest
from guests.tiering import FOLDER, WITHIN_S, Tierd, ballast, tierd
from guests.topology import slow_node
from guests.workloads import hotset

SETTINGS = """
[arena]
enabled = true
"""


DB, KV = "/tenants/db", "/tenants/kv"
FAST_MIB, LARGE_MIB, FREE_MIB, HOT_MIB = 8, 96, 16, 48

COMPETE = f"""
{SETTINGS}
[[target]]
cgroup = "{DB}"
[[tenant]]
cgroup = "{DB}"
[[tenant]]
cgroup = "{KV}"
[policy]
headroom_percent = 0.5
latency_gap_ns = 400.0  # moves take an emulated CPU twenty times as long
"""


@pytest.mark.guest(slow_node())
def test_the_hot_blocks_of_a_program_come_to_dram(guest: Guest) -> None:
    with tierd(guest, settings=SETTINGS) as running:
        running.wait_until_up()
        with skewed_arena(guest, FAST_MIB) as program:
            until_fast(program, running)
            shown = guest.run(["tierctl", "status", "--config", f"{FOLDER}/tierd.toml"]).stdout
            assert "skewed" in shown
            [arena] = arenas(running)
            assert (arena["name"], arena["pid"]) == ("skewed", program.pid)
            assert arena["moved"] >= program.hot
        running.wait_until(lambda: not arenas(running))


@pytest.mark.guest(slow_node())
def test_an_arena_leaves_another_tenant_its_share_of_dram(guest: Guest) -> None:
    """Its cold blocks go, and their memory is what the other's hot pages come to."""
    with tierd(guest, settings=COMPETE) as running:
        running.wait_until_up()
        with skewed_arena(guest, LARGE_MIB) as program:
            put(guest, KV, program.pid)
            until_fast(program, running)
            before = arenas(running)[0]["resident"]["dram"]
            options = ("--mib", "96", "--hot-mib", f"{HOT_MIB}", "--share", "98", "--node", "1")
            with ballast(guest, FREE_MIB), hotset(guest, *options) as load:
                put(guest, DB, load.pid)
                arrived = next((s for s in load.samples(WITHIN_S) if s.hot_share >= 0.95), None)
                assert arrived is not None, running.status
                left = before - arenas(running)[0]["resident"]["dram"]
                assert left >= (HOT_MIB - 2 * FREE_MIB) << 20
                until_fast(program, running)


def put(guest: Guest, cgroup: str, pid: int) -> None:
    guest.run(["mkdir", "-p", f"/sys/fs/cgroup{cgroup}"])
    guest.write(f"/sys/fs/cgroup{cgroup}/cgroup.procs", str(pid).encode())


class SkewedArena:
    """A program with an arena, most of which is cold."""

    def __init__(self, guest: Guest, fast_mib: int) -> None:
        socket = f"{FOLDER}/run/arena.sock"
        command = ["python3", "tests/vm/workloads/skewed_arena.py", socket, str(fast_mib)]
        self.process = guest.start(command)
        self.pid = self.process.pid
        self.hot, self.fast = map(int, self.process.readline(120).split())

    def look(self) -> None:
        self.hot, self.fast = map(int, self.process.readline().split())


@contextmanager
def skewed_arena(guest: Guest, fast_mib: int) -> Iterator[SkewedArena]:
    program = SkewedArena(guest, fast_mib)
    try:
        assert program.fast == 0
        yield program
    finally:
        program.process.signal(signal.SIGKILL)
        program.process.wait()


def until_fast(program: SkewedArena, running: Tierd) -> None:
    """Waits until the daemon has brought all hot blocks to DRAM."""
    deadline = time.monotonic() + WITHIN_S
    while program.fast < program.hot:
        assert time.monotonic() < deadline, f"{running.status} {running.process.stderr}"
        program.look()


def arenas(running: Tierd) -> list[dict[str, Any]]:
    status = running.status
    assert status is not None
    found: list[dict[str, Any]] = status["arenas"]
    return found
