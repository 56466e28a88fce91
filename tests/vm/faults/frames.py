# SPDX-License-Identifier: Apache-2.0
"""Prints which physical pages a process has, of some addresses of the host: a JSON list of frames.

    python -m faults.frames PID START BYTES

Runs in a guest, as root, and by itself: it is what tierd's own reading is held against.
"""

import json
import os
import struct
import sys
from pathlib import Path

PAGE_BYTES = 4096
PRESENT, FRAME = 1 << 63, (1 << 55) - 1


def main() -> None:
    pid, start, size = (int(word, 0) for word in sys.argv[1:])
    wanted = range(start // PAGE_BYTES, (start + size) // PAGE_BYTES)
    found = []
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        pages = (last - first) // PAGE_BYTES
        entries = os.pread(pagemap, pages * 8, first // PAGE_BYTES * 8)
        for (entry,) in struct.iter_unpack("<Q", entries):
            if entry & PRESENT and entry & FRAME in wanted:
                found.append(entry & FRAME)
    os.close(pagemap)
    sys.stdout.write(json.dumps(found))


main()
