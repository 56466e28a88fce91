# SPDX-License-Identifier: Apache-2.0
"""Errors of CXL devices: counted, told, fled from."""

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit import trees
from tests.unit.machine import Machine
from tests.unit.test_frames import set_flags
from tierd import cxl_kept
from tierd.bulk import Plan, Report
from tierd.config import Config, CxlConfig, OnError
from tierd.cxl_errors import FENCE_S, LOOK_S, RARELY_S, CxlErrors
from tierd.daemon import Daemon
from tierd.discover.topology import discover
from tierd.errors import UnsupportedKernel
from tierd.kernel import frames
from tierd.kernel.cxl_events import CxlEvent, Kind, Severity
from tierd.kernel.frames import Frames
from tierd.kernel.free import FreeMemory
from tierd.kernel.process import RANGE
from tierd.migrate.mover import Mover
from tierd.model import PAGE_BYTES, NodeId, Outcome, Pid, Topology
from tierd.observe.cxl_errors import MOST_COUNTS, MOST_PLACES, OTHERS, TOLD, CxlErrorCounts

REGION_START, BLOCK_BYTES = 0x690000000, 128 << 20
FIRST_BLOCK, SLOW = 210, NodeId(1)
FIRST_FRAME, MAPPED = REGION_START // PAGE_BYTES, 1 << 11
OWNER = Pid(640)
BOOT_ID = "proc/sys/kernel/random/boot_id"


def at(dpa: int, kind: Kind = Kind.POISON, size_bytes: int = 64) -> CxlEvent:
    severity = Severity.NONE if kind is Kind.CLEARED else Severity.UNCORRECTED
    return CxlEvent(
        kind=kind,
        severity=severity,
        device="mem0",
        region="region0",
        start=REGION_START + dpa,
        dpa=dpa,
        size_bytes=size_bytes,
    )


def corrected(device: str = "mem0") -> CxlEvent:
    return CxlEvent(kind=Kind.DRAM, severity=Severity.CORRECTED, device=device)


def total(counts: CxlErrorCounts) -> int:
    return counts.counts.total()


def test_a_place_that_is_listed_again_counts_once_until_it_is_cleared() -> None:
    counts = CxlErrorCounts()
    assert counts.take_in(at(0), 0)
    assert not counts.take_in(at(0), 1)
    assert counts.take_in(at(0, Kind.CLEARED), 2)
    assert counts.places == {}
    assert counts.take_in(at(0), 3)
    assert [(c["kind"], c["count"]) for c in counts.account()] == [
        ("poison", 2),
        ("poison_cleared", 1),
    ]


def test_each_error_of_the_media_counts() -> None:
    counts = CxlErrorCounts()
    assert all(counts.take_in(at(0, Kind.DRAM), 0) for _ in range(3))
    assert total(counts) == 3


def test_a_storm_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    counts = CxlErrorCounts()
    with caplog.at_level(logging.INFO, "tierd"):
        for n in range(5000):
            counts.take_in(corrected(), n / 1000)
            counts.go_on(n / 1000)
        assert len(caplog.records) == TOLD
        counts.go_on(100)
        counts.go_on(200)
    assert len(caplog.records) == TOLD + 1
    assert f"{5000 - TOLD} more of dram" in caplog.text
    assert total(counts) == 5000


def test_a_storm_of_names_and_places_is_bounded() -> None:
    counts = CxlErrorCounts()
    for n in range(MOST_PLACES + 100):
        counts.take_in(corrected(f"mem{n}"), 0)
        counts.take_in(at(64 * n), 0)
    assert len(counts.counts) <= MOST_COUNTS + len(Kind) * len(Severity)
    assert len(counts.places) == MOST_PLACES
    assert total(counts) == 2 * (MOST_PLACES + 100)
    assert {count.device for count in counts.counts} >= {"mem0", OTHERS}


class FakeEvents:
    """Tells what it is given, once."""

    amiss = 2
    deaf: str | None = None
    lost = 3

    def __init__(self) -> None:
        self.come: list[CxlEvent] = []

    def read(self) -> list[CxlEvent]:
        come, self.come = self.come, []
        return come


