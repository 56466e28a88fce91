# SPDX-License-Identifier: Apache-2.0
"""Keeps a guest short of memory until it is killed: more is in use than there is, on zram.

Prints the percent of the time that some tasks waited for memory, once that is enough.
Usage: python -m benches._short_of_memory
"""

import mmap
import re
import subprocess
from pathlib import Path

import numpy as np

from tierd.kernel.pressure import read_pressure

PAGE_BYTES = 4096
MORE_BYTES, SWAP_BYTES = 256 << 20, 1 << 30
CHUNK_PAGES = 4096
ENOUGH_PERCENT = 20.0


def turn_swap_on() -> None:
    subprocess.run(["modprobe", "zram"], check=True)
    Path("/sys/block/zram0/disksize").write_text(str(SWAP_BYTES))
    subprocess.run(["mkswap", "--quiet", "/dev/zram0"], check=True)
    subprocess.run(["swapon", "/dev/zram0"], check=True)


def available_bytes() -> int:
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert found
    return int(found[1]) << 10


def main() -> None:
    turn_swap_on()
    pages = (available_bytes() + MORE_BYTES) // PAGE_BYTES
    memory = np.frombuffer(mmap.mmap(-1, pages * PAGE_BYTES), np.uint8)[::PAGE_BYTES]
    told = False
    while True:
        for first in range(0, pages, CHUNK_PAGES):
            memory[first : first + CHUNK_PAGES] += 1
            pressure = read_pressure()
            if not told and pressure is not None and pressure.some_percent >= ENOUGH_PERCENT:
                print(pressure.some_percent, flush=True)
                told = True


if __name__ == "__main__":
    main()
