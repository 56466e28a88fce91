# SPDX-License-Identifier: Apache-2.0
"""What of the guests can be tested without booting one."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guests import accelerator, archive, cache, kernels, topology
from guests.archive import Apt, Suite
from guests.errors import ArchiveError, EmulatorFault, GuestLost, GuestPanic
from guests.guest import why_lost
from guests.kernels import Kernel
from guests.topology import Emulator, Kind, Topology
from hypothesis import given
from hypothesis import strategies as st

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TIERD_CACHE", str(folder))
    return folder


def pairs(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """QEMU's options and their values, which always come in pairs here."""
    assert len(arguments) % 2 == 0
    return zip(arguments[::2], arguments[1::2], strict=True)


def values(arguments: list[str], option: str) -> list[str]:
    return [value for name, value in pairs(arguments) if name == option]


def test_one_cxl_device() -> None:
    arguments = topology.cxl(512).arguments()
    assert values(arguments, "-machine") == ["q35,cxl=on,hmat=on"]
    assert values(arguments, "-cpu") == ["max,hypervisor=off"]
    assert values(arguments, "-object") == ["memory-backend-ram,id=vmem0,size=512M"]
    assert values(arguments, "-M") == ["cxl-fmw.0.targets.0=cxl.0,cxl-fmw.0.size=4G"]
    assert [device.split(",")[0] for device in values(arguments, "-device")] == [
        "pxb-cxl",
        "cxl-rp",
        "cxl-type3",
    ]


def test_room_for_a_cxl_device() -> None:
    with_one, without = topology.cxl(512), topology.cxl(512, plugged=0)
    assert set(with_one.arguments()) - set(without.arguments()) == {
        "-object",
        "memory-backend-ram,id=vmem0,size=512M",
        "cxl-type3,bus=rp0,volatile-memdev=vmem0,id=mem0",
    }
    assert without.provisioning() == ["cxl", "--devices=0"]


def test_two_cxl_devices_have_a_window_each() -> None:
    (windows,) = values(topology.cxl(256, 512).arguments(), "-M")
    assert "cxl-fmw.0.targets.0=cxl.0" in windows
    assert "cxl-fmw.1.targets.0=cxl.1" in windows


def test_interleaved_cxl_devices_share_a_window() -> None:
    (window,) = values(topology.cxl(256, 256, interleaved=True).arguments(), "-M")
    assert window == "cxl-fmw.0.targets.0=cxl.0,cxl-fmw.0.targets.1=cxl.1,cxl-fmw.0.size=4G"


def test_hmat_tells_the_way_to_each_cxl_device() -> None:
    made = topology.cxl(256, 256, latencies_ns=(100, 500), bandwidths=("10G", "5G"))
    arguments = made.arguments()
    ports = [value for value in values(arguments, "-object") if "generic-port" in value]
    assert ports == [
        "acpi-generic-port,id=gp0,pci-bus=cxl.0,node=1",
        "acpi-generic-port,id=gp1,pci-bus=cxl.1,node=2",
    ]
    told = [value for value in values(arguments, "-numa") if "read-latency" in value]
    assert [re.sub(r"\D+", " ", value).split() for value in told] == [
        ["0", "0", "90"],
        ["0", "1", "100"],
        ["0", "2", "500"],
    ]
    for latencies_ns in ((100,), (100, 200, 300)):
        with pytest.raises(ValueError, match="a latency for each"):
            topology.cxl(256, 256, latencies_ns=latencies_ns)
    told = [value.split("=")[-1] for value in values(arguments, "-numa") if "read-band" in value]
    assert told == ["40G", "10G", "5G"]
    with pytest.raises(ValueError, match="a bandwidth for each"):
        topology.cxl(256, 256, latencies_ns=(100, 500), bandwidths=("10G",))


def test_a_slow_nodes_kernel_clears_pages_by_words_where_it_is_to() -> None:
    for by_words, cpu in ((False, "max"), (True, "max,-erms,-fsrm")):
        assert values(topology.slow_node(by_words=by_words).arguments(), "-cpu") == [cpu]
    with pytest.raises(ValueError, match="a cxl guest's kernel clears pages by bytes"):
        dataclasses.replace(topology.cxl(256), by_words=True)


