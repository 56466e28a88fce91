# SPDX-License-Identifier: Apache-2.0
"""Taking a region of CXL memory apart: planned, done, refused, cut short, gone on with, undone."""

import errno
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.unit.fake_cxl import MEMORY, NODE, FakeCxl, killed_at
from tests.unit.test_control import keys
from tierd.cli import cxl as cxl_commands
from tierd.cli import cxl_drain as commands
from tierd.cli.control import main
from tierd.errors import Conflict, TierdError
from tierd.kernel import cxl_regions, held
from tierd.kernel.held import Held
from tierd.kernel.signals import time_limit
from tierd.model import NodeId, Online, Pid
from tierd.provision.create import create, open_journal, undo_left
from tierd.provision.create import look as look_at_free
from tierd.provision.drain import RegionDrainer, look, told_of
from tierd.provision.drain_plan import DrainPlan, InUse, Restricted, make
from tierd.provision.plan import Request
from tierd.provision.plan import make as make_creation

DOCUMENT = Path(__file__).parents[2] / "docs/cxl.md"
MIB = 1 << 20
NODE_1 = NodeId(1)
ENDING = 6
"""The most writes from the region's driver on; one that is refused once is made all the same."""

TREES = ["cxl-7.2", "cxl-interleaved"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cxl_regions, "SETTLE_S", 0.0)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def with_memory(root: Path, tree: str = "cxl-7.2", online: Online = Online.MOVABLE) -> FakeCxl:
    """A machine with a region of all its devices, made by create."""
    fake = FakeCxl(root, tree)
    names = tuple(memdev.name for memdev in look_at_free(root).memdevs)
    plan = make_creation(Request(memdevs=names, online=online), look_at_free(root))
    with open_journal(root.parent / f"{root.name}-made", root, fake) as journal:
        create(plan, journal, fake, root, within_s=0)
    fake.writes.clear()
    return fake


@pytest.fixture
def fake(tmp_path: Path) -> FakeCxl:
    return with_memory(tmp_path / "root")


def drained(fake: FakeCxl, state: Path) -> None:
    """Drains the only region as the command does, from where an earlier one was cut short."""
    with open_journal(state, fake.root, fake) as journal:
        if any(getattr(change, "ends", False) for change in journal.changes.values()):
            journal.undo()
            return
        plan = make(None, look(fake.root))
        RegionDrainer(plan, journal, fake, fake.root, within_s=5).run(lambda _: None)
        assert journal.changes == {}


# The plan


def test_the_writes_for_one_device(fake: FakeCxl) -> None:
    plan = make("mem0", look(fake.root))
    assert plan == make("region1", look(fake.root)) == make(None, look(fake.root))
    (first, *_, last) = sorted(fake.blocks())
    assert (plan.node, len(plan.blocks), plan.kmem) == (1, last - first + 1, ("dax1.0",))
    assert [(str(step.path), step.value) for step in plan.steps] == [
        *((f"{MEMORY}/memory{n}/state", "offline") for n in range(last, first - 1, -1)),
        ("sys/bus/dax/drivers/kmem/unbind", "dax1.0"),
        ("sys/bus/cxl/drivers/cxl_region/unbind", "region1"),
        ("sys/bus/cxl/devices/region1/commit", "0"),
        ("sys/bus/cxl/devices/region1/target0", ""),
        ("sys/bus/cxl/devices/decoder2.0/dpa_size", "0"),
        ("sys/bus/cxl/devices/decoder0.0/delete_region", "region1"),
    ]


def locked(found: InUse, name: str) -> InUse:
    decoders = tuple(replace(d, locked=d.name == name) for d in found.decoders)
    return replace(found, decoders=decoders)


def with_region(found: InUse, **known: Any) -> InUse:
    (region,) = found.regions
    return replace(found, regions=(replace(region, **known),))


def behind(found: InUse) -> InUse:
    """Another region has the device's second half."""
    (ours,) = (d for d in found.decoders if d.name == "decoder2.0")
    other = replace(ours, name="decoder2.1", region="region2", dpa_start=ours.dpa_bytes)
    return replace(found, decoders=(*found.decoders, other))


def restricted(found: InUse, *nodes: int) -> InUse:
    one = Restricted(pid=Pid(7), command="redis", by="cpuset", nodes=frozenset(map(NodeId, nodes)))
    return replace(found, restricted=(one,))


