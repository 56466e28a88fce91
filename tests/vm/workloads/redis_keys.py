# SPDX-License-Identifier: Apache-2.0
"""Tells each second on which nodes the values of redis' hot and cold keys lie.

The values say which key they are of, so they are found in the server's memory; where their pages
are is asked of move_pages(2) through libnuma. Prints objects such as::

    {"hot": {"0": 1251, "1": 3}, "cold": {"1": 28748}}

Usage: redis_keys.py PID HOT_KEYS VALUE_BYTES
"""

import ctypes
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

PAGE_BYTES = 4096
VALUE = re.compile(rb"value:(\d{12}):")
PIECE_BYTES = 16 << 20

LIBNUMA = ctypes.CDLL("libnuma.so.1", use_errno=True)


def values(pid: int) -> Iterator[tuple[int, int]]:
    """Yields keys and the addresses of their values."""
    process = Path(f"/proc/{pid}")
    with (process / "mem").open("rb", buffering=0) as memory:
        for line in (process / "maps").read_text().splitlines():
            span, mode, *rest = line.split()
            if not mode.startswith("rw") or len(rest) > 3:
                continue
            start, end = (int(word, 16) for word in span.split("-"))
            for at in range(start, end, PIECE_BYTES):
                memory.seek(at)
                for match in VALUE.finditer(memory.read(min(PIECE_BYTES, end - at))):
                    yield int(match[1]), at + match.start()


def nodes(pid: int, pages: Sequence[int]) -> Counter[int]:
    """Counts the pages by node; negative ones are errnos."""
    addresses = (ctypes.c_void_p * len(pages))(*pages)
    status = (ctypes.c_int * len(pages))()
    if LIBNUMA.move_pages(pid, ctypes.c_ulong(len(pages)), addresses, None, status, 0):
        raise OSError(ctypes.get_errno(), "move_pages")
    return Counter(status)


def main() -> None:
    pid, hot_keys, value_bytes = map(int, sys.argv[1:])
    pages: dict[str, set[int]] = {"hot": set(), "cold": set()}
    for key, address in values(pid):
        first, last = address // PAGE_BYTES, (address + value_bytes - 1) // PAGE_BYTES
        pages["hot" if key < hot_keys else "cold"].update(range(first, last + 1))
    pages["cold"] -= pages["hot"]
    listed = {name: [page * PAGE_BYTES for page in sorted(found)] for name, found in pages.items()}
    while True:
        print(json.dumps({name: nodes(pid, where) for name, where in listed.items()}), flush=True)
        time.sleep(1)


main()
