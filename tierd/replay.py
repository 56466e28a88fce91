# SPDX-License-Identifier: Apache-2.0
"""Replays a recording: the daemon itself, over a machine that is played from it.

The daemon's own rounds run at the recorded instants and see the recorded accesses, mappings and
free memory; the moves of whichever policy is tried are made to the pieces that it keeps. What is
supposed: a program accesses its memory in the same way wherever that lies, pages of a piece are
alike, no move is refused but for want of room, and each takes what moves took in the recording.
"""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import NO_LOADS, Accesses, Floats, Plan, Report
from tierd.config import Config
from tierd.config.check import Document, check
from tierd.daemon import Daemon, Round
from tierd.decide.heat import divided, is_zoomed, overlay, rates
from tierd.decide.steps import HEADROOM_LOW
from tierd.kernel.pressure import Pressure
from tierd.kernel.process import Process
from tierd.kernel.task import CpuTimes
from tierd.model import (
    MAX_TIERS,
    PAGE_BYTES,
    Backing,
    KernelMoves,
    Node,
    NodeId,
    NodeRoom,
    Outcome,
    Pid,
    Tier,
    Topology,
)
from tierd.observe.moments import Moment, Recording, tiers_of
from tierd.recorder import used_bytes
from tierd.sample.tuning import Tuning
from tierd.tiers import numa
from tierd.watched import Watched

FASTEST_NS = 100.0
"""What an access of the fastest tier is taken to cost where the recording doesn't know."""

COVERED = 0.5
"""A piece is placed as the part of it that the recording knows, if that is more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What became of a replay.

    `at_s` are instants since the beginning; of each, `hits` is the share of accesses that each
    tier had, and `optimum` what the fastest would have had with the hottest bytes in it, put
    there at once and for nothing. `accesses` is what they weigh: how many there were since the
    instant before.
    """

    at_s: Floats
    hits: Floats
    optimum: Floats
    accesses: Floats
    up_bytes: int
    down_bytes: int
    latency_ns: Floats

    @property
    def hit_ratio(self) -> float:
        """The share of all accesses that the fastest tier had."""
        return float(_mean(self.hits[:, 0], self.accesses))

    @property
    def best_ratio(self) -> float:
        """The same of the optimum: no policy has more."""
        return float(_mean(self.optimum, self.accesses))

    @property
    def slowdown(self) -> float:
        """How many times longer an access took than in the fastest tier, on average."""
        taken_ns = _mean(self.hits @ self.latency_ns, self.accesses)
        return float(taken_ns / self.latency_ns[0])


def _mean(values: Floats, weights: Floats) -> float:
    return float((values * weights).sum() / weights.sum()) if weights.sum() else 1.0


def configured(recording: Recording, on_top: Sequence[Document] = ()) -> Config:
    """Returns the recorded configuration with others on top.

    Raises:
        ConfigError: what is wrong in them.
    """
    recorded = Document("the recording", "", recording.begin["config"])
    return check([recorded, *on_top]).config