def crowded(found: InUse, in_use: int, room: int) -> InUse:
    rooms = {NodeId(0): room, NODE_1: 1 << 40}
    return replace(found, in_use={NODE_1: in_use}, rooms=rooms)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("region9", lambda found: found, "region9 is neither a CXL region nor a memory device"),
        ("mem0", lambda found: replace(found, regions=()), "no CXL region of mem0"),
        (None, lambda found: replace(found, regions=()), "no CXL region of volatile memory"),
        (None, lambda found: replace(found, regions=found.regions * 2), "several CXL regions"),
        ("region1", lambda found: with_region(found, mode="pmem"), "of persistent memory"),
        (None, lambda found: with_region(found, mode="pmem"), "no CXL region of volatile memory"),
        (None, lambda found: locked(found, "decoder2.0"), r"decoder2\.0 of region1 is locked"),
        (None, lambda found: locked(found, "decoder1.0"), r"decoder1\.0 of region1 is locked"),
        (None, behind, "region2 has the part of mem0 behind that of region1"),
        (None, lambda found: restricted(found, 1), r"alone: 7 \(redis, by its cpuset\)"),
        (None, lambda found: crowded(found, 9 * MIB, 8 * MIB), "holds 9 MiB .* room for 8 MiB"),
        (
            None,
            lambda found: replace(
                found, dax_devices=(replace(found.dax_devices[0], driver="device_dax"),)
            ),
            r"dax1\.0 of region1 has the driver device_dax",
        ),
    ],
)
def test_what_is_not_to_be_is_refused(
    fake: FakeCxl, name: str | None, change: Any, message: str
) -> None:
    with pytest.raises(TierdError, match=message):
        make(name, change(look(fake.root)))


def test_what_is_in_the_way_of_nothing_is_none(fake: FakeCxl) -> None:
    """A node that is not the region's alone stays, with what is bound to it."""
    found = look(fake.root)
    make(None, crowded(found, 8 * MIB, 8 * MIB))
    make(None, restricted(found, 2))
    wider = replace(found, node_blocks={NODE_1: 99})
    assert make(None, restricted(wider, 1)).node is None
    make(None, crowded(found, 1 << 40, 512 * MIB))  # no more can leave than the region has


# Doing it


@pytest.mark.parametrize("tree", TREES)
def test_a_region_is_taken_apart_as_planned(tmp_path: Path, state: Path, tree: str) -> None:
    fake = with_memory(tmp_path / "root", tree)
    free = FakeCxl(tmp_path / "free", tree).footprint()
    steps = make(None, look(fake.root)).steps
    drained(fake, state)
    assert [(path, value.strip()) for path, value in fake.writes] == [
        (str(step.path), step.value) for step in steps
    ]
    assert fake.footprint() == free


def test_memory_that_is_offline_or_without_kmem_goes_too(tmp_path: Path, state: Path) -> None:
    fake = with_memory(tmp_path / "root", online=Online.NONE)
    assert make(None, look(fake.root)).blocks == ()
    drained(fake, state)
    assert not look(fake.root).regions


@pytest.mark.parametrize("online", [Online.MOVABLE, Online.NORMAL])
def test_a_block_that_stays_brings_all_back_in_its_zone(
    tmp_path: Path, state: Path, online: Online
) -> None:
    fake = with_memory(tmp_path / "root", online=online)
    before, lowest = fake.footprint(), min(fake.blocks())
    fake.busy = {lowest}
    with pytest.raises(
        Conflict, match=f"memory{lowest} of region1 cannot be taken offline"
    ) as told:
        drained(fake, state)
    assert "is in use again" in str(told.value)
    assert fake.footprint() == before
    assert not [path for path, _ in fake.writes if path.endswith("unbind")]


def test_an_interrupt_brings_all_back(fake: FakeCxl, state: Path) -> None:
    before = fake.footprint()
    plan, tell = make(None, look(fake.root)), interrupt_at(2 * 128 * MIB)
    with open_journal(state, fake.root, fake) as journal:
        drainer = RegionDrainer(plan, journal, fake, fake.root, tell=tell)
        with pytest.raises(TierdError, match="interrupted"):
            drainer.run(lambda _: None)
    assert fake.footprint() == before


