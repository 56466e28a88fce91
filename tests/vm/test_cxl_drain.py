# SPDX-License-Identifier: Apache-2.0
"""tierctl cxl drain against the kernel's own sysfs, under programs that run."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from guests.guest import REPOSITORY, Completed, Guest, Process
from guests.tiering import FOLDER as TIERD
from guests.tiering import MIN_FREE, tierd, tunables
from guests.topology import Emulator, cxl

FOLDER = "/run/tierd-cxl-drain"
ONE = cxl(512, emulator=Emulator.FAST)
WRITER = REPOSITORY / "tests" / "vm" / "workloads" / "checked_writer.py"
WRITER_MIB = 32
RULE = """
[[target]]
command = "python"
"""
WITHIN_S = 180
KILLS_WITHIN_S = 540


def tierctl(guest: Guest, *words: str, check: bool = True, of: str = FOLDER) -> Completed:
    command = ["tierctl", "cxl", *words, "--config", f"{of}/tierd.toml"]
    return guest.run(command, timeout=WITHIN_S, check=check)


def listed(guest: Guest) -> Any:
    return json.loads(tierctl(guest, "list", "--json").stdout)


def regions(guest: Guest, *words: str) -> str:
    command = ["python", "-m", "faults.regions", *words]
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}
    return guest.run(command, timeout=KILLS_WITHIN_S, env=one_thread).stdout


@pytest.fixture
def whole(guest: Guest) -> Iterator[Guest]:
    """The guest, whose CXL memory is there again in the end."""
    guest.run(["mkdir", "-p", FOLDER])
    settings = f'[daemon]\nstate_dir = "{FOLDER}/state"\nruntime_dir = "{FOLDER}/run"\n'
    guest.write(f"{FOLDER}/tierd.toml", settings.encode())
    yield guest
    if not listed(guest)["regions"]:
        regions(guest, "make", "mem0")


@contextmanager
def writer(guest: Guest, *kinds: str) -> Iterator[Process]:
    """Runs a writer whose memory is on the CXL node, and free to go elsewhere."""
    node = str(guest.facts.slow[0])
    command = ["numactl", f"--preferred={node}", "python", str(WRITER), str(WRITER_MIB), *kinds]
    process = guest.start(command, env={"OPENBLAS_NUM_THREADS": "1"})
    try:
        assert process.readline(WITHIN_S).strip() == "ready", process.stderr
        assert pages_on(guest, process.pid, node) >= WRITER_MIB * 256
        yield process
    finally:
        process.signal(signal.SIGKILL)
        process.wait()


def pages_on(guest: Guest, pid: int, node: str) -> int:
    found = guest.read(f"/proc/{pid}/numa_maps").decode()
    return sum(map(int, re.findall(rf" N{node}=(\d+)", found)))


@pytest.mark.guest(ONE)
def test_memory_is_drained_under_a_writer(whole: Guest, summary: list[str]) -> None:
    dry = tierctl(whole, "drain", "--dry-run").stdout
    with writer(whole) as running:
        done = tierctl(whole, "drain", "mem0")
        running.signal(signal.SIGUSR1)
        written, damaged = map(int, running.readline(WITHIN_S).split())
        assert damaged == 0
        assert written > 256
    echo = re.compile(r"^echo .*", re.MULTILINE)
    assert echo.findall(done.stdout) == echo.findall(dry)
    found = listed(whole)
    assert (found["regions"], found["nodes"], found["blocks"]) == ([], [], [])
    assert not any(decoder["dpa_bytes"] for decoder in found["decoders"])
    summary.append(f"cxl drain: {WRITER_MIB} MiB under a writer of {written} pages")


@pytest.mark.guest(ONE)
def test_a_daemon_empties_the_node(whole: Guest) -> None:
    with tierd(whole, settings=RULE) as running, writer(whole) as load:
        running.wait_until_up()
        done = json.loads(tierctl(whole, "drain", "--json", of=TIERD).stdout)
        load.signal(signal.SIGUSR1)
        assert load.readline(WITHIN_S).split()[1] == "0"
        running.wait_until(lambda: sum(running.moved.values()) >= WRITER_MIB * 256)
    told = running.process.stderr
    node = whole.facts.slow[0]
    assert done["moved_pages"] > 0, "the rest was hot, and had been placed before"
    assert f"tierd: node {node} is being drained" in told, told
    assert "tierd: tier cxl has gone" in told, told


@pytest.mark.guest(ONE)
def test_what_is_pinned_is_named_and_all_comes_back(whole: Guest) -> None:
    before = listed(whole)
    with writer(whole, "pinned") as running:
        refused = tierctl(whole, "drain", "--timeout", "5", check=False)
        assert refused.rc == 1, refused.stdout
        running.signal(signal.SIGUSR1)
        _, damaged = map(int, running.readline(WITHIN_S).split())
        assert damaged == 0
    assert re.search(r"memory\d+ of \w+ cannot be taken offline: 5 s were not", refused.stderr)
    assert f"of process {running.pid} (python" in refused.stderr, refused.stderr
    assert re.search(r"pages on it: .*2 mapped files", refused.stderr), refused.stderr
    assert "is in use again" in refused.stderr
    assert listed(whole) == before


@pytest.mark.thorough
@pytest.mark.guest(ONE)
def test_memory_that_nothing_else_could_take_stays(whole: Guest) -> None:
    """The other node's watermarks are raised until it takes no more; and so are bound programs."""
    before = listed(whole)
    with writer(whole), tunables(whole, {MIN_FREE: "1250000"}):
        refused = tierctl(whole, "drain", check=False)
    assert refused.rc == 1
    assert "and the other nodes have room for" in refused.stderr, refused.stderr
    node = whole.facts.slow[0]
    bound = whole.start(["numactl", f"--membind={node}", "sleep", "600"])
    try:
        while b"sleep" not in whole.read(f"/proc/{bound.pid}/comm"):
            pass
        refused = tierctl(whole, "drain", check=False)
    finally:
        bound.signal(signal.SIGKILL)
        bound.wait()
    assert f"alone: {bound.pid} (sleep, by its mempolicy)" in refused.stderr, refused.stderr
    assert listed(whole) == before


@pytest.mark.thorough
@pytest.mark.timeout(KILLS_WITHIN_S + 120)
@pytest.mark.guest(ONE)
def test_a_kill_at_each_step_is_undone_or_gone_on_with(whole: Guest, summary: list[str]) -> None:
    report = json.loads(regions(whole, "kill-drain", "mem0"))
    assert report["findings"] == []
    assert report["undone"] > 5
    assert report["finished"] > 5
    assert report["resumed"] > 3
    told = (f"{count} {end}" for end, count in report.items() if end != "findings")
    summary.append(f"cxl drain: kills {', '.join(told)}")
