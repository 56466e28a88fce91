# SPDX-License-Identifier: Apache-2.0
"""Runs commands in a guest, for the host at the other end of a virtio-serial port.

Executed in the guest as a file of its own, by the host's Python, with nothing but the standard
library. Messages are lines of JSON, bytes in them base64. From the host:

    {"id": 1, "op": "spawn", "argv": ["uname", "-r"], "cwd": "/tmp", "env": {"LANG": "C"}}
    {"id": 1, "op": "signal", "signal": 15}
    {"id": 2, "op": "read", "path": "/proc/vmstat"}
    {"id": 3, "op": "write", "path": "/proc/sysrq-trigger", "data": "Yw=="}
    {"id": 4, "op": "leftovers"}

and back:

    {"op": "ready"}
    {"id": 1, "op": "output", "stream": "stdout", "data": "Ni4xMgo="}
    {"id": 1, "op": "exit", "status": 0}
    {"id": 2, "op": "result", "data": "bnJfZnJlZV9wYWdlcyAx"}
    {"id": 3, "op": "error", "errno": 13, "path": "/proc/sysrq-trigger"}
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Message = dict[str, Any]

PR_SET_CHILD_SUBREAPER = 36


class Agent:
    """The single thread that serves the port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.selector = selectors.DefaultSelector()
        self.commands: dict[int, int] = {}
        """The host's id of each command, by pid."""
        self.pending = b""
        self.open = True

    def serve(self) -> None:
        """Serves until the host goes away."""
        self._adopt_orphans()
        self.selector.register(self.port, selectors.EVENT_READ, self._receive)
        self._send({"op": "ready"})
        while self.open:
            for key, _ in self.selector.select():
                key.data()

    def _adopt_orphans(self) -> None:
        """Makes every process that a command leaves behind our child, so that it can be told."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.selector.register(reader, selectors.EVENT_READ, lambda: self._reap(reader))

    def _receive(self) -> None:
        data = os.read(self.port, 1 << 16)
        self.open = bool(data)
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            self._serve_one(json.loads(line))

    def _serve_one(self, message: Message) -> None:
        operation: Callable[[Message], Message | None] = getattr(self, f"_op_{message['op']}")
        try:
            answer = operation(message)
        except OSError as error:
            answer = {"op": "error", "errno": error.errno, "path": error.filename}
        if answer is not None:
            self._send({"id": message["id"], **answer})

    def _op_spawn(self, message: Message) -> None:
        process = subprocess.Popen(
            message["argv"],
            cwd=message["cwd"],
            env=message["env"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.commands[process.pid] = message["id"]
        for name in ("stdout", "stderr"):
            # The descriptor outlives the Popen, which must not wait for the process: _reap does.
            descriptor = os.dup(getattr(process, name).fileno())
            os.set_blocking(descriptor, False)
            forward = self._forwarder(message["id"], name, descriptor)
            self.selector.register(descriptor, selectors.EVENT_READ, forward)
            getattr(process, name).close()
        process.returncode = 0

    def _op_signal(self, message: Message) -> None:
        for pid, command in self.commands.items():
            if command == message["id"]:
                (os.killpg if message["group"] else os.kill)(pid, message["signal"])

    def _op_read(self, message: Message) -> Message:
        return {"op": "result", "data": _encode(Path(message["path"]).read_bytes())}

    def _op_write(self, message: Message) -> Message:
        with Path(message["path"]).open("wb", buffering=0) as file:
            file.write(base64.b64decode(message["data"]))
        return {"op": "result"}

    def _op_ping(self, message: Message) -> Message:
        del message
        return {"op": "result"}

    def _op_leftovers(self, message: Message) -> Message:
        """Tells, and kills, all that descends from commands."""
        del message
        found = {pid: _command_line(pid) for pid in _descendants(os.getpid())}
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return {"op": "result", "processes": list(found.values())}

    def _forwarder(self, command: int, stream: str, descriptor: int) -> Callable[[], None]:
        def forward() -> None:
            if not self._forward(command, stream, descriptor):
                self.selector.unregister(descriptor)
                os.close(descriptor)

        return forward

    def _forward(self, command: int, stream: str, descriptor: int) -> bool:
        """Passes on what a command has printed; False at its end."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        if data:
            self._send({"id": command, "op": "output", "stream": stream, "data": _encode(data)})
        return bool(data)

    def _reap(self, wakeups: int) -> None:
        os.read(wakeups, 1 << 10)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._tell_exit(pid, os.waitstatus_to_exitcode(status))

    def _tell_exit(self, pid: int, status: int) -> None:
        command = self.commands.pop(pid, None)
        if command is None:
            return
        self._drain()
        self._send({"id": command, "op": "exit", "status": status})

    def _drain(self) -> None:
        """Passes on all that is in pipes, so that an exit comes after its command's output."""
        while ready := [
            key for key, _ in self.selector.select(0) if key.data.__name__ == "forward"
        ]:
            for key in ready:
                key.data()

    def _send(self, message: Message) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.port, data) :]


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _descendants(pid: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "1234 (a name) S 1 ...": the name may hold anything, so count from its end.
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid}"
    return f"{pid}: {b' '.join(words).decode(errors='replace').strip()}"


def main() -> None:
    """Serves the port whose device is the one argument."""
    Agent(os.open(sys.argv[1], os.O_RDWR)).serve()


if __name__ == "__main__":
    main()
