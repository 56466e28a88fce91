# SPDX-License-Identifier: Apache-2.0
"""What tierd leaves of a machine: after a kill, beside others, and where it cannot work at all."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guests.damon import (
    Footprint,
    Slot,
    cpu_ticks,
    damon_stat,
    footprint,
    foreign_kdamond,
    niceness,
)
from guests.guest import Completed, Guest
from guests.kernels import Kernel
from guests.tiering import FOLDER, SETTINGS, WITHIN_S, Tierd, counter, start_tierd, tierd, until
from guests.topology import flat, slow_node
from guests.workloads import Hotset, hotset

HOT_MIB, BUFFER_MIB = 4, 32
HOT_PAGES = HOT_MIB * 256
QUIET_PAGES = 32
"""What else may move in a quiet guest, such as by compaction."""

RULE = """
[policy]
horizon_s = 300  # moving pays off late where each page costs an emulated CPU so much
[[target]]
command = "hotset"
"""
NO_TAKE_OVER = SETTINGS.replace("take_over = true", "take_over = false")


@pytest.fixture
def as_it_was(guest: Guest) -> Iterator[Footprint]:
    """The machine before; fails the test if it isn't the same after."""
    before = footprint(guest)
    yield before
    assert footprint(guest) == before


@contextmanager
def workload(guest: Guest) -> Iterator[Hotset]:
    options = ("--mib", f"{BUFFER_MIB}", "--hot-mib", f"{HOT_MIB}", "--share", "95")
    with hotset(guest, *options, "--node", "1") as load:
        load.sample()
        yield load


@contextmanager
def started(guest: Guest, *options: str) -> Iterator[Tierd]:
    """A tierd that the block ends in a way of its own."""
    process = start_tierd(guest, *options, settings=RULE)
    running = Tierd(guest, process)
    try:
        yield running
    finally:
        if process.rc is None:
            process.signal(signal.SIGKILL)
            process.wait()


def watches(running: Tierd, load: Hotset) -> bool:
    """Whether it says that it is watching the workload; what a dead one has left is not it."""
    status = running.status or {"pid": None}
    return status["pid"] == running.pid and any(
        target["pid"] == load.pid and target["pieces"] for target in status["targets"]
    )


def run_tierd(guest: Guest, *options: str, settings: str = SETTINGS) -> Completed:
    """Runs tierd, which is expected to give up by itself."""
    guest.run(["mkdir", "-p", FOLDER])
    guest.write(f"{FOLDER}/other.toml", settings.encode())
    command = ["tierd", "run", "--config", f"{FOLDER}/other.toml", "--for", "5", *options]
    return guest.run(command, timeout=WITHIN_S, check=False)


@pytest.mark.guest(slow_node())
def test_a_killed_daemon_is_undone_at_the_next_start(guest: Guest, as_it_was: Footprint) -> None:
    with workload(guest) as load:
        with started(guest) as killed:
            until(load, killed, lambda: watches(killed, load))
            killed.process.signal(signal.SIGKILL)
            killed.process.wait()
        left = footprint(guest)
        # One more may be at a look at single pages.
        assert {slot.target for slot in left.slots if slot.kdamond} == {load.pid}
        assert left.status

        with started(guest) as next_one:
            until(load, next_one, lambda: watches(next_one, load))
            done = next_one.stop()
        assert done.rc == 0, done.stderr
        told = done.stderr.splitlines()
        assert f"tierd: undone: kdamond 31 of process {load.pid} stopped, its slot emptied" in told
        assert "tierd: undone: nr_kdamonds: 32 back to 0" in told
        assert footprint(guest) == as_it_was


@pytest.mark.guest(slow_node())
def test_a_second_daemon_is_refused_and_the_first_ends_with_all_undone(
    guest: Guest, as_it_was: Footprint
) -> None:
    with workload(guest) as load, started(guest) as first:
        until(load, first, lambda: bool(first.moved))

        second = run_tierd(guest)
        assert second.rc == 1
        assert f"tierd: error: another tierd is running on {FOLDER}/state" in second.stderr
        assert watches(first, load)

        assert first.stop().rc == 0
        assert footprint(guest) == as_it_was


