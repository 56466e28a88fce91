# SPDX-License-Identifier: Apache-2.0
import copy
import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tierd.cli.control import main
from tierd.errors import TierdError
from tierd.observe import status

STATUS: dict[str, Any] = {
    "pid": os.getpid(),
    "mode": "place",
    "paused": False,
    "rounds": 42,
    "rounds_s": 0.2,
    "round_ms": 3.1,
    "tiers": [
        {
            "rank": 0,
            "name": "dram",
            "kind": "dram",
            "nodes": [0],
            "capacity": 1 << 30,
            "free": 601882624,
            "headroom": 21107834,
            "backing": ["dram"],
            "loads": 4200,
            "loaded_cycles": 640.0,
            "closed_to": ["cxl"],
        },
        {
            "rank": 1,
            "name": "cxl",
            "kind": "cxl",
            "nodes": [1, 2],
            "capacity": 512 << 20,
            "free": 300 << 20,
            "headroom": 10 << 20,
            "backing": ["cxl", "unknown"],
            "loads": 1300,
            "loaded_cycles": 610.5,
            "closed_to": [],
        },
    ],
    "targets": [
        {
            "pid": 640,
            "command": "hotset",
            "cgroup": "/system.slice/hotset.service",
            "pin": None,
            "pinned": {"fastest": 0, "here": 0},
            "rests": False,
            "resident": {"dram": 8 << 20, "cxl": 56 << 20},
            "hot": {"dram": 8 << 20, "cxl": 0},
            "rate": {"dram": 5120.0, "cxl": 1280.0},
            "pieces": 14,
        }
    ],
    "arenas": [],
    "arena_blocks": dict.fromkeys(("asked", "moved", "unmoved", "dropped"), 0),
    "tenants": [],
    "moved": [{"from": "cxl", "to": "dram", "pages": 2048}],
    "refused": {"busy": 3, "no_room": 1},
    "flows": [],
    "cache_pages": 0,
    "kept": {"moved or refused lately": 4096},
    "sampler": {
        "way": "tracepoint",
        "lost": 7,
        "zoomed_pages": 640,
        "hardware": None,
        "tuning": {},
    },
    "page_cost_ns": 3120.0,
    "schemes": [],
    "notes": ["node 3 is in no tier"],
}


def with_status(**changes: Any) -> dict[str, Any]:
    """The daemon's, with what the service adds."""
    return copy.deepcopy(STATUS) | {"cxl": {"errors": []}} | changes


