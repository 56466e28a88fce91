# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tierd import config
from tierd.config import DiscoverConfig, TargetConfig
from tierd.discover.targets import TICKS_PER_S, Finder, check_targets, find_targets
from tierd.errors import ConfigError
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
    return Finder(rules(*lines), DiscoverConfig(**limits), root=root, own=OWN, clock_s=clock)


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
