# SPDX-License-Identifier: Apache-2.0
"""A guest that is up: runs commands in it, reads and writes its files."""

from __future__ import annotations

import itertools
import os
import queue
import shlex
import signal as signals
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guests.channel import Channel, ChannelClosed, Conversation, Message, decode, encode
from guests.counter import Counter
from guests.errors import CommandEnded, CommandFailed, CommandTimeout, GuestLost, panicked
from guests.qmp import Message as QmpMessage
from guests.qmp import Monitor, MonitorClosed
from guests.topology import Topology

REPOSITORY = Path(__file__).resolve().parents[3]

PING_TIMEOUT_S = 60
"""An agent that takes longer for a word has hung; a busy emulated guest takes a few seconds."""
HANGS_S = 180
"""A command that takes longer has hung. On a slow host one of seconds took more than a minute."""


Sink = Callable[[str, bytes], None]
"""Takes pieces of a stream, `stdout` or `stderr`."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that has ended: its exit status, or minus the signal that killed it."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the guest turned out to be."""

    release: str
    fast: tuple[int, ...]
    """The nodes with CPUs."""
    slow: tuple[int, ...]
    """The nodes with memory alone."""
    kvm: bool
    up_after_s: float
    """From the start of QEMU to a guest that is set up."""


class Process:
    """A command that runs in the guest."""

    def __init__(
        self, guest: Guest, argv: tuple[str, ...], pid: int, conversation: Conversation
    ) -> None:
        self.pid = pid
        self._guest = guest
        self._argv = argv
        self._conversation = conversation
        self._streams = {"stdout": b"", "stderr": b""}
        self._lines_read = 0
        self.rc: int | None = None

    @property
    def stdout(self) -> str:
        """All that it has printed so far."""
        self._take_arrived()
        return self._streams["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        """All that it has complained of so far."""
        self._take_arrived()
        return self._streams["stderr"].decode(errors="replace")

    @property
    def output(self) -> str:
        """Both, for people."""
        return self.stdout + self.stderr

    def readline(self, timeout: float = HANGS_S) -> str:
        """The next line of stdout without its end.

        Raises:
            CommandEnded: the command ended without another line.
            CommandTimeout: no line came in `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            lines = self._lines()
            if self._lines_read < len(lines) - 1:
                self._lines_read += 1
                return lines[self._lines_read - 1].decode(errors="replace")
            if self.rc is not None:
                what = f"{shlex.join(self._argv)} ended with {self.rc}"
                raise CommandEnded(f"{what}: {self.stderr}" if self.stderr else what)
            self._advance(deadline, f"no line in {timeout} s")

    def skip_lines(self, *, but: int = 0) -> None:
        """Passes over the lines that it has printed so far, but for so many of the last ones."""
        self._take_arrived()
        self._lines_read = max(self._lines_read, len(self._lines()) - 1 - but)

    def wait(self, timeout: float = HANGS_S) -> Completed:
        """Waits for its end.

        Raises:
            CommandTimeout: it runs on; signal it or wait again.
        """
        deadline = time.monotonic() + timeout
        while self.rc is None:
            self._advance(deadline, f"still running after {timeout} s")
        return Completed(self._argv, self.rc, self.stdout, self.stderr)

    def stream(self, sink: Sink) -> int:
        """Passes on what it prints as it comes, as long as it runs; returns its exit status."""
        while self.rc is None:
            message = self._guest.receive(self._conversation, None)
            if message["op"] == "output":
                sink(message["stream"], decode(message["data"]))
            else:
                self.rc = message["status"]
        return self.rc

    def type(self, data: bytes) -> None:
        """Types on its terminal."""
        self._conversation.send(op="input", data=encode(data))

    def signal(self, number: int, *, group: bool = False) -> None:
        """Sends a signal to it, or to all of its process group."""
        self._conversation.send(op="signal", signal=int(number), group=group)

    def _lines(self) -> list[bytes]:
        """The lines of stdout, the last one without its end."""
        return self._streams["stdout"].split(b"\n")

    def _take_arrived(self) -> None:
        while self.rc is None:
            try:
                self._take(self._guest.receive(self._conversation, 0))
            except queue.Empty:
                return

    def _advance(self, deadline: float, complaint: str) -> None:
        try:
            message = self._guest.receive(self._conversation, deadline - time.monotonic())
        except queue.Empty:
            self._guest.ping()
            raise CommandTimeout(f"{shlex.join(self._argv)}: {complaint}\n{self.output}") from None
        self._take(message)

    def _take(self, message: Message) -> None:
        if message["op"] == "output":
            self._streams[message["stream"]] += decode(message["data"])
        else:
            self.rc = message["status"]


class Guest:
    """A guest that is up. Commands run as root in the repository, its .venv first on PATH."""

    def __init__(
        self,
        topology: Topology,
        emulator: subprocess.Popen[bytes],
        channel: Channel,
        monitor: Monitor,
        counter: Counter,
        console: Path,
    ) -> None:
        self.topology = topology
        self.counter = counter
        self.console = console
        self._emulator = emulator
        self._channel = channel
        self._monitor = monitor
        self._plugged = itertools.count()
        self.facts = Facts(release="", fast=(), slow=(), kvm=False, up_after_s=0)

    def start(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        terminal: tuple[int, int] | None = None,
    ) -> Process:
        """Starts a command, on a terminal of so many rows and columns or without one.

        Any number may run at once.

        Raises:
            OSError: it could not be started.
        """
        words = tuple(str(word) for word in argv)
        conversation = self._channel.open(
            op="spawn",
            argv=words,
            cwd=str(cwd),
            env={**_environment(), **(env or {})},
            terminal=terminal,
        )
        started = self._answer(conversation)
        return Process(self, words, started["pid"], conversation)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        timeout: float = HANGS_S,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
    ) -> Completed:
        """Runs a command to its end.

        Raises:
            CommandFailed: `check` is set and its exit status isn't 0.
            CommandTimeout: it took longer than `timeout` seconds, and was killed.
            OSError: it could not be started.
        """
        process = self.start(argv, env=env, cwd=cwd)
        try:
            done = process.wait(timeout)
        except CommandTimeout:
            process.signal(signals.SIGKILL, group=True)
            process.wait(PING_TIMEOUT_S)
            raise
        if check and done.rc != 0:
            raise CommandFailed(
                f"{shlex.join(done.argv)} ended with {done.rc}\n{done.stdout}{done.stderr}"
            )
        return done

    def read(self, path: str | Path) -> bytes:
        """A file's content; files of /proc and /sys too."""
        return decode(self._ask(op="read", path=str(path))["data"])

    def write(self, path: str | Path, data: bytes) -> None:
        """Makes `data` a file's content, in one write, as sysfs wants it."""
        self._ask(op="write", path=str(path), data=encode(data))

    def uptime_s(self) -> float:
        """Seconds since it booted."""
        return float(self.read("/proc/uptime").split()[0])

    def leftovers(self) -> list[str]:
        """The command lines of all processes that commands have left behind; kills them."""
        found: list[str] = self._ask(op="leftovers")["processes"]
        return found

    def ping(self) -> None:
        """Returns if the guest is alive.

        Raises:
            GuestLost: it isn't.
        """
        self._ask(op="ping")

    def qmp(self, command: str, **arguments: object) -> Any:
        """Has QEMU do something, such as `qmp("device_del", id="mem0")`; returns its answer.

        Raises:
            QmpError: it refuses.
            GuestLost: it has ended.
        """
        try:
            return self._monitor.execute(command, **arguments)
        except MonitorClosed:
            raise self._lost() from None

    def qmp_event(self, name: str, timeout: float = 60) -> QmpMessage:
        """Waits for something that QEMU tells by itself; returns its data. Each is told once.

        Raises:
            TimeoutError: it did not happen within `timeout` seconds.
            GuestLost: QEMU has ended.
        """
        try:
            return self._monitor.event(name, timeout)
        except MonitorClosed:
            raise self._lost() from None

    def plug(self, device: int = 0) -> None:
        """Plugs in a CXL device, by its place in the topology; the guest finds it in a while.

        Its memory is new each time: QEMU does not take it again from a device that has gone.
        """
        memory, size_bytes = f"plugged{next(self._plugged)}", self.topology.slow_mib[device] << 20
        backend = {"qom-type": "memory-backend-ram", "id": memory, "size": size_bytes}
        self.qmp("object-add", **backend)
        self.qmp("device_add", **self.topology.cxl_device(device, memory))

    def unplug(self, device: int = 0, timeout: float = 60) -> None:
        """Presses its attention button, whereupon the guest lets go of it, and waits for that.

        The event DEVICE_DELETED may never come: QEMU 11 goes on using the memory of a device that
        has ever been in a region.

        Raises:
            TimeoutError: it was not let go within `timeout` seconds.
        """
        name, deadline = f"mem{device}", time.monotonic() + timeout
        self.qmp("device_del", id=name)
        while any(
            part["name"] == name for part in self.qmp("qom-list", path="/machine/peripheral")
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the guest did not let go of {name} in {timeout} s")
            time.sleep(0.5)

    def receive(self, conversation: Conversation, timeout: float | None) -> Message:
        """The next answer to a request; a guest that ended is an error of its own."""
        try:
            return conversation.receive(None if timeout is None else max(timeout, 0))
        except ChannelClosed:
            raise self._lost() from None

    def _ask(self, **request: object) -> Message:
        conversation = self._channel.open(**request)
        try:
            return self._answer(conversation)
        finally:
            conversation.end()

    def _answer(self, conversation: Conversation) -> Message:
        """The answer that the agent gives at once if it lives."""
        try:
            return self.receive(conversation, PING_TIMEOUT_S)
        except queue.Empty:
            raise GuestLost(
                f"the guest {self.topology.name} has hung: no answer in {PING_TIMEOUT_S} s",
                self.console,
            ) from None

    def _lost(self) -> GuestLost:
        try:
            status = self._emulator.wait(PING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return GuestLost(f"the agent in guest {self.topology.name} ended", self.console)
        return why_lost(self.topology.name, status, self.console, kvm=self.facts.kvm)


def why_lost(name: str, status: int, console: Path, *, kvm: bool) -> GuestLost:
    """The error for an emulator that has ended."""
    ended = f"the guest {name} ended, QEMU with status {status}"
    return panicked(name, console, kvm=kvm) or GuestLost(ended, console)


def _environment() -> dict[str, str]:
    path = f"{REPOSITORY}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    passed_on = {name: value for name, value in os.environ.items() if name.startswith("TIERD_")}
    return {
        **passed_on,
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PATH": path,
        "PYTHONPATH": f"{REPOSITORY}/tests/vm",
    }
