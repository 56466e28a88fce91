# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a running daemon, and tells it: curl, tierctl and a terminal."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import pytest
from guests.guest import Guest
from guests.pictures import SCREENS
from guests.tiering import FOLDER, PAGE_KIB, counter, tierd, until
from guests.topology import slow_node
from guests.workloads import Hotset, Sample, hotset

WIDTH, HEIGHT = 116, 24
SCREEN_S, SCREENS_S = 120, 400
QUIET_S, DRAIN_S = 5, 120
MIB, HOT_MIB = 64, 8

RULE = """
[conflicts]
numa_balancing = "take_over"
[[target]]
command = "hotset"
"""


def ask(guest: Guest, path: str, method: str = "GET", socket: str = "tierd.sock") -> str:
    """Asks the daemon as any program can."""
    url = f"http://localhost{path}"
    where = ("--unix-socket", f"{FOLDER}/run/{socket}")
    return guest.run(["curl", "-sS", "--fail-with-body", "-X", method, *where, url]).stdout


def asked(guest: Guest, path: str) -> Any:
    return json.loads(ask(guest, path))


@pytest.mark.guest(slow_node())
def test_an_operator_sees_and_steers(guest: Guest) -> None:
    guest.write("/proc/sys/vm/compaction_proactiveness", b"0")  # it migrates pages too
    before = Migrated.now(guest)
    # All of it goes to the window: a twentieth, on a fast machine, would make the rest warm.
    options = ("--mib", f"{MIB}", "--hot-mib", f"{HOT_MIB}", "--share", "100", "--node", "1")
    with hotset(guest, *options) as load, tierd(guest, settings=RULE) as running:
        until(load, running, lambda: load.sample().hot_share >= 0.95)
        sockets_are_for_whom_they_should_be(guest)
        until(load, running, lambda: is_explained(guest, load))
        the_screens_show_it(guest, load)
        a_pause_holds(guest, load)
        the_figures_agree(guest, before)
        ask(guest, "/v1/resume", "POST")
        until(load, running, lambda: load.sample().hot_share >= 0.95)
        a_drain_is_interrupted(guest)
        a_node_is_drained(guest, load)
        ask(guest, "/v1/pause", "POST")
        rounds = asked(guest, "/v1/status")["rounds"]
        until(load, running, lambda: asked(guest, "/v1/status")["rounds"] > rounds)
        the_figures_agree(guest, before)
        kinds = kinds_since_the_start(guest)
        assert kinds.index("start") < kinds.index("target.new") < kinds.index("moved")
        assert kinds.index("paused") < kinds.index("resumed")


def kinds_since_the_start(guest: Guest) -> list[str]:
    """The kinds of the events since the last start; those of other tests are told too."""
    kinds = [event["kind"] for event in asked(guest, "/v1/events?most=2000")["events"]]
    return kinds[len(kinds) - 1 - kinds[::-1].index("start") :]


def a_drain_is_interrupted(guest: Guest) -> None:
    (slow,) = guest.facts.slow
    drain = f"tierctl drain {slow} --config {FOLDER}/tierd.toml"
    with terminal(guest, f"trap : INT; {drain}; sleep 600") as screen:
        wait_for(screen, "pages moved; pass 1")
        screen.tmux("send-keys", "C-c")
        wait_for(screen, f"ended: node {slow} is used again")


def a_node_is_drained(guest: Guest, load: Hotset) -> None:
    (slow,) = guest.facts.slow
    path = f"/v1/drains/{slow}"
    told = json.loads(ask(guest, path, "PUT"))
    seconds = load.samples(DRAIN_S)
    while not told["done"]:
        assert next(seconds, None), told
        told = json.loads(ask(guest, path, "PUT"))
    # Samples are of a second each, and some may be waiting from before.
    left = next((s for s in load.samples(DRAIN_S) if s.cold_on_slow == 0), None)
    assert left is not None, told
    assert (left.hot_on_fast, left.absent) == (left.hot_pages, 0)
    assert json.loads(ask(guest, path, "DELETE"))["left"] == told["left"]


def sockets_are_for_whom_they_should_be(guest: Guest) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    may = {
        name: guest.run([*nobody, "test", "-w", f"{FOLDER}/run/{name}"], check=False).rc == 0
        for name in ("tierd.sock", "monitor.sock")
    }
    assert may == {"tierd.sock": False, "monitor.sock": True}
    where = ("--unix-socket", f"{FOLDER}/run/monitor.sock", "http://localhost/v1/pause")
    refused = guest.run(["curl", "-sS", "-X", "POST", *where])
    assert "nothing is here" in refused.stdout