def interrupt_at(offline_bytes: int) -> Any:
    def tell(progress: Any) -> None:
        if progress.offline_bytes >= offline_bytes:
            raise KeyboardInterrupt

    return tell


def test_room_is_looked_at_before_each_block(fake: FakeCxl, state: Path) -> None:
    before = fake.footprint()
    plan = make(None, look(fake.root))
    meminfo = fake.root / NODE / "node1/meminfo"
    content = meminfo.read_text()
    full = re.sub(r"AnonPages: +\d+", f"AnonPages: {1 << 30}", content)

    def fill(progress: Any) -> None:
        meminfo.write_text(full if progress.offline_bytes else content)

    zoneinfo = fake.root / "proc/zoneinfo"
    zoneinfo.write_text(re.sub(r"pages free +\d+", "pages free 0", zoneinfo.read_text()))
    with (
        open_journal(state, fake.root, fake) as journal,
        pytest.raises(TierdError, match="the other nodes have room for 0 MiB"),
    ):
        RegionDrainer(plan, journal, fake, fake.root, tell=fill).run(lambda _: None)
    meminfo.write_text(content)
    assert fake.writes, "the first block went offline"
    assert fake.footprint() == before


def test_a_refusal_at_each_write_leaves_all_or_nothing(tmp_path: Path) -> None:
    """Until the region's driver is gone all comes back; from then on it is gone on to the end."""
    count = len(make(None, look(with_memory(tmp_path / "count").root)).steps)
    free = FakeCxl(tmp_path / "free").footprint()
    ends = list[str]()
    for at in range(count):
        fake, state = with_memory(tmp_path / f"root{at}"), tmp_path / f"state{at}"
        before = fake.footprint()
        refuse_once(fake, at)
        wanted = (TierdError, OSError)
        with pytest.raises(wanted) if at < count - ENDING else suppress(*wanted):
            drained(fake, state)
        undo_left(state, fake.root, fake)
        now = fake.footprint()
        assert now in (before, free), at
        ends.append("back" if now == before else "apart")
    assert ends == sorted(ends, reverse=True)
    assert set(ends) == {"back", "apart"}


def refuse_once(fake: FakeCxl, at: int) -> None:
    write, left = fake.write, iter(range(at))
    is_refused = False

    def refuse(path: Path, value: str) -> None:
        nonlocal is_refused
        if next(left, None) is None and not is_refused:
            is_refused = True
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        write(path, value)

    fake.write = refuse  # type: ignore[method-assign]


def killed(tmp_path: Path, tree: str) -> Iterator[tuple[FakeCxl, Path, int]]:
    """Yields machines on which a drain was killed before each write, until one is not."""
    for at in range(100):
        fake, state = with_memory(tmp_path / f"root{at}", tree), tmp_path / f"state{at}"
        if killed_at(at, partial(drained, fake, state)):
            assert at > 15
            return
        yield fake, state, at
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("tree", TREES)
def test_a_kill_at_each_step_is_undone(tmp_path: Path, tree: str) -> None:
    """Or finished, once the region has lost its driver. Undoing twice is as good as once."""
    free, before = (
        FakeCxl(tmp_path / "free", tree).footprint(),
        with_memory(tmp_path / "before", tree).footprint(),
    )
    ends = list[bool]()
    for fake, state, at in killed(tmp_path, tree):
        undo_left(state, fake.root, fake)
        assert undo_left(state, fake.root, fake) == []
        ends.append(fake.footprint() == free)
        assert ends[-1] or fake.footprint() == before, at
    assert ends == sorted(ends)
    assert set(ends) == {False, True}


def test_a_kill_at_each_step_is_gone_on_with(tmp_path: Path) -> None:
    free = FakeCxl(tmp_path / "free").footprint()
    for fake, state, at in killed(tmp_path, "cxl-7.2"):
        if look(fake.root).regions:
            drained(fake, state)
        assert fake.footprint() == free, at
        assert undo_left(state, fake.root, fake) == []


