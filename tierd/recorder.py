# SPDX-License-Identifier: Apache-2.0
"""Writes down what the daemon sees, round by round; tierd/replay.py plays it again."""

import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Accesses
from tierd.config import Config
from tierd.config.show import as_dict
from tierd.daemon import Round
from tierd.errors import Conflict, NotFound
from tierd.model import MAX_TIERS, Pid, Tier
from tierd.observe.events import event
from tierd.observe.files import new_file
from tierd.observe.recording import Frame, Kind, encode, preamble
from tierd.version import VERSION
from tierd.watched import Watched

log = logging.getLogger("tierd")

MOST_BYTES = 1 << 40
"""A client's recording is as long as the client wants it."""

WAITING_BYTES, FORGOTTEN_S = 8 << 20, 30.0
"""So much waits to be fetched, and so long; then the recording ends."""

NUMBERS = 1 << 53
"""Recordings are numbered at random, so that none is taken for one of an earlier daemon."""

TABLES = ("policy", "migrate", "damon", "tenant")
"""Of the configuration; the others say nothing of how memory is placed, but much of the host."""


class Recorder:
    """Turns rounds into a recording's bytes.

    Args:
        write: takes them; what it raises ends the recording, not the daemon.
        most_bytes: where they would be more, it ends.
    """

    def __init__(self, write: Callable[[bytes], object], *, most_bytes: int) -> None:
        self.write, self.most_bytes = write, most_bytes
        self.bytes = 0
        self.ended: str | None = None
        """Why it has ended before the daemon did."""
        self._begun: tuple[Config, Sequence[Tier]] | None = None
        self._targets: dict[Pid, int] = {}
        self._mapped: dict[Pid, NDArray[np.void]] = {}
        self._known: dict[Pid, int] = {}

    def __call__(self, round: Round) -> None:
        """Writes down a round, whole or not at all."""
        if self.ended is not None:
            return
        data = b"".join(map(encode, self._frames(round)))
        if not self.bytes:
            data = preamble() + data
        if self.bytes + len(data) > self.most_bytes:
            self._end(f"it has reached {self.most_bytes >> 20} MiB")
            return
        try:
            self.write(data)
        except OSError as error:
            self._end(str(error.strerror))
        else:
            self.bytes += len(data)

    def _end(self, why: str) -> None:
        self.ended = why
        log.warning("the recording ends: %s", why, extra=event("recording.ended"))

    def _frames(self, round: Round) -> Iterator[Frame]:
        if self._begun != (round.config, round.tiers):
            self._begun = round.config, round.tiers
            self._known.clear()
            yield _begin(round)
        yield from self._targets_frames(round.watched)
        for accesses in round.seen:
            if accesses.pid in self._targets:
                yield _accesses(accesses)
        for pid, watched in round.watched.items():
            known = _known_bytes(watched)
            if known != self._known.get(pid, 0):
                self._known[pid] = known
                yield _places(pid, watched)
        yield _end_of(round)

    def _targets_frames(self, watched: Mapping[Pid, Watched]) -> Iterator[Frame]:
        now = {pid: one.process.start_ticks for pid, one in watched.items()}
        for pid in [p for p, start_ticks in self._targets.items() if now.get(p) != start_ticks]:
            for known in (self._targets, self._mapped, self._known):
                known.pop(pid, None)
            yield Frame(kind=Kind.GONE, text={"pid": pid})
        for pid, one in watched.items():
            if pid not in self._targets:
                self._targets[pid] = one.process.start_ticks
                who = {"command": one.process.command, "cgroup": one.process.cgroup}
                yield Frame(kind=Kind.TARGET, text={"pid": pid, **who})
            mapped = one.mapped
            if mapped is not None and mapped is not self._mapped.get(pid):
                self._mapped[pid] = mapped
                yield Frame(kind=Kind.MAPPED, text={"pid": pid}, rows=mapped)


