# SPDX-License-Identifier: Apache-2.0
"""What tierd leaves of a machine after a kill at any step, on a full disk, in another time."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from guests.damon import Footprint, footprint
from guests.guest import Completed, Guest
from guests.tiering import FOLDER, WITHIN_S, Tierd, start_tierd, tierd, until
from guests.topology import slow_node
from guests.workloads import Hotset, hotset

PHASES = {"start", "rounds", "reload", "rounds after the reload", "stop", "undo"}
SAMPLE, SAMPLE_WITHIN_S, ALL_WITHIN_S = 8, 550, 1800
"""Kills of each of two machines in CI, and how long they, or all, may take."""

STATE = f"{FOLDER}/state"
RULE = """
[policy]
horizon_s = 300
[[target]]
command = "hotset"
"""
OPTIONS = ("--mib", "16", "--hot-mib", "4", "--share", "95", "--node", "1")


@pytest.fixture
def as_it_was(guest: Guest) -> Iterator[Footprint]:
    """The machine before; fails the test if it isn't the same after."""
    before = footprint(guest)
    yield before
    assert footprint(guest) == before


@pytest.mark.timeout(ALL_WITHIN_S + 60)
@pytest.mark.guest(slow_node())
def test_a_kill_at_any_step_leaves_nothing(
    guest: Guest, as_it_was: Footprint, summary: list[str]
) -> None:
    """Of all steps with TIERD_ALL_KILLS in the environment, else of the same sample each time."""
    everything = "TIERD_ALL_KILLS" in os.environ
    sample = () if everything else ("--most", str(SAMPLE))
    with hotset(guest, *OPTIONS) as load:
        load.sample()
        done = guest.run(
            ["python", "-m", "faults.kills", str(load.pid), *sample],
            env={"OPENBLAS_NUM_THREADS": "1"},
            timeout=ALL_WITHIN_S if everything else SAMPLE_WITHIN_S,
            check=False,
        )
    assert done.rc == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    summary += map(told, reports)
    assert [report["findings"] for report in reports] == [[], []]
    assert set().union(*(report["kills"] for report in reports)) == PHASES
    assert all(sum(report["kills"].values()) >= SAMPLE * 0.8 for report in reports)
    assert all(report["left"] for report in reports), "no kill left anything to undo"


def told(report: dict[str, Any]) -> str:
    """A line for the end of the tests."""
    kills = report["kills"]
    phases = ", ".join(f"{count} in {phase}" for phase, count in kills.items())
    return (
        f"{report['machine']}: {sum(kills.values())} kills of {report['planned']} ({phases}) in "
        f"{report['seconds']} s, "
        f"{report['left']} left something to undo, "
        f"{len(report['findings'])} findings; did not come: {'; '.join(report['missed']) or 'none'}"
    )


@contextmanager
def small_disk(guest: Guest) -> Iterator[None]:
    """A file system of 128 KiB under the state directory."""
    guest.run(["mkdir", "-p", STATE])
    guest.run(["mount", "-t", "tmpfs", "-o", "size=128k", "small", STATE])
    try:
        yield
    finally:
        guest.run(["umount", STATE])


FILL = f"""
cd {STATE}
if [ -s journal.jsonl ]; then  # up to the end of its last page, by a line of an earlier boot
    short=$((4096 - $(stat -c %s journal.jsonl) % 4096))
    [ $short -ge 64 ] || short=$((short + 4096))
    printf '%-*s\\n' $((short - 1)) '{{"boot": "-", "id": 1, "kind": "undone"}}' >> journal.jsonl
fi
cat /dev/zero > filler
"""


def fill(guest: Guest) -> None:
    """Leaves no room on the small disk, not for a byte more in the journal either."""
    guest.run(["sh", "-c", FILL], check=False)


def watched(running: Tierd) -> set[int]:
    status = running.status or {"pid": None, "targets": []}
    own = status["pid"] == running.pid
    return {target["pid"] for target in status["targets"]} if own else set()


def goes_on(running: Tierd, load: Hotset) -> None:
    """Waits for three more rounds."""
    rounds = (running.status or {})["rounds"]
    until(load, running, lambda: (running.status or {})["rounds"] > rounds + 3)


@pytest.mark.guest(slow_node())
def test_nothing_is_changed_where_the_disk_is_full(guest: Guest, as_it_was: Footprint) -> None:
    with hotset(guest, *OPTIONS) as load, small_disk(guest):
        load.sample()
        fill(guest)
        done = ended(guest, "--for", "5", "--pid", str(load.pid))
        assert done.rc == 1
        says = "No space left on device: tierd changes nothing that it cannot record"
        assert f"tierd: error: {STATE}/journal.jsonl: {says}" in done.stderr
        assert "tierd: hint: make the state directory writable" in done.stderr
        assert footprint(guest) == as_it_was


def ended(guest: Guest, *options: str) -> Completed:
    """Runs tierd, which is expected to give up by itself."""
    return start_tierd(guest, *options).wait(WITHIN_S)


@pytest.mark.guest(slow_node())
def test_a_clock_that_jumps_changes_nothing_and_a_full_disk_keeps_new_targets_out(
    guest: Guest, as_it_was: Footprint
) -> None:
    with small_disk(guest), hotset(guest, *OPTIONS) as load:
        with tierd(guest, settings=RULE) as running:
            until(load, running, lambda: watched(running) == {load.pid})
            the_clock_jumps(guest, load, running)
            the_disk_fills_up(guest, load, running)
            fill(guest)
        assert footprint(guest) == as_it_was


def the_clock_jumps(guest: Guest, load: Hotset, running: Tierd) -> None:
    now = int(guest.run(["date", "+%s"]).stdout)
    try:
        for jump_s in (-400 * 86_400, +800 * 86_400):
            guest.run(["date", "--set", f"@{now + jump_s}"])
            goes_on(running, load)
            assert watched(running) == {load.pid}
        until(load, running, lambda: load.sample().hot_share >= 0.95)
        sampler = (running.status or {})["sampler"]
        assert sampler["lost"] == 0
    finally:
        guest.run(["date", "--set", f"@{now + 60}"])


def the_disk_fills_up(guest: Guest, load: Hotset, running: Tierd) -> None:
    fill(guest)
    with hotset(guest, *OPTIONS) as late:
        until(load, running, lambda: "is not watched" in running.process.stderr)
        assert watched(running) == {load.pid}
        goes_on(running, load)
        (note,) = (n for n in (running.status or {})["notes"] if str(late.pid) in n)
        assert "No space left on device" in note

        guest.run(["rm", f"{STATE}/filler"])
        until(load, running, lambda: watched(running) == {load.pid, late.pid})


@pytest.mark.guest(slow_node())
def test_a_spoilt_journal_is_told_and_the_rest_of_it_undone(
    guest: Guest, as_it_was: Footprint
) -> None:
    with hotset(guest, *OPTIONS) as load:
        killed = Tierd(guest, start_tierd(guest, "--pid", str(load.pid)))
        until(load, killed, lambda: watched(killed) == {load.pid})
        killed.process.signal(signal.SIGKILL)
        killed.process.wait()
        guest.run(["sh", "-c", f"printf '\\0\\377[[[\\n' >> {STATE}/journal.jsonl"])
        assert footprint(guest) != as_it_was

        done = ended(guest, "--for", "0")

        assert done.rc == 0, done.stderr
        assert "cannot be read" in done.stderr
        assert f"undone: kdamond 31 of process {load.pid} stopped" in done.stderr
        assert footprint(guest) == as_it_was