def is_explained(guest: Guest, load: Hotset) -> bool:
    """Tells whether what is known by now is what is so: most accesses go to fast memory."""
    told = asked(guest, f"/v1/targets/{load.pid}")
    fast, slow = (tier["name"] for tier in asked(guest, "/v1/status")["tiers"])
    too_cold = told["why"].get("it is too cold to win back the cost of a move", 0)
    return bool(told["rate"][fast] > told["rate"][slow] and too_cold > MIB << 19)


def a_pause_holds(guest: Guest, load: Hotset) -> None:
    """The hot window moves on, maybe to what is on fast memory, and no page follows it."""
    assert json.loads(ask(guest, "/v1/pause", "POST")) == {"paused": True}
    before = load.sample().window
    load.move_window()
    moved_on = (sample for sample in load.samples(SCREENS_S) if sample.window != before)
    on_fast = [on_fast_pages(sample) for sample in islice(moved_on, QUIET_S)]
    assert on_fast == on_fast[:1] * QUIET_S


def on_fast_pages(sample: Sample) -> int:
    return sample.hot_on_fast + sample.cold_pages - sample.cold_on_slow


@dataclass(frozen=True, slots=True)
class Migrated:
    """What the kernel has counted: pages it migrated, and those that compaction has taken up.

    Where an allocation of several pages finds none, compaction makes room for it, and what it
    migrates for that is counted like what anybody moves.
    """

    pages: int
    compacted: int

    @classmethod
    def now(cls, guest: Guest) -> "Migrated":
        return cls(counter(guest, "pgmigrate_success"), counter(guest, "compact_isolated"))


def the_figures_agree(guest: Guest, before: Migrated) -> None:
    """The status, the metrics and the kernel tell the same number of pages, to the page."""
    now = Migrated.now(guest)
    migrated, compacted = now.pages - before.pages, now.compacted - before.compacted
    flows = asked(guest, "/v1/status")["moved"]
    told = sum(flow["pages"] for flow in flows)
    assert migrated - compacted <= told <= migrated, "but for compaction, to the page"
    assert told >= 0.95 * HOT_MIB * 1024 // PAGE_KIB
    text = ask(guest, "/metrics", socket="monitor.sock")
    moved = re.findall(r'^tierd_migration_pages_total{.*outcome="moved".*} (\S+)$', text, re.M)
    assert sum(map(float, moved)) == told


def the_screens_show_it(guest: Guest, load: Hotset) -> None:
    config = f"--config {FOLDER}/tierd.toml"
    with terminal(guest, f"tierctl top {config}", "top") as screen:
        seen = wait_for(screen, "q to quit")
        assert re.search(r"^tierd \d+: place +hits +\d", seen)
        assert re.search(rf"^{load.pid} +hotset +\d", seen, re.M)
    with terminal(
        guest, f"tierctl heat {load.pid} --for 8 --rows 16 {config}; sleep 600", "heat"
    ) as screen:
        seen = wait_for(screen, "a row is")
        assert "█" in seen or "▓" in seen
    with terminal(guest, f"tierctl doctor {config}; sleep 600", "doctor") as screen:
        seen = wait_for(screen, "targets:")
        assert re.search(r"^ok +tiers: ", seen, re.M)
        assert f"{load.pid} (hotset)" in seen


class Screen:
    """A program in a terminal, of a tmux of its own: one that ends may not yet be gone."""

    numbers = count()

    def __init__(self, guest: Guest) -> None:
        self.guest, self.name = guest, f"-Lscreen{next(self.numbers)}"

    def tmux(self, *arguments: str) -> str:
        return self.guest.run(["tmux", "-u", "-f", "/dev/null", self.name, *arguments]).stdout

    def capture(self, *options: str) -> str:
        return self.tmux("capture-pane", "-p", *options)


@contextmanager
def terminal(guest: Guest, command: str, keep_as: str | None = None) -> Iterator[Screen]:
    """Runs a command line in a terminal; with a name, it is kept for ./scripts/pictures."""
    screen = Screen(guest)
    size = ("-x", f"{WIDTH}", "-y", f"{HEIGHT}")
    screen.tmux("new-session", "-d", *size, f"LANG=C.UTF-8 {command}")
    try:
        yield screen
        if keep_as is not None:
            SCREENS.mkdir(parents=True, exist_ok=True)
            (SCREENS / f"{keep_as}.ans").write_text(screen.capture("-e"), encoding="utf-8")
    finally:
        screen.tmux("kill-server")


def wait_for(screen: Screen, text: str) -> str:
    """Returns the screen once it has the text."""
    end_s = time.monotonic() + SCREEN_S
    while text not in (seen := screen.capture()):
        assert time.monotonic() < end_s, seen
        time.sleep(1)
    return seen
