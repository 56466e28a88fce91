# SPDX-License-Identifier: Apache-2.0
"""A process that writes all over its memory, and holds each byte against what it wrote there last.

Usage: checked_writer.py MIB [pinned]

It prints `ready` once all is written, and goes on writing until SIGUSR1 comes; then how many pages
it wrote since, and how many words of four bytes were not as written. With `pinned`, a
pipe holds two pages of a file that it has mapped, which then cannot be moved.
"""

import mmap
import os
import signal
import sys

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES, CHUNK_PAGES = 4096, 256


class Memory:
    """Memory in chunks, each of which was written so many times."""

    def __init__(self, mib: int) -> None:
        self.memory = mmap.mmap(-1, mib << 20, flags=mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        words = np.frombuffer(self.memory, np.uint32)
        self.chunks = words.reshape(-1, CHUNK_PAGES * PAGE_BYTES // 4)
        self.times = [0] * len(self.chunks)
        self.numbers = np.arange(self.chunks.shape[1], dtype=np.uint32)

    def content(self, chunk: int) -> NDArray[np.uint32]:
        salt = np.uint32(chunk * 131 + self.times[chunk] * 7919)
        return self.numbers * np.uint32(2654435761) + salt

    def write(self, chunk: int) -> None:
        self.times[chunk] += 1
        self.chunks[chunk] = self.content(chunk)

    def damaged(self, chunk: int) -> int:
        return int(np.count_nonzero(self.chunks[chunk] != self.content(chunk)))


def pin() -> tuple[int, int, mmap.mmap]:
    """Has a pipe hold two pages of a file in memory, which is mapped."""
    file = os.memfd_create("pinned")
    os.write(file, b"p" * 2 * PAGE_BYTES)
    mapped = mmap.mmap(file, 2 * PAGE_BYTES)
    mapped[0], mapped[PAGE_BYTES] = mapped[0], mapped[PAGE_BYTES]
    ends = os.pipe()
    os.splice(file, ends[1], 2 * PAGE_BYTES, offset_src=0)
    return *ends, mapped


def main() -> None:
    asked_to_end: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked_to_end.append(number))
    held = pin() if "pinned" in sys.argv[2:] else None
    memory = Memory(int(sys.argv[1]))
    every = range(len(memory.chunks))
    for chunk in every:
        memory.write(chunk)
    print("ready", flush=True)
    damaged = written = 0
    while not asked_to_end:
        chunk = written % len(every)
        damaged += memory.damaged(chunk)
        memory.write(chunk)
        written += 1
    damaged += sum(map(memory.damaged, every))
    print(written * CHUNK_PAGES, damaged, flush=True)
    del held


main()