def test_an_undo_that_is_killed_at_each_step_is_finished_by_the_next(tmp_path: Path) -> None:
    """kmem is unbound by then, and the policy of new blocks would have them in another zone."""
    before = with_memory(tmp_path / "before").footprint()
    for at in range(100):
        fake, state = with_memory(tmp_path / f"root{at}"), tmp_path / f"state{at}"
        assert not killed_at(1 + 2 * len(fake.blocks()) + 2, partial(drained, fake, state))
        assert fake.blocks() == {}
        assert fake.read(fake.root / MEMORY / "auto_online_blocks") == "online"
        whole = killed_at(at, partial(undo_left, state, fake.root, fake))
        undo_left(state, fake.root, fake)
        assert fake.footprint() == before, at
        if whole:
            assert at > 5
            return
    raise AssertionError("it never came to its end")


def test_another_region_of_that_name_is_left(fake: FakeCxl, state: Path) -> None:
    killed_at(4, lambda: drained(fake, state))
    folder = fake.device("region1")
    moved = folder.rename(folder.parent / "kept")
    folder.mkdir()
    (line,) = undo_left(state, fake.root, fake)
    assert "is not the one that was being drained" in line
    folder.rmdir()
    moved.rename(folder)


# Holders


def test_a_time_limit_ends_what_hangs() -> None:
    begin_s = time.monotonic()
    reader, writer = os.pipe()
    with pytest.raises(TimeoutError), time_limit(0.1):
        os.read(reader, 1)
    assert time.monotonic() - begin_s < 5
    os.close(reader)
    os.close(writer)


def test_pages_are_told_by_kind() -> None:
    bit = np.uint64(1)
    flags = np.array(
        [
            bit << np.uint64(10),
            bit << np.uint64(7) | bit << np.uint64(15),
            bit << np.uint64(16),
            bit << np.uint64(12) | bit << np.uint64(11) | bit << np.uint64(5),
            bit << np.uint64(26),
            bit << np.uint64(5),
            0,
        ],
        np.uint64,
    )
    names = [held._KINDS[kind][1] for kind in held.kinds_of(flags)]
    assert names == [
        "free",
        "slab",
        "slab",
        "anonymous",
        "page tables",
        "page cache",
        "the kernel's own",
    ]