def replay(
    recording: Recording,
    config: Config,
    *,
    fast_bytes: int | None = None,
    progress: Callable[[float], None] = lambda seconds: None,
) -> Outcomes:
    """Runs the daemon over a recording.

    Args:
        recording: what it sees.
        config: the policy to try, and the budgets.
        fast_bytes: what the targets may have of the fastest tier, in place of what was free.
        progress: is told the seconds replayed since it was told last.
    """
    machine = _Played(recording, config, fast_bytes)
    daemon = Daemon(
        config,
        topology=machine.topology,
        sampler=machine,
        mover=machine if config.policy.mode.moves else None,
        machine=machine,
        tell=None,
        record=machine.note,
    )
    machine.daemon = daemon
    with _quietly():
        took_ns = [*(moment.took_ns for moment in recording.moments[1:]), 0.0]
        for moment, machine.took_ns in zip(recording.moments, took_ns, strict=True):
            passed_s = machine.enter(moment)
            daemon.round()
            progress(passed_s)
    return machine.outcomes()


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps what the daemon logs to itself: it is of another time and perhaps another machine."""
    log = logging.getLogger("tierd")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class _Played:
    """A machine, sampler and mover that are played from a recording."""

    way = "recording"
    losses = 0
    zoomed_pages = 0
    sampling = None
    loads = NO_LOADS
    tuning: Mapping[Pid, Tuning] = {}

    def __init__(self, recording: Recording, config: Config, fast_bytes: int | None) -> None:
        self.config, self.fast_bytes = config, fast_bytes
        self.knows_places = recording.knows_places
        self.begin = recording.begin
        self.moment = first = recording.moments[0]
        self.now_s = self.begun_s = first.at_s
        self.passed_s = 0.0
        self.took_ns = 0.0
        """What a page of this moment's moves took when it was recorded, 0 where that is unknown."""
        self.daemon: Daemon
        self.topology = _topology(self.begin, self._rooms(first))
        self.tiers = self.topology.tiers
        """At their most; tiers may come and go."""
        self.processes: dict[Pid, Process] = {}
        self.mappings: dict[Pid, NDArray[np.void]] = {}
        self.places: dict[Pid, NDArray[np.void]] = {}
        self.exited: list[Pid] = []
        self.moved_bytes = [0, 0]
        self.told: list[tuple[float, Floats, float, float]] = []

    def enter(self, moment: Moment) -> float:
        """Goes on to a moment; returns how many seconds that is after the one before."""
        self.passed_s = moment.at_s - self.now_s
        self.moment, self.now_s = moment, moment.at_s
        if moment.begin is not None and moment.begin is not self.begin:
            self.begin = moment.begin
            topology = _topology(self.begin, self._rooms(moment))
            self.daemon.retier(topology, self.daemon.mover)
            self.topology = topology
            self.tiers = max(self.tiers, topology.tiers, key=len)
            self.places.clear()
        for pid in moment.gone:
            self.exited.append(pid)
            for known in (self.processes, self.mappings, self.places):
                known.pop(pid, None)
        for pid, text in moment.new.items():
            self.processes[pid] = _process(pid, text, len(self.told))
            self.daemon.targets.find_soon()
        self.mappings |= moment.mapped
        for pid, places in moment.places.items():
            self.places[pid] = _first_known(self.places.get(pid), places)
        return self.passed_s

    # As a machine

    def monotonic(self) -> float:
        return self.now_s

    def find(self) -> Iterable[Process]:
        return list(self.processes.values())

    def mapped(self, pid: Pid) -> NDArray[np.void] | None:
        return self.mappings.get(pid)

    def named(self, pid: Pid, names: Container[str]) -> list[tuple[int, int, str]]:
        return []  # names of mappings are not recorded

    def pressure(self) -> Pressure | None:
        return None

    def kernel_moves(self) -> KernelMoves:
        return KernelMoves()  # no kernel sorts pages in a replay

    def cpu_times(self, pids: Iterable[Pid]) -> Mapping[Pid, CpuTimes]:
        return {}  # likewise

    def promoted_pages(self, pids: Iterable[Pid]) -> Mapping[Pid, int]:
        return {}  # likewise

    def locate(
        self,
        pid: Pid,
        pieces: NDArray[np.void],
        rank_of_node: NDArray[np.int8],
        *,
        budget_pages: int,
        now_s: float,
    ) -> None:
        """Puts what is new where the recording found it first, or on the next tier with room."""
        new = np.flatnonzero(np.isneginf(pieces["probed_s"]))
        if not len(new):
            return
        resident, known = self._found(pid, pieces[new])
        new, resident = new[known], resident[known]
        length = (pieces["end"] - pieces["start"])[new].astype(np.float64)
        pieces["resident"][new] = _spilt(resident, length, self._room())
        pieces["probed_s"][new] = now_s

    def _found(self, pid: Pid, pieces: NDArray[np.void]) -> tuple[Floats, NDArray[np.bool_]]:
        """Returns the pieces' shares as recorded, and whether they are."""
        if not self.knows_places:
            resident = np.zeros((len(pieces), MAX_TIERS))
            resident[:, 0] = 1.0
            return resident, np.ones(len(pieces), np.bool_)
        layer = self.places.get(pid)
        if layer is None:
            return np.zeros((len(pieces), MAX_TIERS)), np.zeros(len(pieces), np.bool_)
        start, end, (piece, row) = overlay(pieces, layer)
        both = (piece >= 0) & (row >= 0)
        piece, row = piece[both], row[both]
        size = (end - start)[both].astype(np.float64)
        covered = np.bincount(piece, size, len(pieces))
        resident = np.zeros((len(pieces), MAX_TIERS))
        for rank in range(MAX_TIERS):
            weights = size * layer["resident"][row, rank]
            resident[:, rank] = np.bincount(piece, weights, len(pieces))
        resident /= np.maximum(covered, 1.0)[:, None]
        return resident, covered > COVERED * (pieces["end"] - pieces["start"])

    def rooms(self) -> Mapping[NodeId, NodeRoom]:
        room = self._room()
        aside = np.minimum(self._aside(), room)
        return {
            NodeId(rank): NodeRoom(int(size), int(kept))
            for rank, (size, kept) in enumerate(zip(room - aside, aside, strict=True))
        }

    def _room(self) -> Floats:
        """Returns what is free of each tier now, for single CPUs too."""
        available = self._available()
        return np.maximum(available - used_bytes(self.daemon.watched)[: len(available)], 0.0)

    def _available(self) -> Floats:
        """Returns what the targets may have of each tier now."""
        rooms = self._rooms(self.moment)
        return np.asarray(rooms["free_bytes"] + rooms["used_bytes"], np.float64) + self._aside()

    def _aside(self) -> Floats:
        """Returns what single CPUs keep of each tier now."""
        moment = self.moment
        known = moment.aside_bytes and self.fast_bytes is None
        return np.array(moment.aside_bytes) if known else np.zeros(len(moment.rooms))

    def _rooms(self, moment: Moment) -> NDArray[np.void]:
        """Returns the recorded rooms, the fastest tier as large as it is to be."""
        if self.fast_bytes is None:
            return moment.rooms
        rooms = moment.rooms.copy()
        others = rooms["capacity_bytes"][0] - rooms["free_bytes"][0] - rooms["used_bytes"][0]
        rooms["capacity_bytes"][0] = others + self.fast_bytes
        rooms["free_bytes"][0], rooms["used_bytes"][0] = self.fast_bytes, 0
        return rooms

    # As a sampler

    is_calm = False

    @property
    def can_look(self) -> bool:
        return True

    @property
    def can_zoom(self) -> bool:
        return self.config.damon.zoom

    def watch(self, pid: Pid) -> None:
        """Nothing begins: what was recorded is there."""

    def unwatch(self, pid: Pid) -> None:
        """Nothing ends."""

    def zoom(self, pid: Pid, start: int, end: int, *, per_page_s: float) -> bool:
        """Nothing is looked at but what was; it comes when it came."""
        return self.can_look

    def poll(self) -> list[Accesses]:
        return self.moment.seen

    def gone(self) -> list[Pid]:
        gone, self.exited = self.exited, []
        return gone

    def filenos(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        """Nothing is open."""

    # As a mover

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        """Makes what moves there is time and room for, each page at the recorded cost."""
        moves = plan.moves
        moment, policy = self.moment, self.config.policy.placement
        cost_ns = self.took_ns or moment.page_cost_ns or policy.move_cost_ns
        share = np.empty(len(moves))
        for index, pid in enumerate(plan.pids):
            mine = moves["target"] == index
            pieces = self.daemon.watched[pid].pieces
            at = np.searchsorted(pieces["start"], moves["start"][mine])
            share[mine] = pieces["resident"][at, moves["source"][mine]]
        length = (moves["end"] - moves["start"]).astype(np.float64)
        walk = np.ceil(moves["bytes"] / share / PAGE_BYTES) * PAGE_BYTES
        walk = np.minimum(walk, length)
        pages = np.rint(share * walk / PAGE_BYTES).astype(np.int64)
        most = max((deadline_s - self.now_s) * 1e9 / cost_ns, 0.0)
        tried = np.clip(int(most) - (np.cumsum(pages) - pages), 0, pages)
        made = self._fitting(moves, tried)
        report = np.zeros((len(moves), len(Outcome)), np.int64)
        report[:, Outcome.MOVED] = made
        report[:, Outcome.NO_ROOM] = tried - made
        report[:, Outcome.LATER] = pages - tried
        walked = np.ceil(walk * made / np.maximum(pages, 1) / PAGE_BYTES) * PAGE_BYTES
        reached = moves["start"] + walked.astype(np.uint64)
        up = moves["destination"] < moves["source"]
        for direction, these in enumerate((up, ~up)):
            self.moved_bytes[direction] += int(made[these].sum()) * PAGE_BYTES
        busy_ns = int(made.sum() * cost_ns)
        return Report(plan=plan, pages=report, reached=reached, busy_ns=busy_ns)

    def _fitting(self, moves: NDArray[np.void], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many pages of each move find room where they go.

        As a mover has it: pages change places in the upper half of the headroom. What does not
        find room further down makes none further up.
        """
        rooms = numa.rooms(self.tiers, self.rooms(), self.config.policy.headroom_percent)
        for room in reversed(rooms):
            arrives, leaves = (moves[end] == room.rank for end in ("destination", "source"))
            most = (room.free_bytes - HEADROOM_LOW * room.headroom_bytes) // PAGE_BYTES
            taken = np.cumsum(np.where(arrives, pages, np.where(leaves, -pages, 0)))
            over = np.maximum(np.maximum.accumulate(taken) - int(most), 0)
            refused = np.where(arrives, np.minimum(np.diff(over, prepend=0), pages), 0)
            pages = pages - refused
        return pages

    # What comes out

    def note(self, round: Round) -> None:
        """Notes how the accesses since the last round were shared between the tiers."""
        parts = [_accessed(w) for w in round.watched.values() if w.accesses and len(w.pieces)]
        if not parts:
            return
        rate = np.concatenate([rate for rate, _ in parts])
        resident = np.concatenate([resident for _, resident in parts])
        by_tier = (rate[:, None] * resident).sum(axis=0)
        total = float(by_tier.sum())
        if not total:
            return
        best = _hottest(rate, resident.sum(axis=1), float(self._available()[0]))
        at_s, accesses = self.now_s - self.begun_s, total * self.passed_s
        self.told.append((at_s, by_tier / total, best / total, accesses))

    def outcomes(self) -> Outcomes:
        """Returns what was noted."""
        tiers = self.tiers
        at_s = np.array([at_s for at_s, *_ in self.told])
        return Outcomes(
            at_s=at_s,
            hits=np.array([hits[: len(tiers)] for _, hits, _, _ in self.told]),
            optimum=np.array([best for _, _, best, _ in self.told]),
            accesses=np.array([accesses for *_, accesses in self.told]),
            up_bytes=self.moved_bytes[0],
            down_bytes=self.moved_bytes[1],
            latency_ns=latencies_ns(tiers, self.config.policy.placement.latency_gap_ns),
        )


def _accessed(watched: Watched) -> tuple[Floats, Floats]:
    """Returns the accesses per byte and second of parts of a target's memory, as seen last.

    Returns:
        the accesses, and the bytes of each part on each tier.
    """
    seen, pieces = watched.accesses, watched.pieces
    assert seen is not None
    start, end, (region, piece) = overlay(seen.regions, pieces)
    both = (region >= 0) & (piece >= 0)
    size = (end - start)[both].astype(np.float64)
    region, piece, rate = region[both], piece[both], rates(seen)[region[both]]
    if is_zoomed(pieces).any():
        rate = divided(pieces.take(piece), rate, region, size)
    return rate.astype(np.float64), size[:, None] * pieces["resident"][piece]


def latencies_ns(tiers: Sequence[Tier], gap_ns: float) -> Floats:
    """Returns the tiers' latencies; the unknown ones are `gap_ns` above the tier before."""
    latencies: list[float] = []
    for tier in tiers:
        guess = latencies[-1] + gap_ns if latencies else FASTEST_NS
        latencies.append(float(guess if tier.latency_ns is None else tier.latency_ns))
    return np.array(latencies)


def _hottest(rate: Floats, size: Floats, capacity: float) -> float:
    """Returns the accesses a second of the hottest bytes that fit."""
    order = np.argsort(-rate)
    size = size[order]
    taken = np.clip(capacity - (np.cumsum(size) - size), 0.0, size)
    return float((rate[order] * taken).sum())


def _spilt(resident: Floats, length: Floats, room: Floats) -> Floats:
    """Returns the shares with what a tier has no room for on the next one; the last takes all."""
    for rank in range(len(room) - 1):
        wanted = float((resident[:, rank] * length).sum())
        kept = min(1.0, room[rank] / wanted) if wanted else 1.0
        resident[:, rank + 1] += (1 - kept) * resident[:, rank]
        resident[:, rank] *= kept
    return resident


def _first_known(known: NDArray[np.void] | None, now: NDArray[np.void]) -> NDArray[np.void]:
    """Returns what is known now, each place as it was found first."""
    if known is None:
        return now
    start, end, (before, after) = overlay(known, now)
    kept = after >= 0
    rows = now.take(after[kept])
    rows["start"], rows["end"] = start[kept], end[kept]
    old = before[kept] >= 0
    rows["resident"][old] = known["resident"][before[kept][old]]
    return rows


def _topology(begin: Mapping[str, Any], rooms: NDArray[np.void]) -> Topology:
    """Returns tiers of a node each, the node's number being the rank."""
    tiers = tiers_of(begin, rooms)
    nodes = [
        Node(
            id=tier.nodes[0],
            cpus=(),
            total_bytes=tier.capacity_bytes,
            distances={},
            any_initiator=None,
            cpu_initiator=None,
            kernel_tier=None,
            backing=Backing.UNKNOWN,
        )
        for tier in tiers
    ]
    return Topology(nodes=tuple(nodes), tiers=tuple(tiers))


def _process(pid: Pid, text: Mapping[str, Any], number: int) -> Process:
    return Process(
        pid=pid,
        leader=pid,
        command=str(text["command"]),
        start_ticks=number,
        resident_bytes=0,
        is_kernel_thread=False,
        user_id=None,
        cgroup=text["cgroup"],
        allowed_nodes=None,
        locked_bytes=0,
    )
