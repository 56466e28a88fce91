# SPDX-License-Identifier: Apache-2.0
"""Making a region of CXL memory: planned, made, refused, cut short, undone."""

import contextlib
import errno
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from tests.unit.fake_cxl import CXL, MEMORY, FakeCxl, killed_at
from tests.unit.test_control import keys
from tierd import journal as journal_module
from tierd import startup
from tierd.cli import cxl as commands
from tierd.cli.control import main
from tierd.errors import Conflict, TierdError, UnsupportedKernel
from tierd.journal import Journal
from tierd.kernel import cxl_regions
from tierd.kernel.cxl_regions import Regions
from tierd.model import CxlRegion, Decoder, Memdev, Online
from tierd.provision.create import create, look, open_journal, undo_left
from tierd.provision.plan import Found, RegionPlan, Request, make

MIB = 1 << 20
DOCUMENT = Path(__file__).parents[2] / "docs/cxl.md"


@pytest.fixture
def fake(tmp_path: Path) -> FakeCxl:
    return FakeCxl(tmp_path / "root")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cxl_regions, "SETTLE_S", 0.0)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def two(tmp_path: Path) -> FakeCxl:
    return FakeCxl(tmp_path / "two", "cxl-interleaved")


def planned(fake: FakeCxl, request: Request | None = None) -> RegionPlan:
    return make(request or Request(), look(fake.root))


def made(fake: FakeCxl, state: Path, request: Request | None = None) -> RegionPlan:
    with open_journal(state, fake.root, fake) as journal:
        journal.undo()
        plan = planned(fake, request)
        create(plan, journal, fake, fake.root, within_s=0)
        assert journal.changes == {}
    return plan


# The plan


def test_the_writes_for_one_device(fake: FakeCxl) -> None:
    devices = "sys/bus/cxl/devices"
    assert [(str(step.path), step.value) for step in planned(fake).steps] == [
        (f"{devices}/decoder0.0/create_ram_region", "region1"),
        (f"{devices}/region1/interleave_granularity", "256"),
        (f"{devices}/region1/interleave_ways", "1"),
        (f"{devices}/region1/size", "536870912"),
        (f"{devices}/decoder2.0/mode", "ram"),
        (f"{devices}/decoder2.0/dpa_size", "536870912"),
        (f"{devices}/region1/target0", "decoder2.0"),
        (f"{devices}/region1/commit", "1"),
        ("sys/devices/system/memory/auto_online_blocks", "online_movable"),
        ("sys/bus/cxl/drivers/cxl_region/bind", "region1"),
        ("sys/devices/system/memory/auto_online_blocks", "online"),
    ]


def memdev(number: int, *, mib: int = 1024, bridge: str = "12", route: str = "") -> Memdev:
    return Memdev(
        name=f"mem{number}",
        serial=number,
        ram_bytes=mib * MIB,
        pmem_bytes=0,
        node=None,
        firmware=None,
        bridge=bridge,
        route=(f"port{bridge}", *route.split(), f"endpoint{number}"),
    )


def window(number: int, *targets: str, mib: int = 65536, granularity: int = 1024) -> Decoder:
    return Decoder(
        name=f"decoder0.{number}",
        kind="root",
        start=number << 40,
        size_bytes=mib * MIB,
        interleave_ways=len(targets),
        interleave_granularity_bytes=granularity,
        region=None,
        locked=False,
        modes=("ram",),
        targets=targets,
    )


def endpoint_decoder(memdev: Memdev, number: int, **known: Any) -> Decoder:
    plain = Decoder(
        name=f"decoder{memdev.name.removeprefix('mem')}0.{number}",
        kind="endpoint",
        start=None,
        size_bytes=0,
        interleave_ways=1,
        interleave_granularity_bytes=256,
        region=None,
        locked=False,
        mode="none",
        memdev=memdev.name,
    )
    return replace(plain, **known)


