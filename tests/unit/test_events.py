# SPDX-License-Identifier: Apache-2.0
"""What happened, kept over restarts and told to systemd's journal."""

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from logging_journald import JournaldLogHandler

from tierd.cli.daemon import log_handler
from tierd.observe.events import FILE_BYTES, MOST_EVENTS, NAME, History, event

Log = Callable[..., None]


def log_to(history: History, message: str = "it happened", **extra: object) -> None:
    record = logging.makeLogRecord({"msg": message, "levelno": logging.INFO, **extra})
    record.levelname = "INFO"
    history.handle(record)


def test_an_event_has_its_kind_and_fields(tmp_path: Path) -> None:
    history = History(tmp_path)
    log_to(history, **event("target.new", pid=640))
    log_to(history, "and this")
    first, second = history.recent()
    assert (first["id"], first["kind"], first["fields"]) == (1, "target.new", {"pid": 640})
    assert (second["id"], second["kind"], second["level"]) == (2, "message", "info")
    lines = (tmp_path / NAME).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [first, second]


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    for _ in range(3):
        log_to(History(tmp_path))
    assert [happened["id"] for happened in History(tmp_path).recent()] == [1, 2, 3]


@pytest.mark.parametrize(
    "torn", ['{"id": 4, "ti', "[]", '{"id": "x"}', "null", "[" * 5000, '{"time": 1}', "\x00\xff"]
)
def test_a_torn_line_is_left_out(tmp_path: Path, torn: str) -> None:
    log_to(History(tmp_path))
    with (tmp_path / NAME).open("a") as file:
        file.write(torn + "\n")
    history = History(tmp_path)
    log_to(history)
    assert [happened["id"] for happened in history.recent()] == [1, 2]


def test_files_and_memory_are_bounded(tmp_path: Path) -> None:
    history = History(tmp_path)
    for _ in range(MOST_EVENTS + 500):
        log_to(history, "x" * 900)
    assert len(history.recent()) == MOST_EVENTS
    assert history.recent()[-1]["id"] == MOST_EVENTS + 500
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [NAME, f"{NAME}.1"]
    assert all(file.stat().st_size < FILE_BYTES + 2000 for file in files)
    again = History(tmp_path).recent()
    assert again[-1]["id"] == MOST_EVENTS + 500
    assert len(again) > 1000


def test_a_folder_that_cannot_be_written_is_told_and_survived(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    history = History(folder)
    log_to(history)
    assert "No such file" in str(history.trouble)
    assert len(history.recent()) == 1
    folder.mkdir()
    log_to(history)
    assert history.trouble is None
    assert len((folder / NAME).read_text().splitlines()) == 1


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    history = History(tmp_path)
    for _ in range(5):
        log_to(history)
    assert [happened["id"] for happened in history.recent(after=3)] == [4, 5]
    assert [happened["id"] for happened in history.recent(most=2)] == [4, 5]


def test_the_journal_is_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(path))
        monkeypatch.setattr(JournaldLogHandler, "SOCKET_PATH", path)
        monkeypatch.setattr("tierd.cli.daemon.check_journal_stream", lambda: True)
        handler = log_handler()
        record = logging.makeLogRecord({"msg": "moved", "levelno": logging.WARNING})
        record.__dict__.update(event("target.new", pid=640))
        handler.handle(record)
        told = journal.recv(1 << 16).decode().splitlines()
        assert isinstance(handler, JournaldLogHandler)
        handler.transport.socket.close()
    assert {"MESSAGE=moved", "PRIORITY=4", "SYSLOG_IDENTIFIER=tierd"} <= set(told)
    assert {"EXTRA_TIERD_KIND=target.new", "EXTRA_TIERD_PID=640"} <= set(told)


def test_elsewhere_it_is_told_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    assert type(log_handler()) is logging.StreamHandler
