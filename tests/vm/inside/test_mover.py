# SPDX-License-Identifier: Apache-2.0
"""The mover against the kernel; where pages lie is asked of /proc/PID/numa_maps."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tierd.bulk import MOVE, Plan, Report
from tierd.kernel import pages, vmstat, zoneinfo
from tierd.migrate.limits import LimitsReader
from tierd.migrate.mover import Mover
from tierd.model import (
    PAGE_BYTES,
    Backing,
    Node,
    NodeId,
    Outcome,
    Pid,
    Rank,
    Tier,
    TierKind,
    Topology,
)

FAST, SLOW = NodeId(0), NodeId(1)
PLENTY = 1 << 40


def _node(number: NodeId) -> Node:
    return Node(
        id=number,
        cpus=(),
        total_bytes=1 << 30,
        distances={},
        any_initiator=None,
        cpu_initiator=None,
        kernel_tier=None,
        backing=Backing.UNKNOWN,
    )


def _tier(rank: int, kind: TierKind, node: NodeId) -> Tier:
    return Tier(rank=Rank(rank), name=str(kind), kind=kind, nodes=(node,), capacity_bytes=1 << 30)


TOPOLOGY = Topology(
    nodes=(_node(FAST), _node(SLOW)),
    tiers=(_tier(0, TierKind.DRAM, FAST), _tier(1, TierKind.CXL, SLOW)),
)


@dataclass(frozen=True, slots=True)
class Holder:
    pid: Pid
    address: int
    pages: int
    process: subprocess.Popen[str]

    def on_node(self, node: NodeId) -> int:
        """Pages on a node, by numa_maps, of the mappings within the buffer."""
        total = 0
        end = self.address + self.pages * PAGE_BYTES
        for line in Path(f"/proc/{self.pid}/numa_maps").read_text().splitlines():
            if self.address <= int(line.split()[0], 16) < end:
                total += sum(int(n) for n in re.findall(rf"\bN{node}=(\d+)", line))
        return total

    def wrong_stretches(self) -> int:
        """Has the process check its data."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("check\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def holding(count: int, *kinds: str, node: NodeId = SLOW) -> Iterator[Holder]:
    command = ["numactl", f"--preferred={node}", sys.executable]
    script = str(Path(__file__).with_name("holder.py"))
    with subprocess.Popen(
        [*command, script, str(count), *kinds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            address = int(process.stdout.readline())
            yield Holder(Pid(process.pid), address, count, process)
        finally:
            process.kill()


def mover(
    *,
    room: Callable[[NodeId], int] = lambda _: PLENTY,
    move_locked: bool = False,
    may_replace: bool = True,
) -> Mover:
    return Mover(
        topology=TOPOLOGY,
        room=room,
        limits=LimitsReader(move_locked=move_locked),
        batch_pages=512,
        may_replace=lambda _: may_replace,
    )


def plan_of(
    holder: Holder,
    *ranges: tuple[int, int],
    source: int = 1,
    destination: int = 0,
    limit_pages: int = 1 << 30,
) -> Plan:
    moves = np.zeros(len(ranges), MOVE)
    for move, (first, last) in zip(moves, ranges, strict=True):
        move["source"], move["destination"] = source, destination
        move["start"] = holder.address + first * PAGE_BYTES
        move["end"] = holder.address + last * PAGE_BYTES
        move["bytes"] = min(last - first, limit_pages) * PAGE_BYTES
    return Plan(pids=(holder.pid,), moves=moves)


def run(made: Plan, by: Mover | None = None, seconds: float = 600) -> Report:
    return (by or mover()).run(made, deadline_s=time.monotonic() + seconds)


def outcomes(report: Report) -> dict[Outcome, int]:
    totals = report.pages.sum(axis=0)
    return {Outcome(i): int(n) for i, n in enumerate(totals) if n}


def oom_kills() -> str:
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next(line for line in lines if line.startswith("oom_kill "))


def test_a_range_moves_and_keeps_its_data() -> None:
    with holding(3000) as holder:
        before = vmstat.read_vmstat()
        report = run(plan_of(holder, (0, 3000)))
        assert outcomes(report) == {Outcome.MOVED: 3000}
        assert holder.on_node(FAST) == 3000
        after = vmstat.read_vmstat()
        assert before.pgmigrate_success is not None
        assert after.pgmigrate_success is not None
        assert after.pgmigrate_success - before.pgmigrate_success >= 3000
        assert holder.wrong_stretches() == 0


def test_many_small_ranges_move_as_one() -> None:
    with holding(2000) as holder:
        ranges = [(first, first + 2) for first in range(0, 2000, 4)]
        report = run(plan_of(holder, *ranges))
        assert (report.pages[:, Outcome.MOVED] == 2).all()
        assert holder.on_node(FAST) == 1000


def test_residents_are_filtered_out() -> None:
    with holding(1000) as holder:
        run(plan_of(holder, (0, 400)))
        assert outcomes(run(plan_of(holder, (0, 1000)))) == {
            Outcome.RESIDENT: 400,
            Outcome.MOVED: 600,
        }


def test_a_move_stops_at_its_bytes_and_says_where() -> None:
    with holding(9000) as holder:
        report = run(plan_of(holder, (0, 9000), limit_pages=700))
        assert report.pages[0, Outcome.MOVED] == 700
        assert report.reached[0] == holder.address + 700 * PAGE_BYTES
        assert holder.on_node(FAST) == 700


def test_a_destination_without_room_is_not_filled() -> None:
    with holding(2000) as holder:
        room = 600 * PAGE_BYTES

        def left(_node: NodeId) -> int:
            return max(0, room - holder.on_node(FAST) * PAGE_BYTES)

        report = run(plan_of(holder, (0, 2000)), mover(room=left))
        assert outcomes(report) == {Outcome.MOVED: 600, Outcome.NO_ROOM: 1400}
        assert report.reached[0] == holder.address + 600 * PAGE_BYTES


@pytest.mark.parametrize(("may", "outcome"), [(True, Outcome.MOVED), (False, Outcome.NO_ROOM)])
def test_pages_change_places_where_nothing_is_free(*, may: bool, outcome: Outcome) -> None:
    """As many come as have made way, where that is allowed."""
    with holding(100) as holder:
        run(plan_of(holder, (0, 20)))
        down = plan_of(holder, (0, 20), source=0, destination=1)
        moves = np.concatenate([down.moves, plan_of(holder, (50, 80)).moves])
        full = mover(room=lambda node: 0 if node == FAST else PLENTY, may_replace=may)
        report = run(replace(down, moves=moves), full)
        assert report.pages[0, Outcome.MOVED] == 20
        assert report.pages[1, outcome] >= 20
        assert report.pages[1].sum() == 30
        assert holder.on_node(FAST) == report.pages[1, Outcome.MOVED] <= 20


def test_a_full_node_kills_nobody() -> None:
    free = zoneinfo.free_above_watermarks_bytes()[FAST]
    count = free // PAGE_BYTES + 20_000
    kills = oom_kills()
    with holding(count) as holder:
        by = mover(room=lambda node: zoneinfo.free_above_watermarks_bytes()[node])
        report = run(plan_of(holder, (0, count)), by)
        assert report.pages[0, Outcome.NO_ROOM] > 0, (free, count, outcomes(report))
        assert report.pages[0, Outcome.MOVED] > count // 2
        assert holder.process.poll() is None
    assert oom_kills() == kills


def test_the_deadline_puts_the_rest_off() -> None:
    with holding(2000) as holder:
        report = run(plan_of(holder, (0, 1000), (1000, 2000)), seconds=0)
        assert outcomes(report) == {Outcome.LATER: 2000}
        assert (report.reached == report.plan.moves["start"]).all()


def test_of_what_the_deadline_leaves_nothing_is_asked() -> None:
    with holding(10) as holder:
        made = plan_of(holder, (0, 10))
    assert outcomes(run(made)) == {Outcome.GONE: 10}
    assert outcomes(run(made, seconds=0)) == {Outcome.LATER: 10}


def test_single_pages_move_and_those_between_stay() -> None:
    """In steps of 32, 128 and then 512 of them."""
    with holding(2000) as holder:
        report = run(plan_of(holder, *((page, page + 1) for page in range(0, 2000, 2))))
        assert outcomes(report) == {Outcome.MOVED: 1000}
        assert (report.pages[:, Outcome.MOVED] == 1).all()
        assert (report.reached == report.plan.moves["end"]).all()
        assert holder.on_node(FAST) == holder.on_node(SLOW) == 1000
        assert holder.wrong_stretches() == 0


def test_a_range_that_begins_within_a_page_takes_the_page() -> None:
    with holding(10) as holder:
        made = plan_of(holder, (2, 4))
        made.moves["start"] += 100
        made.moves["end"] -= 100
        report = run(made)
        assert outcomes(report) == {Outcome.MOVED: 2}
        assert (report.reached == made.moves["end"]).all()


def test_a_cpuset_is_respected(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/tierd-test")
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpuset")
    group.mkdir()
    try:
        with holding(500) as holder:
            (group / "cpuset.mems").write_text(str(SLOW))
            (group / "cgroup.procs").write_text(str(holder.pid))
            report = run(plan_of(holder, (0, 500)))
            assert outcomes(report) == {Outcome.CPUSET: 500}
            assert report.reached[0] == report.plan.moves["end"][0]
            assert holder.on_node(FAST) == 0
    finally:
        group.rmdir()


def test_a_bound_range_is_respected() -> None:
    with holding(500, f"bound:{SLOW}") as holder:
        assert outcomes(run(plan_of(holder, (0, 500)))) == {Outcome.MEMPOLICY: 500}
        assert holder.on_node(FAST) == 0


def test_locked_pages_stay_unless_configured() -> None:
    with holding(500, "locked") as holder:
        assert outcomes(run(plan_of(holder, (0, 500)))) == {Outcome.LOCKED: 500}
        assert outcomes(run(plan_of(holder, (0, 500)), mover(move_locked=True))) == {
            Outcome.MOVED: 500
        }


def test_pages_of_several_processes_stay() -> None:
    with holding(500, "shared") as holder:
        assert outcomes(run(plan_of(holder, (0, 500)))) == {Outcome.SHARED: 500}


def test_untouched_memory_is_nothing_to_move() -> None:
    with holding(500, "untouched") as holder:
        report = run(plan_of(holder, (0, 500)))
        assert report.moved_pages == 0
        assert report.reached[0] == report.plan.moves["end"][0]


def test_huge_pages_move_whole() -> None:
    Path("/sys/kernel/mm/transparent_hugepage/enabled").write_text("madvise")
    with holding(2048, "huge") as holder:
        report = run(plan_of(holder, (0, 2048)))
        assert outcomes(report) == {Outcome.MOVED: 2048}
        with pages.Pagemap(holder.pid) as pagemap:
            end = holder.address + 2048 * PAGE_BYTES
            listed, _ = pagemap.folios(holder.address, end, 4096)
        assert listed["pages"].max() == 512
        assert holder.on_node(FAST) == 2048


@pytest.mark.parametrize(
    ("ranges", "moved", "cut"),
    [
        ([(500, 600)], 0, 100),
        ([(0, 500)], 512, 0),
        ([(12, 600)], 512, 88),
        ([(0, 200), (200, 400)], 512, 0),
    ],
)
def test_a_huge_page_makes_way_with_what_has_most_of_it(
    ranges: list[tuple[int, int]], moved: int, cut: int
) -> None:
    Path("/sys/kernel/mm/transparent_hugepage/enabled").write_text("madvise")
    with holding(2048, "huge", node=FAST) as holder:
        found = outcomes(run(plan_of(holder, *ranges, source=0, destination=1)))
        assert found.get(Outcome.CUT, 0) == cut
        assert holder.on_node(SLOW) == moved


def test_a_huge_page_rises_for_any_part_of_it() -> None:
    Path("/sys/kernel/mm/transparent_hugepage/enabled").write_text("madvise")
    with holding(2048, "huge") as holder:
        assert outcomes(run(plan_of(holder, (100, 200)))) == {Outcome.MOVED: 512}
        assert holder.on_node(FAST) == 512


@pytest.mark.parametrize("kind", ["huge", "small"])
def test_each_page_tells_whether_it_is_in_a_huge_one(kind: str) -> None:
    Path("/sys/kernel/mm/transparent_hugepage/enabled").write_text("madvise")
    with holding(2304, kind) as holder:  # 256 at the end are too few for a huge one
        end = holder.address + holder.pages * PAGE_BYTES
        found, _ = pages.every_page(holder.address, end, holder.pages)
        pages.look(holder.pid, found)
        assert (found["node"] == SLOW).all()
        assert (found["pages"][:2048] == (512 if kind == "huge" else 1)).all()
        assert (found["pages"][2048:] == 1).all()


def test_a_process_that_has_gone_is_a_result() -> None:
    with holding(100) as holder:
        holder.process.kill()
        holder.process.wait()
        assert outcomes(run(plan_of(holder, (0, 100)))) == {Outcome.GONE: 100}


def test_a_process_that_exits_in_mid_move_is_a_result() -> None:
    with holding(30_000) as holder:
        seen = 0

        def room(_node: NodeId) -> int:
            nonlocal seen
            seen += 1
            if seen == 10:
                holder.process.kill()
                holder.process.wait()
            return PLENTY

        totals = outcomes(run(plan_of(holder, (0, 30_000)), mover(room=room)))
        assert totals[Outcome.GONE] > 0
        assert totals[Outcome.MOVED] > 0
        assert sum(totals.values()) == 30_000


def test_a_process_killed_by_another_thread_while_it_moves() -> None:
    with holding(30_000) as holder:
        killer = threading.Timer(0.05, os.kill, (holder.pid, signal.SIGKILL))
        killer.start()
        totals = outcomes(run(plan_of(holder, (0, 30_000))))
        killer.join()
        assert sum(totals.values()) >= 30_000 - 512


def test_demotion_is_the_same_the_other_way_round() -> None:
    with holding(500, node=FAST) as holder:
        report = run(plan_of(holder, (0, 500), source=0, destination=1))
        assert outcomes(report) == {Outcome.MOVED: 500}
        assert holder.on_node(SLOW) == 500


@pytest.mark.parametrize("batch_pages", [1, 7, 4096])
def test_any_batch_size_moves_all(batch_pages: int) -> None:
    with holding(600) as holder:
        report = run(plan_of(holder, (0, 600)), replace(mover(), batch_pages=batch_pages))
        assert outcomes(report) == {Outcome.MOVED: 600}
