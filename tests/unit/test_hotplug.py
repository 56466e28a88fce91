# SPDX-License-Identifier: Apache-2.0
"""Memory that comes and goes, over trees captured in guests."""

import logging
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from tests.unit import trees
from tests.unit.machine import Undisputed
from tierd import startup
from tierd.api.inbox import Inbox
from tierd.api.view import View
from tierd.arbiter import Arbiter
from tierd.bulk import rank_nodes
from tierd.config import Config, Mode, Place, PolicyConfig, TierConfig
from tierd.cxl_errors import CxlErrors
from tierd.daemon import Daemon
from tierd.decide.unsorted import Sorting
from tierd.discover import hotplug
from tierd.discover.hotplug import LOOK_S, Hotplug, differences
from tierd.discover.targets import Finder
from tierd.discover.topology import discover
from tierd.drains import Drains
from tierd.errors import UnsupportedKernel
from tierd.kernel.cxl_events import CxlEvents
from tierd.kernel.free import FreeMemory
from tierd.kernel.text import UnexpectedContent
from tierd.migrate.mover import Mover
from tierd.model import NodeId, TierKind, Topology
from tierd.recorder import Recordings
from tierd.sample.session import Session
from tierd.service import CommandLine, Service

NODES = "sys/devices/system/node"
TIERS = "sys/devices/virtual/memory_tiering"
FAR = TierConfig(
    name="far",
    kind=TierKind.CXL,
    nodes=(NodeId(1),),
    place=Place(file="f", line=4, key="tier[2].nodes"),
)
NEAR = TierConfig(
    name="near",
    kind=TierKind.DRAM,
    nodes=(NodeId(0),),
    place=Place(file="f", line=1, key="tier[1].nodes"),
)


class Events:
    """Fake events: as many as were put in, taken out all at once."""

    def __init__(self) -> None:
        self.waiting = 0

    def read(self) -> bool:
        any_waiting, self.waiting = bool(self.waiting), 0
        return any_waiting


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return trees.unpack("cxl-two-regions", tmp_path)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Topology]:
    """What each look at the machine has found."""
    found: list[Topology] = []

    def look(*arguments: object, **more: object) -> Topology:
        found.append(discover(*arguments, **more))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(hotplug, "discover", look)
    return found


def resize(root: Path, node: int, size_kib: int) -> None:
    """Has blocks of a node go offline or come online, as meminfo shows it."""
    path = root / f"{NODES}/node{node}/meminfo"
    path.write_text(re.sub(r"(MemTotal: +)\d+", rf"\g<1>{size_kib}", path.read_text()))


def remove(root: Path, node: int) -> None:
    """Takes away the last node, as when kmem lets go of its memory."""
    shutil.rmtree(root / f"{NODES}/node{node}")
    (root / f"{NODES}/online").write_text(f"0-{node - 1}\n")
    for other in range(node):
        path = root / f"{NODES}/node{other}/distance"
        path.write_text(path.read_text().rpartition(" ")[0] + "\n")


def watch(root: Path, events: Events | None = None, *declared: TierConfig) -> Hotplug:
    found = Hotplug(discover(declared, root), declared, events or Events(), root=root)
    assert found.poll() is None
    return found


def test_the_first_look_finds_what_changed_before_events_were_listened_to(root: Path) -> None:
    before = discover((), root)
    remove(root, 2)
    watched = Hotplug(before, (), Events(), root=root)
    found = watched.poll()
    assert found is not None
    assert [node.id for node in found.nodes] == [0, 1]
    assert watched.poll() is None


def test_the_kernel_is_asked_for_a_nodes_tier_once(root: Path) -> None:
    """A second time could lock up the kernel: docs/decisions/0012."""
    events = Events()
    watched = watch(root, events)
    before = {node.id: node.kernel_tier for node in watched.topology.nodes}
    for path in (root / TIERS).glob("memory_tier*/nodelist"):
        path.write_text("not to be read")
    remove(root, 2)
    events.waiting = 1
    found = watched.poll()
    assert found is not None
    assert {node.id: node.kernel_tier for node in found.nodes} == {
        id: tier for id, tier in before.items() if id != 2
    }


def test_the_kernel_is_asked_for_the_tier_of_a_node_that_is_new(root: Path) -> None:
    events = Events()
    whole = shutil.copytree(root, root.parent / "whole", symlinks=True)
    tiers = {node.id: node.kernel_tier for node in discover((), root).nodes}
    remove(root, 2)
    watched = watch(root, events)
    shutil.rmtree(root)
    shutil.copytree(whole, root, symlinks=True)
    events.waiting = 1
    found = watched.poll()
    assert found is not None
    assert {node.id: node.kernel_tier for node in found.nodes} == tiers


