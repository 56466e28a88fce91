# SPDX-License-Identifier: Apache-2.0
"""Scans a SQLite table from its start to its end, again and again, through a mapping of the file.

Reports each second as hotset does: the pages are those of the database, none of them hot, and a
page that is scanned is one access. Where they lie is asked of move_pages(2) through libnuma.

Usage: sqlite_scan.py --make FILE MIB     or FILE FAST_NODE
"""

import ctypes
import json
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = 4096
ROW_BYTES = 200
MAPPED_BYTES = 1 << 30
ROWS = 2000
"""To be read before it looks at the clock."""


def make(path: Path, mib: int) -> None:
    """Writes a database of that size, about."""
    rows = (mib << 20) // ROW_BYTES
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, number INTEGER, text TEXT)")
        text = "x" * (ROW_BYTES - 12)
        database.executemany("INSERT INTO t VALUES (?, ?, ?)", ((i, i, text) for i in range(rows)))


def scan_forever(database: sqlite3.Connection, rows: int) -> Iterator[int]:
    """Yields how many rows were read, some thousand at a time, without an end."""
    query = "SELECT sum(length(text)) FROM t WHERE id >= ? AND id < ?"
    while True:
        for first in range(0, rows, ROWS):
            database.execute(query, (first, first + ROWS)).fetchone()
            yield min(ROWS, rows - first)


class Mapping:
    """Where the pages of a file lie that this process has mapped."""

    def __init__(self, path: Path) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
        starts = [
            at for low, high in spans for at in range(int(low, 16), int(high, 16), PAGE_BYTES)
        ]
        self.count = len(starts)
        self._pages = (ctypes.c_void_p * self.count)(*starts)
        self._status = (ctypes.c_int * self.count)()
        self._libnuma = ctypes.CDLL("libnuma.so.1", use_errno=True)

    def nodes(self) -> Counter[int]:
        """Counts the pages by node; negative ones are errnos."""
        count = ctypes.c_ulong(self.count)
        if self._libnuma.move_pages(0, count, self._pages, None, self._status, 0):
            raise OSError(ctypes.get_errno(), "move_pages")
        return Counter(self._status)


def report(mapping: Mapping, fast_node: int, t: float, pages_per_s: float) -> None:
    nodes = mapping.nodes()
    fast, absent = nodes[fast_node], sum(count for node, count in nodes.items() if node < 0)
    sample = {
        "t": t,
        "ops_per_s": pages_per_s,
        "window": 0,
        "hot_pages": 0,
        "hot_on_fast": 0,
        "cold_pages": mapping.count,
        "cold_on_slow": mapping.count - absent - fast,
        "absent": absent,
        "hit_ratio": fast / mapping.count,
        "hot_ratio": 0.0,
    }
    print(json.dumps(sample), flush=True)


def scan(path: Path, fast_node: int) -> None:
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA mmap_size={MAPPED_BYTES}")
    rows = database.execute("SELECT count(length(text)) FROM t").fetchone()[0]
    mapping = Mapping(path)
    last_s, t, done = time.monotonic(), 0.0, 0
    for count in scan_forever(database, rows):
        done += count
        now_s = time.monotonic()
        if (second := now_s - last_s) >= 1:
            t += second
            report(mapping, fast_node, t, done / rows * mapping.count / second)
            last_s, done = time.monotonic(), 0


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if sys.argv[1] == "--make":
        make(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        scan(Path(sys.argv[1]), int(sys.argv[2]))


main()