def test_time_goes_by_instructions_where_it_is_to_and_none_is_there_for_real() -> None:
    counted = topology.slow_node(counted=True)
    assert counted.name != topology.slow_node().name
    arguments = accelerator.arguments(kvm=False, counted=counted.counted)
    assert values(arguments, "-icount") == ["shift=2,sleep=on"]
    assert values(arguments, "-accel") == ["tcg,thread=single"]  # QEMU counts with no other
    assert accelerator.arguments(kvm=True, counted=True) == ["-accel", "kvm"]
    assert accelerator.arguments(kvm=False) == ["-accel", "tcg,thread=multi"]


def test_slow_node_is_an_nvdimm_of_node_1() -> None:
    arguments = topology.slow_node(memory_mib=1024, slow_mib=768).arguments()
    assert values(arguments, "-object") == [
        "memory-backend-ram,id=fast,size=1024M",
        "memory-backend-ram,id=slow,size=768M",
    ]
    assert values(arguments, "-device") == ["nvdimm,id=nvdimm0,memdev=slow,node=1"]


def test_memory_of_numa_nodes_adds_up() -> None:
    arguments = topology.numa(memory_mib=1024, slow_mib=512).arguments()
    assert values(arguments, "-m") == ["1536M"]
    assert values(arguments, "-numa") == [
        "node,nodeid=0,cpus=0-1,memdev=fast",
        "node,nodeid=1,memdev=slow",
    ]


@pytest.mark.parametrize(
    ("kind", "slow_mib", "interleaved"),
    [
        (Kind.CXL, (), False),
        (Kind.CXL, (512, 512, 512), False),
        (Kind.CXL, (300,), False),
        (Kind.CXL, (256,), True),
        (Kind.CXL, (256, 512), True),
        (Kind.SLOW_NODE, (512, 512), False),
        (Kind.SLOW_NODE, (512,), True),
        (Kind.NUMA, (), False),
        (Kind.FLAT, (512,), False),
    ],
)
def test_impossible_topology(kind: Kind, slow_mib: tuple[int, ...], *, interleaved: bool) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Topology(kind=kind, slow_mib=slow_mib, interleaved=interleaved)


TOPOLOGIES = st.one_of(
    st.builds(
        Topology,
        kind=st.just(Kind.CXL),
        memory_mib=st.sampled_from([1024, 2048]),
        slow_mib=st.sampled_from([(256,), (512,), (256, 512), (512, 256)]),
        emulator=st.sampled_from(Emulator),
        cpus=st.sampled_from([1, 2, 4]),
        numa_balancing=st.booleans(),
    ),
    st.builds(
        Topology,
        kind=st.sampled_from([Kind.NUMA, Kind.SLOW_NODE]),
        memory_mib=st.sampled_from([512, 1024]),
        slow_mib=st.sampled_from([(512,), (1024,)]),
    ),
    st.builds(topology.flat),
)


@pytest.mark.parametrize(
    "change",
    [
        {"memory_mib": 1024},
        {"slow_mib": (256, 512)},
        {"interleaved": True},
        {"plugged": 1},
        {"emulator": Emulator.FAST},
        {"cpus": 4},
        {"numa_balancing": True},
        {"latencies_ns": (100, 500)},
        {"latencies_ns": (100, 500), "bandwidths": ("10G", "5G")},
    ],
)
def test_names_tell_topologies_apart(change: dict[str, Any]) -> None:
    plain = topology.cxl(256, 256)
    assert dataclasses.replace(plain, **change).name != plain.name


@given(TOPOLOGIES)
def test_devices_have_ids_of_their_own(given_topology: Topology) -> None:
    named = [
        part
        for _, value in pairs(given_topology.arguments())
        for part in value.split(",")
        if part.startswith(("id=", "bus_nr=", "nodeid="))
    ]
    assert len(named) == len(set(named))


def build(folder: Path) -> str:
    (folder / "file").write_text("content")
    return "0123abcd"


