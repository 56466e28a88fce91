# SPDX-License-Identifier: Apache-2.0
"""The process connector of the running kernel."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernel.test_pages import grown_bytes
from tierd.kernel.proc_events import CHANGED, ENDED, ProcEvents


@pytest.fixture
def events() -> Iterator[ProcEvents]:
    with ProcEvents() as listening:
        listening.read()
        yield listening


def of(pid: int, found: NDArray[np.void]) -> list[int]:
    return [int(kind) for kind in found["kind"][found["pid"] == pid]]


def test_a_process_begins_changes_and_ends(events: ProcEvents) -> None:
    code = "open('/proc/self/comm', 'w').write('renamed')"
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        pass
    found, lost = events.read()
    assert not lost
    assert of(process.pid, found) == [CHANGED, CHANGED, CHANGED, ENDED], "fork, exec, name, end"
    assert of(process.pid, events.read()[0]) == [], "each is told once"


def test_another_user_is_a_change(events: ProcEvents) -> None:
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        os._exit(0)
    os.waitpid(pid, 0)
    assert of(pid, events.read()[0]) == [CHANGED, CHANGED, ENDED], "fork, user, end"


def test_threads_are_left_out(events: ProcEvents) -> None:
    threads = [threading.Thread(target=time.sleep, args=(0,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert of(os.getpid(), events.read()[0]) == []


def fork(times: int) -> None:
    """Has a shell fork so many processes, one after the other."""
    loop = f"i=0; while [ $i -lt {times} ]; do (:); i=$((i+1)); done"
    subprocess.run(["sh", "-c", loop], check=True)


def test_more_than_a_batch_is_read(events: ProcEvents) -> None:
    fork(3000)
    found, lost = events.read()
    assert not lost
    begun, ended = (found["pid"][found["kind"] == kind] for kind in (CHANGED, ENDED))
    assert len(ended) >= 3000
    assert np.isin(ended, begun).mean() > 0.99, "all but what had begun before"


def test_a_full_queue_is_told() -> None:
    with ProcEvents(queue_bytes=32 << 10) as events:
        fork(500)
        assert events.read()[1]
        assert not events.read()[1]


def test_closed_it_leaves_no_descriptor() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        with ProcEvents():
            pass
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_who_may_not_listen_is_told() -> None:
    code = "from tierd.kernel.proc_events import ProcEvents; ProcEvents()"
    command = ["setpriv", "--bounding-set=-net_admin", sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "PermissionError: [Errno 1] Operation not permitted" in ended.stderr


def test_one_protocol_of_pyroute2_is_imported_and_the_others_can_be() -> None:
    code = """
import sys
from tierd.kernel.proc_events import ProcEvents
ProcEvents().close()
assert "pyroute2.netlink.connector.cn_proc" in sys.modules
assert not {"pyroute2", "pyroute2.iproute"} & sys.modules.keys()
from pyroute2 import IPRoute
ProcEvents().close()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reading_leaks_nothing(events: ProcEvents) -> None:
    """What a read takes would come to 6 MiB; Python may take another arena of 1 MiB meanwhile."""

    def fork_and_read() -> None:
        fork(1)
        assert len(events.read()[0]) >= 2

    assert grown_bytes(fork_and_read, calls=200) < 2 << 20
