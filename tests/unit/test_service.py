# SPDX-License-Identifier: Apache-2.0
"""What changes a running daemon, on a fake machine."""

import json
import math
import socket
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.unit.machine import (
    HOT,
    NODES,
    OTHER,
    SPAN,
    FakeFree,
    FakeSampler,
    Machine,
    Memory,
    Undisputed,
    half_hot,
)
from tests.unit.test_handover import FakeFree as FreeOfWatermarks
from tests.unit.test_handover import FakeKernel
from tests.unit.test_hits import FakeHardware, pages
from tierd import config
from tierd.account import account
from tierd.api.inbox import Inbox
from tierd.api.view import View
from tierd.arbiter import Arbiter
from tierd.config import Config, ConflictsConfig, Rival
from tierd.cxl_errors import CxlErrors, Events
from tierd.decide.filling import Filling
from tierd.decide.look import Look
from tierd.decide.unsorted import Sorting
from tierd.discover.hotplug import Hotplug
from tierd.discover.targets import Finder
from tierd.drains import Drains
from tierd.errors import ConfigError, Conflict, NotFound, TierdError
from tierd.handover import UNRESPECTED, Handover
from tierd.kernel.free import FreeMemory
from tierd.kernel.notify import notify
from tierd.kernel.task import CpuTimes
from tierd.migrate.mover import Mover
from tierd.migrate.schemes import KernelSchemes
from tierd.model import KernelMoves, Pin, Rank, Tier, TierKind, Topology
from tierd.observe.events import History
from tierd.observe.moments import load
from tierd.recorder import Recordings
from tierd.sample.fused import Fused
from tierd.sample.session import Session
from tierd.service import PAGES_PER_MIB, STEP_S, CommandLine, Service, make_mover


class FakeFinder:
    """A fake that takes every rule."""

    def follow(self, *_: object) -> None: ...


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tierd.toml"
    file.write_text(f'[daemon]\nruntime_dir = "{tmp_path}"\n[policy]\npayback = 3\n')
    return file


@pytest.fixture
def service(
    path: Path, machine: Machine, history: History, monkeypatch: pytest.MonkeyPatch
) -> Service:
    machine.start(HOT, Memory(SPAN))
    command_line = CommandLine(path=path, pids=(), dry_run=False)
    files = config.load(path)
    settings = command_line.on_top_of(files)
    sampler = FakeSampler(half_hot(20), machine)
    daemon = machine.daemon(sampler, settings)
    inbox = Inbox(lambda: inbox.run())
    free = cast(FreeMemory, FakeFree())
    mover_of = cast(Callable[[Topology], Mover], lambda topology: machine.mover)
    drains = Drains(daemon=daemon, free=free, make_mover=mover_of)
    service = Service(
        command_line=command_line,
        files=files,
        settings=settings,
        daemon=daemon,
        sampler=cast(Session, sampler),
        finder=cast(Finder, FakeFinder()),
        free=free,
        arbiter=cast(Arbiter, Undisputed()),
        drains=drains,
        cxl_errors=CxlErrors(
            daemon=daemon,
            free=free,
            make_mover=mover_of,
            fence=drains.fence,
            folder=Path("/nonexistent"),
            listen=lambda: cast(Events, None),
        ),
        recordings=Recordings(None),
        hotplug=cast(Hotplug, None),
        interrupted=lambda: False,
        view=View(daemon, history),
        inbox=inbox,
    )
    daemon.tell = lambda daemon, rooms: service.publish(account(daemon, rooms))
    monkeypatch.setattr("tierd.kernel.nodes.read_in_use", lambda node: IN_USE)
    machine.rounds(daemon, 3)
    return service


_, SLOW = NODES
IN_USE = 32 << 20


def test_a_node_in_a_drain_is_told_in_the_status(service: Service, machine: Machine) -> None:
    told = service.drain(SLOW, wanted=True)
    assert (told["node"], told["done"], told["in_use"]) == (SLOW, False, IN_USE)
    machine.rounds(service.daemon, 1)
    assert service.view.status()["drains"] == [told]
    service.drain(SLOW, wanted=False)
    assert service.free.closed == set()
    with pytest.raises(NotFound, match="not being drained"):
        service.drain(SLOW, wanted=False)


