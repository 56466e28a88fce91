# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tierd import config
from tierd.config import DiscoverConfig, TargetConfig
from tierd.discover.targets import (
    SCAN_COST,
    SCAN_REST_S,
    TICKS_PER_S,
    WAIT_S,
    Finder,
    check_targets,
    find_targets,
)
from tierd.errors import ConfigError
from tierd.kernel import process
from tierd.kernel.proc_events import CHANGED, ENDED, EVENT
from tierd.model import Pid

OWN = Pid(99)


ID = "3f4a5b6c7d8e" + "0" * 52


def put(
    root: Path,
    pid: int,
    command: str,
    *,
    cgroup: str = "/",
    flags: int = 0,
    leader: int = 0,
    user: int = 0,
    start_ticks: int = 7,
    mib: int = 64,
) -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    head, numbers = f"{pid} ({command}) S 1 1 1 0 -1 {flags}", "9 0 0 0 0 0 0 0 20 0 1 0"
    (folder / "stat").write_text(f"{head} {numbers} {start_ticks} 31 {mib * 256} 18\n")
    status = f"Name:\t{command}\nTgid:\t{leader or pid}\nUid:\t{user}\t0\t0\t0\n"
    (folder / "status").write_text(status)
    (folder / "comm").write_text(f"{command}\n")
    (folder / "cgroup").write_text(f"0::{cgroup}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, 2, "kthreadd", flags=0x00208040)
    put(tmp_path, 40, "redis-server", cgroup="/system.slice/redis.service")
    put(tmp_path, 41, "redis-server", cgroup="/system.slice/redis.service/sub")
    put(tmp_path, 42, "postgres", cgroup="/system.slice/redis.service2", user=104)
    put(tmp_path, 45, "node", cgroup=f"/system.slice/docker-{ID}.scope/app", user=104)
    put(tmp_path, 46, "node", cgroup=f"/docker/{ID.replace('3f', '4f')}", user=105)
    put(tmp_path, 43, "gone")
    (tmp_path / "proc/43/stat").unlink()
    put(tmp_path, 44, "worker", leader=40)
    put(tmp_path, OWN, "redis-server", cgroup="/system.slice/redis.service")
    return tmp_path


def rules(*lines: str) -> tuple[TargetConfig, ...]:
    return config.parse("".join(f"[[target]]\n{line}\n" for line in lines), "f").targets


@pytest.mark.parametrize(
    ("lines", "pids"),
    [
        ((), []),
        (("pid = 42",), [42]),
        (("pid = 7",), []),
        (("pid = 2",), []),
        (("pid = 44",), []),
        (("command = 'redis-server'",), [40, 41]),
        (("command = 'redis'",), []),
        (("command = 'gone'",), []),
        (("command = 'kthreadd'",), []),
        (("cgroup = '/system.slice/redis.service'",), [40, 41]),
        (("cgroup = '/system.slice/redis.service/sub/'",), [41]),
        (("cgroup = '/'",), [40, 41, 42, 45, 46]),
        (("unit = 'redis.service'",), [40, 41]),
        (("unit = 'system.slice'",), [40, 41, 42, 45]),
        (("container = '3f4a5b6c7d8e'",), [45]),
        ((f"container = '{ID.replace('3f', '4f')}'",), [46]),
        (("container = '5b6c7d8e0000'",), []),
        (("user = '104'",), [42, 45]),
        (("user = 'root'",), [40, 41]),
        (("user = 'nobody-of-that-name'",), []),
        (("user = '104'\ncommand = 'node'",), [45]),
        (("command = 'node'\ncgroup = '/docker'", "user = '104'"), [42, 45, 46]),
        (("command = 'redis-server'", "pid = 40", "command = 'postgres'"), [40, 41, 42]),
    ],
)
def test_rules(root: Path, lines: tuple[str, ...], pids: list[int]) -> None:
    assert [found.pid for found in find_targets(rules(*lines), root, OWN)] == pids


@pytest.mark.parametrize(
    ("pid", "message"),
    [
        (7, "there is no process 7"),
        (43, "there is no process 43"),
        (2, "process 2 is a kernel thread (kthreadd): it has no memory of its own"),
        (44, "44 is a thread of process 40 (worker): name that one"),
        (99, "process 99 is tierd itself"),
    ],
)
def test_pid_that_cannot_be_placed(root: Path, pid: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_targets(rules("command = 'nobody'", f"pid = {pid}", "pid = 40"), root, OWN)
    assert str(caught.value) == f"f:4: target[2].pid: {message}"


def test_pids_that_can_be_placed(root: Path) -> None:
    check_targets(rules("pid = 40", "pid = 42", "cgroup = '/none'"), root, OWN)


def test_user_that_does_not_exist(root: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_targets(rules("user = 'root'", "user = 'nobody-of-that-name'"), root, OWN)
    assert str(caught.value) == "f:4: target[2].user: there is no user nobody-of-that-name"


class Clock:
    """Seconds since a boot of the test's."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def finder(root: Path, clock: Clock, *lines: str, **limits: float) -> Finder:
    limited = DiscoverConfig(**limits)
    return Finder(rules(*lines), limited, root=root, own=OWN, clock_s=clock)


class FakeEvents:
    """A fake that tells what it was told to."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self.lost = False

    def read(self) -> tuple[NDArray[np.void], bool]:
        told, lost = np.array(self.events, EVENT), self.lost
        self.events, self.lost = [], False
        return told, lost


@dataclass
class Eventful:
    """A finder with events, over one process that is a target already."""

    root: Path
    clock: Clock
    events: FakeEvents
    find: Finder

    def pids(self, after_s: float = 0) -> list[int]:
        self.clock.now_s += after_s
        return [found.pid for found in self.find()]


@pytest.fixture
def eventful(tmp_path: Path) -> Eventful:
    clock, events = Clock(), FakeEvents()
    put(tmp_path, 50, "worker")
    find = Finder(
        rules("command = 'worker'"),
        DiscoverConfig(min_mib=20, min_age_s=5),
        lambda: events,
        root=tmp_path,
        own=OWN,
        clock_s=clock,
    )
    made = Eventful(tmp_path, clock, events, find)
    assert made.pids() == [50]
    return made


def start(made: Eventful, pid: int, command: str = "worker", mib: int = 64) -> None:
    ticks = round(made.clock.now_s * TICKS_PER_S)
    put(made.root, pid, command, start_ticks=ticks, mib=mib)
    made.events.events.append((pid, CHANGED))


def test_what_an_event_tells_of_is_looked_at_when_it_is_old_enough(eventful: Eventful) -> None:
    start(eventful, 60)
    assert eventful.pids() == [50]
    assert eventful.pids(after_s=4) == [50]
    assert eventful.pids(after_s=1) == [50, 60]


def test_what_ends_before_is_never_looked_at(
    eventful: Eventful, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Pid] = []
    monkeypatch.setattr(process, "read_command", lambda pid, root: looked.append(pid))
    for pid in range(1000, 3000):
        eventful.events.events += [(pid, CHANGED), (pid, CHANGED), (pid, ENDED)]
    eventful.pids()
    eventful.events.events += [(4000, CHANGED)]
    eventful.pids()
    eventful.events.events += [(4000, ENDED)]
    eventful.pids(after_s=10)
    assert looked == []


def test_a_pid_that_is_given_again_within_one_reading_is_looked_at(eventful: Eventful) -> None:
    eventful.events.events += [(60, CHANGED), (60, ENDED)]
    start(eventful, 60)
    assert eventful.pids() == [50]
    assert eventful.pids(after_s=5) == [50, 60]


def test_what_is_too_small_is_looked_at_again(eventful: Eventful) -> None:
    start(eventful, 60, mib=1)
    assert eventful.pids() == [50]
    assert eventful.pids(after_s=5) == [50]
    put(eventful.root, 60, "worker", start_ticks=round(1000 * TICKS_PER_S))
    assert eventful.pids(after_s=1) == [50]
    assert eventful.pids(after_s=WAIT_S) == [50, 60]


def test_what_has_ended_or_become_another_program_is_no_target(eventful: Eventful) -> None:
    start(eventful, 60)
    eventful.pids()
    assert eventful.pids(after_s=5) == [50, 60]
    eventful.events.events.append((60, ENDED))
    (eventful.root / "proc/60/stat").unlink()
    assert eventful.pids() == [50]
    put(eventful.root, 50, "another")
    eventful.events.events.append((50, CHANGED))
    eventful.pids()
    assert eventful.pids(after_s=5) == []


def test_after_a_loss_and_now_and_then_all_are_looked_at(eventful: Eventful) -> None:
    put(eventful.root, 60, "worker")
    assert eventful.pids(after_s=5) == [50]
    eventful.events.lost = True
    assert eventful.pids() == [50, 60]
    put(eventful.root, 61, "worker")
    assert eventful.pids(after_s=SCAN_REST_S - 1) == [50, 60]
    assert eventful.pids(after_s=1) == [50, 60, 61]


def test_losses_have_all_looked_at_no_more_often_than_that_is_worth(
    eventful: Eventful, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = 0

    def slow_scan(root: Path) -> tuple[Pid, ...]:
        nonlocal scans
        scans += 1
        eventful.clock.now_s += 0.1
        return ()

    monkeypatch.setattr(process, "read_pids", slow_scan)
    for _ in range(30):
        eventful.events.lost = True
        eventful.pids(after_s=1)
    assert 1 <= scans <= 1 + 30 / (0.1 * SCAN_COST)


def test_nobody_listens_for_given_pids_alone(tmp_path: Path) -> None:
    def listen() -> None:
        raise AssertionError

    put(tmp_path, 50, "worker")
    find = Finder(rules("pid = 50"), DiscoverConfig(), listen, root=tmp_path, own=OWN)
    assert [found.pid for found in find()] == [50]
    with pytest.raises(AssertionError):
        find.follow(rules("command = 'worker'"), DiscoverConfig())


def test_small_and_young_processes_are_not_targets_yet(tmp_path: Path) -> None:
    clock = Clock()
    started = round(clock.now_s * TICKS_PER_S)
    put(tmp_path, 50, "worker", start_ticks=started, mib=100)
    put(tmp_path, 51, "worker", start_ticks=started - 10 * TICKS_PER_S, mib=10)
    find = finder(tmp_path, clock, "command = 'worker'", min_mib=20, min_age_s=5)
    assert find() == []
    clock.now_s += 5
    assert [found.pid for found in find()] == [50]
    put(tmp_path, 51, "worker", start_ticks=started - 10 * TICKS_PER_S, mib=20)
    assert [found.pid for found in find()] == [50, 51]


def test_a_target_stays_one_when_it_shrinks_but_its_successor_is_new(tmp_path: Path) -> None:
    clock = Clock()
    put(tmp_path, 50, "worker", mib=100)
    find = finder(tmp_path, clock, "command = 'worker'", min_mib=20)
    assert [found.pid for found in find()] == [50]
    put(tmp_path, 50, "worker", mib=1)
    assert [found.pid for found in find()] == [50]
    put(tmp_path, 50, "worker", mib=1, start_ticks=8)
    assert find() == []


def test_a_pid_is_a_target_whatever_its_size_and_not_its_successor(tmp_path: Path) -> None:
    put(tmp_path, 50, "worker", mib=0)
    find = finder(tmp_path, Clock(), "pid = 50", "pid = 51", min_mib=20)
    assert [found.pid for found in find()] == [50]
    put(tmp_path, 51, "later")
    assert [found.pid for found in find()] == [50]
    put(tmp_path, 50, "worker", mib=100, start_ticks=8)
    assert find() == []


def test_other_rules_are_followed_and_pids_that_stay_are_the_same_processes(tmp_path: Path) -> None:
    put(tmp_path, 50, "given")
    put(tmp_path, 51, "worker")
    find = finder(tmp_path, Clock(), "pid = 50")
    put(tmp_path, 50, "successor", start_ticks=8)
    find.follow(rules("command = 'worker'", "pid = 50"), DiscoverConfig())
    assert [found.pid for found in find()] == [51]
    find.follow(rules("pid = 51"), DiscoverConfig())
    assert [found.pid for found in find()] == [51]
