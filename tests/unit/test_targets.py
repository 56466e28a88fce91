# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tierd import config
from tierd.config import TargetConfig
from tierd.discover.targets import check_targets, find_targets
from tierd.errors import ConfigError
from tierd.model import Pid

OWN = Pid(99)


def put(
    root: Path, pid: int, command: str, *, cgroup: str = "/", flags: int = 0, leader: int = 0
) -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    stat = f"{pid} ({command}) S 1 1 1 0 -1 {flags} 9 0 0 0 0 0 0 0 20 0 1 0 {pid}7 31 35 18\n"
    (folder / "stat").write_text(stat)
    (folder / "status").write_text(f"Name:\t{command}\nTgid:\t{leader or pid}\n")
    (folder / "comm").write_text(f"{command}\n")
    (folder / "cgroup").write_text(f"0::{cgroup}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, 2, "kthreadd", flags=0x00208040)
    put(tmp_path, 40, "redis-server", cgroup="/system.slice/redis.service")
    put(tmp_path, 41, "redis-server", cgroup="/system.slice/redis.service/sub")
    put(tmp_path, 42, "postgres", cgroup="/system.slice/redis.service2")
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
        (("cgroup = '/'",), [40, 41, 42]),
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
