# SPDX-License-Identifier: Apache-2.0
"""The rings of CXL's tracepoints on the running kernel, which need not have any.

Two tracepoints of prctl(2) stand for them, whose fields the tests choose: see test_ring.py.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.kernel.test_pages import as_nobody
from tierd.errors import UnsupportedKernel
from tierd.kernel.cxl_events import CxlEvent, CxlEvents, Kind, Severity

LIBC = ctypes.CDLL(None)
NO_OPTION = 1_000_000
NAME_AT, NAME = 32, b"mem0"
FORMAT = """\
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:__data_loc char[] memdev;\toffset:24;\tsize:4;\tsigned:0;
\tfield:u64 dpa;\toffset:40;\tsize:8;\tsigned:0;
\tfield:u64 hpa;\toffset:48;\tsize:8;\tsigned:0;
"""
CPUS = "sys/devices/system/cpu/online"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root whose tracefs has two of CXL's tracepoints, by the ids of prctl's."""
    root, tracefs = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("tracefs")
    (root / CPUS).parent.mkdir(parents=True)
    shutil.copy(Path("/") / CPUS, root / CPUS)
    subprocess.run(["mount", "-t", "tracefs", "tracefs", tracefs], check=True)
    try:
        for name, stands_in in (("cxl_poison", "sys_enter_prctl"), ("cxl_dram", "sys_exit_prctl")):
            event = root / "sys/kernel/tracing/events/cxl" / name
            event.mkdir(parents=True)
            (event / "format").write_text(FORMAT)
            (event / "id").write_text((tracefs / f"events/syscalls/{stands_in}/id").read_text())
        yield root
    finally:
        subprocess.run(["umount", tracefs], check=True)


def emit(dpa: int, hpa: int) -> None:
    name = int.from_bytes(NAME, "little")
    words = map(ctypes.c_ulong, (NAME_AT | 8 << 16, name, dpa, hpa))
    assert LIBC.prctl(NO_OPTION, *words) == -1


def test_events_of_every_cpu_come_in_their_order(root: Path) -> None:
    allowed = os.sched_getaffinity(0)
    with CxlEvents(root) as events:
        try:
            for number, cpu in enumerate([*sorted(allowed)] * 2):
                os.sched_setaffinity(0, {cpu})
                emit(number, 1 << 40)
        finally:
            os.sched_setaffinity(0, allowed)
        found = [event for event in events.read() if event.device == "mem0"]
        assert [event for event in events.read() if event.device == "mem0"] == []
        assert events.lost == 0
        assert events.amiss > 0, "the other tracepoint's records name no device"
    assert found == [
        CxlEvent(
            kind=Kind.POISON,
            severity=Severity.UNCORRECTED,
            device="mem0",
            start=1 << 40,
            dpa=number,
            size_bytes=64,
        )
        for number in range(2 * len(allowed))
    ]


def test_a_cpu_that_comes_is_heard_from_then_on(root: Path) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    online = (root / CPUS).read_text()
    own = psutil.Process()
    try:
        (root / CPUS).write_text(f"{first}\n")
        with CxlEvents(root) as events:
            before = own.num_fds()
            (root / CPUS).write_text(online)
            events.read()
            os.sched_setaffinity(0, others)
            emit(7, 0)
            assert [event.dpa for event in events.read() if event.device == "mem0"] == [7]
            (root / CPUS).write_text(f"{first}\n")
            events.read()
            assert (own.num_fds(), events.deaf) == (before, None)
            (root / CPUS).write_text(f"{first},4095\n")
            os.sched_setaffinity(0, {first})
            emit(8, 0)
            assert [event.dpa for event in events.read() if event.device == "mem0"] == [8]
            assert "perf_event_open" in str(events.deaf)
            assert own.num_fds() == before
    finally:
        os.sched_setaffinity(0, [first, *others])
        (root / CPUS).write_text(online)


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """Each has a ring of its own."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    yield
    os.sched_setaffinity(0, cpus)


@pytest.mark.usefixtures("one_cpu")
def test_what_does_not_fit_is_counted(root: Path) -> None:
    with CxlEvents(root) as events:
        for number in range(2000):
            emit(number, 0)
        assert len(events.read()) < 2000
        emit(0, 0)  # whereupon the kernel tells what it had no room for
        events.read()
        assert events.lost > 0


def test_all_files_are_closed(root: Path) -> None:
    own = psutil.Process()
    before = own.num_fds()
    for _ in range(3):
        with CxlEvents(root):
            assert own.num_fds() >= before + 2 * len(os.sched_getaffinity(0))
    assert own.num_fds() == before


def listen(root: Path) -> None:
    with CxlEvents(root):
        pass


def test_others_may_not_listen(root: Path) -> None:
    told = as_nobody(listen, root)
    assert isinstance(told, UnsupportedKernel), "what it reads is root's"