def test_what_is_on_a_block_is_read_from_procs_files(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    cgroup = tmp_path / "sys/fs/cgroup/system.slice"
    cgroup.mkdir(parents=True)
    flags = np.full(8, 1 << 10, np.uint64)
    flags[5], flags[6] = 1 << 7, 1 << 12
    flags.tofile(proc / "kpageflags")
    charged = np.zeros(8, np.uint64)
    charged[6] = charged[2] = cgroup.stat().st_ino
    charged.tofile(proc / "kpagecgroup")
    found = held.read_held(range(4 * 4096, 8 * 4096), tmp_path)
    assert found == Held(
        kinds={"slab": 1, "anonymous": 1}, processes={}, cgroups={"/system.slice": 1}
    )
    assert told_of(found, tmp_path) == (
        "pages on it: 1 slab, 1 anonymous\ncharged: 1 of /system.slice"
    )
    assert held.read_held(range(4096), tmp_path / "none") is None
    assert "is not known" in told_of(None, tmp_path)


# The command


@pytest.fixture
def run(fake: FakeCxl, state: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings = state.parent / "tierd.toml"
    settings.write_text(f'[daemon]\nstate_dir = "{state}"\nruntime_dir = "{state.parent}/none"\n')
    monkeypatch.setattr(commands, "KernelFiles", lambda: fake)
    monkeypatch.setattr(cxl_commands, "KernelFiles", lambda: fake)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def invoke(*words: str) -> Result:
        options = ["--root", str(fake.root), "--config", str(settings)]
        return CliRunner().invoke(main, ["cxl", *words, *options], prog_name="tierctl")

    return invoke


def echoes(output: str) -> list[str]:
    return re.findall(r"^echo .*", output, re.M)


def test_a_dry_run_prints_every_write_and_makes_none(run: Any, fake: FakeCxl, state: Path) -> None:
    before = fake.footprint()
    shown = run("drain", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert (fake.writes, fake.footprint()) == ([], before)
    assert not state.exists()
    done = run("drain", "region1")
    assert done.exit_code == 0, done.output
    assert echoes(done.output) == echoes(shown.output)
    assert len(echoes(shown.output)) == len(fake.writes)
    assert "region1 is apart: mem0 may be taken away" in done.output


def test_the_json_of_a_drain_has_the_documented_keys(run: Any) -> None:
    text = DOCUMENT.read_text().split("## JSON of drain")[1]
    documented = set(re.findall(r"^\| `([^`]+)` \|", text, re.M))
    for options in (["--dry-run"], []):
        result = run("drain", "--json", *options)
        assert result.exit_code == 0, result.output
        assert keys(json.loads(result.output)) == documented
        assert json.loads(result.output)["dry_run"] is bool(options)


def test_what_was_killed_is_gone_on_with_by_the_same_command(
    run: Any, fake: FakeCxl, state: Path
) -> None:
    killed_at(6, lambda: drained(fake, state))
    assert "offline" in fake.blocks().values()
    result = run("drain", "mem0")
    assert result.exit_code == 0, result.output
    assert not look(fake.root).regions


def test_what_was_killed_is_undone_where_it_is_refused_by_now(
    run: Any, fake: FakeCxl, state: Path
) -> None:
    before = fake.footprint()
    killed_at(6, lambda: drained(fake, state))
    (dax,) = (fake.root / "sys/bus/dax/devices").glob("dax1.0")
    (dax / "driver").unlink()
    (dax / "driver").symlink_to("device_dax")
    result = run("drain")
    assert result.exit_code == 1
    assert "dax1.0 of region1 has the driver device_dax" in result.output
    assert "offline" not in fake.blocks().values()
    (dax / "driver").unlink()
    fake._link(dax.resolve() / "driver", fake.root / "sys/bus/dax/drivers/kmem")
    run("drain", "--undo")
    assert fake.footprint() == before


@pytest.mark.parametrize("words", [("drain", "--undo"), ("list",), ("create",)])
def test_what_was_killed_is_undone_by_others(
    run: Any, fake: FakeCxl, state: Path, words: tuple[str, ...]
) -> None:
    before = fake.footprint()
    killed_at(6, lambda: drained(fake, state))
    result = run(*words)
    assert "undone: region1, whose drain was cut short at memory" in result.output
    assert fake.footprint() == before
    assert "nothing to undo" in run("drain", "--undo").output


def test_the_end_is_finished(run: Any, fake: FakeCxl, state: Path) -> None:
    count = 2 * len(fake.blocks()) + 8
    killed_at(count, lambda: drained(fake, state))
    assert look(fake.root).regions
    result = run("drain")
    assert "was taken apart to the end" in result.output
    assert not look(fake.root).regions


def test_only_root_drains(run: Any, fake: FakeCxl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = run("drain")
    assert result.exit_code == 1
    assert "needs root" in result.output
    assert fake.writes == []


class FakeDaemon:
    """A daemon that drains node 1 in three looks."""

    def __init__(self, going: bool = False) -> None:
        self.asked: list[tuple[str, str]] = []
        self.drains = [{"node": 1}] if going else []

    def get(self, path: str) -> Any:
        return {"paused": False, "drains": self.drains}

    def request(self, method: str, path: str) -> Any:
        self.asked.append((method, path))
        done = len(self.asked) >= 3
        return {"done": done, "passes": 1, "node": 1, "moved_pages": 9}


@pytest.mark.parametrize("going", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_daemon_empties_the_node_and_is_told_of_the_end(
    run: Any, fake: FakeCxl, monkeypatch: pytest.MonkeyPatch, going: bool, busy: bool
) -> None:
    """A drain that an operator has begun is the operator's."""
    daemon = FakeDaemon(going)
    monkeypatch.setattr(commands, "_client", lambda _: daemon)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    fake.busy = {min(fake.blocks())} if busy else set()
    result = run("drain", "--json")
    assert result.exit_code == busy, result.output
    ended = [] if going else [("DELETE", "/v1/drains/1")]
    assert daemon.asked == [("PUT", "/v1/drains/1")] * 3 + ended
    if not busy:
        assert json.loads(result.output)["moved_pages"] == 9


def test_a_daemons_drain_is_ended_after_a_kill(
    run: Any, fake: FakeCxl, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = FakeDaemon()
    monkeypatch.setattr(commands, "_client", lambda _: daemon)
    with open_journal(state, fake.root, fake) as journal:
        plan: DrainPlan = make(None, look(fake.root))
        drainer = RegionDrainer(plan, journal, fake, fake.root)
        drainer._begin()
        drainer._note_daemon(NODE_1)
    run("list")
    assert daemon.asked == [("DELETE", "/v1/drains/1")]
