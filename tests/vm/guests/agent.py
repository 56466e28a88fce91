# SPDX-License-Identifier: Apache-2.0
"""Runs commands in a guest, for the host at the other end of a virtio-serial port.

Executed in the guest as a file of its own, by the host's Python, with nothing but the standard
library. Messages are lines of JSON, bytes in them base64. From the host:

    {"id": 1, "op": "spawn", "argv": ["uname", "-r"], "cwd": "/tmp", "env": {"LANG": "C"}}
    {"id": 1, "op": "signal", "signal": 15, "group": false}
    {"id": 5, "op": "spawn", "argv": ["bash"], "cwd": "/", "env": {}, "terminal": [24, 80]}
    {"id": 5, "op": "input", "data": "bHMK"}
    {"id": 2, "op": "read", "path": "/proc/vmstat"}
    {"id": 3, "op": "write", "path": "/proc/sysrq-trigger", "data": "Yw=="}
    {"id": 4, "op": "leftovers"}

and back:

    {"op": "ready"}
    {"id": 1, "op": "started", "pid": 301}
    {"id": 1, "op": "output", "stream": "stdout", "data": "Ni4xMgo="}
    {"id": 1, "op": "exit", "status": 0}
    {"id": 2, "op": "result", "data": "bnJfZnJlZV9wYWdlcyAx"}
    {"id": 3, "op": "error", "errno": 13, "path": "/proc/sysrq-trigger"}
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import select
import selectors
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

PR_SET_CHILD_SUBREAPER = 36
ENDED = ("Z", "X")
"""The states in /proc/PID/stat of a process that only waits to be reaped."""
POLL_S = 0.05


@dataclass(slots=True)
class Command:
    """A command that runs: its id on the host, and the names of its outputs by descriptor."""

    identity: int
    pid: int
    outputs: dict[int, str]
    input: int | None


class Agent:
    """The single thread that serves the port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.selector = selectors.DefaultSelector()
        self.commands: dict[int, Command] = {}
        """The commands that run, by pid."""
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

    def _op_spawn(self, message: Message) -> Message:
        spawn = spawn_on_terminal if message.get("terminal") else spawn_on_pipes
        command = spawn(message)
        self.commands[command.pid] = command
        for descriptor in command.outputs:
            os.set_blocking(descriptor, False)
            forward = functools.partial(self._forward, command, descriptor)
            self.selector.register(descriptor, selectors.EVENT_READ, forward)
        return {"op": "started", "pid": command.pid}

    def _op_input(self, message: Message) -> None:
        for command in self.commands.values():
            if command.identity == message["id"] and command.input is not None:
                os.write(command.input, base64.b64decode(message["data"]))

    def _op_signal(self, message: Message) -> None:
        for command in self.commands.values():
            if command.identity == message["id"]:
                (os.killpg if message["group"] else os.kill)(command.pid, message["signal"])

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
        found: dict[int, str] = {}
        while living := _descendants(os.getpid()):
            found = {**{pid: _command_line(pid) for pid in living}, **found}
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        return {"op": "result", "processes": list(found.values())}

    def _forward(self, command: Command, descriptor: int) -> None:
        """Passes on a piece of what a command has printed."""
        if descriptor not in command.outputs:
            # Its end was seen at the command's own, after this event was fetched.
            return
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            # A terminal's end.
            if error.errno != errno.EIO:
                raise
            data = b""
        if data:
            stream = command.outputs[descriptor]
            answer = {"op": "output", "stream": stream, "data": _encode(data)}
            self._send({"id": command.identity, **answer})
        else:
            self.selector.unregister(descriptor)
            del command.outputs[descriptor]
            os.close(descriptor)

    def _reap(self, wakeups: int) -> None:
        os.read(wakeups, 1 << 10)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self.commands.pop(pid, None)
            if command is not None:
                self._tell_exit(command, os.waitstatus_to_exitcode(status))

    def _tell_exit(self, command: Command, status: int) -> None:
        for descriptor in list(command.outputs):
            # What it has printed before it ended comes before its end, and what its children
            # print comes as long as they live.
            while descriptor in command.outputs and _readable(descriptor):
                self._forward(command, descriptor)
        self._send({"id": command.identity, "op": "exit", "status": status})

    def _send(self, message: Message) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.port, data) :]


def spawn_on_pipes(message: Message) -> Command:
    """Starts a command whose output is told apart, and which has no input."""
    outputs = {}
    writers = {}
    for stream in ("stdout", "stderr"):
        reader, writers[stream] = os.pipe()
        outputs[reader] = stream
    try:
        pid = _popen(message, stdin=subprocess.DEVNULL, **writers)
    except OSError:
        for descriptor in outputs:
            os.close(descriptor)
        raise
    finally:
        for descriptor in writers.values():
            os.close(descriptor)
    return Command(message["id"], pid, outputs, None)


def spawn_on_terminal(message: Message) -> Command:
    """Starts a command on a terminal of its own."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", *message["terminal"], 0, 0))
    try:
        pid = _popen(
            message, "setsid", "--ctty", "--wait", stdin=theirs, stdout=theirs, stderr=theirs
        )
    finally:
        os.close(theirs)
    return Command(message["id"], pid, {ours: "stdout"}, ours)


def _popen(message: Message, *prefix: str, stdin: int, stdout: int, stderr: int) -> int:
    process = subprocess.Popen(
        [*prefix, *message["argv"]],
        cwd=message["cwd"],
        env=message["env"],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    # It is waited for in Agent._reap, not by the Popen.
    process.returncode = 0
    return process.pid


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _descendants(pid: int) -> list[int]:
    """The processes that descend from one, without those that have ended."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "1234 (a name) S 1 ...": the name may hold anything, so count from its end.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in ENDED:
            parents[int(folder.name)] = int(parent)
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