class MovesAll:
    """A mover that moves all it is told to, and keeps the plans."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def interrupted(self) -> bool:
        return False

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        self.plans.append(plan)
        pages = np.zeros((len(plan.moves), len(Outcome)), np.int64)
        pages[:, Outcome.MOVED] = plan.moves["bytes"] // PAGE_BYTES
        return Report(plan=plan, pages=pages, reached=plan.moves["end"].copy(), busy_ns=1)


class World:
    """A machine with CXL memory on node 1, and a process with some pages in the first block."""

    def __init__(self, root: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.daemon = root, daemon
        self.now_s = 0.0
        self.events, self.mover = FakeEvents(), MovesAll()
        self.fenced: list[NodeId] = []
        self.left_out: list[set[int]] = []
        self.held = 3
        self.free = FreeMemory(root)
        monkeypatch.setattr(frames, "find_in", self.find_in)
        monkeypatch.setattr("tierd.kernel.process.read_pids", lambda: [OWNER])
        monkeypatch.setattr("tierd.kernel.process.read_cgroup", lambda pid: "/db")
        monkeypatch.setattr(self.free, "room_bytes", lambda node: 1 << 30)
        self.errors = self.make(lambda: self.events)

    def make(self, listen: Callable[[], FakeEvents]) -> CxlErrors:
        return CxlErrors(
            daemon=self.daemon,
            free=self.free,
            make_mover=self.make_mover,
            fence=self.fence,
            folder=self.root,
            listen=listen,
            root=self.root,
            clock=lambda: self.now_s,
        )

    def make_mover(self, topology: Topology) -> Mover:
        self.topology = topology
        mover: Any = self.mover
        mover.topology = topology
        return cast(Mover, mover)

    def fence(self, node: NodeId) -> None:
        self.fenced.append(node)
        self.free.closed.add(node)

    def find_in(
        self, pid: Pid, block: range, but: Frames, *, cursor: int, root: Path
    ) -> tuple[NDArray[np.void], int | None]:
        """Two mappings, the second in the next call; after so many calls nothing is left."""
        self.left_out.append({frame for part in frames.parts_of(but) for frame in part})
        held, self.held = self.held, self.held - 1
        if held <= 0:
            return np.zeros(0, RANGE), None
        start = cursor or 0x1000
        return np.array([(start, start + PAGE_BYTES)], RANGE), None if cursor else 0x9000

    @property
    def told(self) -> dict[str, Any]:
        """Of the only evacuation."""
        (told,) = self.errors.account()["evacuations"]
        return cast(dict[str, Any], told)

    def go_on(self, *events: CxlEvent) -> None:
        self.events.come = [*events]
        self.daemon.yields = False
        self.errors.go_on()
        self.now_s += 1


@pytest.fixture
def world(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> World:
    root = trees.unpack("cxl-7.2", tmp_path / "root")
    daemon = cast(Daemon, FakeDaemon(discover((), root), machine))
    (root / BOOT_ID).parent.mkdir(parents=True, exist_ok=True)
    (root / BOOT_ID).write_text("1\n")
    world = World(root, daemon, monkeypatch)
    world.errors.begin()
    return world


class FakeDaemon:
    """What is asked of the daemon."""

    def __init__(self, topology: Topology, machine: Machine) -> None:
        self.topology, self.mover = topology, object()
        self.config = Config(cxl=CxlConfig(on_error=OnError.EVACUATE, fence_after=3))
        self.yields = self.paused = False
        self.budget_bytes = 1 << 30
        self.cost = self.flows = self
        self.page_ns = 1000.0
        self.told: list[Report] = []

    def add(self, report: Report, *_: object) -> None:
        self.told.append(report)


def test_what_is_told_by_default_moves_nothing(world: World) -> None:
    world.daemon.config = Config()
    world.go_on(at(0), at(64), at(128), at(192))
    told = world.errors.account()
    assert told["errors"][0]["count"] == 4
    assert (told["evacuations"], told["fenced"], world.mover.plans) == ([], [], [])
    assert (told["listens"], told["lost"]) == (True, 5)


def test_a_block_is_evacuated_but_for_what_is_lost(world: World) -> None:
    world.go_on(at(4096 * 5, size_bytes=4096 + 64))
    world.go_on()
    world.go_on()
    (told,) = world.errors.account()["evacuations"]
    assert (told["block"], told["node"], told["done"]) == (FIRST_BLOCK, SLOW, True)
    assert (told["moved_pages"], told["bad_pages"]) == (3, 2)
    first = REGION_START // PAGE_BYTES
    lost = {first + 5, first + 6}
    assert all(lost <= left_out for left_out in world.left_out)
    assert {plan.moves["source"][0] for plan in world.mover.plans} == {1}
    (note,) = world.errors.notes()
    assert "tierctl cxl retire 210" in note


def evacuated(world: World) -> int:
    """Has the first page lost and its block evacuated; returns how often processes were asked."""
    set_flags(world.root, {FIRST_FRAME: MAPPED})
    world.go_on(at(0))
    while not world.told["done"]:
        world.go_on()
    assert (world.told["mapped_pages"], world.told["moved_pages"]) == (0, 3)
    return len(world.left_out)


def test_a_block_that_fills_again_is_evacuated_again(world: World) -> None:
    asked = evacuated(world)
    world.now_s += LOOK_S
    world.go_on()
    assert len(world.left_out) == asked, "nobody has got memory there but for what is lost"
    set_flags(world.root, {FIRST_FRAME: MAPPED, FIRST_FRAME + 9: MAPPED})
    world.held = 2
    world.go_on()
    assert len(world.left_out) == asked, "it is not looked at in each round"
    world.now_s += LOOK_S
    world.go_on()
    assert (world.told["mapped_pages"], world.told["moved_pages"]) == (1, 5)
    set_flags(world.root, {FIRST_FRAME: MAPPED})
    world.now_s += LOOK_S
    world.go_on()
    assert (world.told["mapped_pages"], world.told["done"]) == (0, True)


def test_what_cannot_be_moved_is_told_and_tried_more_and_more_rarely(world: World) -> None:
    asked = evacuated(world)
    set_flags(world.root, {FIRST_FRAME + 9: MAPPED})
    tries = []
    end_s = world.now_s + 4 * RARELY_S
    while world.now_s < end_s:
        world.go_on()
        if len(world.left_out) > asked:
            asked = len(world.left_out)
            tries.append(world.now_s)
    waited_s = [later - sooner for sooner, later in pairwise(tries)]
    assert waited_s == sorted(waited_s)
    assert RARELY_S <= waited_s[-1] < RARELY_S + 2 * LOOK_S
    assert len(tries) < 20
    assert world.told["mapped_pages"] == 1
    (note,) = world.errors.notes()
    assert "but for 1 pages of programs that cannot be moved now" in note


def test_where_flags_are_out_of_reach_that_is_told(world: World) -> None:
    world.go_on(at(0))
    while not world.told["done"]:
        world.go_on()
    assert world.told["mapped_pages"] is None
    (note,) = world.errors.notes()
    assert "is evacuated, as far as is known" in note


def test_a_second_error_has_it_looked_through_again(world: World) -> None:
    world.go_on(at(0))
    world.go_on()
    world.go_on()
    before = len(world.left_out)
    world.go_on(at(4096))
    assert len(world.left_out) > before
    assert len(world.errors.evacuations) == 1


def test_a_drain_goes_first_and_a_pause_holds_it(world: World) -> None:
    world.events.come = [at(0)]
    world.daemon.yields = True
    world.errors.go_on()
    assert world.mover.plans == []
    world.daemon.paused = True
    world.go_on()
    assert world.mover.plans == []
    world.daemon.paused = False
    world.go_on()
    assert world.mover.plans != []
    assert world.daemon.yields, "placing rests meanwhile"


def test_where_nothing_may_move_the_note_says_what_does(world: World) -> None:
    world.daemon.mover = None
    world.go_on(at(0))
    assert world.mover.plans == []
    assert "tierd only observes" in next(iter(world.errors.notes()))


def test_an_error_outside_of_memory_is_only_counted(world: World) -> None:
    world.go_on(at(1 << 40), at(0x40, Kind.DRAM, size_bytes=0))
    assert world.errors.account()["evacuations"] == []
    assert sum(error["count"] for error in world.errors.account()["errors"]) == 2


def test_too_many_in_a_day_fence_the_node_until_it_is_used_again(world: World) -> None:
    world.go_on(at(0), at(64))
    assert world.fenced == []
    world.go_on(at(128), at(192))
    assert world.fenced == [SLOW]
    assert world.errors.account()["fenced"] == [{"node": SLOW, "device": "mem0"}]
    assert "tierctl drain 1 --undo" in [*world.errors.notes()][-1]
    world.free.closed.discard(SLOW)  # as the operator has it
    world.go_on()
    assert world.errors.account()["fenced"] == []
    world.go_on(at(256), at(320))
    assert world.fenced == [SLOW], "they are counted anew"
    world.go_on(at(384))
    assert world.fenced == [SLOW, SLOW]


def test_a_drain_leaves_out_what_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = np.array([(0x1000, 0x5000)], RANGE)
    monkeypatch.setattr("tierd.kernel.process.read_mapped", lambda pid: everything)
    found, following = world.errors.find_on(SLOW, OWNER, 0)
    assert (found.tolist(), following) == (everything.tolist(), None)
    assert world.left_out == [], "frames are not asked for without need"
    world.daemon.config = Config()
    world.go_on(at(4096 * 5))
    world.errors.find_on(SLOW, OWNER, 0)
    assert REGION_START // PAGE_BYTES + 5 in world.left_out[0]


def test_a_restart_forgets_nothing_of_this_boot(world: World) -> None:
    world.go_on(at(0), at(64), at(128))
    assert world.fenced == [SLOW]
    after = world.make(lambda: world.events)
    after.restore()
    assert world.fenced == [SLOW, SLOW]
    assert [*after.evacuations] == [FIRST_BLOCK]
    assert after.is_bad(SLOW)
    told = after.account()
    assert (told["fenced"], told["errors"]) == ([{"node": SLOW, "device": "mem0"}], [])
    assert after.known.places == world.errors.known.places
    world.errors = after
    world.free.closed.discard(SLOW)  # as the operator has it
    world.go_on()
    (world.root / BOOT_ID).write_text("another\n")
    other = world.make(lambda: world.events)
    other.restore()
    assert (other.evacuations, other.known.places) == ({}, {})


def test_a_node_that_is_used_again_stays_so_after_a_restart(world: World) -> None:
    world.go_on(at(0), at(64), at(128))
    world.free.closed.discard(SLOW)
    world.go_on()
    after = world.make(lambda: world.events)
    after.restore()
    assert world.fenced == [SLOW]
    assert [*after.evacuations] == [FIRST_BLOCK]


@pytest.mark.parametrize("text", ["", "[]", '{"boot": "1", "fenced": 1}', "[" * 100_000, "\xff"])
def test_what_was_kept_and_cannot_be_read_is_told(
    world: World, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (world.root / cxl_kept.NAME).write_text(text)
    world.errors.restore()
    assert "earlier errors of CXL devices are forgotten" in caplog.text
    assert world.errors.account()["fenced"] == []


def test_where_nothing_can_be_kept_that_is_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.errors.folder = world.root / "none"
    world.go_on(at(0))
    assert "are forgotten by a restart" in caplog.text
    assert [*world.errors.evacuations] == [FIRST_BLOCK]


def test_errors_of_another_day_are_forgotten(world: World) -> None:
    world.go_on(at(0), at(64))
    world.now_s += FENCE_S
    world.go_on(at(128))
    assert world.fenced == []


def test_corrected_errors_are_no_reason_to_flee(world: World) -> None:
    world.go_on(*(corrected() for _ in range(20)))
    assert world.fenced == []
    assert world.errors.evacuations == {}


def test_it_goes_on_with_other_tiers(world: World) -> None:
    world.go_on(at(0))
    world.errors.follow()
    assert [*world.errors.evacuations] == [FIRST_BLOCK]
    (world.root / f"sys/devices/system/memory/memory{FIRST_BLOCK}/state").write_text("offline\n")
    world.errors.follow()
    assert [*world.errors.evacuations] == []


def test_a_cpu_that_is_not_heard_is_noted(world: World) -> None:
    world.events.deaf = "perf_event_open: Too many open files"
    assert [*world.errors.notes()] == [
        "errors that some CPU tells of CXL devices are not seen: " + world.events.deaf
    ]


def test_why_nothing_is_heard_is_noted(world: World) -> None:
    def deaf() -> FakeEvents:
        raise UnsupportedKernel("no tracepoints", hint="load cxl_core")

    errors = world.make(deaf)
    errors.begin()
    errors.go_on()
    assert [*errors.notes()] == [
        "errors of CXL devices are not seen: no tracepoints (load cxl_core)"
    ]
    assert not errors.account()["listens"]