def found(
    memdevs: list[Memdev], windows: list[Decoder], *regions: CxlRegion, **decoders: Decoder
) -> Found:
    """A machine with two decoders a device; `decoders` are others in place of these."""
    of_devices = [endpoint_decoder(memdev, number) for memdev in memdevs for number in (0, 1)]
    known = {d.name: d for d in of_devices} | {d.name: d for d in decoders.values()}
    return Found(
        memdevs=tuple(memdevs),
        decoders=(*windows, *known.values()),
        regions=regions,
        next_regions={decoder.name: "region7" for decoder in windows},
        drivers=frozenset({"cxl_region", "cxl_dax_region", "kmem"}),
        auto_online="offline",
    )


def a_region(root: Decoder, start: int, mib: int) -> CxlRegion:
    return CxlRegion(
        name="region3",
        start=start,
        size_bytes=mib * MIB,
        mode="ram",
        interleave_ways=1,
        interleave_granularity_bytes=256,
        memdevs=("mem9",),
        committed=True,
        root=root.name,
    )


def test_all_that_each_device_can_give_is_taken() -> None:
    plan = make(
        Request(memdevs=("mem0", "mem1")),
        found([memdev(0, mib=900), memdev(1, mib=2048)], [window(0, "12")]),
    )
    assert (plan.size_bytes, plan.ways) == (2 * 768 * MIB, 2)
    assert plan.granularity_bytes == 1024


def test_what_is_free_is_behind_what_is_handed_out() -> None:
    device = memdev(0, mib=1024)
    used = endpoint_decoder(device, 0, mode="ram", dpa_start=0, dpa_bytes=256 * MIB)
    plan = make(Request(), found([device], [window(0, "12")], used=used))
    assert (plan.size_bytes, plan.decoders) == (768 * MIB, ("decoder00.1",))


def test_positions_follow_the_windows_bridges_and_then_the_switches() -> None:
    devices = [
        *(memdev(n, bridge="12", route=f"port{8 + n // 2}") for n in range(4)),
        *(memdev(n, bridge="9", route=f"port{8 + n // 2}") for n in range(4, 8)),
    ]
    names = tuple(device.name for device in devices)
    plan = make(Request(memdevs=names), found(devices, [window(0, "9", "12")]))
    assert plan.memdevs == ("mem4", "mem0", "mem6", "mem2", "mem5", "mem1", "mem7", "mem3")


def test_the_window_of_most_ways_and_least_room_is_taken() -> None:
    devices = [memdev(0, bridge="1"), memdev(1, bridge="2")]
    windows = [window(0, "1", "2"), window(1, "1", "2", mib=4096), window(2, "1"), window(3, "2")]
    assert make(Request(memdevs=("mem0", "mem1")), found(devices, windows)).root == "decoder0.1"
    assert make(Request(memdevs=("mem1",)), found(devices, windows)).root == "decoder0.3"


def test_room_is_the_largest_gap_of_a_window() -> None:
    root = window(1, "12", mib=2048)
    regions = [replace(a_region(root, (1 << 40) + 768 * MIB, 512), name="region4")]
    machine = found([memdev(0, mib=1024)], [root], *regions)
    with pytest.raises(TierdError, match=r"decoder0\.1 has only 768 MiB free"):
        make(Request(), machine)
    assert make(Request(size_bytes=768 * MIB), machine).size_bytes == 768 * MIB


@pytest.mark.parametrize("online", list(Online))
def test_what_becomes_of_the_blocks(online: Online) -> None:
    steps = make(Request(online=online), found([memdev(0)], [window(0, "12")])).steps
    policies = [step.value for step in steps if step.path.name == "auto_online_blocks"]
    wanted = {"movable": ["online_movable", "offline"], "normal": ["online_kernel", "offline"]}
    assert policies == wanted.get(online, [])


ONE = found([memdev(0)], [window(0, "12")])
TWO = found([memdev(0), memdev(1)], [window(0, "12")])
PERSISTENT = replace(memdev(0), pmem_bytes=1024 * MIB)
USED = endpoint_decoder(memdev(0), 0, mode="ram", dpa_start=0, dpa_bytes=1024 * MIB)


