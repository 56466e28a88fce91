# SPDX-License-Identifier: Apache-2.0
"""Kills tierd before every kind of change that it makes, starts it again, and looks at the machine.

    python -m faults.kills PID [--most N] [--seed N] [--only TEXT]

PID is a process with hot memory on the slow node. A run without a kill lists the steps: the system
calls that change something, by the phase that they come in and what they do,

    start: write kdamonds/31/state: on

and each of them is then killed, the first and the last time that it comes. All runs are children of
this process, which has imported everything: in an emulated guest that alone takes half a minute.
The phases are what tierd itself tells systemd: READY, RELOADING, STOPPING.

It is done twice: where nobody else uses DAMON but the kernel's own damon_stat, and beside somebody
else's kdamond and somebody else's slot. Prints what it did and found, as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import pyroute2.netlink.connector.cn_proc  # noqa: F401  # what the daemon imports late

from faults import machine, tracer
from faults.machine import DAMON_STAT, KDAMONDS, NUMA_BALANCING, Machine
from faults.tracer import Call, Ending
from tierd.cli import daemon
from tierd.sample import governor

FOLDER = Path("/run/tierd-faults")
STATE, RUNTIME = FOLDER / "state", FOLDER / "run"
CONFIG, STDERR, SYSTEMD = FOLDER / "tierd.toml", FOLDER / "stderr", FOLDER / "systemd"

SETTINGS = f"""
[daemon]
interval_s = 0.1
state_dir = "{STATE}"
runtime_dir = "{RUNTIME}"
[conflicts]
numa_balancing = "take_over"
[discover]
min_mib = 1.0
min_age_s = 0.0
[damon]
take_over = true
sample_us = 5000
aggregation_us = 100000
cpu_percent = 0.1  # too little, so that intervals are changed while a kdamond runs
[policy]
horizon_s = 300.0
"""
TARGET = """
[[target]]
command = "hotset"
"""
JUDGE_S = 1.0

MOST_ROUNDS = 100
LATE_OCCURRENCE = 4
"""Rounds are many: a step of theirs is killed at its first time, and at this one."""
MOVES_ENOUGH = 3
WITHIN_S = 120
ALIVE_WITHIN_S = 30

COMPLAINTS = re.compile(r"could not undo|left as it is|left at|cannot be read|Traceback")
SYS_MIGRATE_PAGES = 256


class Way(StrEnum):
    """How a run goes on after its start."""

    STOP = "stop"
    """Rounds with moves, then SIGTERM."""
    RELOAD = "reload"
    """A round, a reload that takes the target away, two rounds, SIGTERM."""
    UNDO = "undo"
    """A start on what a killed one has left, and its end at once."""


class Phase(StrEnum):
    START = "start"
    ROUNDS = "rounds"
    RELOAD = "reload"
    RELOADED = "rounds after the reload"
    STOP = "stop"
    UNDO = "undo"


OF_WAY = {
    Way.STOP: {Phase.START, Phase.ROUNDS, Phase.STOP},
    Way.RELOAD: {Phase.RELOAD, Phase.RELOADED},
    Way.UNDO: {Phase.UNDO},
}
"""The phases of which the steps are killed in runs of a way."""


class Step(NamedTuple):
    """Something that tierd does to the machine."""

    phase: Phase
    what: str

    def __str__(self) -> str:
        return f"{self.phase}: {self.what}"


@dataclass(frozen=True, slots=True)
class Kill:
    """Where to kill: before the n-th time that a step comes."""

    way: Way
    step: Step
    occurrence: int

    def __str__(self) -> str:
        return f"{self.step} (time {self.occurrence})"


@dataclass(slots=True)
class Followed:
    """A run: where it is, and what it is told to do next."""

    way: Way
    kill: Kill | None = None
    phase: Phase = field(init=False)
    seen: Counter[Step] = field(default_factory=Counter)
    rounds: int = 0
    is_killed: bool = False

    def __post_init__(self) -> None:
        self.phase = Phase.UNDO if self.way is Way.UNDO else Phase.START

    def before(self, call: Call) -> bool:
        """Follows it; says whether it may go on."""
        what = describe(call)
        if what is None:
            return True
        told = call.data.partition(b"\n")[0] if call.name == "send" else b""
        self.phase = {b"RELOADING=1": Phase.RELOAD, b"STOPPING=1": Phase.STOP}.get(told, self.phase)
        step = Step(self.phase, what)
        self.seen[step] += 1
        if self.kill and (step, self.seen[step]) == (self.kill.step, self.kill.occurrence):
            self.is_killed = True
            return False
        if told == b"READY=1":
            self.phase = Phase.ROUNDS if self.phase is not Phase.RELOAD else Phase.RELOADED
            self.rounds = 0
        if call.name == "rename" and call.paths[-1] == str(RUNTIME / "status.json"):
            self._round(call.pid)
        return True

    def _round(self, pid: int) -> None:
        self.rounds += 1
        if self.phase is Phase.ROUNDS and self.way is Way.RELOAD and self.rounds == 1:
            CONFIG.write_text(SETTINGS)
            os.kill(pid, signal.SIGHUP)
        elif self._is_over():
            os.kill(pid, signal.SIGTERM)

    def _is_over(self) -> bool:
        if self.rounds == MOST_ROUNDS:
            return True
        if self.way is Way.RELOAD:
            return self.phase is Phase.RELOADED and self.rounds == 2
        if self.kill is not None:
            return self.kill.step.phase is Phase.STOP and self.rounds == 1
        moves = self.seen[Step(Phase.ROUNDS, "move_pages")]
        return self.rounds >= LATE_OCCURRENCE and moves >= MOVES_ENOUGH and self._has_tuned()

    def _has_tuned(self) -> bool:
        return any("commit" in step.what for step in self.seen)


def describe(call: Call) -> str | None:
    """Names a call by what it does, the same in each run; None where it is nobody's business."""
    paths = [shown for path in call.paths if (shown := _shown(path))]
    if call.name.startswith("write") and (str(STDERR) in call.paths or not paths):
        return None  # a line of the log, or a byte that wakes the main thread up
    if call.name == "open" and call.paths[0].startswith(("/sys/", "/proc/")):
        return None  # the write comes next
    return " ".join([call.name, *paths]) + _shown_data(call)