def test_a_burst_of_events_is_one_look_and_one_to_be_sure(
    root: Path, looks: list[Topology]
) -> None:
    events = Events()
    watched = watch(root, events)
    events.waiting = 500
    resize(root, 1, 131072)
    found = watched.poll()
    assert found is not None
    assert found.tiers[1].capacity_bytes == (128 + 512) << 20
    assert [watched.poll() for _ in range(5)] == [None] * 5
    assert len(looks) == 1 + 2


def test_events_of_what_does_not_matter_change_nothing(root: Path, looks: list[Topology]) -> None:
    events = Events()
    watched = watch(root, events)
    events.waiting = 1
    assert watched.poll() is None
    assert len(looks) == 2


def test_after_an_error_the_machine_is_looked_at_again(root: Path) -> None:
    events = Events()
    watched = watch(root, events)
    whole = (root / f"{NODES}/node0/distance").read_text()
    (root / f"{NODES}/node0/distance").write_text("10\n")  # a node has just come
    events.waiting = 1
    for _ in range(2):
        with pytest.raises(UnexpectedContent):
            watched.poll()
    (root / f"{NODES}/node0/distance").write_text(whole)
    resize(root, 2, 0)
    found = watched.poll()
    assert found is not None
    assert [tier.nodes for tier in found.tiers] == [(0,), (1,)]


def test_without_events_sizes_are_looked_at_now_and_then(root: Path, looks: list[Topology]) -> None:
    clock = Clock()
    watched = Hotplug(discover((), root), (), None, root=root, clock_s=clock)
    assert watched.poll() is None
    resize(root, 1, 0)
    assert watched.poll() is None
    clock.now_s += LOOK_S
    found = watched.poll()
    assert found is not None
    assert [tier.nodes for tier in found.tiers] == [(0,), (2,)]
    for _ in range(5):
        clock.now_s += LOOK_S
        assert watched.poll() is None
    assert len(looks) == 1 + 2


def test_where_events_cannot_be_had_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(startup, "Uevents", refuse)
    with ExitStack() as stack:
        assert startup._listen_to_memory(stack) is None
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "no events of memory ([Errno 1] Operation not permitted)" in told.message


def test_a_declared_tier_whose_node_goes_is_left_out_and_comes_back(root: Path) -> None:
    events = Events()
    watched = watch(root, events, NEAR, FAR)
    resize(root, 1, 0)
    events.waiting = 1
    found = watched.poll()
    assert found is not None
    assert [(tier.name, tier.rank) for tier in found.tiers] == [("near", 0)]
    assert any(w.startswith("node 1 of tier far has no memory now") for w in found.warnings)
    resize(root, 1, 262144)
    events.waiting = 1
    found = watched.poll()
    assert found is not None
    assert [(tier.name, tier.nodes) for tier in found.tiers] == [("near", (0,)), ("far", (1,))]
    assert not any("no memory now" in warning for warning in found.warnings)


def test_ranks_close_up_where_a_declared_tier_in_the_middle_goes(root: Path) -> None:
    middle = FAR
    last = TierConfig(name="last", kind=TierKind.CXL, nodes=(NodeId(2),), place=FAR.place)
    resize(root, 1, 0)
    found = discover((NEAR, middle, last), root, strict=False)
    assert [(tier.name, tier.rank) for tier in found.tiers] == [("near", 0), ("last", 1)]
    assert list(rank_nodes(found)) == [0, -1, 1]


def test_a_declared_tier_loses_the_one_node_that_goes(root: Path) -> None:
    both = TierConfig(name="far", kind=TierKind.CXL, nodes=(NodeId(1), NodeId(2)), place=FAR.place)
    resize(root, 1, 0)
    found = discover((NEAR, both), root, strict=False)
    assert found.tiers[1].nodes == (2,)
    assert found.tiers[1].capacity_bytes == 512 << 20


def test_all_declared_tiers_may_go(root: Path) -> None:
    resize(root, 1, 0)
    found = discover((FAR,), root, strict=False)
    assert found.tiers == ()
    assert found.warnings[0].startswith("fewer than two of the tiers in [[tier]]")


def told(root: Path, before: Topology) -> list[str]:
    return list(differences(before, discover((), root)))


def test_a_node_that_loses_its_memory_and_gets_it_back_is_told(root: Path) -> None:
    whole = discover((), root)
    resize(root, 1, 0)
    resize(root, 2, 0)
    bare = discover((), root)
    assert list(differences(whole, bare)) == [
        "node 1 has no memory any more, it had 256 MiB (cxl)",
        "node 2 has no memory any more, it had 512 MiB (cxl)",
        "tier cxl has gone",
        "there are no two tiers any more: nothing is moved until there are",
    ]
    assert list(differences(bare, whole)) == [
        "node 1 has memory now, 256 MiB (cxl)",
        "node 2 has memory now, 512 MiB (cxl)",
        "tier 1: cxl, nodes 1, 2",
        "there are 2 tiers now: placing goes on",
    ]


