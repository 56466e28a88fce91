# SPDX-License-Identifier: Apache-2.0
"""Limits of a process below a fake /proc, whose files are as test_process.py has them."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tierd.kernel.process import RANGE, BoundRange
from tierd.migrate import limits
from tierd.migrate.limits import Limits, LimitsReader
from tierd.model import NodeId, Pid

PID = Pid(42)
DRAM, CXL, FAR = NodeId(0), NodeId(1), NodeId(2)
TICK_S = 0.1
STAT = "42 (a) S 1 42 42 0 -1 4194304 98 0 0 0 0 0 0 0 20 0 1 0 {start} 31 35 18\n"
STATUS = "Tgid:\t42\nVmLck:\t{locked} kB\n{cpuset}"
CPUSET = "Mems_allowed_list:\t{}\n"
SMAPS = """\
1000-2000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac
2000-4000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me lo ac
"""
BOUND = "1000 default anon=1\n2000 bind:1 anon=1\n3000 interleave:0-1 anon=1\n4000 default\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A process with locked and bound memory, allowed on nodes 0 and 1."""
    folder = tmp_path / "proc/42"
    folder.mkdir(parents=True)
    status = STATUS.format(locked=8, cpuset=CPUSET.format("0-1"))
    for name, content in {
        "stat": STAT.format(start=7),
        "status": status,
        "comm": "a\n",
        "cgroup": "0::/\n",
        "smaps": SMAPS,
        "numa_maps": BOUND,
    }.items():
        (folder / name).write_text(content)
    return folder


class Clock:
    """time.monotonic() by hand: a tenth of a second goes by with each reading."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        self.now_s += TICK_S
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    return clock


def reader(proc: Path, *, move_locked: bool = False) -> LimitsReader:
    return LimitsReader(move_locked=move_locked, root=proc.parents[1])


def read(reader: LimitsReader) -> Limits:
    found = reader(PID)
    assert found is not None
    return found


def at(*addresses: int) -> NDArray[np.uint64]:
    return np.array(addresses, np.uint64)


def test_cpuset(proc: Path) -> None:
    assert read(reader(proc)).among([FAR, CXL]) == [CXL]
    assert read(reader(proc)).among([FAR]) == []


def test_without_cpusets_every_node_is_allowed(proc: Path) -> None:
    (proc / "status").write_text(STATUS.format(locked=0, cpuset=""))
    assert read(reader(proc)).among([FAR, CXL]) == [FAR, CXL]


def test_locked_pages_are_told_from_their_neighbours(proc: Path) -> None:
    found = read(reader(proc)).is_locked(at(0x0, 0x1FFF, 0x2000, 0x3FFF, 0x4000))
    assert found.tolist() == [False, False, True, True, False]


def test_locked_pages_are_like_others_where_they_may_be_moved(proc: Path) -> None:
    assert not read(reader(proc, move_locked=True)).is_locked(at(0x2000)).any()


def test_bound_pages_may_go_where_they_are_bound_to(proc: Path) -> None:
    found, pages = read(reader(proc)), at(0x1000, 0x2000, 0x2FFF, 0x3000, 0x4000)
    assert found.is_bound_elsewhere(pages, DRAM).tolist() == [False, True, True, False, False]
    assert found.is_bound_elsewhere(pages, CXL).tolist() == [False] * 5
    assert found.is_bound_elsewhere(pages, FAR).tolist() == [False, True, True, True, False]


def test_ranges_that_are_not_there_hold_nothing() -> None:
    none = Limits(nodes=None, locked=np.empty(0, RANGE), bound=())
    assert not none.is_locked(at(0, 1)).any()
    assert not none.is_bound_elsewhere(at(0, 1), DRAM).any()


def test_an_address_behind_the_last_range_is_free() -> None:
    bound = (BoundRange(start=0x1000, end=0x2000, nodes=(CXL,)),)
    found = Limits(nodes=None, locked=np.empty(0, RANGE), bound=bound)
    assert found.is_bound_elsewhere(at(0x0FFF, 0x1000, 0x2000), DRAM).tolist() == [
        False,
        True,
        False,
    ]


def test_a_process_that_has_gone_has_no_limits(proc: Path) -> None:
    (proc / "stat").unlink()
    assert reader(proc)(PID) is None


def test_a_process_that_goes_while_it_is_read_has_none_either(proc: Path) -> None:
    (proc / "numa_maps").write_text("")
    assert reader(proc)(PID) is None


def test_mempolicies_are_kept_for_a_multiple_of_what_reading_took(proc: Path, clock: Clock) -> None:
    again = reader(proc)
    before = read(again).bound
    (proc / "numa_maps").write_text("1000 default\n")
    assert read(again).bound == before
    clock.now_s += limits.POLICIES_COST * TICK_S
    assert read(again).bound == ()


def test_mempolicies_of_a_process_that_had_the_pid_before_are_forgotten(
    proc: Path, clock: Clock
) -> None:
    again = reader(proc)
    assert read(again).bound
    (proc / "stat").write_text(STAT.format(start=8))
    (proc / "numa_maps").write_text("1000 default\n")
    assert read(again).bound == ()


def test_locks_and_cpuset_are_read_each_time(proc: Path, clock: Clock) -> None:
    again = reader(proc)
    read(again)
    (proc / "status").write_text(STATUS.format(locked=0, cpuset=CPUSET.format("0")))
    found = read(again)
    assert found.among([DRAM, CXL]) == [DRAM]
    assert not len(found.locked)
