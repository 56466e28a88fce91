# SPDX-License-Identifier: Apache-2.0
"""A process that holds memory: prints its address, and at a line of stdin what is damaged of it.

Usage: holder.py PAGES [shared|locked|huge|small|untouched|bound:NODE]...

`small` is what it has without another kind.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator

PAGE_BYTES = 4096
MPOL_BIND = 2
SYS_MBIND = 237

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


def bind(address: int, length: int, node: int) -> None:
    mask = ctypes.c_ulong(1 << node)
    arguments = (address, length, MPOL_BIND, ctypes.byref(mask), 64, 0)
    check(libc.syscall(SYS_MBIND, *map(ctypes.c_void_p, arguments[:3]), *arguments[3:]), "mbind")


def say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def pattern(pages: int) -> Iterator[tuple[int, bytes]]:
    """Yields (first byte, content) of stretches of memory; neighbouring pages differ."""
    stretch = b"".join(bytes([page]) * PAGE_BYTES for page in range(251))
    for first in range(0, pages, 251):
        yield first * PAGE_BYTES, stretch[: min(251, pages - first) * PAGE_BYTES]


def main() -> None:
    pages, kinds = int(sys.argv[1]), sys.argv[2:]
    length = pages * PAGE_BYTES
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if "shared" in kinds else mmap.MAP_PRIVATE)
    memory = mmap.mmap(-1, length + (2 << 20), flags=flags)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    skip = -start % (2 << 20)
    address = start + skip
    # The advice also makes the buffer a mapping of its own, so that numa_maps tells it alone.
    memory.madvise(mmap.MADV_HUGEPAGE if "huge" in kinds else mmap.MADV_NOHUGEPAGE, skip, length)
    for kind in kinds:
        if kind.startswith("bound:"):
            bind(address, length, int(kind.removeprefix("bound:")))
    if "locked" in kinds:
        check(libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)), "mlock")
    for at, content in pattern(0 if "untouched" in kinds else pages):
        memory[skip + at : skip + at + len(content)] = content
    if "shared" in kinds and os.fork() == 0:
        sum(memory[skip : skip + length : PAGE_BYTES])
        sys.stdin.read()
        os._exit(0)
    say(address)
    sys.stdin.readline()
    say(sum(memory[skip + at : skip + at + len(c)] != c for at, c in pattern(pages)))


main()