def _shown(path: str) -> str:
    """A path without what differs from run to run; nothing for what has no name."""
    if not path.startswith("/"):
        return ""
    path = path.removeprefix(f"{KDAMONDS.parent}/").removeprefix(f"{FOLDER}/")
    return re.sub(r"^/proc/\d+", "/proc/PID", path)


def _shown_data(call: Call) -> str:
    if call.name == "send":
        word = call.data.partition(b"\n")[0]
        return f" {word.decode()}" if (word.isascii() and word.isalnum()) or b"=" in word else ""
    if call.name in ("bind", "connect"):
        return f" {_shown(_unix_path(call.data))}".rstrip()
    if call.name != "write" or not call.data:
        return ""
    if call.paths[0].startswith(("/sys/", "/proc/")):
        return ": " + re.sub(r"\d{2,}", "#", call.data.decode())
    if call.paths[0].endswith("journal.jsonl"):
        return ": " + _shown_line(call.data)
    return ""


def _unix_path(address: bytes) -> str:
    """The path in a struct sockaddr_un; nothing for another address."""
    family, path = int.from_bytes(address[:2], "little"), address[2:].split(b"\0")[0]
    return path.decode() if family == socket.AF_UNIX else ""


def _shown_line(line: bytes) -> str:
    fields = json.loads(line)
    pid = " with its pid" if fields.get("pid") else ""
    return f"{fields['kind']} {Path(fields.get('path', '')).name}".rstrip() + pid