def gone_pid() -> int:
    """A pid that was a process's, which has been waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def tierctl(folder: Path, *options: str) -> Result:
    config = folder / "tierd.toml"
    config.write_text(f'[daemon]\nruntime_dir = "{folder}"\n')
    return CliRunner().invoke(main, ["status", "--config", str(config), *options])


def test_what_was_published_last_is_read(tmp_path: Path) -> None:
    status.publish(tmp_path, with_status(rounds=1))
    status.publish(tmp_path, with_status(rounds=2))
    assert status.read(tmp_path) == with_status(rounds=2)
    assert [file.name for file in tmp_path.iterdir()] == [status.NAME]


def test_anybody_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        status.publish(tmp_path, STATUS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / status.NAME).stat().st_mode) == 0o644


def test_a_reader_sees_the_old_status_whole_while_a_new_one_comes(tmp_path: Path) -> None:
    status.publish(tmp_path, with_status(rounds=1))
    with (tmp_path / status.NAME).open() as reader:
        status.publish(tmp_path, with_status(rounds=2))
        assert json.load(reader)["rounds"] == 1


def test_nothing_is_left_when_it_is_withdrawn(tmp_path: Path) -> None:
    status.publish(tmp_path, STATUS)
    (tmp_path / f".{status.NAME}.new").write_text("{")  # killed while it wrote
    status.withdraw(tmp_path)
    assert not list(tmp_path.iterdir())
    status.withdraw(tmp_path)


def test_no_status_is_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(TierdError, match="no tierd is running on") as caught:
        status.read(tmp_path)
    assert "left its status" not in str(caught.value)
    assert "systemctl start tierd" in str(caught.value.hint)


def test_a_status_left_behind_is_told_as_such(tmp_path: Path) -> None:
    pid = gone_pid()
    status.publish(tmp_path, with_status(pid=pid))
    with pytest.raises(TierdError, match=rf"process {pid} has left its status behind"):
        status.read(tmp_path)


def test_a_daemon_of_another_user_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError(errno.EPERM, "kill")

    monkeypatch.setattr(os, "kill", refuse)
    status.publish(tmp_path, STATUS)
    assert status.read(tmp_path) == STATUS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"pid": null}',
        b'{"pid": "x"}',
        b'{"pid": 0}',
        b'{"pid": -1}',
        b'{"pid": 1e999}',
        b'{"pid": 9999999999999999999999}',
        b"[" * 100_000,
    ],
    ids=lambda content: content[:20].decode(errors="replace") or "empty",
)
def test_what_is_no_status_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / status.NAME).write_bytes(content)
    with pytest.raises(TierdError, match=r"status\.json is not a status of tierd"):
        status.read(tmp_path)


def test_of_a_huge_file_no_more_is_read_than_a_status_can_be(tmp_path: Path) -> None:
    with (tmp_path / status.NAME).open("wb") as file:
        file.write(json.dumps(STATUS).encode())
        file.write(b" " * status.LARGEST_BYTES)
        file.truncate(1 << 40)  # zeros, which are no JSON: to read them all would not end
    assert status.read(tmp_path) == STATUS


def test_a_status_that_cannot_be_read_is_told_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / status.NAME).mkdir()
    with pytest.raises(TierdError, match="Is a directory"):
        status.read(tmp_path)


def test_tables(tmp_path: Path) -> None:
    status.publish(tmp_path, with_status())
    shown = tierctl(tmp_path)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == TABLES.format(pid=os.getpid())


TABLES = """\
tierd {pid}: place, 42 rounds, the last took 3.1 ms; DAMON by tracepoint, 7 records lost; \
a page costs 3.1 µs to move

TIER  KIND  NODES  CAPACITY  ROOM     HEADROOM  BACKED BY
dram  dram  0      1 GiB     574 MiB  20.1 MiB  dram
cxl   cxl   1-2    512 MiB   300 MiB  10 MiB    cxl, unknown

TARGET  COMMAND  DRAM   CXL     HOT DRAM  HOT CXL
640     hotset   8 MiB  56 MiB  8 MiB     0 B

MOVED        PAGES  BYTES
cxl to dram  2048   8 MiB

NOT MOVED                         HOW MUCH
hot, but moved or refused lately  4 KiB
busy                              3 pages
no room                           1 pages

note: node 3 is in no tier
"""


def test_what_the_kernel_moves_by_itself_is_a_table(tmp_path: Path) -> None:
    up = {"action": "migrate_hot", "pages": 512, "regions": 3, "tried_bytes": 5 << 20}
    schemes = [up | {"over_quota": 0}]
    status.publish(tmp_path, with_status(moved=[], schemes=schemes))
    shown = tierctl(tmp_path).stdout
    assert (
        "DAMON'S SCHEME  PAGES MOVED  BYTES MOVED  LOOKED THROUGH\n"
        "migrate_hot     512          2 MiB        5 MiB\n"
    ) in shown
    assert "nothing moved yet" not in shown


def test_nothing_yet_is_told_in_words(tmp_path: Path) -> None:
    status.publish(tmp_path, with_status(targets=[], moved=[], refused={}, kept={}, notes=[]))
    shown = tierctl(tmp_path).stdout
    assert "no targets: none of the configured processes is there\n\nnothing moved yet\n" in shown
    assert "NOT MOVED" not in shown


def test_json_is_what_was_published(tmp_path: Path) -> None:
    status.publish(tmp_path, STATUS)
    assert json.loads(tierctl(tmp_path, "--json").stdout) == STATUS


def test_without_a_daemon_tierctl_says_so_and_what_to_do(tmp_path: Path) -> None:
    shown = tierctl(tmp_path)
    assert shown.exit_code == 1
    assert "error: no tierd is running" in shown.stderr
    assert "hint: start it with: systemctl start tierd" in shown.stderr
