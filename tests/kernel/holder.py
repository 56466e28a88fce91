# SPDX-License-Identifier: Apache-2.0
"""A process that holds memory of several kinds, for others to look at.

Run as a program it maps what it was asked for, prints where as JSON, and ends with its input.
"""

import ctypes
import json
import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from tierd.model import PAGE_BYTES, Pid

HUGE_BYTES = 2 << 20
GIGANTIC_BYTES = 1 << 30
MAP_NORESERVE, MAP_HUGETLB, MAP_HUGE_SHIFT = 0x4000, 0x40000, 26


class Kind(StrEnum):
    PLAIN = "plain"  # 8 MiB, every second page written
    THP = "thp"  # 8 MiB of transparent huge pages
    ZERO = "zero"  # 1 MiB that was only read
    SPARSE = "sparse"  # 1 TiB with its first, middle and last page written
    HUGETLB = "hugetlb"  # one page of 2 MiB
    GIGANTIC = "gigantic"  # one page of 1 GiB


@dataclass(frozen=True, slots=True)
class Holder:
    pid: Pid
    start: int
    end: int
    process: subprocess.Popen[bytes]


@contextmanager
def holding(kind: Kind) -> Iterator[Holder]:
    """Starts a process that holds memory of that kind, and ends it."""
    program = [sys.executable, __file__, kind]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        start, end = json.loads(process.stdout.readline())
        yield Holder(Pid(process.pid), start, end, process)
        process.kill()


def _map(size: int, flags: int = 0) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _write(memory: mmap.mmap, offsets: range) -> None:
    for offset in offsets:
        memory[offset] = 1


def _plain() -> tuple[mmap.mmap, int, int]:
    memory, start = _map(8 << 20)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    _write(memory, range(0, 8 << 20, 2 * PAGE_BYTES))
    return memory, start, start + (8 << 20)


def _thp() -> tuple[mmap.mmap, int, int]:
    memory, start = _map(10 << 20)
    memory.madvise(mmap.MADV_HUGEPAGE)
    first = -start % HUGE_BYTES
    _write(memory, range(first, first + (8 << 20), PAGE_BYTES))
    return memory, start + first, start + first + (8 << 20)


def _zero() -> tuple[mmap.mmap, int, int]:
    memory, start = _map(1 << 20)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    assert not any(memory[offset] for offset in range(0, 1 << 20, PAGE_BYTES))
    return memory, start, start + (1 << 20)


def _sparse() -> tuple[mmap.mmap, int, int]:
    memory, start = _map(1 << 40, MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for offset in (0, 1 << 39, (1 << 40) - PAGE_BYTES):
        memory[offset] = 1
    return memory, start, start + (1 << 40)


def _hugetlb(size: int) -> tuple[mmap.mmap, int, int]:
    shift = size.bit_length() - 1
    memory, start = _map(size, MAP_HUGETLB | shift << MAP_HUGE_SHIFT)
    memory[0] = 1
    return memory, start, start + size


def hold(kind: Kind) -> tuple[mmap.mmap, int, int]:
    """Maps memory of that kind. Returns it with its first address and the one behind its last."""
    match kind:
        case Kind.PLAIN:
            return _plain()
        case Kind.THP:
            return _thp()
        case Kind.ZERO:
            return _zero()
        case Kind.SPARSE:
            return _sparse()
        case Kind.HUGETLB:
            return _hugetlb(HUGE_BYTES)
        case Kind.GIGANTIC:
            return _hugetlb(GIGANTIC_BYTES)


if __name__ == "__main__":
    _memory, *_place = hold(Kind(sys.argv[1]))
    sys.stdout.write(json.dumps(_place) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
