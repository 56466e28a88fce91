# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierd.kernel import task
from tierd.model import Pid

KDAMOND = (
    "412 (kdamond.0) S 2 0 0 0 -1 2129984 0 0 0 0 3 161 0 0 20 0 1 0 8812 0 0 "
    "18446744073709551615 0 0 0 0 0 0 0 2147483647 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
)


def test_a_kdamond_is_the_kernels_own_and_has_used_cpu() -> None:
    found = task.parse(KDAMOND)

    assert found.is_kernel_thread
    assert found.name == "kdamond.0"
    assert found.cpu_s == pytest.approx(164 / os.sysconf("SC_CLK_TCK"))


def test_a_name_may_hold_anything() -> None:
    assert task.parse(KDAMOND.replace("kdamond.0", ") S 1 (2")).name == ") S 1 (2"


def test_a_process_of_ours_is_a_process_and_its_time_grows() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            while task.read(Pid(busy.pid)).cpu_s < 0.05:
                assert busy.poll() is None
            assert not task.read(Pid(busy.pid)).is_kernel_thread
        finally:
            busy.kill()


def test_a_process_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProcessLookupError, match="no process 5"):
        task.read(Pid(5), tmp_path)