def tierd(*arguments: str) -> Callable[[], int]:
    """Returns a function that is tierd."""

    def main() -> int:
        governor.JUDGE_S = JUDGE_S
        try:
            daemon.main(["run", "--config", str(CONFIG), *arguments], prog_name="tierd")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return main


@dataclass(slots=True)
class Trial:
    """The kills on one machine."""

    name: str
    target: int
    notified: socket.socket
    before: Machine = field(default_factory=dict)
    killed: Counter[Phase] = field(default_factory=Counter)
    planned: int = 0
    left: int = 0
    missed: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def run_all(self, most: int | None, chance: random.Random, only: str) -> None:
        CONFIG.write_text(SETTINGS)
        self._clean_up("the first start")
        self.before = machine.look(STATE, RUNTIME)
        kills = [kill for kill in self._plan() if only in str(kill)]
        self.planned = len(kills)
        for kill in kills if most is None else sample(kills, most, chance):
            self._kill(kill)

    def _plan(self) -> list[Kill]:
        """Lists the steps of each way, and where to kill."""
        listed = {way: self._list(way) for way in (Way.STOP, Way.RELOAD)}
        self._follow(Way.STOP, DIRTY)
        undo = self._list(Way.UNDO)
        usual = {s.what: n for s, n in listed[Way.STOP].items() if s.phase is Phase.START}
        more = {step: n for step, n in undo.items() if n > usual.get(step.what, 0)}
        listed[Way.UNDO] = Counter(more)
        self.steps = [f"{n} x {step}" for seen in listed.values() for step, n in seen.items()]
        return [
            Kill(way, step, occurrence)
            for way, seen in listed.items()
            for step, count in seen.items()
            if step.phase in OF_WAY[way]
            for occurrence in sorted({1, _last(step, count)})
        ]

    def _list(self, way: Way) -> Counter[Step]:
        run, ending = self._follow(way)
        self._verify(f"{way}, without a kill", ending)
        return run.seen

    def _kill(self, kill: Kill) -> None:
        if kill.way is Way.UNDO:
            self._follow(Way.STOP, DIRTY)
        run, ending = self._follow(kill.way, kill)
        if not run.is_killed:
            self.missed.append(str(kill))
        elif ending.rc != -signal.SIGKILL:
            self.findings.append(f"{kill}: ended with {ending.rc}, not killed: {ending.stderr}")
        else:
            self.killed[kill.step.phase] += 1
        found = machine.differences(self.before, machine.look(STATE, RUNTIME))
        self.left += run.is_killed and bool(found)
        self._clean_up(str(kill))

    def _clean_up(self, after: str) -> None:
        self._drain()
        self._verify(after, tracer.run(tierd("--for", "0"), STDERR, within_s=WITHIN_S))

    def _verify(self, after: str, ending: Ending) -> None:
        if ending.rc or COMPLAINTS.search(ending.stderr):
            self.findings.append(f"{after}: ended with {ending.rc}: {ending.stderr}")
        if self.before:
            found = machine.differences(self.before, machine.look(STATE, RUNTIME))
            self.findings += [f"{after}: {difference}" for difference in found]

    def _follow(self, way: Way, kill: Kill | None = None) -> tuple[Followed, Ending]:
        CONFIG.write_text(SETTINGS + TARGET)
        make_slow_again(self.target)
        run = Followed(way, kill)
        arguments = ("--for", "0") if way is Way.UNDO else ()

        def before(call: Call) -> bool:
            self._drain()
            return run.before(call)

        ending = tracer.run(tierd(*arguments), STDERR, before=before, within_s=WITHIN_S)
        return run, ending

    def _drain(self) -> None:
        """Takes what tierd has told; a full queue would hold it up."""
        while True:
            try:
                self.notified.recv(4096)
            except BlockingIOError:
                return


DIRTY = Kill(Way.STOP, Step(Phase.STOP, "send STOPPING=1"), 1)
"""A kill with everything still set up."""