def test_a_client_records(service: Service, machine: Machine, tmp_path: Path) -> None:
    service.daemon.record = service.recordings
    number = service.record()["id"]
    with pytest.raises(Conflict, match="being made already"):
        service.record()
    data = b""
    for _ in range(10):
        machine.rounds(service.daemon, 1)
        told = service.recorded(number, wanted=True)
        assert told["ended"] is None
        data += b64decode(told["data"])
    machine.rounds(service.daemon, 1)
    data += b64decode(service.recorded(number, wanted=False)["data"])
    with pytest.raises(NotFound, match=f"no recording {number}"):
        service.recorded(number, wanted=True)
    path = tmp_path / "recording"
    path.write_bytes(data)
    assert load(path).seconds == 10
    assert service.record()["id"] != number


def kinds(service: Service) -> list[str]:
    return [happened["kind"] for happened in service.view.history.recent()]


def test_keys_are_set_on_top_of_the_files_and_taken_back(service: Service) -> None:
    told = service.set({"policy": {"payback": 5, "hysteresis": 2}})
    assert told["changes"] == [
        {"key": "policy.hysteresis", "before": 1.5, "after": 2.0},
        {"key": "policy.payback", "before": 3.0, "after": 5.0},
    ]
    assert service.daemon.config.policy.placement.payback == 5
    told = service.set({"policy": {"payback": None}})
    assert told["set"] == {"policy": {"hysteresis": 2}}
    placement = service.daemon.config.policy.placement
    assert (placement.payback, placement.hysteresis) == (3, 2)
    assert kinds(service).count("set") == 2


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"policy": {"payback": 5, "hysteresis": 0}}, ConfigError),
        ({"policy": {"payback": 5, "long_s": 1}}, ConfigError),
        ({"policy": {"payback": 5}, "damon": {"sample_us": 1000}}, TierdError),
    ],
)
def test_a_wrong_key_leaves_all_as_it_was(
    service: Service, changes: dict[str, object], error: type[TierdError]
) -> None:
    before = service.daemon.config
    with pytest.raises(error):
        service.set(changes)
    assert service.daemon.config is before
    assert service.was_set == {}


def test_a_reload_keeps_what_was_set(service: Service, path: Path) -> None:
    service.set({"policy": {"hysteresis": 2}})
    path.write_text(path.read_text().replace("payback = 3", "payback = 4"))
    service.reload()
    placement = service.daemon.config.policy.placement
    assert (placement.payback, placement.hysteresis) == (4, 2)
    path.write_text("nonsense")
    service.reload()
    assert service.daemon.config.policy.placement == placement
    assert kinds(service)[-2:] == ["reload", "reload.refused"]


def test_a_pause_is_told_once(service: Service) -> None:
    for _ in range(2):
        assert service.pause() == {"paused": True}
    assert service.daemon.paused
    for _ in range(2):
        assert service.resume() == {"paused": False}
    assert [kind for kind in kinds(service) if kind in ("paused", "resumed")] == [
        "paused",
        "resumed",
    ]


def test_the_kernel_promotes_no_pages_while_moves_are_the_operators(service: Service) -> None:
    def is_sorted_by_kernel() -> bool:
        service.follow_rival()
        return service.daemon.sorted_by_kernel

    assert is_sorted_by_kernel()
    service.pause()
    assert not is_sorted_by_kernel()
    service.resume()
    assert is_sorted_by_kernel()
    service.drain(SLOW, wanted=True)
    assert not is_sorted_by_kernel()
    service.drain(SLOW, wanted=False)
    assert is_sorted_by_kernel()


def test_the_kernel_is_to_sort_what_is_left(service: Service) -> None:
    arbiter = cast(Undisputed, service.arbiter)
    service.follow_rival()
    assert arbiter.look is not None
    service.daemon.sorting = Sorting(is_due=False)
    service.follow_rival()
    assert arbiter.look is None


def test_the_kernels_first_look_is_one_before_samples_tell(service: Service) -> None:
    arbiter = cast(Undisputed, service.arbiter)
    for knows in (False, True):
        service.daemon.sorting = Sorting(knows=knows)
        service.follow_rival()
        assert arbiter.look is not None
        assert arbiter.look.first is not knows


