# SPDX-License-Identifier: Apache-2.0
"""A block of memory that has lost data goes out of use; and the commands for that."""

import errno
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.unit import trees
from tests.unit.test_cxl_errors import BLOCK_BYTES, FIRST_BLOCK, REGION_START, at
from tests.unit.test_frames import FREE, POISONED, set_flags
from tierd.cli import cxl_errors
from tierd.cli.control import main
from tierd.errors import Conflict, NotFound
from tierd.kernel import cxl_events, frames
from tierd.kernel.blocks import read_block_bytes
from tierd.kernel.cxl import read_memdevs, read_regions
from tierd.kernel.cxl_events import CxlEvent
from tierd.kernel.frames import Frames
from tierd.kernel.tunable import KernelFiles
from tierd.model import PAGE_BYTES, CxlRegion
from tierd.provision import retire as retiring
from tierd.provision.retire import GIVE_UP, bad_frames, frames_of, plan, retire, state_of

FRAME = REGION_START // PAGE_BYTES
USED = 1 << 5
FILES = KernelFiles()


class Writes(KernelFiles):
    """Keeps what is written, and refuses what ends with one of these."""

    def __init__(self, **refused: int) -> None:
        self.refused = refused
        self.made: list[tuple[str, str]] = []

    def write(self, path: Path, value: str) -> None:
        if path.name in self.refused:
            raise OSError(self.refused[path.name], os.strerror(self.refused[path.name]), str(path))
        self.made.append((path.name, value))


def pages(*numbers: int) -> Frames:
    return frames.join(range(number, number + 1) for number in numbers)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = trees.unpack("cxl-7.2", tmp_path / "root")
    (root / GIVE_UP).touch()
    (root / "proc").mkdir(exist_ok=True)
    set_flags(root, {FRAME: FREE, FRAME + 1: USED, FRAME + 2: POISONED})
    return root


def test_free_pages_are_given_up_and_the_block_goes_offline(root: Path) -> None:
    files = Writes()
    wanted = plan(FIRST_BLOCK, pages(FRAME, FRAME + 2), FILES, root)
    retire(wanted, files, root, force=False)
    assert files.made == [("hard_offline_page", f"{REGION_START:#x}"), ("state", "offline")]


def test_a_page_in_use_is_given_up_only_when_told(root: Path) -> None:
    files = Writes()
    wanted = plan(FIRST_BLOCK, pages(FRAME, FRAME + 1), FILES, root)
    assert wanted.in_use == (FRAME + 1,)
    with pytest.raises(
        Conflict, match="1 poisoned pages of memory block 210 are in use"
    ) as refused:
        retire(wanted, files, root, force=False)
    assert files.made == []
    assert "--give-up" in (refused.value.hint or "")
    retire(wanted, files, root, force=True)
    assert len(files.made) == 3


@pytest.mark.parametrize("name", ["state", "hard_offline_page"])
def test_what_the_kernel_refuses_is_told(root: Path, name: str) -> None:
    wanted = plan(FIRST_BLOCK, pages(FRAME), FILES, root)
    with pytest.raises(Conflict, match=f"memory block 210 stays in use: {name}: .*busy"):
        retire(wanted, Writes(**{name: errno.EBUSY}), root, force=False)


def test_what_is_offline_stays_so(root: Path) -> None:
    (root / state_of(FIRST_BLOCK)).write_text("offline\n")
    files = Writes()
    retire(plan(FIRST_BLOCK, pages(FRAME + 1), FILES, root), files, root, force=False)
    assert files.made == []


def test_there_is_no_such_block(root: Path) -> None:
    with pytest.raises(NotFound, match="no memory block 9999"):
        plan(9999, pages(), FILES, root)


def region(ways: int) -> CxlRegion:
    return CxlRegion(
        name="region0",
        start=REGION_START,
        size_bytes=4 * BLOCK_BYTES,
        mode="ram",
        interleave_ways=ways,
        interleave_granularity_bytes=256,
        memdevs=("mem0",),
        committed=True,
    )


@pytest.mark.parametrize(("ways", "count"), [(1, 2), (2, 4)])
def test_what_is_interleaved_may_be_in_more_pages(ways: int, count: int) -> None:
    block = frames_of(FIRST_BLOCK, BLOCK_BYTES)
    bad = bad_frames(block, [at(0, size_bytes=2 * PAGE_BYTES)], [region(ways)])
    assert frames.parts_of(bad) == [range(FRAME, FRAME + count)]


def test_what_is_lost_in_the_next_block_is_not_of_this_one() -> None:
    block = frames_of(FIRST_BLOCK, BLOCK_BYTES)
    edge = at(BLOCK_BYTES - 64, size_bytes=1 << 40)
    bad = bad_frames(block, [edge, at(BLOCK_BYTES)], [region(1)])
    assert frames.parts_of(bad) == [block[-1:]]


# Commands


class Tierctl:
    """tierctl cxl as root, on the tree; `lost` is what mem0 is to answer."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: list[CxlEvent] = []
        for name, real in (
            ("read_memdevs", read_memdevs),
            ("read_regions", read_regions),
            ("read_block_bytes", read_block_bytes),
        ):
            monkeypatch.setattr(cxl_errors, name, partial(real, root))
        monkeypatch.setattr(retiring, "plan", partial(plan, root=root))
        monkeypatch.setattr(retiring, "retire", partial(retire, root=root))
        monkeypatch.setattr(cxl_events, "read_poison", self.read_poison)
        monkeypatch.setattr("os.geteuid", lambda: 0)

    def read_poison(self, memdevs: Sequence[str]) -> dict[str, list[CxlEvent]]:
        return {name: [event for event in self.lost if event.device == name] for name in memdevs}

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(main, ["cxl", *words])


@pytest.fixture
def tierctl(root: Path, monkeypatch: pytest.MonkeyPatch) -> Tierctl:
    return Tierctl(root, monkeypatch)


def test_poison_lists_places(tierctl: Tierctl) -> None:
    assert tierctl("poison").output == "mem0: no poison\n"
    tierctl.lost = [at(0x1000040)]
    assert tierctl("poison").output == (
        "mem0: 64 bytes at 0x1000040, in region0 at 0x691000040, memory block 210\n"
    )
    (place,) = json.loads(tierctl("poison", "mem0", "--json").output)["poison"]["mem0"]
    assert (place["dpa"], place["start"], place["block"]) == (0x1000040, 0x691000040, 210)
    assert "no CXL device mem7" in tierctl("poison", "mem7").output


def test_retire_shows_each_write(tierctl: Tierctl, root: Path) -> None:
    tierctl.lost = [at(0)]
    assert tierctl("retire", "210", "--dry-run").output.splitlines() == [
        "echo 0x690000000 > /sys/devices/system/memory/hard_offline_page",
        "echo offline > /sys/devices/system/memory/memory210/state",
    ]
    assert (root / state_of(210)).read_text() == "online\n"
    told = json.loads(tierctl("retire", "210", "--json").output)
    assert (told["offline"], told["given_up"], told["in_use"]) == (True, 1, 0)
    assert (root / state_of(210)).read_text() == "offline"
    assert tierctl("retire", "210").output == "memory block 210 is offline\n"


def test_retire_refuses_memory_of_no_device(tierctl: Tierctl) -> None:
    done = tierctl("retire", "1")
    assert done.exit_code != 0
    assert "memory block 1 is of no CXL region" in done.output


@pytest.mark.parametrize("words", [("poison",), ("retire", "210")])
def test_others_than_root_are_told_so(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    done = CliRunner().invoke(main, ["cxl", *words])
    assert done.exit_code != 0
    assert "needs root" in done.output