@pytest.mark.parametrize(
    ("request_", "machine", "message", "hint"),
    [
        (Request(memdevs=("mem5",)), ONE, "no CXL device mem5; there are mem0", "cxl list"),
        (Request(memdevs=("mem0", "mem0")), ONE, "named twice", "once"),
        (Request(memdevs=("mem0",), ways=2), ONE, "2 ways take as many devices, not 1", "--memdev"),
        (Request(), TWO, "2 CXL devices are free: mem0, mem1", "--interleave 2"),
        (Request(ways=4), TWO, "2 CXL devices are free", "--memdev"),
        (Request(size_bytes=300 * MIB), ONE, "300 MiB is no multiple of 256 MiB", "--size 256M"),
        (Request(size_bytes=100 * MIB), ONE, "100 MiB is no multiple of 256 MiB", "--size 256M"),
        (Request(size_bytes=0), ONE, "0 MiB is no multiple", "--size 256M"),
        (
            Request(memdevs=("mem0", "mem1"), size_bytes=256 * MIB),
            TWO,
            "no multiple of 512 MiB, 256 MiB times 2 devices",
            "--size 512M",
        ),
        (Request(size_bytes=2048 * MIB), ONE, "more than the 1024 MiB that are free", "1024M"),
        (Request(granularity_bytes=300), ONE, "300 bytes are no granularity", "256, 512"),
        (
            Request(granularity_bytes=512, memdevs=("mem0", "mem1")),
            found([memdev(0), memdev(1, bridge="2")], [window(0, "12", "2")]),
            "decoder0.0 is interleaved by 1024 bytes",
            "--granularity 1024",
        ),
        (Request(), found([PERSISTENT], [window(0, "12")]), "volatile memory alone", "--memdev"),
        (
            Request(memdevs=("mem0",)),
            found([replace(PERSISTENT, ram_bytes=0)], [window(0, "12")]),
            "mem0 has persistent memory alone",
            "-t pmem",
        ),
        (
            Request(memdevs=("mem0",)),
            found([memdev(0)], [window(0, "12")], a_region(window(0), 0, 1024), used=USED),
            "mem0 is in use by a decoder without a region",
            "cxl list",
        ),
        (
            Request(),
            found(
                [memdev(0)],
                [window(0, "12")],
                locked=endpoint_decoder(memdev(0), 0, locked=True),
            ),
            "decoder00.0 of mem0 is locked by the firmware",
            "firmware",
        ),
        (
            Request(),
            found([memdev(0)], [replace(window(0, "12"), locked=True)]),
            "decoder0.0 is locked by the firmware",
            "cxl list",
        ),
        (Request(), found([memdev(0)], [window(0, "7")]), "not for the host bridges 12", "list"),
        (
            Request(memdevs=("mem0", "mem1", "mem2")),
            found([memdev(n) for n in range(3)], [window(0, "12")]),
            "decoder0.0 takes 1 devices, or that times a power of two, not 3",
            "cxl list",
        ),
        (
            Request(memdevs=("mem0", "mem1")),
            found([memdev(0), memdev(1)], [window(0, "12", "2")]),
            "wants as many devices behind each",
            "cxl list",
        ),
    ],
)
def test_what_cannot_be_done_is_told(
    request_: Request, machine: Found, message: str, hint: str
) -> None:
    with pytest.raises(TierdError, match=re.escape(message)) as caught:
        make(request_, machine)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("machine", "message", "hint"),
    [
        (replace(ONE, memdevs=()), "no CXL memory device", "cxl_pci"),
        (replace(ONE, decoders=ONE.decoders[1:]), "no window", "modprobe cxl_acpi"),
        (found([replace(memdev(0), route=())], [window(0, "12")]), "no endpoint", "cxl_port"),
        (replace(ONE, drivers=ONE.drivers - {"kmem"}), "driver kmem", "kmem"),
        (replace(ONE, drivers=ONE.drivers - {"cxl_dax_region"}), "cxl_dax_region", "dax_cxl"),
        (replace(ONE, drivers=ONE.drivers - {"cxl_region"}), "cxl_region", "CONFIG_CXL_REGION"),
    ],
)
def test_a_missing_driver_is_named(machine: Found, message: str, hint: str) -> None:
    with pytest.raises(UnsupportedKernel, match=message) as caught:
        make(Request(), machine)
    assert hint in (caught.value.hint or "")


