# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tierd.kernel import task
from tierd.model import Pid

KDAMOND = (
    "(kdamond.0) S 2 0 0 0 -1 2129984 0 0 0 0 3 161 0 0 20 0 1 0 8812 0 0 18446744073709551615"
)


@pytest.mark.parametrize("name", ["kdamond.0", ") S 1 (2", "a b"])
def test_user_and_system_time_are_added_whatever_the_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "proc/412").mkdir(parents=True)
    (tmp_path / "proc/412/stat").write_text(f"412 {KDAMOND.replace('kdamond.0', name)}\n")

    assert task.cpu_s(Pid(412), tmp_path) == pytest.approx(164 / os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize(
    ("user_s", "kernel_s", "held_up_s"),
    [(0, 0, 0), (0.1, 0, 0), (0, 0.1, 0.1), (0.02, 0.08, 0.08), (0, 0.05, 0.05), (0.2, 0.6, 0.075)],
    ids=["idle", "own", "all", "most", "half of it asleep", "of eight threads"],
)
def test_a_task_is_held_up_while_the_kernel_has_it(
    user_s: float, kernel_s: float, held_up_s: float
) -> None:
    before = task.CpuTimes(10, 20)
    after = task.CpuTimes(10 + user_s, 20 + kernel_s)
    assert task.held_up_s(before, after, 0.1) == pytest.approx(held_up_s)


def test_a_busy_process_is_seen_to_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            while task.cpu_s(Pid(busy.pid)) < 0.05:
                assert busy.poll() is None
        finally:
            busy.kill()


NICE = """
import os
from tierd.kernel import task
begin = os.getpriority(os.PRIO_PROCESS, 0)
for nice in 0, 12, 7:
    task.give_way(nice)
    print(os.getpriority(os.PRIO_PROCESS, 0) - (0 if nice else begin))
"""


def test_a_process_gives_way_by_more_but_never_by_less() -> None:
    told = subprocess.run([sys.executable, "-c", NICE], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["0", "12", "12"]


def test_what_is_no_kdamond_any_more_keeps_its_priority() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        os.setpriority(os.PRIO_PROCESS, other.pid, 19)
        task.give_way_likewise(Pid(other.pid))
        assert os.getpriority(os.PRIO_PROCESS, other.pid) == 19
        other.kill()
    task.give_way_likewise(Pid(other.pid))


def test_a_kdamond_that_we_may_not_slow_down_stays_as_it_is() -> None:
    """As under the unit: it has capabilities that we lack."""
    with (
        patch.object(task, "read_command", return_value="kdamond.0"),
        patch("os.setpriority", side_effect=PermissionError),
    ):
        task.give_way_likewise(Pid(412))


def test_a_task_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProcessLookupError, match="no task 5"):
        task.cpu_s(Pid(5), tmp_path)


SCHED = """\
head (412, #threads: 1)
-------------------------------------------------------------------
se.exec_start                                :      29055870.912271
mm->numa_scan_seq                            :28
numa_pages_migrated                          :                12346
numa_preferred_nid                           :                   -1
"""


@pytest.mark.parametrize(
    ("sched", "pages"),
    [(SCHED, 12346), (SCHED.partition("mm->")[0], 0), (None, 0)],
    ids=["told", "without numa_balancing", "no such task"],
)
def test_it_is_told_what_faults_of_a_task_had_moved(
    tmp_path: Path, sched: str | None, pages: int
) -> None:
    if sched is not None:
        (tmp_path / "proc/412").mkdir(parents=True)
        (tmp_path / "proc/412/sched").write_text(sched)
    assert task.promoted_pages(Pid(412), tmp_path) == pages