@pytest.mark.guest(slow_node())
def test_a_foreign_kdamond_goes_on_beside_ours(guest: Guest, as_it_was: Footprint) -> None:
    with workload(guest) as load, foreign_kdamond(guest, slots=2) as foreign:
        with started(guest) as running:
            until(load, running, lambda: bool(running.moved))
            theirs, ours = footprint(guest).slots
            assert (theirs, ours.target) == (foreign, load.pid)
            assert theirs.kdamond is not None
            assert ours.kdamond is not None
            pids = running.pid, ours.kdamond, theirs.kdamond
            assert [niceness(guest, pid) for pid in pids] == [5, 5, 0]
            assert running.stop().rc == 0
        assert_undisturbed(guest, load, foreign, slots=2)


@pytest.mark.guest(slow_node())
def test_a_foreign_kdamond_in_the_only_slot_is_named(guest: Guest, as_it_was: Footprint) -> None:
    with workload(guest) as load, foreign_kdamond(guest, slots=1) as foreign:
        done = run_tierd(guest, "--pid", str(load.pid))
        assert done.rc == 1
        holder = f"kdamond 0 (on, pid {foreign.kdamond}; vaddr of process {foreign.target})"
        assert f"tierd: error: DAMON has no free slot of 1; others hold {holder}" in done.stderr
        assert "tierd: hint: stop one" in done.stderr
        assert_undisturbed(guest, load, foreign, slots=1)


def assert_undisturbed(guest: Guest, load: Hotset, foreign: Slot, *, slots: int) -> None:
    """Somebody's kdamond, alone in so many slots, is the one that it was, and works on."""
    assert foreign.kdamond is not None
    empty = Slot(kdamond=None, target=None)
    assert footprint(guest).slots == (foreign, *[empty] * (slots - 1))
    before = cpu_ticks(guest, foreign.kdamond)
    assert any(cpu_ticks(guest, foreign.kdamond) > before for _ in load.samples(WITHIN_S))


@pytest.mark.guest(slow_node(), only=Kernel.LATEST)  # 6.12 has no damon_stat
def test_damon_stat_is_not_taken_over_unasked(guest: Guest, as_it_was: Footprint) -> None:
    with workload(guest) as load, damon_stat(guest, "Y"):
        done = run_tierd(guest, "--pid", str(load.pid), settings=NO_TAKE_OVER)
        assert done.rc == 1
        assert "tierd: error: damon_stat holds DAMON for itself" in done.stderr
        assert "tierd: hint: set take_over = true in [damon] of tierd.toml" in done.stderr
        assert footprint(guest).damon_stat == "Y"


@pytest.mark.guest(slow_node())
def test_a_dry_run_tells_what_is_hot_and_moves_nothing(guest: Guest, as_it_was: Footprint) -> None:
    with workload(guest) as load:
        before = counter(guest, "pgmigrate_success")
        with started(guest, "--dry-run") as running:
            until(load, running, lambda: hot_bytes(running) >= HOT_PAGES * 2048)
            rounds = (running.status or {})["rounds"]
            until(load, running, lambda: (running.status or {})["rounds"] > rounds + 3)
            assert running.moved == {}
            assert running.stop().rc == 0
        assert counter(guest, "pgmigrate_success") - before <= QUIET_PAGES
        assert load.sample().hot_on_fast == 0


def hot_bytes(running: Tierd) -> int:
    """What it says is hot, and in the slower tier."""
    targets = (running.status or {"targets": []})["targets"]
    return sum(list(target["hot"].values())[-1] for target in targets)


@pytest.mark.guest(slow_node())
def test_processes_without_memory_to_place_are_named(guest: Guest, as_it_was: Footprint) -> None:
    own = ("sh", "-c", "exec tierd run --pid $$ --pid 2 --pid 4194303")
    done = guest.run(own, timeout=WITHIN_S, check=False)
    assert done.rc == 1
    assert "--pid 4194303: there is no process 4194303" in done.stderr
    assert "--pid 2: process 2 is a kernel thread (kthreadd)" in done.stderr
    assert "is tierd itself" in done.stderr


