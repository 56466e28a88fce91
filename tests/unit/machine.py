# SPDX-License-Identifier: Apache-2.0
"""A machine for the daemon: fakes of its clock, processes, their memory, sampler and mover."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.unit.replay import MIB, Replay
from tests.unit.world import BASE, snapshot
from tierd.account import account
from tierd.bulk import Accesses, Plan, Report
from tierd.config import Config, Rival
from tierd.daemon import Daemon
from tierd.decide.look import Look
from tierd.errors import Conflict
from tierd.kernel.pressure import Pressure
from tierd.kernel.process import RANGE, Process
from tierd.kernel.task import CpuTimes
from tierd.model import (
    PAGE_BYTES,
    Backing,
    KernelMoves,
    Node,
    NodeId,
    NodeRoom,
    Outcome,
    Pid,
    Rank,
    Tier,
    TierKind,
    Topology,
)
from tierd.sample import residence

DRAM, CXL = Rank(0), Rank(1)
NODES = (NodeId(0), NodeId(2))  # not the same numbers as the ranks'
HOT, OTHER = Pid(640), Pid(641)
AGGREGATION_S = 0.4
MOVE_NS = 3000


def topology(fast_bytes: int) -> Topology:
    def node(id: NodeId, size_bytes: int, backing: Backing) -> Node:
        return Node(
            id=id,
            cpus=(),
            total_bytes=size_bytes,
            distances={},
            any_initiator=None,
            cpu_initiator=None,
            kernel_tier=None,
            backing=backing,
        )

    def tier(rank: Rank, kind: TierKind, size_bytes: int) -> Tier:
        nodes = (NODES[rank],)
        return Tier(rank=rank, name=kind, kind=kind, nodes=nodes, capacity_bytes=size_bytes)

    slow_bytes = 1 << 30
    return Topology(
        nodes=(
            node(NODES[DRAM], fast_bytes, Backing.DRAM),
            node(NODES[CXL], slow_bytes, Backing.CXL),
        ),
        tiers=(tier(DRAM, TierKind.DRAM, fast_bytes), tier(CXL, TierKind.CXL, slow_bytes)),
        warnings=("node 3 is in no tier",),
    )


def a_process(pid: Pid, start_ticks: int = 1) -> Process:
    return Process(
        pid=pid,
        leader=pid,
        command="hotset",
        start_ticks=start_ticks,
        resident_bytes=64 * MIB,
        is_kernel_thread=False,
        user_id=0,
        cgroup=None,
        allowed_nodes=None,
        locked_bytes=0,
    )


class Memory:
    """A fake process's memory: mapped over `span`, each page on a rank."""

    def __init__(self, span: range, rank: Rank = CXL) -> None:
        self.span = span
        self.rank = np.full(len(span) // PAGE_BYTES, rank)
        self.is_huge = False

    def index(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (addresses.astype(np.int64) - self.span.start) // PAGE_BYTES

    def share(self, part: range, rank: Rank) -> float:
        first = (part.start - self.span.start) // PAGE_BYTES
        return float(np.mean(self.rank[first : first + len(part) // PAGE_BYTES] == rank))


class FakeSampler(Replay):
    """A fake that plays snapshots, and tells of exits as it is told to."""

    def __init__(self, snapshots: Sequence[Accesses], machine: "Machine") -> None:
        super().__init__(snapshots, machine.monotonic)
        self.machine = machine
        self.lost: list[Pid] = []
        self.refused: set[Pid] = set()
        self.calls: list[tuple[str, Pid]] = []

    def watch(self, pid: Pid) -> None:
        self.calls.append(("watch", pid))
        if pid not in self.machine.memory:
            raise ProcessLookupError
        if pid in self.refused:
            raise Conflict("DAMON has no free slot")
        super().watch(pid)

    def unwatch(self, pid: Pid) -> None:
        self.calls.append(("unwatch", pid))
        super().unwatch(pid)

    def gone(self) -> list[Pid]:
        gone, self.lost = self.lost, []
        return gone


class FakeMover:
    """A fake that moves all that it is asked to, at a fixed cost."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.moved: list[int] = []

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        assert deadline_s > self.machine.now_s
        pages = np.zeros((len(plan.moves), len(Outcome)), np.int64)
        reached = plan.moves["end"].copy()
        for row, move in enumerate(plan.moves):
            memory = self.machine.memory[plan.pids[move["target"]]]
            first, behind = memory.index(np.array([move["start"], move["end"]]))
            there = first + np.flatnonzero(memory.rank[first:behind] == move["source"])
            there = there[: -(-int(move["bytes"]) // PAGE_BYTES)]
            memory.rank[there] = move["destination"]
            pages[row, Outcome.MOVED] = len(there)
            if len(there) * PAGE_BYTES >= move["bytes"]:
                reached[row] = memory.span.start + (there[-1] + 1) * PAGE_BYTES
        moved = int(pages.sum())
        self.moved.append(moved)
        return Report(plan=plan, pages=pages, reached=reached, busy_ns=moved * MOVE_NS)


class FakeFree:
    """A fake where each node has room for 64 MiB."""

    def __init__(self) -> None:
        self.closed: set[NodeId] = set()

    def room_bytes(self, node: NodeId) -> int:
        return 64 << 20

    def may_replace(self, node: NodeId) -> bool:
        return True


class Undisputed:
    """A fake arbiter of a machine where the kernel places nothing."""

    note = None
    rests = False
    look: Look | None = Look()
    budget_mbps = 0.0

    def may_move(
        self,
        wanted: Rival,
        *,
        moves: bool,
        rests: bool = False,
        look: Look | None = None,
        budget_mbps: float = 0,
    ) -> bool:
        self.rests, self.look = rests, look
        self.budget_mbps = budget_mbps
        return moves

    @property
    def cooperates(self) -> bool:
        return not self.rests


class Machine:
    """Fakes of the kernel's side: /proc/PID/maps, move_pages(2)'s query, free memory, the clock."""

    def __init__(self, fast_bytes: int = 128 * MIB) -> None:
        self.now_s = 5000.0
        self.topology = topology(fast_bytes)
        self.processes: list[Process] = []
        self.memory: dict[Pid, Memory] = {}
        self.names: dict[Pid, dict[str, range]] = {}
        self.looks = 0
        self.told: list[dict[str, Any]] = []
        self.mover = FakeMover(self)
        self.stall_percent = 0.0
        self.kernels = KernelMoves()
        self.ran: dict[Pid, CpuTimes] = {}
        self.promoted: dict[Pid, int] = {}
        self.rng = np.random.default_rng(1)

    def start(self, pid: Pid, memory: Memory, start_ticks: int = 1) -> None:
        self.processes.append(a_process(pid, start_ticks))
        self.memory[pid] = memory

    def end(self, pid: Pid) -> None:
        self.processes = [process for process in self.processes if process.pid != pid]
        self.memory.pop(pid, None)

    def monotonic(self) -> float:
        return self.now_s

    def find(self) -> list[Process]:
        self.looks += 1
        return list(self.processes)

    def mapped(self, pid: Pid) -> NDArray[np.void] | None:
        if pid not in self.memory:
            return None
        span = self.memory[pid].span
        return np.array([(span.start, span.stop)], RANGE)

    def find_in(self, pid: Pid, cursor: int) -> tuple[NDArray[np.void], None]:
        """As a drain walks a process."""
        mapped = self.mapped(pid)
        return (np.zeros(0, RANGE) if mapped is None else mapped[mapped["end"] > cursor]), None

    def named(self, pid: Pid, names: Container[str]) -> list[tuple[int, int, str]]:
        mappings = self.names.get(pid, {})
        return [(m.start, m.stop, name) for name, m in mappings.items() if name in names]

    def locate(
        self,
        pid: Pid,
        pieces: NDArray[np.void],
        rank_of_node: NDArray[np.int8],
        *,
        budget_pages: int,
        now_s: float,
    ) -> None:
        residence.probe(
            pid,
            pieces,
            rank_of_node,
            budget_pages=budget_pages,
            now_s=now_s,
            rng=self.rng,
            query=self.query,
        )

    def pressure(self) -> Pressure:
        return Pressure(some_percent=self.stall_percent, full_percent=0)

    def kernel_moves(self) -> KernelMoves:
        return self.kernels

    def cpu_times(self, pids: Iterable[Pid]) -> dict[Pid, CpuTimes]:
        return {pid: self.ran[pid] for pid in pids if pid in self.ran}

    def promoted_pages(self, pids: Iterable[Pid]) -> dict[Pid, int]:
        return {pid: self.promoted.get(pid, 0) for pid in pids}

    def query(self, pid: Pid, folios: NDArray[np.void]) -> None:
        if pid not in self.memory:
            raise ProcessLookupError
        memory = self.memory[pid]
        folios["node"] = np.array(NODES)[memory.rank[memory.index(folios["addr"])]]
        if memory.is_huge:
            folios["pages"] = 512

    def rooms(self) -> dict[NodeId, NodeRoom]:
        on = sum(np.bincount(memory.rank, minlength=2) for memory in self.memory.values())
        used = np.zeros(2, int) + on * PAGE_BYTES
        return {
            tier.nodes[0]: NodeRoom(tier.capacity_bytes - int(used[tier.rank]))
            for tier in self.topology.tiers
        }

    def daemon(
        self, sampler: FakeSampler, config: Config | None = None, *, moves: bool = True
    ) -> Daemon:
        return Daemon(
            config or Config(),
            topology=self.topology,
            sampler=sampler,
            mover=self.mover if moves else None,
            machine=self,
            tell=lambda daemon, rooms: self.told.append(account(daemon, rooms)),
        )

    def look(self, daemon: Daemon) -> None:
        """Goes round once, in which the targets are found and nothing is moved."""
        daemon.paused = True
        self.rounds(daemon, 1)
        daemon.paused = False

    def rounds(self, daemon: Daemon, seconds: float) -> list[int]:
        """Goes round each second; returns the pages moved in each round."""
        moved = []
        for _ in range(round(seconds)):
            before = sum(self.mover.moved)
            daemon.round()
            moved.append(sum(self.mover.moved) - before)
            self.now_s += 1.0
        return moved


SPAN = range(BASE, BASE + 64 * MIB)
PAGES = len(SPAN) // PAGE_BYTES
HALF_HOT = range(BASE, BASE + 32 * MIB)


def half_hot(snapshots: int, hits: int = 20, others: int = 0) -> list[Accesses]:
    """Snapshots of which the first half of SPAN is hot, as hot as it can be with 20 hits."""
    return [
        snapshot([0, PAGES // 2, PAGES], [hits, others], at_s=number * AGGREGATION_S)
        for number in range(snapshots)
    ]