# The making


@pytest.mark.parametrize("online", list(Online))
def test_one_device_becomes_memory(fake: FakeCxl, state: Path, online: Online) -> None:
    plan = made(fake, state, Request(online=online))
    steps = [(str(step.path), step.value) for step in plan.steps]
    assert fake.writes == steps
    assert set(fake.blocks().values()) == {"offline" if online is Online.NONE else "online"}
    assert len(fake.blocks()) == 4
    assert fake.read(fake.root / MEMORY / "auto_online_blocks") == "online"


def test_two_devices_are_interleaved(two: FakeCxl, state: Path) -> None:
    plan = made(two, state, Request(ways=2))
    (region,) = look(two.root).regions
    assert region.memdevs == plan.memdevs == ("mem0", "mem1")
    assert (region.size_bytes, len(two.blocks())) == (512 * MIB, 4)


def test_a_port_of_one_decoder_has_one_region(fake: FakeCxl, state: Path) -> None:
    made(fake, state, Request(size_bytes=256 * MIB, online=Online.NONE))
    with pytest.raises(
        TierdError, match=r"no decoder of port1, .* is free: decoder1\.0 by region1"
    ):
        planned(fake)


@pytest.mark.parametrize("tree", ["cxl-7.2", "cxl-interleaved"])
def test_a_refusal_at_each_step_is_undone(tmp_path: Path, state: Path, tree: str) -> None:
    fake = FakeCxl(tmp_path / "root", tree)
    before = fake.footprint()
    request = Request(memdevs=tuple(memdev.name for memdev in look(fake.root).memdevs))
    count = len(planned(fake, request).steps)
    for position in range(count):
        step = planned(fake, request).steps[position]
        with refused(fake, position), pytest.raises(TierdError) as caught:
            made(fake, state, request)
        if position < count - 1:
            assert str(step.path) in str(caught.value)
            assert fake.footprint() == before, step
        else:
            assert "made whole" in str(caught.value), "only the policy could not be put back"


@contextlib.contextmanager
def refused(fake: FakeCxl, position: int) -> Iterator[None]:
    """Has the kernel refuse the n-th write, and nothing after it."""
    writes = itertools.count()
    write = FakeCxl.write

    def refuse(path: Path, value: str) -> None:
        if next(writes) == position:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        write(fake, path, value)

    vars(fake)["write"] = refuse
    yield
    del vars(fake)["write"]


def kill_at(fake: FakeCxl, state: Path, at: int, request: Request) -> bool:
    """Dies before the n-th write to the machine or the journal; tells whether it got to the end."""
    return killed_at(at, lambda: made(fake, state, request))


def test_what_a_tierctl_has_left_is_undone_with_the_daemons(
    fake: FakeCxl, state: Path, tmp_path: Path
) -> None:
    """As where tierd is removed, and its journals with it."""
    before = fake.footprint()
    assert not kill_at(fake, state, 8, Request())
    assert fake.footprint() != before
    startup.undo_left(state, fake.root, fake)
    assert fake.footprint() == before
    assert not kill_at(fake, state, 8, Request())
    with (
        open_journal(state, fake.root, fake),
        pytest.raises(Conflict, match="another tierctl is making"),
    ):
        startup.undo_left(state, fake.root, fake)


