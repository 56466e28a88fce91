# SPDX-License-Identifier: Apache-2.0
"""The API's sockets, with clients that behave and clients that don't."""

import errno
import grp
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tierd.api import server
from tierd.api.client import Client
from tierd.api.inbox import Inbox
from tierd.api.server import Endpoint, serving, tcp_listener, unix_listener
from tierd.errors import Busy, Conflict, TierdError

BIG = "x" * 300_000


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    """Answers with what it was sent, or with much where that is asked for."""
    sent = environ["wsgi.input"].read()
    told = BIG if environ["PATH_INFO"] == "/big" else sent.decode()
    body = json.dumps({"sent": told}).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


@contextmanager
def served(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Two sockets of the same application."""
    one, other = folder / "one.sock", folder / "other.sock"
    with ExitStack() as stack:
        listeners = [stack.enter_context(unix_listener(path, 0o666)) for path in (one, other)]
        stack.enter_context(serving([Endpoint(listener=li, app=application) for li in listeners]))
        yield one, other


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    with served(tmp_path) as paths:
        yield paths


def raw(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def answer_to(path: Path, request: bytes) -> bytes:
    with raw(path) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096)


def is_well(path: Path) -> bool:
    return bool(Client(path).request("POST", "/", {"a": 1}) == {"sent": '{"a": 1}'})


def test_it_answers_on_each_socket(sockets: tuple[Path, Path]) -> None:
    assert [is_well(path) for path in sockets] == [True, True]


def test_the_sockets_and_threads_are_gone_afterwards(tmp_path: Path) -> None:
    before = threading.enumerate(), len([*Path("/proc/self/fd").iterdir()])
    for _ in range(2):
        with served(tmp_path) as (one, _):
            assert is_well(one)
    assert list(tmp_path.iterdir()) == []
    assert (threading.enumerate(), len([*Path("/proc/self/fd").iterdir()])) == before


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (server.HEADER_BYTES + 1) + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"\x16\x03\x01 hello\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
    ],
)
def test_a_broken_or_huge_request_is_refused(
    sockets: tuple[Path, Path], request_: bytes, status: bytes
) -> None:
    assert answer_to(sockets[0], request_).split()[1] == status
    assert is_well(sockets[0])


def test_who_never_ends_a_request_keeps_nobody_waiting(sockets: tuple[Path, Path]) -> None:
    with ExitStack() as stack:
        for _ in range(server.THREADS * 4):
            stack.enter_context(raw(sockets[0])).sendall(b"POST / HTTP/1.1\r\nContent-Le")
        assert is_well(sockets[0])


def test_who_never_reads_keeps_nobody_waiting(sockets: tuple[Path, Path]) -> None:
    with ExitStack() as stack:
        for _ in range(server.THREADS * 4):
            stack.enter_context(raw(sockets[0])).sendall(b"GET /big HTTP/1.1\r\n\r\n" * 10)
        assert is_well(sockets[0])


def test_who_fills_one_socket_leaves_the_other(sockets: tuple[Path, Path]) -> None:
    with ExitStack() as stack:
        for _ in range(server.MOST_CONNECTIONS):
            stack.enter_context(raw(sockets[0]))
        with raw(sockets[0]) as late:
            late.sendall(b"GET / HTTP/1.1\r\n\r\n")
            late.settimeout(0.5)
            with pytest.raises(TimeoutError):
                late.recv(1)
        begin_s = time.monotonic()
        assert is_well(sockets[1])
        assert time.monotonic() - begin_s < server.IDLE_S / 2, "it was not closed for being idle"
    assert is_well(sockets[0])


def test_a_socket_left_by_a_crash_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with unix_listener(path, 0o660) as listener:
        assert listener.getsockname() == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert not path.exists()


def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        unix_listener(path, 0o660),
        pytest.raises(Conflict, match="another daemon"),
        unix_listener(path, 0o660),
    ):
        pass
    with pytest.raises(TierdError, match="no tierd"):
        Client(path).request("GET", "/")


def test_without_the_group_a_socket_is_roots_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with unix_listener(tmp_path / "s", 0o660, "nobody-has-this-group"):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert "there is no group nobody-has-this-group" in caplog.text


def test_who_is_not_in_the_group_has_the_socket_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, user: int, group: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("tierd.api.server.os.chown", refuse)
    caplog.set_level(logging.INFO)
    with unix_listener(tmp_path / "s", 0o660, grp.getgrgid(0).gr_name):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert "is for its owner alone" in caplog.text


def test_tcp_is_for_the_loopback_address_that_was_named() -> None:
    with tcp_listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with tcp_listener("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_an_address_that_cannot_be_listened_on_is_told() -> None:
    with (
        tcp_listener("127.0.0.1", 0) as taken,
        pytest.raises(TierdError, match="Address already in use") as refused,
    ):
        tcp_listener("127.0.0.1", taken.getsockname()[1])
    assert "systemctl edit tierd" in str(refused.value.hint)


def test_work_is_done_by_who_runs_the_inbox() -> None:
    woken = threading.Event()
    inbox = Inbox(woken.set)
    done: list[object] = []

    def ask() -> None:
        done.append(inbox.call(threading.get_ident, 10))
        with pytest.raises(ZeroDivisionError):
            inbox.call(lambda: 1 // 0, 10)
        done.append("both")

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        assert woken.wait(10)
        inbox.run()
        thread.join(0.01)
    assert done == [threading.get_ident(), "both"]


def test_work_that_was_not_come_to_in_time_is_not_done_later() -> None:
    inbox = Inbox(lambda: None)
    done: list[int] = []
    with pytest.raises(Busy, match="within 0"):
        inbox.call(lambda: done.append(1), 0.01)
    inbox.run()
    assert done == []


def test_an_answer_in_the_making_is_waited_for() -> None:
    def work() -> str:
        time.sleep(0.2)
        return "done"

    inbox = Inbox(lambda: threading.Thread(target=inbox.run).start())
    assert inbox.call(work, 0.1) == "done"
