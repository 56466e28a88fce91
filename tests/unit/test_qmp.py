# SPDX-License-Identifier: Apache-2.0
"""QEMU's monitor as tests speak to it, against what QEMU says."""

import json
import socket
from collections.abc import Iterator

import pytest
from guests.qmp import Monitor, MonitorClosed, QmpError

GREETING = {"QMP": {"version": {}, "capabilities": ["oob"]}}
DONE: dict[str, object] = {"return": {}}
DELETED = {"event": "DEVICE_DELETED", "data": {"device": "mem0"}, "timestamp": {}}
REFUSED = {"error": {"class": "DeviceNotFound", "desc": "Device 'mem0' not found"}}


@pytest.fixture
def qemu() -> Iterator[tuple[socket.socket, Monitor]]:
    ours, theirs = socket.socketpair()
    with theirs:
        monitor = Monitor(ours)
        yield theirs, monitor
        monitor.close()


def say(theirs: socket.socket, *messages: object) -> None:
    theirs.sendall(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))


def test_answers_and_events_come_apart(qemu: tuple[socket.socket, Monitor]) -> None:
    theirs, monitor = qemu
    say(theirs, GREETING, DONE, DELETED, {"return": [1]})
    assert monitor.execute("device_del", id="mem0") == [1]
    asked = [json.loads(line) for line in theirs.recv(1 << 16).splitlines()]
    assert asked == [
        {"execute": "qmp_capabilities", "arguments": {}},
        {"execute": "device_del", "arguments": {"id": "mem0"}},
    ]
    assert monitor.event("DEVICE_DELETED", 1) == {"device": "mem0"}
    with pytest.raises(TimeoutError):
        monitor.event("DEVICE_DELETED", 0.01)
    say(theirs, {"event": "STOP", "timestamp": {}}, DELETED)
    assert monitor.event("DEVICE_DELETED", 1) == {"device": "mem0"}
    assert monitor.event("STOP", 1) == {}


def test_what_qemu_refuses_is_told(qemu: tuple[socket.socket, Monitor]) -> None:
    theirs, monitor = qemu
    say(theirs, GREETING, DONE, REFUSED, DONE)
    with pytest.raises(QmpError, match="device_del: Device 'mem0' not found") as refused:
        monitor.execute("device_del", id="mem0")
    assert refused.value.kind == "DeviceNotFound"
    assert monitor.execute("query-status") == {}


def test_the_end_of_qemu_is_told(qemu: tuple[socket.socket, Monitor]) -> None:
    theirs, monitor = qemu
    theirs.close()
    with pytest.raises(MonitorClosed):
        monitor.execute("query-status")