@pytest.mark.parametrize("tree", ["cxl-7.2", "cxl-interleaved"])
def test_a_kill_at_each_step_is_undone(tmp_path: Path, tree: str) -> None:
    """Or kept, where all was there by then. Undoing says which, and twice is as good as once."""
    fake, ends = FakeCxl(tmp_path / "root", tree), list[str]()
    before, state = fake.footprint(), tmp_path / "state"
    request = Request(memdevs=tuple(memdev.name for memdev in look(fake.root).memdevs))
    for at in range(100):
        if kill_at(fake, state, at, request):
            break
        left = fake.footprint() != before
        told = undo_left(state, fake.root, fake)
        whole = any("made whole" in line for line in told)
        assert told or not left, at
        assert undo_left(state, fake.root, fake) == []
        if whole:
            assert set(fake.blocks().values()) == {"online"}
            assert fake.read(fake.root / MEMORY / "auto_online_blocks") == "online"
            fake, state = FakeCxl(tmp_path / f"root{at}", tree), tmp_path / f"state{at}"
        assert fake.footprint() == before
        ends.append("kept" if whole else "undone")
    else:
        raise AssertionError("it never came to its end")
    assert ends == sorted(ends, reverse=True)
    assert {"undone", "kept"} == set(ends)
    assert len(ends) > 20


def test_an_undo_that_is_killed_at_each_step_is_finished_by_the_next(
    fake: FakeCxl, state: Path
) -> None:
    """Where kmem takes no device, all writes are made and all are undone."""
    before, fake.probes = fake.footprint(), False
    with pytest.raises(TierdError, match=r"dax1\.0 has no driver"):
        made(fake, state)
    writes = len(fake.writes)
    assert fake.footprint() == before
    for at in range(writes, 4 * writes):
        with contextlib.suppress(TierdError):
            kill_at(fake, state, at, Request())
        undo_left(state, fake.root, fake)
        assert fake.footprint() == before, at


def test_memory_in_use_is_never_taken_away(fake: FakeCxl, state: Path) -> None:
    """One block stays offline, and another cannot be taken offline."""
    fake_add = fake._add_blocks

    def add_but_one(addresses: range) -> None:
        fake_add(addresses)
        first, second, *_ = fake.blocks()
        fake._put(fake.root / MEMORY / f"memory{first}/state", "offline")
        fake.busy = {second}

    vars(fake)["_add_blocks"] = add_but_one
    with pytest.raises(TierdError, match="did not come as asked for") as caught:
        made(fake, state)
    assert "1 memory blocks of region1 are in use and stay online" in str(caught.value)
    assert "tierctl cxl list tries again" in str(caught.value)
    assert list(fake.blocks().values()).count("online") == 1
    (told,) = undo_left(state, fake.root, fake)
    assert "could not undo" in told
    fake.busy = set()
    (told,) = undo_left(state, fake.root, fake)
    assert told.startswith("region1, whose making was cut short at /sys/bus/cxl/drivers")
    assert fake.blocks() == {}


def test_a_region_of_that_name_by_somebody_else_is_left(fake: FakeCxl, state: Path) -> None:
    kill_at(fake, state, 12, Request())
    window = fake.device("decoder0.0")
    region = fake.device("region1")
    assert region.exists()
    for decoder in region.parent.parent.glob("port*/endpoint*/decoder*.0"):
        if fake.read(decoder / "region"):
            fake.write(region / "target0", "\n")
        fake.write(decoder / "dpa_size", "0")
    fake.write(window / "delete_region", "region1")
    for attribute in ("create_ram_region", "create_pmem_region"):
        fake._put(window / attribute, "region1")
    fake.write(window / "create_ram_region", "region1")
    (told,) = undo_left(state, fake.root, fake)
    assert told == "region1 is not the one that was being made: left as it is"
    assert fake.device("region1").exists()