@pytest.mark.guest(slow_node())
def test_a_tier_of_a_node_that_is_not_there_is_named(guest: Guest, as_it_was: Footprint) -> None:
    tiers = """
[[tier]]
name = "near"
kind = "dram"
nodes = [0]
[[tier]]
name = "far"
kind = "cxl"
nodes = [1, 7]
"""
    done = run_tierd(guest, settings=SETTINGS + tiers)
    assert done.rc == 1
    line = (SETTINGS + tiers).splitlines().index("nodes = [1, 7]") + 1
    assert f"{FOLDER}/other.toml:{line}: tier[2].nodes: " in done.stderr
    assert "7" in done.stderr.partition("nodes: ")[2]


@pytest.mark.guest(flat())
def test_one_tier_is_refused_with_a_hint(guest: Guest) -> None:
    guest.run(["mkdir", "-p", f"{FOLDER}/run"])
    guest.write(f"{FOLDER}/run/status.json", b'{"pid": 1}')  # a killed one's
    done = run_tierd(guest)
    assert done.rc == 1
    assert "tierd: error: all memory is in one tier: there is nothing to place" in done.stderr
    assert "tierd: hint: " in done.stderr
    assert footprint(guest).slots == ()
    assert not footprint(guest).status


@pytest.mark.guest(flat())
def test_who_is_not_root_is_told(guest: Guest) -> None:
    command = ["setpriv", "--reuid=65534", "--clear-groups", "tierd", "run"]
    done = guest.run(command, timeout=WITHIN_S, check=False)
    assert done.rc == 1
    assert done.stderr.startswith("tierd: error: tierd run needs root")
    assert "tierd: hint: run it with sudo" in done.stderr


@pytest.mark.guest(flat())
def test_an_unknown_key_is_named_with_its_line(guest: Guest) -> None:
    settings = SETTINGS.replace("cpu_percent", "cpu_percnt")
    done = run_tierd(guest, settings=settings)
    assert done.rc == 1
    (line,) = (n for n, text in enumerate(settings.splitlines(), 1) if "cpu_percnt" in text)
    complaint = "damon.cpu_percnt: unknown key; did you mean cpu_percent?"
    assert f"tierd: error: {FOLDER}/other.toml:{line}: {complaint}" in done.stderr


def doctor(guest: Guest, settings: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """What tierctl doctor finds as that user would see it: its exit status, findings by subject."""
    guest.run(["mkdir", "-p", FOLDER])
    guest.write(f"{FOLDER}/other.toml", settings.encode())
    command = ["tierctl", "doctor", "--json", "--config", f"{FOLDER}/other.toml"]
    done = guest.run(command, timeout=WITHIN_S, check=False)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout):
        found.setdefault(finding["subject"], []).append(finding)
    return done.rc, found


@pytest.mark.guest(slow_node())
def test_the_doctor_finds_what_is_there_and_changes_nothing(
    guest: Guest, as_it_was: Footprint
) -> None:
    with damon_stat(guest, "Y"):
        if footprint(guest).damon_stat is not None:
            rc, found = doctor(guest, NO_TAKE_OVER)
            assert rc == 1
            assert [finding["verdict"] for finding in found["DAMON"]] == ["ok", "fail"]
            assert found["DAMON"][1]["next_step"].startswith("set take_over = true in [damon]")
        rc, found = doctor(guest, SETTINGS + RULE)
        assert rc == 0, found
    for subject in ("tiers", "DAMON", "tracepoint", "page tables", "processes"):
        assert {finding["verdict"] for finding in found[subject]} == {"ok"}, found[subject]
    balancing = guest.read("/proc/sys/kernel/numa_balancing").strip() != b"0"
    assert (found["numa_balancing"][0]["verdict"] == "warn") == balancing


@pytest.mark.guest(slow_node())
def test_numa_balancing_is_off_meanwhile_and_put_back(guest: Guest) -> None:
    path = "/proc/sys/kernel/numa_balancing"
    before = guest.read(path)
    settings = RULE + '[conflicts]\nnuma_balancing = "take_over"\n'
    try:
        guest.write(path, b"1")
        with workload(guest) as load, tierd(guest, settings=settings) as running:
            until(load, running, lambda: watches(running, load))
            assert guest.read(path) == b"0\n"
        assert guest.read(path) == b"1\n"
    finally:
        guest.write(path, before)