def test_tree_is_built_once(private_cache: Path) -> None:
    first = cache.tree("name", build)
    assert first == private_cache / "trees" / "0123abcd"
    assert (first / "file").read_text() == "content"
    assert cache.tree("name", lambda _: pytest.fail("built again")) == first


def test_same_content_is_kept_once() -> None:
    assert cache.tree("name", build) == cache.tree("other", build)


def test_build_that_fails_leaves_nothing(private_cache: Path) -> None:
    def fail(folder: Path) -> str:
        (folder / "half").touch()
        raise ArchiveError("no network")

    with pytest.raises(ArchiveError):
        cache.tree("name", fail)
    assert list((private_cache / "trees").iterdir()) == []
    assert cache.tree("name", build).is_dir()


def test_tree_that_was_deleted_is_built_again() -> None:
    tree = cache.tree("name", build)
    (tree / "file").unlink()
    tree.rmdir()
    assert (cache.tree("name", build) / "file").exists()


BUILDER = """
import sys
from guests import cache

def build(folder):
    print("building", flush=True)
    sys.stdin.readline()
    return "digest"

print("going", flush=True)
cache.tree("name", build)
print("done")
"""


def start_builder(cache_folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER],
        env={"PYTHONPATH": str(REPOSITORY / "tests/vm"), "TIERD_CACHE": str(cache_folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_want_one_tree_build_it_once(private_cache: Path) -> None:
    first = start_builder(private_cache)
    assert first.stdout is not None
    assert [first.stdout.readline() for _ in range(2)] == ["going\n", "building\n"]
    second = start_builder(private_cache)
    assert second.stdout is not None
    assert second.stdout.readline() == "going\n"
    assert first.communicate("go on\n")[0] == "done\n"
    assert second.communicate("go on\n")[0] == "done\n"


def test_newest_release_is_by_number() -> None:
    class Answer(Apt):
        def search(self, pattern: str) -> list[str]:
            del pattern
            return [f"linux-image-7.2.{n}+deb14-amd64" for n in (9, 13, 1)]

    apt = Answer(Suite.SID, Path())
    assert kernels.newest_release(apt, Kernel.LATEST) == "7.2.13+deb14-amd64"


def test_series_that_the_archive_dropped() -> None:
    class Nothing(Apt):
        def search(self, pattern: str) -> list[str]:
            del pattern
            return []

    with pytest.raises(ArchiveError, match=r"no kernel 6\.12"):
        kernels.newest_release(Nothing(Suite.TRIXIE, Path()), Kernel.LTS)


def test_no_archive_without_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ArchiveError, match="apt-get"), archive.suite(Suite.SID):
        pass


def test_kvm_is_tried_once_a_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "DEVICE", tmp_path)
    monkeypatch.setattr(accelerator, "BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("first\n")
    assert accelerator.kvm_works(lambda: True)
    assert accelerator.kvm_works(lambda: pytest.fail("tried again"))
    (tmp_path / "boot_id").write_text("second\n")
    assert not accelerator.kvm_works(lambda: False)
    assert not accelerator.kvm_works(lambda: pytest.fail("tried again"))


def test_no_kvm_without_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "DEVICE", tmp_path / "kvm")
    assert not accelerator.kvm_works(lambda: pytest.fail("tried"))


@pytest.mark.parametrize(
    "start",
    [
        "[   15.9] Kernel panic - not syncing: sysrq triggered crash",
        "[   15.9] Oops: int3: 0000 [#1] SMP NOPTI",
        "[   15.9] BUG: kernel NULL pointer dereference, address: 0000000000000010",
    ],
)
def test_panic_is_shown_from_its_start(tmp_path: Path, start: str) -> None:
    """The panic that an oops ends in does not hide its cause."""
    console = tmp_path / "console"
    end = "Kernel panic - not syncing: Fatal exception in interrupt\n"
    console.write_text("boot\n" * 100 + f"{start}\n" + "trace\n" * 30 + end + "trace\n" * 100)
    shown = str(GuestPanic("it panicked", console)).splitlines()
    assert shown[1] == start
    assert shown[32] == end.strip()
    assert len(shown) == 62


