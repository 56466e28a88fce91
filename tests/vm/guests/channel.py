# SPDX-License-Identifier: Apache-2.0
"""The host's end of the virtio-serial port that the guest's agent serves; see agent.py."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import socket
import threading
from typing import Any

Message = dict[str, Any]

END: Message = {"op": "end"}
"""What every queue receives when the guest's end is gone."""


class ChannelClosed(Exception):
    """The guest's end is gone."""


class Channel:
    """Sends requests and sorts the answers, which may come in any order, by request."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._queues: dict[int, queue.SimpleQueue[Message]] = {}
        self._closed = False
        self._ready: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._queues[0] = self._ready
        self._reader = threading.Thread(target=self._read, name="guest channel", daemon=True)
        self._reader.start()

    def wait_ready(self, timeout: float) -> None:
        """Waits for the agent to come up.

        Raises:
            queue.Empty: it has not within `timeout` seconds.
            ChannelClosed: the guest ended first.
        """
        if self._ready.get(timeout=timeout) is END:
            raise ChannelClosed

    def open(self, **message: object) -> Conversation:
        """Sends a request; the answers come as they come."""
        with self._lock:
            identity = next(self._ids)
            answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
            self._queues[identity] = answers
            if self._closed:
                answers.put(END)
        self.send({"id": identity, **message})
        return Conversation(self, identity, answers)

    def send(self, message: Message) -> None:
        """Sends a message; one to a guest that is gone is lost, and its answer is END."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._connection.sendall(data)
        except OSError:
            self._end()

    def close(self) -> None:
        """Closes our end, whereupon the agent and the guest end too."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()

    def forget(self, identity: int) -> None:
        """Drops the answers that still come to a request."""
        with self._lock:
            self._queues.pop(identity, None)

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    self._sort(json.loads(line))
        except (OSError, ValueError):
            # The guest died, perhaps in the middle of a line.
            pass
        self._end()

    def _sort(self, message: Message) -> None:
        with self._lock:
            answers = self._queues.get(message.get("id", 0))
        if answers is not None:
            answers.put(message)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            waiting = list(self._queues.values())
        for answers in waiting:
            answers.put(END)


class Conversation:
    """One request and its answers."""

    def __init__(
        self, channel: Channel, identity: int, answers: queue.SimpleQueue[Message]
    ) -> None:
        self._channel = channel
        self._identity = identity
        self._answers = answers

    def send(self, **message: object) -> None:
        """Sends more about the same request."""
        self._channel.send({"id": self._identity, **message})

    def receive(self, timeout: float | None) -> Message:
        """The next answer.

        Raises:
            queue.Empty: none came within `timeout` seconds.
            ChannelClosed: none will come.
            OSError: the request failed in the guest.
        """
        message = self._answers.get(timeout=timeout)
        if message is END:
            self._answers.put(END)
            raise ChannelClosed
        if message["op"] == "error":
            self.end()
            raise _os_error(message)
        return message

    def end(self) -> None:
        """Says that no more answers are wanted."""
        self._channel.forget(self._identity)


def decode(data: str) -> bytes:
    """The bytes in a message."""
    return base64.b64decode(data)


def encode(data: bytes) -> str:
    """Bytes for a message."""
    return base64.b64encode(data).decode()


def _os_error(message: Message) -> OSError:
    return OSError(message["errno"], os.strerror(message["errno"]), message["path"])