class Recordings:
    """Who records: a file, and at most one client, which fetches what there is piece by piece.

    Args:
        file: None where none is recorded to.
        clock: in seconds.
    """

    def __init__(self, file: Recorder | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._client: _Client | None = None

    def __call__(self, round: Round) -> None:
        """Writes down a round."""
        if self._client is not None and self._clock() > self._client.fetched_s + FORGOTTEN_S:
            log.warning("a recording was not fetched any more", extra=event("recording.forgotten"))
            self._client = None
        if self._client is not None:
            self._client.recorder(round)
        if self._file is not None:
            self._file(round)

    def begin(self) -> int:
        """Begins a recording for a client; returns its number.

        Raises:
            Conflict: there is one already.
        """
        if self._client is not None:
            raise Conflict(
                "a recording is being made already",
                hint=f"it ends with its tierctl, or {FORGOTTEN_S:g} s after that was killed",
            )
        self._client = _Client(self._clock())
        log.info("a recording begins", extra=event("recording.begins"))
        return self._client.number

    def fetch(self, number: int) -> tuple[bytes, str | None]:
        """Returns what was recorded since it was fetched last, and why there will be no more.

        Raises:
            NotFound: there is no such recording, or none any more.
        """
        if self._client is None or self._client.number != number:
            raise NotFound(f"there is no recording {number}", hint="begin another one")
        self._client.fetched_s = self._clock()
        return self._client.take(), self._client.recorder.ended

    def end(self, number: int) -> bytes:
        """Ends a recording and returns the rest of it.

        Raises:
            NotFound: there is no such recording, or none any more.
        """
        rest, _ = self.fetch(number)
        self._client = None
        log.info("a recording has ended", extra=event("recording.ended"))
        return rest


class _Client:
    """What waits to be fetched."""

    def __init__(self, now_s: float) -> None:
        self.number = secrets.randbelow(NUMBERS)
        self.fetched_s = now_s
        self.recorder = Recorder(self._put, most_bytes=MOST_BYTES)
        self._waiting: list[bytes] = []

    def _put(self, data: bytes) -> None:
        if len(data) + sum(map(len, self._waiting)) > WAITING_BYTES:
            raise OSError(errno.ENOBUFS, "it was not fetched in time")
        self._waiting.append(data)

    def take(self) -> bytes:
        data, self._waiting = b"".join(self._waiting), []
        return data


@contextmanager
def recording_to(path: Path, *, most_bytes: int) -> Iterator[Recorder]:
    """Records to a new file; see new_file()."""
    with new_file(path) as file:
        yield Recorder(file.write, most_bytes=most_bytes)


def _begin(round: Round) -> Frame:
    config = as_dict(round.config)
    return Frame(
        kind=Kind.BEGIN,
        text={
            "tierd": VERSION,
            "kernel": os.uname().release,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "tiers": [
                {"name": tier.name, "kind": str(tier.kind), "latency_ns": tier.latency_ns}
                for tier in round.tiers
            ],
            "config": {name: config[name] for name in TABLES},
        },
    )


def _accesses(accesses: Accesses) -> Frame:
    intervals = {"sample_s": accesses.sample_s, "aggregation_s": accesses.aggregation_s}
    flags = {name: True for name in ("zoomed", "relative") if getattr(accesses, name)}
    return Frame(
        kind=Kind.ACCESSES,
        text={"pid": accesses.pid, "at_s": accesses.at_s, **intervals, **flags},
        rows=accesses.regions,
    )


def _known_bytes(watched: Watched) -> int:
    pieces = watched.pieces
    known = np.isfinite(pieces["probed_s"])
    return int((pieces["end"] - pieces["start"])[known].sum())


def _places(pid: Pid, watched: Watched) -> Frame:
    known = watched.pieces[np.isfinite(watched.pieces["probed_s"])]
    rows = np.zeros(len(known), Kind.PLACES.dtype)
    for name in rows.dtype.names or ():
        rows[name] = known[name]
    return Frame(kind=Kind.PLACES, text={"pid": pid}, rows=rows)


def _end_of(round: Round) -> Frame:
    rows = np.zeros(len(round.rooms), Kind.ROUND.dtype)
    rows["capacity_bytes"] = [room.capacity_bytes for room in round.rooms]
    rows["free_bytes"] = [max(room.free_bytes, 0) for room in round.rooms]
    rows["used_bytes"] = used_bytes(round.watched)[: len(rows)]
    return Frame(
        kind=Kind.ROUND,
        text={
            "at_s": round.at_s,
            "page_cost_ns": round.page_cost_ns,
            "took_ns": round.took_ns,
            "aside_bytes": [room.aside_bytes for room in round.rooms],
        },
        rows=rows,
    )


def used_bytes(watched: Mapping[Pid, Watched]) -> NDArray[np.float64]:
    """Returns what the targets have on each tier."""
    return sum((one.resident_bytes() for one in watched.values()), start=np.zeros(MAX_TIERS))
