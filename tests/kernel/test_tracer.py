# SPDX-License-Identifier: Apache-2.0
"""The tracer that the fault test kills by: what it sees of a child, and what a kill leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from guests.guest import REPOSITORY

CHILD = """
import json, os, sys, threading, time
from pathlib import Path
from faults import tracer

folder, kill_at = Path(sys.argv[1]), sys.argv[2]

def main():
    (folder / "a").read_text()
    (folder / "new").write_text("hello")
    (folder / "new").rename(folder / "a")
    thread = threading.Thread(target=(folder / "of-a-thread").touch)
    thread.start()
    thread.join()
    if kill_at == "hang":
        time.sleep(60)
    return 3

seen = []
within_s = 1 if kill_at == "hang" else 30

def before(call):
    seen.append([call.name, *(Path(path).name for path in call.paths), call.data.decode()])
    return call.name != kill_at

try:
    ending = tracer.run(main, folder / "log", before=before, within_s=within_s)
    rc = ending.rc
except tracer.HasHung:
    rc = "hung"
print(json.dumps([rc, seen]))
"""


def trace(folder: Path, kill_at: str) -> list[Any]:
    (folder / "a").write_text("before")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), kill_at],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests/vm")},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def test_what_changes_something_is_seen_and_what_reads_is_not(tmp_path: Path) -> None:
    rc, seen = trace(tmp_path, "")
    assert rc == 3
    assert seen == [
        ["open", "new", ""],
        ["write", "new", "hello"],
        ["rename", "new", "a", ""],
        ["open", "of-a-thread", ""],
    ]


def test_a_killed_child_has_not_made_the_call(tmp_path: Path) -> None:
    rc, seen = trace(tmp_path, "rename")
    assert (rc, len(seen)) == (-9, 3)
    assert (tmp_path / "new").read_text() == "hello"
    assert (tmp_path / "a").read_text() == "before"


def test_a_child_that_hangs_is_killed(tmp_path: Path) -> None:
    assert trace(tmp_path, "hang")[0] == "hung"
