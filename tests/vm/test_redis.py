# SPDX-License-Identifier: Apache-2.0
"""An unmodified redis-server on the slow node: the values of its hot keys come to the fast one."""

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from guests.guest import Guest, Process
from guests.tiering import FOLDER, tierd
from guests.topology import slow_node

KEYS, HOT_KEYS, VALUE_BYTES = 24_000, 1_000, 4096
SOCKET = f"{FOLDER}/redis.sock"
CPU = "1"
"""Server and client share it: each switch between them flushes what an emulated CPU has cached of
the page table, without which DAMON misses nearly all accesses."""

ARRIVED, ARRIVE_S, START_S = 0.95, 120, 120

RULE = """
[policy]
latency_gap_ns = 2000.0  # an emulated CPU reads few keys a second, and moves take 30 us and more
[[target]]
command = "redis-server"
"""

FILL = f"""
local rest = string.rep('x', {VALUE_BYTES} - 19)
for i = 0, {KEYS} - 1 do
    local key = string.format('%012d', i)
    redis.call('set', 'key:' .. key, 'value:' .. key .. ':' .. rest)
end
"""
COUNT_GOOD = f"""
local rest, good = string.rep('x', {VALUE_BYTES} - 19), 0
for i = 0, {KEYS} - 1 do
    local key = string.format('%012d', i)
    if redis.call('get', 'key:' .. key) == 'value:' .. key .. ':' .. rest then good = good + 1 end
end
return good
"""


@pytest.mark.guest(slow_node())
def test_hot_keys_are_promoted(guest: Guest) -> None:
    with redis(guest) as server, hot_reads(guest), oracle(guest, server.pid) as where:
        before = places(where)
        assert share(before["hot"], node=1) >= ARRIVED, before
        with tierd(guest, settings=RULE) as running:
            seen = before
            for _ in range(START_S + ARRIVE_S):
                seen = places(where)
                if share(seen["hot"], node=0) >= ARRIVED:
                    break
            assert share(seen["hot"], node=0) >= ARRIVED, (seen, running.status)
            assert share(seen["cold"], node=1) >= ARRIVED, (seen, running.status)
        assert evaluate(guest, COUNT_GOOD) == f"{KEYS}\n"


@contextmanager
def redis(guest: Guest) -> Iterator[Process]:
    """A server whose memory starts on the slow node, filled."""
    guest.run(["mkdir", "-p", FOLDER])
    where = ["numactl", "--preferred=1", f"--physcpubind={CPU}"]
    options = ["--port", "0", "--unixsocket", SOCKET, "--save", "", "--dir", FOLDER]
    server = guest.start([*where, "redis-server", *options])
    try:
        while "eady to accept" not in server.readline():
            pass
        evaluate(guest, FILL)
        yield server
    finally:
        server.signal(signal.SIGTERM)
        server.wait()


def evaluate(guest: Guest, script: str) -> str:
    return guest.run(["redis-cli", "-s", SOCKET, "eval", script, "0"], timeout=120).stdout


@contextmanager
def hot_reads(guest: Guest) -> Iterator[None]:
    """A client that reads the first keys for as long as the context lasts."""
    options = ["-s", SOCKET, "-c", "1", "-P", "16", "-r", f"{HOT_KEYS}", "-n", "1000000000", "-q"]
    client = guest.start(
        ["taskset", "--cpu-list", CPU, "redis-benchmark", *options, "get", "key:__rand_int__"]
    )
    try:
        yield
    finally:
        client.signal(signal.SIGKILL)
        client.wait()


@contextmanager
def oracle(guest: Guest, pid: int) -> Iterator[Process]:
    program = ["tests/vm/workloads/redis_keys.py", f"{pid}", f"{HOT_KEYS}", f"{VALUE_BYTES}"]
    process = guest.start(["python3", *program])
    try:
        yield process
    finally:
        process.signal(signal.SIGKILL)
        process.wait()


def places(where: Process) -> Mapping[str, Mapping[str, int]]:
    """The pages of hot and of cold keys' values by node, a second later each time."""
    found: Mapping[str, Mapping[str, int]] = json.loads(where.readline())
    return found


def share(pages: Mapping[str, int], *, node: int) -> float:
    return pages.get(str(node), 0) / sum(pages.values())