def test_a_node_that_leaves_its_tier_is_told(root: Path) -> None:
    before = discover((), root)
    remove(root, 2)
    assert told(root, before) == [
        "node 2 has no memory any more, it had 512 MiB (cxl)",
        "tier 1: cxl, nodes 1",
    ]


def test_blocks_that_go_offline_are_told_as_size(root: Path) -> None:
    before = discover((), root)
    resize(root, 1, 131072)
    assert told(root, before) == ["node 1 has 128 MiB now, it had 256 MiB"]


def test_devices_are_told(root: Path) -> None:
    before = discover((), root)
    (root / "sys/bus/cxl/devices/mem1").unlink()
    (root / "sys/bus/cxl/devices/region1").unlink()
    (root / "sys/bus/dax/devices/dax1.0").unlink()
    link = (root / "sys/bus/dax/devices/dax0.0").resolve() / "driver"
    link.unlink()
    after = discover((), root)
    assert list(differences(before, after))[:4] == [
        "CXL device mem1 has gone",
        "CXL region region1 has gone",
        "dax device dax1.0 has gone",
        "dax device dax0.0 has no driver now",
    ]
    assert "CXL device mem1 has come" in list(differences(after, before))
    assert "dax device dax0.0 has the driver kmem now" in list(differences(after, before))


class FakeDaemon:
    """A fake that notes the tiers and movers that it is given."""

    paused = yields = False
    sorting = Sorting()

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.given: list[Mover | None] = []

    def retier(self, topology: Topology, mover: Mover | None) -> None:
        self.topology = topology
        self.given.append(mover)


def deaf() -> CxlEvents:
    raise UnsupportedKernel("no tracepoints")


def serve(root: Path, events: Events, mode: Mode = Mode.PLACE) -> tuple[Service, FakeDaemon]:
    watched = watch(root, events)
    fake = FakeDaemon(watched.topology)
    settings = Config(policy=PolicyConfig(mode=mode))
    free, mover = FreeMemory(root), cast(Mover, None)
    drains = Drains(daemon=cast(Daemon, fake), free=free, make_mover=lambda topology: mover)
    service = Service(
        command_line=CommandLine(path=None, pids=(), dry_run=False),
        files=settings,
        settings=settings,
        daemon=cast(Daemon, fake),
        sampler=cast(Session, None),
        finder=cast(Finder, None),
        free=free,
        arbiter=cast(Arbiter, Undisputed()),
        drains=drains,
        cxl_errors=CxlErrors(
            daemon=cast(Daemon, fake),
            free=free,
            make_mover=lambda topology: mover,
            fence=drains.fence,
            folder=Path("/nonexistent"),
            listen=deaf,
        ),
        recordings=Recordings(None),
        hotplug=watched,
        interrupted=lambda: False,
        view=cast(View, None),
        inbox=Inbox(lambda: None),
    )
    return service, fake


def test_the_daemon_goes_on_with_a_mover_of_the_tiers_that_are_there(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    events = Events()
    service, fake = serve(root, events)
    service.follow_memory()
    assert not fake.given
    resize(root, 2, 0)
    events.waiting = 8
    for _ in range(3):
        service.follow_memory()
    (mover,) = fake.given
    assert mover is not None
    assert [tier.nodes for tier in mover.topology.tiers] == [(0,), (1,)]
    assert [record.message for record in caplog.records] == [
        "node 2 has no memory any more, it had 512 MiB (cxl)",
        "tier 1: cxl, nodes 1",
    ]


def test_a_daemon_that_only_observes_gets_no_mover(root: Path) -> None:
    events = Events()
    service, fake = serve(root, events, Mode.OBSERVE)
    resize(root, 2, 0)
    events.waiting = 1
    service.follow_memory()
    assert fake.given == [None]


def test_memory_that_cannot_be_looked_at_is_told_once_and_survived(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events()
    service, fake = serve(root, events)
    (root / f"{NODES}/node0/distance").write_text("10\n")
    events.waiting = 1
    for _ in range(3):
        service.follow_memory()
    (told_once,) = caplog.records
    assert "the tiers stay as they were" in told_once.message
    assert "node0/distance holds '10'" in told_once.message
    assert not fake.given


def test_nothing_is_told_of_what_stayed(root: Path) -> None:
    assert told(root, discover((), root)) == []