def test_memory_that_comes_late_finds_the_policy_still(
    fake: FakeCxl, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.is_late = True
    monkeypatch.setattr("time.sleep", lambda _: fake.probe())
    with open_journal(state, fake.root, fake) as journal:
        create(planned(fake), journal, fake, fake.root)
    assert {"online"} == set(fake.blocks().values())
    zones = {p.read_text() for p in (fake.root / MEMORY).glob("memory*/valid_zones")}
    assert "Movable\n" in zones
    assert fake.read(fake.root / MEMORY / "auto_online_blocks") == "online"


def test_memory_that_is_still_coming_is_waited_for_before_kmem_goes(
    fake: FakeCxl, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, fake.is_late = fake.footprint(), True
    monkeypatch.setattr(cxl_regions, "SETTLE_S", 5.0)
    monkeypatch.setattr("time.sleep", lambda _: fake.probe())
    with pytest.raises(TierdError, match="did not come as asked for"):
        made(fake, state)
    assert fake.footprint() == before


def test_another_tool_that_is_faster_is_told(fake: FakeCxl, state: Path) -> None:
    plan = planned(fake)
    fake.write(fake.device("decoder0.0") / "create_ram_region", "region1")
    with open_journal(state, fake.root, fake) as journal:
        with pytest.raises(Conflict, match="another tool has made a region meanwhile"):
            create(plan, journal, fake, fake.root, within_s=0)
        assert journal.changes == {}
    assert fake.device("region1").exists(), "it is the other tool's"


def test_a_region_that_another_tool_has_changed_is_not_committed(
    fake: FakeCxl, state: Path
) -> None:
    before = fake.footprint()
    write = FakeCxl.write

    def meddle(path: Path, value: str) -> None:
        write(fake, path, value)
        if path.name == "target0" and value.strip():
            write(fake, path, "\n")

    vars(fake)["write"] = meddle
    with pytest.raises(Conflict, match="another tool has changed it meanwhile"):
        made(fake, state)
    assert fake.footprint() == before


def test_a_hypervisor_that_keeps_caches_from_being_flushed_is_named(
    fake: FakeCxl, state: Path
) -> None:
    before, fake.flushes = fake.footprint(), False
    (fake.root / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu hypervisor lm\n")
    with pytest.raises(UnsupportedKernel, match="under a hypervisor") as caught:
        made(fake, state)
    assert "hypervisor=off" in (caught.value.hint or "")
    (fake.root / "proc/cpuinfo").unlink()
    assert fake.footprint() == before
    with pytest.raises(UnsupportedKernel, match="could not synchronize the CPUs' caches"):
        made(fake, state)


def test_an_interrupt_undoes_too(fake: FakeCxl, state: Path) -> None:
    before = fake.footprint()
    write = FakeCxl.write

    def interrupt(path: Path, value: str) -> None:
        if path.name == "commit" and value == "1":
            raise KeyboardInterrupt
        write(fake, path, value)

    vars(fake)["write"] = interrupt
    with pytest.raises(TierdError, match="interrupted\nregion1, whose making was cut short at"):
        made(fake, state)
    assert fake.footprint() == before


def test_after_a_reboot_nothing_is_left_to_undo(fake: FakeCxl, state: Path) -> None:
    kill_at(fake, state, 12, Request())
    fake.reboot("boot-2")
    assert undo_left(state, fake.root, fake) == []


def test_a_second_one_is_kept_out(fake: FakeCxl, state: Path) -> None:
    with (
        open_journal(state, fake.root, fake),
        pytest.raises(Conflict, match="another tierctl is making or draining a CXL region"),
    ):
        made(fake, state)


def test_a_running_daemon_is_not_in_the_way(fake: FakeCxl, state: Path) -> None:
    with Journal(state, root=fake.root, files=fake):
        made(fake, state)
    assert len(fake.blocks()) == 4


def test_a_failed_write_of_the_journal_makes_nothing(
    fake: FakeCxl, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_module, "_write_synced", refuse)
    with pytest.raises(TierdError, match="changes nothing that it cannot record"):
        made(fake, state)
    assert fake.writes == []


def test_regions_that_are_gone_need_nothing(fake: FakeCxl) -> None:
    regions = Regions(fake.root, fake)
    assert regions.folder("region9") is None
    assert regions.missing("region9", "offline") == "region9 is gone"
    regions.unplug("region9")
    assert fake.writes == []


# The command


@pytest.fixture
def run(fake: FakeCxl, state: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings = state.parent / "tierd.toml"
    settings.write_text(f'[daemon]\nstate_dir = "{state}"\n')
    monkeypatch.setattr(commands, "KernelFiles", lambda: fake)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def invoke(*words: str) -> Result:
        options = ["--root", str(fake.root), "--config", str(settings)]
        return CliRunner().invoke(main, ["cxl", *words, *options], prog_name="tierctl")

    return invoke


def echoes(output: str) -> list[tuple[str, str]]:
    return [(path, value) for value, path in re.findall(r"^echo (\S+) > (\S+)", output, re.M)]


def test_a_dry_run_prints_every_write_and_makes_none(run: Any, fake: FakeCxl, state: Path) -> None:
    before = fake.footprint()
    shown = run("create", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert (fake.writes, fake.footprint()) == ([], before)
    assert not state.exists()
    made = run("create")
    assert made.exit_code == 0, made.output
    told = [(path.removeprefix(f"{fake.root}/"), value) for path, value in echoes(shown.output)]
    assert told == fake.writes
    assert echoes(made.output) == echoes(shown.output)
    assert "region1: ram, 512 MiB, 1 way of 256 B, committed, driver cxl_region" in made.output
    assert "online, Movable" in made.output


def test_the_json_of_a_creation_has_the_documented_keys(run: Any) -> None:
    text = DOCUMENT.read_text().split("## JSON of create")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| `([^`]+)` \|", text, re.M))
    for options in (["--dry-run"], []):
        result = run("create", "--json", *options)
        assert result.exit_code == 0, result.output
        assert keys(json.loads(result.output)) == documented
        assert json.loads(result.output)["dry_run"] is bool(options)


@pytest.mark.parametrize("command", ["list", "create"])
def test_what_a_killed_one_has_left_is_undone_and_told(
    run: Any, fake: FakeCxl, state: Path, command: str
) -> None:
    kill_at(fake, state, 12, Request())
    result = run(command)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("undone: region1, whose making was cut short at /sys/bus/cxl")
    assert bool(fake.blocks()) is (command == "create")


def test_a_list_beside_a_create_undoes_nothing(run: Any, fake: FakeCxl, state: Path) -> None:
    with open_journal(state, fake.root, fake):
        result = run("list")
    assert result.exit_code == 0
    assert result.output.startswith(
        "undone: nothing: another tierctl is making or draining a CXL region"
    )


def test_only_root_makes_regions(run: Any, fake: FakeCxl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = run("create")
    assert result.exit_code == 1
    assert "tierctl cxl create needs root" in result.stderr
    assert "sudo" in result.stderr
    assert run("create", "--dry-run").exit_code == 0
    assert run("list").exit_code == 0
    assert fake.writes == []


def test_each_line_of_a_refusal_is_told(run: Any, fake: FakeCxl) -> None:
    fake.refused = {f"{CXL}/drivers/cxl_region/bind": errno.ENODEV}
    result = run("create")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0].startswith(
        "tierctl: error: /sys/bus/cxl/drivers/cxl_region/bind = 'region1': No"
    )
    assert any("was taken apart" in line for line in lines)
    assert lines[-1].startswith("tierctl: hint: see that nothing else")


def test_the_shell_completes_devices(two: FakeCxl, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = ShellComplete(main, {}, "tierctl", "_TIERCTL_COMPLETE")
    monkeypatch.setattr(commands, "read_memdevs", lambda: look(two.root).memdevs)
    found = complete.get_completions(["cxl", "create", "--memdev"], "mem")
    assert [item.value for item in found] == ["mem0", "mem1"]
    assert [item.value for item in complete.get_completions(["cxl"], "")] == [
        "create",
        "drain",
        "list",
        "poison",
        "provision",
        "retire",
    ]
