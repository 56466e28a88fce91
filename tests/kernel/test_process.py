# SPDX-License-Identifier: Apache-2.0
"""The process reader on the running kernel; psutil, smaps and numactl are the oracles."""

import ctypes
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tierd.kernel import process
from tierd.kernel.process import BoundRange
from tierd.model import Pid

OWN = Pid(os.getpid())
LIBC = ctypes.CDLL(None, use_errno=True)
LIBNUMA = ctypes.CDLL("libnuma.so.1", use_errno=True)


@contextmanager
def sleeper(*prefix: str) -> Iterator[Pid]:
    """Runs a program that is past its execve when it is handed out, and ends it."""
    with subprocess.Popen(
        [*prefix, "sh", "-c", "echo; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield Pid(child.pid)
        child.communicate(b"\n")


def covered(ranges: NDArray[np.void] | None, address: int) -> bool:
    assert ranges is not None
    return bool(((ranges["start"] <= address) & (address < ranges["end"])).any())


def test_own_process() -> None:
    oracle = psutil.Process()
    found = process.read_process(OWN)
    assert found is not None
    assert found.leader == OWN
    assert found.command == oracle.name()
    assert not found.is_kernel_thread
    started = psutil.boot_time() + found.start_ticks / os.sysconf("SC_CLK_TCK")
    assert started == pytest.approx(oracle.create_time(), abs=1)
    assert found.allowed_nodes


def test_every_process_is_read() -> None:
    found = {pid: process.read_process(pid) for pid in process.read_pids()}
    assert OWN in found
    kernels = {p.pid for p in found.values() if p is not None and p.is_kernel_thread}
    assert 2 in kernels
    assert OWN not in kernels


def test_mapped_ranges_are_as_psutil_tells() -> None:
    with sleeper() as pid:
        ranges = process.read_mapped(pid)
        maps = psutil.Process(pid).memory_maps(grouped=False)
    assert ranges is not None
    told = [
        tuple(int(end, 16) for end in mapping.addr.split("-"))
        for mapping in maps
        if mapping.path not in ("[vdso]", "[vsyscall]") and not mapping.path.startswith("[vvar")
    ]
    assert sum(end - start for start, end in told) == int((ranges["end"] - ranges["start"]).sum())
    assert all(covered(ranges, start) and covered(ranges, end - 1) for start, end in told)


def test_locked_memory() -> None:
    with mmap.mmap(-1, 16 * mmap.PAGESIZE) as memory:
        buffer = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(buffer) + 4 * mmap.PAGESIZE
        assert LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(8 * mmap.PAGESIZE)) == 0
        found = process.read_process(OWN)
        assert found is not None
        assert found.locked_bytes == 8 * mmap.PAGESIZE
        ranges = process.read_locked(found)
        del buffer
    assert ranges is not None
    assert [(int(a), int(b)) for a, b in ranges] == [(address, address + 8 * mmap.PAGESIZE)]


@pytest.mark.parametrize(
    ("options", "restricts"),
    [
        (["--membind=0"], True),
        (["--interleave=0"], True),
        (["--preferred=0"], False),
        (["--localalloc"], False),
    ],
)
def test_policy_of_a_process(options: list[str], restricts: bool) -> None:
    with sleeper("numactl", *options) as pid:
        policies = process.read_policies(pid)
        mapped = process.read_mapped(pid)
    assert policies is not None
    assert mapped is not None
    bound = all(any(p.start <= start < p.end for p in policies) for start in mapped["start"])
    assert (bound, bool(policies)) == (restricts, restricts)
    assert {p.nodes for p in policies} <= {(0,)}


def test_policy_of_a_range() -> None:
    length = 16 * mmap.PAGESIZE
    with mmap.mmap(-1, length) as memory:
        buffer = ctypes.c_char.from_buffer(memory)
        address, mask = ctypes.addressof(buffer), ctypes.c_ulong(1)
        mode = 2  # MPOL_BIND
        arguments = (ctypes.c_void_p(address), ctypes.c_ulong(length), mode, ctypes.byref(mask), 64)
        assert LIBNUMA.mbind(*arguments, 0) == 0, os.strerror(ctypes.get_errno())
        policies = process.read_policies(OWN)
        del buffer
    assert policies is not None
    assert [(p.start, p.nodes) for p in policies] == [(address, (0,))]
    assert policies[0].end >= address + length
    assert isinstance(policies[0], BoundRange)


def test_process_that_exits() -> None:
    with sleeper() as pid:
        found = process.read_process(pid)
        assert found is not None
        assert process.is_alive(found)
    assert not process.is_alive(found)
    assert process.read_process(pid) is None
    assert process.read_mapped(pid) is None
    assert process.read_policies(pid) is None
    assert process.read_locked(replace(found, locked_bytes=4096)) is None


def test_zombie_has_gone() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert process.read_process(Pid(child.pid)) is None
    assert process.read_mapped(Pid(child.pid)) is None
    child.wait()
