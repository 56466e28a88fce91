# SPDX-License-Identifier: Apache-2.0
"""A recording in memory, round by round, checked: what tierd/replay.py plays.

Frames are tierd's (recording.py), or are made of damo's records (damo.py).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Accesses
from tierd.model import MAX_TIERS, NodeId, Pid, Rank, Tier, TierKind
from tierd.observe import damo
from tierd.observe.recording import BadRecording, Frame, Kind, read

DAMO_ROUND_S = 1.0
"""How often the daemon goes round over damo's records, which know of no rounds."""

ABOUT = ("tierd", "kernel", "time")
"""What a recording tells of where it was made."""


@dataclass(slots=True, kw_only=True)
class Moment:
    """What one recorded round has seen."""

    at_s: float = 0.0
    begin: Mapping[str, Any] | None = None
    gone: list[Pid] = field(default_factory=list)
    new: dict[Pid, Mapping[str, Any]] = field(default_factory=dict)
    mapped: dict[Pid, NDArray[np.void]] = field(default_factory=dict)
    seen: list[Accesses] = field(default_factory=list)
    places: dict[Pid, NDArray[np.void]] = field(default_factory=dict)
    rooms: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, Kind.ROUND.dtype))
    aside_bytes: Sequence[float] = ()
    """Of each tier, what single CPUs keep of it; none where that was not recorded."""
    page_cost_ns: float = 0.0
    took_ns: float = 0.0
    """What a page of the moves before took; 0 of few moves, and where that was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording in memory; `knows_places` unless it comes from elsewhere than tierd."""

    moments: Sequence[Moment]
    knows_places: bool = True

    @property
    def begun_s(self) -> float:
        return self.moments[0].at_s

    @property
    def ended_s(self) -> float:
        return self.moments[-1].at_s

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s

    @property
    def most_bytes(self) -> int:
        """The most that the targets have had of all tiers together."""
        return max(int(moment.rooms["used_bytes"].sum()) for moment in self.moments)

    @property
    def begin(self) -> Mapping[str, Any]:
        """What the recording says of itself, at its beginning."""
        begin = self.moments[0].begin
        assert begin is not None
        return begin


def load(path: Path, *, until_damage: bool = False) -> Recording:
    """Reads a recording, tierd's or damo's.

    Args:
        path: the file.
        until_damage: take the rounds before a damaged place for all.

    Raises:
        BadRecording: it is none, is damaged, or holds no round.
        OSError: it cannot be read.
    """
    if damo.is_damos(path):
        return _of_damo(path)
    moments: list[Moment] = []
    try:
        for moment in _moments(path, read(path)):
            moments.append(moment)
    except BadRecording:
        if not (until_damage and moments):
            raise
    if not moments:
        raise BadRecording(f"{path}: holds no round", hint="record for longer")
    return Recording(moments=moments)


def _of_damo(path: Path) -> Recording:
    """Reads damo's records: two tiers are supposed, and all that was monitored for memory."""
    found = [accesses for accesses in damo.read(path) if len(accesses.regions)]
    if not found:
        raise BadRecording(f"{path}: holds no snapshot", hint="record for longer")
    for accesses in found:
        try:
            _check_intervals(accesses.sample_s, accesses.aggregation_s)
            _checked(accesses.regions)
        except ValueError as error:
            raise BadRecording(
                f"{path}: a snapshot lacks {error}",
                hint="damo record without --snapshot: on some kernels that repeats regions",
            ) from None
    first_s = found[0].at_s
    begun = datetime.fromtimestamp(first_s, UTC).isoformat(timespec="seconds")
    tiers = [{"name": n, "kind": n, "latency_ns": None} for n in (TierKind.DRAM, TierKind.CXL)]
    about = {"tierd": "none", "kernel": "unknown", "time": begun, "tiers": tiers, "config": {}}
    moments, new = [Moment(at_s=first_s - DAMO_ROUND_S, begin=about)], set()
    for accesses in found:
        if accesses.at_s > moments[-1].at_s:
            moments.append(Moment(at_s=max(accesses.at_s, moments[-1].at_s + DAMO_ROUND_S)))
        moment, pid = moments[-1], accesses.pid
        moment.seen.append(accesses)
        moment.mapped[pid] = accesses.regions
        if pid not in new:
            new.add(pid)
            moment.new[pid] = {"command": f"target {pid}", "cgroup": None}
    monitored = {accesses.pid: accesses.regions for accesses in found}
    whole_bytes = sum(int((r["end"] - r["start"]).sum()) for r in monitored.values())
    for moment in moments:
        moment.rooms = np.array([(0, 0, 0), (whole_bytes, 0, whole_bytes)], Kind.ROUND.dtype)
    return Recording(moments=moments, knows_places=False)