def _last(step: Step, count: int) -> int:
    is_round = step.phase in (Phase.ROUNDS, Phase.RELOADED)
    return min(count, LATE_OCCURRENCE) if is_round else count


def sample(kills: list[Kill], most: int, chance: random.Random) -> list[Kill]:
    """Draws so many, of each phase as many as of any other, as far as there are."""
    drawn: Counter[Phase] = Counter()
    turns: dict[Kill, int] = {}
    for kill in chance.sample(kills, len(kills)):
        turns[kill] = drawn[kill.step.phase]
        drawn[kill.step.phase] += 1
    first = sorted(turns, key=turns.__getitem__)[:most]
    return sorted(first, key=kills.index)


def make_slow_again(pid: int) -> None:
    """Moves a process's memory from node 0 to node 1, where it would be moved from."""
    old, new = ctypes.c_ulong(1), ctypes.c_ulong(2)
    if tracer.libc.syscall(SYS_MIGRATE_PAGES, pid, 64, ctypes.byref(old), ctypes.byref(new)) < 0:
        raise OSError(ctypes.get_errno(), f"migrate_pages of {pid}")


@contextmanager
def value(path: Path, wanted: str) -> Iterator[None]:
    """Has a tunable hold that, where there is one."""
    before = path.read_text() if path.exists() else wanted
    if before.strip() != wanted:
        path.write_text(wanted)
    try:
        yield
    finally:
        if before.strip() != wanted:
            path.write_text(before)


@contextmanager
def alone() -> Iterator[None]:
    with value(NUMA_BALANCING, "1"), value(DAMON_STAT, "Y"):
        yield


@contextmanager
def beside_others() -> Iterator[None]:
    """Somebody else's kdamond, and somebody else's slot that isn't on; a third one is free."""
    with value(NUMA_BALANCING, "1"), value(DAMON_STAT, "N"):
        (KDAMONDS / "nr_kdamonds").write_text("3")
        for slot in (0, 1):
            context = KDAMONDS / f"{slot}/contexts/0"
            (KDAMONDS / f"{slot}/contexts/nr_contexts").write_text("1")
            (context / "operations").write_text("vaddr")
            (context / "targets/nr_targets").write_text("1")
            (context / "targets/0/pid_target").write_text(str(os.getppid()))
        (KDAMONDS / "0/state").write_text("on")
        thread = int((KDAMONDS / "0/pid").read_text())
        before = machine.cpu_ticks(thread)
        try:
            yield
            wait_until(lambda: machine.cpu_ticks(thread) > before, "the foreign kdamond to work")
        finally:
            (KDAMONDS / "0/state").write_text("off")
            (KDAMONDS / "nr_kdamonds").write_text("0")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + ALIVE_WITHIN_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {ALIVE_WITHIN_S} s for {what}")
        time.sleep(0.1)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pid", type=int)
    parser.add_argument("--most", type=int, help="kill a sample of so many steps on each machine")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    parser.add_argument("--only", default="", help="kill only at steps with this in their name")
    given = parser.parse_args(arguments)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork takes one thread along"
    for folder in (STATE, RUNTIME):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "of-somebody-else").touch()
    reports = []
    SYSTEMD.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(SYSTEMD))
        notified.setblocking(False)
        os.environ["NOTIFY_SOCKET"] = str(SYSTEMD)
        for others in (alone, beside_others):
            begin_s = time.monotonic()
            trial = Trial(others.__name__, given.pid, notified)
            with others():
                trial.run_all(given.most, random.Random(given.seed), given.only)
            reports.append(report(trial, time.monotonic() - begin_s))
            sys.stdout.write(json.dumps(reports[-1]) + "\n")
            sys.stdout.flush()


def report(trial: Trial, took_s: float) -> dict[str, object]:
    return {
        "machine": trial.name,
        "planned": trial.planned,
        "kills": dict(trial.killed),
        "left": trial.left,
        "missed": trial.missed,
        "findings": trial.findings,
        "steps": trial.steps,
        "seconds": round(took_s),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
