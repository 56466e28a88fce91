# SPDX-License-Identifier: Apache-2.0
"""QEMU's monitor, over a socket that QEMU was started with.

Follows QEMU's docs/interop/qmp-spec.rst, a JSON document a line, with events between the answers::

    <- {"QMP": {"version": ..., "capabilities": ["oob"]}}
    -> {"execute": "qmp_capabilities", "arguments": {}}
    <- {"return": {}}
    -> {"execute": "device_del", "arguments": {"id": "mem0"}}
    <- {"return": {}}
    <- {"event": "DEVICE_DELETED", "data": {"device": "mem0", ...}, "timestamp": ...}
    -> {"execute": "device_del", "arguments": {"id": "mem0"}}
    <- {"error": {"class": "DeviceNotFound", "desc": "Device 'mem0' not found"}}
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from guests.errors import GuestError

ANSWER_TIMEOUT_S = 60

Message = dict[str, Any]


class MonitorClosed(Exception):
    """QEMU has ended."""


class QmpError(GuestError):
    """QEMU refused a command."""

    def __init__(self, command: str, error: Message) -> None:
        super().__init__(f"{command}: {error['desc']}")
        self.kind: str = error["class"]


class Monitor:
    """Commands to QEMU, and what it tells by itself. It is greeted at the first use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""
        self._events: list[Message] = []
        self._is_greeted = False

    def execute(self, command: str, **arguments: object) -> Any:
        """Returns what QEMU answers.

        Raises:
            QmpError: it refuses.
            MonitorClosed: it has ended.
            TimeoutError: it has hung.
        """
        if not self._is_greeted:
            self._receive(time.monotonic() + ANSWER_TIMEOUT_S)
            self._is_greeted = True
            self._ask("qmp_capabilities", {})
        return self._ask(command, arguments)

    def event(self, name: str, timeout: float) -> Message:
        """Waits for an event that has not been asked for yet; returns its data.

        Raises:
            TimeoutError: it did not come within `timeout` seconds.
            MonitorClosed: QEMU has ended.
        """
        deadline = time.monotonic() + timeout
        while True:
            for event in self._events:
                if event["event"] == name:
                    self._events.remove(event)
                    return dict(event.get("data", {}))
            self._events.append(self._receive(deadline))

    def close(self) -> None:
        """Closes our end."""
        self._connection.close()

    def _ask(self, command: str, arguments: Message) -> Any:
        request = json.dumps({"execute": command, "arguments": arguments})
        try:
            self._connection.sendall(request.encode() + b"\n")
        except OSError as error:
            raise MonitorClosed from error
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while "event" in (message := self._receive(deadline)):
            self._events.append(message)
        if "error" in message:
            raise QmpError(command, message["error"])
        return message["return"]

    def _receive(self, deadline: float) -> Message:
        while b"\n" not in self._unread:
            # A timeout of 0 would mean that nothing blocks.
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._connection.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                raise MonitorClosed
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message: Message = json.loads(line)
        return message