def _moments(path: Path, frames: Iterable[Frame]) -> Iterator[Moment]:
    moment, tiers, last_s = Moment(), 0, -math.inf
    for frame in frames:
        try:
            _take(moment, frame)
            if moment.begin is not None:
                tiers = len(moment.begin["tiers"])
            if frame.kind is Kind.ROUND:
                _check_round(moment, tiers, last_s)
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecording(f"{path}: a frame of {frame.kind.name} lacks {error}") from None
        if frame.kind is Kind.ROUND:
            yield moment
            moment, last_s = Moment(), moment.at_s


def _check_round(moment: Moment, tiers: int, last_s: float) -> None:
    if not tiers:
        raise ValueError("a beginning before it")
    if len(moment.rooms) != tiers:
        raise ValueError("a row for each tier")
    if not last_s <= moment.at_s < math.inf:
        raise ValueError("an instant that is not before the last")
    if not all(0 <= cost < math.inf for cost in (moment.page_cost_ns, moment.took_ns)):
        raise ValueError("costs that make sense")
    if len(moment.aside_bytes) not in (0, tiers):
        raise ValueError("what is aside of each tier")
    if not all(0 <= size < math.inf for size in moment.aside_bytes):
        raise ValueError("sizes that make sense")


def _take(moment: Moment, frame: Frame) -> None:
    """Takes a frame into the moment.

    Raises:
        KeyError, TypeError, ValueError: what it lacks.
    """
    text, rows = frame.text, np.zeros(0, np.void) if frame.rows is None else frame.rows
    match frame.kind:
        case Kind.BEGIN:
            moment.begin = {**text, **{key: str(text[key]) for key in ABOUT}}
            tiers_of(text, np.zeros(len(text["tiers"]), Kind.ROUND.dtype))
            if not isinstance(text["config"], dict):
                raise ValueError("a configuration")
        case Kind.TARGET:
            pid = Pid(int(text["pid"]))
            moment.new[pid] = {key: text[key] for key in ("command", "cgroup")}
        case Kind.GONE:
            moment.gone.append(Pid(int(text["pid"])))
        case Kind.MAPPED:
            moment.mapped[Pid(int(text["pid"]))] = _checked(rows)
        case Kind.ACCESSES:
            moment.seen.append(_accesses(text, rows))
        case Kind.PLACES:
            if not ((rows["resident"] >= 0) & (rows["resident"] <= 1)).all():
                raise ValueError("shares from 0 to 1")
            moment.places[Pid(int(text["pid"]))] = _checked(rows)
        case Kind.ROUND:
            moment.at_s, moment.rooms = float(text["at_s"]), rows
            moment.page_cost_ns = float(text["page_cost_ns"])
            moment.took_ns = float(text.get("took_ns", 0))
            moment.aside_bytes = [float(size) for size in text.get("aside_bytes", ())]


def _accesses(text: Mapping[str, Any], rows: NDArray[np.void]) -> Accesses:
    sample_s, aggregation_s = float(text["sample_s"]), float(text["aggregation_s"])
    _check_intervals(sample_s, aggregation_s)
    return Accesses(
        pid=Pid(int(text["pid"])),
        at_s=float(text["at_s"]),
        sample_s=sample_s,
        aggregation_s=aggregation_s,
        regions=_checked(rows),
        zoomed=text.get("zoomed") is True,
        relative=text.get("relative") is True,
    )


def _check_intervals(sample_s: float, aggregation_s: float) -> None:
    if not 0 < sample_s <= aggregation_s < 1e6:
        raise ValueError("intervals that make sense")


def _checked(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Returns ranges that are sorted and disjoint.

    Raises:
        ValueError: they are not.
    """
    if (rows["start"] >= rows["end"]).any() or (rows["end"][:-1] > rows["start"][1:]).any():
        raise ValueError("ranges in order")
    return rows


def tiers_of(begin: Mapping[str, Any], rooms: NDArray[np.void]) -> list[Tier]:
    """Returns a recording's tiers, each of one node whose number is its rank.

    Raises:
        KeyError, TypeError, ValueError: what the beginning lacks.
    """
    told = begin["tiers"]
    if not 1 <= len(told) == len(rooms) <= MAX_TIERS:
        raise ValueError("as many rooms as tiers")
    return [
        Tier(
            rank=Rank(rank),
            name=str(tier["name"]),
            kind=TierKind(tier["kind"]),
            nodes=(NodeId(rank),),
            capacity_bytes=int(room["capacity_bytes"]),
            latency_ns=None if tier["latency_ns"] is None else int(tier["latency_ns"]),
        )
        for rank, (tier, room) in enumerate(zip(told, rooms, strict=True))
    ]
