# SPDX-License-Identifier: Apache-2.0
"""Writes down what the daemon sees, round by round; tierd/replay.py plays it again."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd import __version__
from tierd.config import Config
from tierd.config.show import as_dict
from tierd.daemon import Round, Watched
from tierd.errors import TierdError
from tierd.model import MAX_TIERS, Accesses, Pid, Tier
from tierd.observe.events import event
from tierd.observe.recording import Frame, Kind, encode, preamble

log = logging.getLogger("tierd")

TABLES = ("policy", "migrate", "damon")
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


@contextmanager
def recording_to(path: Path, *, most_bytes: int) -> Iterator[Recorder]:
    """Writes a recording to a new file, which only its owner may read.

    Raises:
        TierdError: the file is there already, or cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise TierdError(f"{path} is there already", hint="choose another name") from None
    except OSError as error:
        raise TierdError(f"{path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        yield Recorder(file.write, most_bytes=most_bytes)


def _begin(round: Round) -> Frame:
    config = as_dict(round.config)
    return Frame(
        kind=Kind.BEGIN,
        text={
            "tierd": __version__,
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
    return Frame(
        kind=Kind.ACCESSES,
        text={"pid": accesses.pid, "at_s": accesses.at_s, **intervals},
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
        text={"at_s": round.at_s, "page_cost_ns": round.page_cost_ns},
        rows=rows,
    )


def used_bytes(watched: Mapping[Pid, Watched]) -> NDArray[np.float64]:
    """Returns what the targets have on each tier."""
    return sum(
        (
            ((w.pieces["end"] - w.pieces["start"])[:, None] * w.pieces["resident"]).sum(axis=0)
            for w in watched.values()
        ),
        start=np.zeros(MAX_TIERS),
    )
