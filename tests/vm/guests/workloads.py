# SPDX-License-Identifier: Apache-2.0
"""The programs in ../workloads, compiled on the host, run in guests."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from guests.errors import CommandFailed
from guests.guest import HANGS_S, REPOSITORY, Completed, Guest, Process

SOURCES = Path(__file__).resolve().parents[1] / "workloads"
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")


def build(name: str) -> Path:
    """The program of that name."""
    return compiled(SOURCES / f"{name}.c", "-lm")


def compiled(source: Path, *flags: str) -> Path:
    """What comes of a source with these flags, anew if that, or a header beside it, is newer."""
    program = REPOSITORY / ".out" / "workloads" / source.stem
    newest = max(path.stat().st_mtime for path in (source, *source.parent.glob("*.h")))
    if program.exists() and program.stat().st_mtime >= newest:
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    scratch = program.with_name(f".{source.stem}.{threading.get_native_id()}")
    subprocess.run(["gcc", *FLAGS, source, "-o", scratch, *flags], check=True)
    return scratch.rename(program)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A second of hotset; see hotset.c."""

    t: float
    ops_per_s: float
    window: int
    hot_pages: int
    hot_on_fast: int
    cold_pages: int
    cold_on_slow: int
    absent: int
    hit_ratio: float
    """The share of the accesses that went to pages on fast nodes."""
    hot_ratio: float
    """The share that went to hot pages, wherever they are."""

    @property
    def hot_share(self) -> float:
        """The share of the hot window that is on fast nodes."""
        return self.hot_on_fast / self.hot_pages


class Hotset:
    """A hotset that runs in a guest, or a program that reports as it does."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    def sample(self, timeout: float = HANGS_S) -> Sample:
        """The next second; the first comes when the buffer is filled."""
        return Sample(**json.loads(self._process.readline(timeout)))

    def samples(self, seconds: float) -> Iterator[Sample]:
        """The samples of so many seconds of the workload's own time."""
        sample = self.sample()
        end = sample.t + seconds
        while sample.t < end:
            yield sample
            sample = self.sample()
        yield sample

    def latest(self) -> Sample:
        """The last second that it has told of since it was asked, or the next one."""
        self._process.skip_lines(but=1)
        return self.sample()

    def catch_up(self) -> None:
        """Passes over what it has told of so far, and the second that goes on now."""
        self._process.skip_lines()
        self.sample()

    def skip_to(self, t: float) -> None:
        """Reads what it has told meanwhile, up to a second of its own time."""
        while self.sample().t < t:
            pass

    def move_window(self) -> None:
        """Moves the hot window on."""
        self._process.signal(signal.SIGUSR1)

    def pause(self) -> None:
        """Has it do nothing until it is to go on: its memory is cold then."""
        self._process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.signal(signal.SIGCONT)

    def stop(self, timeout: float = HANGS_S) -> Completed:
        """Ends it; its data are verified if it was started with --verify."""
        self._process.signal(signal.SIGTERM)
        return self._process.wait(timeout)


@contextmanager
def hotset(guest: Guest, *options: str) -> Iterator[Hotset]:
    """Runs hotset with these options on the guest's last CPU, verified at its end.

    Raises:
        CommandFailed: it, or the verification, failed.
    """
    with reporting(guest, [*hotset_command(guest), *options]) as running:
        yield running


def hotset_command(guest: Guest) -> list[str]:
    """How hotset is run on a guest's last CPU, without what it is to do there."""
    fast = ",".join(map(str, guest.facts.fast))
    cpu = str(guest.topology.cpus - 1)
    return [str(build("hotset")), "--cpu", cpu, "--fast-nodes", fast, "--verify"]


@contextmanager
def reporting(guest: Guest, argv: Sequence[str]) -> Iterator[Hotset]:
    """Runs a program that reports as hotset does.

    Raises:
        CommandFailed: it failed.
    """
    running = Hotset(guest.start(argv))
    try:
        yield running
    finally:
        done = running.stop()
    if done.rc != 0:
        raise CommandFailed(f"{argv[0]} ended with {done.rc}: {done.stderr}")