def test_of_its_first_look_it_is_told_what_that_takes_the_program(
    service: Service, machine: Machine
) -> None:
    """Of the target that it takes most, from step to step, and of none once the look is over."""
    daemon, arbiter = service.daemon, cast(Undisputed, service.arbiter)
    daemon.sorted_by_kernel = True
    daemon.sorting = Sorting(knows=True, came_s={HOT: machine.now_s})
    daemon.watched[OTHER] = daemon.watched[HOT]
    ran = {HOT: CpuTimes(5, 1), OTHER: CpuTimes(5, 1)}
    machine.ran = ran
    daemon.follow_kernel()
    told, found = list[float](), 200

    def stop_asked(for_s: float) -> bool:
        machine.now_s += for_s
        for pid, kernel_s in ((HOT, 0.08), (OTHER, 0.04)):
            user_s = for_s - kernel_s
            machine.ran[pid] = CpuTimes(ran[pid].user_s + user_s, ran[pid].kernel_s + kernel_s)
        step = KernelMoves(faults=200, candidates=found, promoted=found)
        machine.kernels = KernelMoves(*map(sum, zip(machine.kernels, step, strict=True)))
        told.append(held_up_s())
        return False

    def held_up_s() -> float:
        assert arbiter.look is not None
        return arbiter.look.held_up_s

    service.waited(4 * STEP_S, stop_asked)
    assert told == pytest.approx([0, 0, 0.08, 0.16, 0.24]), "the first step has none before it"
    found = 0
    service.waited(4 * STEP_S, stop_asked)
    assert (arbiter.look, held_up_s()) == (daemon.sorting.look, 0)


def test_of_what_it_promotes_it_is_told_how_much_is_of_targets_that_lack_nothing(
    service: Service, machine: Machine
) -> None:
    daemon = service.daemon
    daemon.sorted_by_kernel = True
    daemon.sorting = Sorting(knows=True, served=frozenset({OTHER}), came_s={HOT: machine.now_s})
    daemon.follow_kernel()
    for of_other, promotes in ((100, True), (200, False)):
        machine.now_s += STEP_S
        machine.promoted[OTHER] = machine.promoted.get(OTHER, 0) + of_other
        step = KernelMoves(faults=300, candidates=300, promoted=300)
        machine.kernels = KernelMoves(*map(sum, zip(machine.kernels, step, strict=True)))
        daemon.follow_kernel()
        assert daemon.sorting.promotes is promotes


def test_the_kernel_promotes_no_more_than_has_to_rise(service: Service) -> None:
    """Nor than tierd itself may move."""
    arbiter = cast(Undisputed, service.arbiter)
    most_mbps = service.settings.migrate.budget_mbps
    for mib, told_mbps in ((math.inf, most_mbps), (2 * most_mbps, most_mbps), (10, 10)):
        service.daemon.sorting = Sorting(lacking_pages=mib * PAGES_PER_MIB)
        service.follow_rival()
        assert (arbiter.look, arbiter.budget_mbps) == (Look(first=True), told_mbps)


def test_the_kernels_looks_are_followed_between_rounds(service: Service, machine: Machine) -> None:
    """Until the first one at a new target is over; then the kernel waits, and tierd as ever."""
    daemon, waited = service.daemon, list[float]()
    daemon.sorted_by_kernel, daemon.sorting = True, Sorting(came_s={HOT: machine.now_s})
    daemon.follow_kernel()

    def stop_asked(for_s: float) -> bool:
        waited.append(for_s)
        machine.now_s += for_s
        faults, candidates, *_ = machine.kernels
        found = 200 if len(waited) < 3 else 0
        machine.kernels = KernelMoves(faults=faults + 200, candidates=candidates + found)
        return False

    assert not service.waited(1.0, stop_asked)
    assert waited == [*[STEP_S] * 4, pytest.approx(1.0 - 4 * STEP_S)]
    assert cast(Undisputed, service.arbiter).look is None
    assert service.waited(1.0, lambda for_s: for_s == 1.0)


def test_between_rounds_the_kernel_is_told_how_much_room_is_left(
    service: Service, machine: Machine
) -> None:
    daemon, arbiter = service.daemon, cast(Undisputed, service.arbiter)
    migrate = replace(service.settings.migrate, budget_mbps=1 << 20)
    service.settings = replace(service.settings, migrate=migrate)
    daemon.sorted_by_kernel = True
    new = Sorting(knows=True, looked=True, filling=Filling(left_bytes=10 << 20))
    daemon.sorting = new.with_room(daemon._rooms()[0])
    daemon.follow_kernel()
    step = KernelMoves(faults=800, candidates=800, promoted=512)
    machine.kernels = KernelMoves(*map(sum, zip(machine.kernels, step, strict=True)))
    assert not service.waited(3 * STEP_S, lambda for_s: False)
    assert arbiter.budget_mbps == 8


@pytest.mark.parametrize(
    ("rival", "kept"), [(Rival.IGNORE, 5 << 20), (Rival.COOPERATE, 0)], ids=str
)
def test_pages_change_places_within_the_headroom(rival: Rival, kept: int) -> None:
    """A plan has a page make way for a page, for as long as half of it is free."""
    tier = Tier(
        rank=Rank(0), name="dram", kind=TierKind.DRAM, nodes=(SLOW,), capacity_bytes=1000 << 20
    )
    settings = Config(
        policy=replace(Config().policy, headroom_percent=1.0),
        conflicts=ConflictsConfig(numa_balancing=rival),
    )
    free = cast(FreeMemory, FakeFree())
    mover = make_mover(settings, Topology(nodes=(), tiers=(tier,)), free)
    assert mover.room(SLOW) == (64 << 20) - kept