@pytest.mark.parametrize(("content", "shown"), [("a\n" * 70, "a\n" * 60), ("", "(nothing)\n")])
def test_end_of_a_console_is_shown(tmp_path: Path, content: str, shown: str) -> None:
    console = tmp_path / "console"
    console.write_text(content)
    assert str(GuestLost("gone", console)).startswith(f"gone; its console says:\n{shown}(all of")


@pytest.mark.parametrize(
    ("oops", "kvm", "kind"),
    [
        ("Oops: int3: 0000 [#1] SMP NOPTI", False, EmulatorFault),
        ("Oops: int3: 0000 [#1] SMP NOPTI", True, GuestPanic),
        ("Oops: general protection fault: 0000 [#1] SMP NOPTI", False, GuestPanic),
    ],
)
def test_code_that_was_replaced_is_the_emulators_fault(
    tmp_path: Path, oops: str, kvm: bool, kind: type[GuestPanic]
) -> None:
    console = tmp_path / "console"
    end = "Kernel panic - not syncing: Fatal exception in interrupt"
    console.write_text(f"boot\n[   85.7] {oops}\n[   85.8] {end}\n")
    assert type(why_lost("flat", 0, console, kvm=kvm)) is kind
    console.write_text("boot\n")
    assert type(why_lost("flat", 1, console, kvm=kvm)) is GuestLost


NO_GUESTS = """
from contextlib import contextmanager
from types import SimpleNamespace

from guests import boot

@contextmanager
def nothing(*machine):
    facts = SimpleNamespace(up_after_s=1)
    yield SimpleNamespace(ping=lambda: None, leftovers=lambda: [], facts=facts)

boot.boot = nothing
"""

LOST = """
from pathlib import Path

import pytest
from guests.errors import EmulatorFault, GuestPanic
from guests.topology import flat

pytestmark = pytest.mark.guest(flat())
ENDS = {"once": [EmulatorFault], "twice": [EmulatorFault, EmulatorFault], "panic": [GuestPanic]}

@pytest.mark.parametrize("how", ENDS)
def test_that_loses_its_guest(guest, how):
    if ENDS[how]:
        raise ENDS[how].pop()("it ended", Path("/dev/null"))

FOUND_TWICE = [EmulatorFault, EmulatorFault]

def asks_it_again():
    yield
    if FOUND_TWICE:
        raise FOUND_TWICE.pop()("it ended", Path("/dev/null"))

@pytest.fixture
def before(guest):
    yield from asks_it_again()

@pytest.fixture
def beside(guest):
    yield from asks_it_again()

def test_whose_fixtures_find_that_too(guest, before, beside):
    if FOUND_TWICE:
        raise EmulatorFault("it ended", Path("/dev/null"))
"""


def test_only_what_the_emulator_broke_runs_again(tmp_path: Path) -> None:
    folder = tmp_path / "vm"
    folder.mkdir()
    for path in ("conftest.py", "vm/conftest.py"):
        (tmp_path / path).symlink_to(REPOSITORY / "tests" / path)
    (tmp_path / "no_guests.py").write_text(NO_GUESTS)
    (folder / "test_lost.py").write_text(LOST)
    places = (tmp_path, REPOSITORY, REPOSITORY / "scripts", REPOSITORY / "tests/vm")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no_guests", folder],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(map(str, places))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search("^2 failed, 2 passed.* 4 rerun in ", done.stdout, re.MULTILINE), done.stdout


SKIPS = """
import pytest

def test_that_skips():
    pytest.skip("no such hardware")

@pytest.mark.xfail(reason="known")
def test_that_is_known_to_fail():
    assert False
"""


@pytest.mark.parametrize(("no_skip", "outcome"), [("1", "1 failed"), ("", "1 skipped")])
def test_skips_can_be_refused(tmp_path: Path, no_skip: str, outcome: str) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "conftest.py").symlink_to(REPOSITORY / "tests/conftest.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path],
        cwd=tmp_path,
        env={"TIERD_NO_SKIP": no_skip},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{outcome}, 1 xfailed" in done.stdout
    assert "no such hardware" in done.stdout or not no_skip