def test_pins_are_refused_where_the_kernel_promotes(service: Service) -> None:
    conflicts = ConflictsConfig(numa_balancing=Rival.COOPERATE)
    service.settings = replace(service.settings, conflicts=conflicts)
    with pytest.raises(Conflict, match="knows no pins"):
        service.pin(HOT, Pin.FASTEST)
    assert service.pin(HOT, None)["pin"] is None


def test_a_pin_is_told_in_the_status(service: Service, machine: Machine) -> None:
    assert service.pin(HOT, Pin.HERE) == {"pid": HOT, "pin": "here", "pins": []}
    machine.rounds(service.daemon, 1)
    assert service.view.status()["targets"][0]["pin"] == "here"
    assert service.pin(HOT, None) == {"pid": HOT, "pin": None, "pins": []}
    with pytest.raises(NotFound):
        service.pin(1, Pin.HERE)


def test_of_a_pinned_range_the_events_tell_no_address(service: Service) -> None:
    service.pin(HOT, Pin.HERE)
    told = service.pin(HOT, Pin.FASTEST, range(SPAN.start, SPAN.start + 8192))
    (pinned,) = told["pins"]
    assert (told["pin"], pinned["pin"], pinned["start"]) == ("here", "fastest", SPAN.start)
    *_, event = service.view.events(after=0, most=100)["events"]
    assert event["message"] == f"process {HOT}: pin of 8192 bytes is now fastest"
    assert event["fields"] == {"pid": HOT, "pin": "fastest"}


def test_where_damos_moves_its_account_is_told_and_pins_are_refused(
    service: Service, machine: Machine
) -> None:
    assert service.view.status()["schemes"] == []
    service.handover = Handover(
        daemon=service.daemon,
        kernel=cast(KernelSchemes, FakeKernel()),
        free=cast(FreeMemory, FreeOfWatermarks()),
    )
    service.handover.begin()
    machine.rounds(service.daemon, 1)

    told = service.view.status()
    assert [scheme["action"] for scheme in told["schemes"]] == ["migrate_hot", "migrate_cold"]
    assert UNRESPECTED in told["notes"]
    assert 'tierd_damos_moved_pages_total{action="migrate_hot"} 0.0' in service.view.metrics()
    with pytest.raises(Conflict, match="knows no pins"):
        service.pin(HOT, Pin.HERE)
    assert service.pin(HOT, None) == {"pid": HOT, "pin": None, "pins": []}


def test_the_engine_stays_as_it_was_at_the_start(service: Service) -> None:
    with pytest.raises(TierdError, match=r"migrate\.engine: only a restart can change this"):
        service.set({"migrate": {"engine": "damos"}})


def test_the_status_has_what_was_set_and_what_is_amiss(
    service: Service, machine: Machine, path: Path
) -> None:
    service.set({"policy": {"hysteresis": 2}})
    service.view.history.trouble = "no room"
    machine.rounds(service.daemon, 1)
    told = json.loads((path.parent / "status.json").read_text())
    assert told["set"] == {"policy": {"hysteresis": 2}}
    assert told["config"]["policy"]["hysteresis"] == 2
    assert "no room" in told["notes"]
    assert not any("sysfs" in note for note in told["notes"])


def test_that_accesses_are_read_the_slow_way_is_told(
    service: Service, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSampler, "way", "tried_regions")
    machine.rounds(service.daemon, 1)
    assert any("read from sysfs" in note for note in service.view.status()["notes"])


def test_systemd_is_told_but_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    monkeypatch.setattr("tierd.kernel.notify.NOTIFY_S", 0.001)
    notify("READY=1")  # nobody is there
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        for _ in range(1000):
            notify("WATCHDOG=1")  # until its queue is full, and on
        assert systemd.recv(64) == b"WATCHDOG=1"


def test_a_write_weight_that_is_set_holds_from_then_on(service: Service) -> None:
    hardware = FakeHardware(pages())
    service.daemon.sampler = Fused(service.daemon.sampler, hardware)
    service.set({"policy": {"write_weight": 3}})
    assert hardware.write_weight == 3
    service.set({"policy": {"write_weight": None}})
    assert hardware.write_weight == 1
