# SPDX-License-Identifier: Apache-2.0
"""Blocks on a disk: by io_uring, without it, and past failures of the disk."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierd.arena import Arena
from tierd.errors import Conflict, NoRoom, TierdError, TierFailed
from tierd.kernel.uring import OneByOne, Uring
from tierd.tiers import Health, Tier, load
from tierd.tiers import nvme as module
from tierd.tiers.kit import TierContract
from tierd.tiers.memory import dram
from tierd.tiers.nvme import DiskSpace, DiskTier, nvme

ON_DISK = "/var/tmp"  # /tmp may be memory
BLOCK, MIB = 4096, 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=ON_DISK) as folder:
        yield Path(folder)


@pytest.fixture
def without_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(most: int) -> Uring:
        raise PermissionError(errno.EPERM, "io_uring is turned off")

    monkeypatch.setattr(module, "Uring", refuse)


class TestByUring(TierContract):
    def make(self) -> Tier:
        tier = nvme(ON_DISK, MIB)
        assert tier.direct
        return tier

    def test_it_is_by_uring(self) -> None:
        with self.space() as space:
            assert isinstance(space, DiskSpace)
            assert isinstance(space.parts, Uring)


@pytest.mark.usefixtures("without_uring")
class TestOneByOne(TierContract):
    def make(self) -> Tier:
        return nvme(ON_DISK, MIB)

    def test_it_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        with self.space() as space:
            assert isinstance(space, DiskSpace)
            assert isinstance(space.parts, OneByOne)
        assert "no io_uring (io_uring is turned off)" in caplog.text


class TestThroughThePageCache(TierContract):
    block_bytes = 4096

    def make(self) -> Tier:
        return nvme(ON_DISK, MIB, direct=False)


def blocks(count: int, seed: int = 0, size: int = BLOCK) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)


def tier_and_space(folder: Path, slots: int = 64) -> tuple[DiskTier, DiskSpace]:
    tier = nvme(folder, slots * BLOCK)
    return tier, tier.reserve(BLOCK, slots)


def test_memory_that_is_not_aligned_will_do(folder: Path) -> None:
    _, space = tier_and_space(folder)
    slots, data = np.arange(40), blocks(40)
    odd = np.zeros(40 * BLOCK + 1, np.uint8)[1:].reshape(40, BLOCK)

    odd[:] = data
    space.store(slots, odd)
    odd[:] = 0
    space.load(slots, odd)

    np.testing.assert_array_equal(odd, data)
    space.free()


def test_what_a_disk_has_done_is_counted(folder: Path) -> None:
    tier, space = tier_and_space(folder)
    space.store(np.arange(5), blocks(5))
    space.load(np.arange(2), blocks(2))
    assert (tier.written_bytes, tier.read_bytes) == (5 * BLOCK, 2 * BLOCK)
    space.free()


def test_by_its_name_it_is_a_plugin(folder: Path) -> None:
    tier = load("nvme", {"path": str(folder), "capacity_bytes": MIB})
    assert tier.facts.name == "nvme"


def test_a_new_file_has_its_name_until_the_end(folder: Path) -> None:
    file = folder / "blocks"
    space = nvme(file, MIB).reserve(BLOCK, 4)
    assert file.stat().st_size == 4 * BLOCK
    assert file.stat().st_mode & 0o077 == 0
    space.free()
    assert not file.exists()


def test_what_is_there_is_not_overwritten(folder: Path) -> None:
    file = folder / "mine"
    file.write_bytes(b"precious")
    with pytest.raises(TierdError, match="is there already, and what is in it would be lost"):
        nvme(file, MIB)
    assert file.read_bytes() == b"precious"


def test_a_file_that_came_meanwhile_is_not_overwritten(folder: Path) -> None:
    file = folder / "mine"
    tier = nvme(file, MIB)
    file.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        tier.reserve(BLOCK, 4)
    assert file.read_bytes() == b"precious"


def test_a_file_to_overwrite_is_for_one_arena_and_stays(folder: Path) -> None:
    file = folder / "blocks"
    file.touch()
    tier = nvme(file, MIB, overwrite=True)
    space = tier.reserve(BLOCK, 4)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(Conflict, match="is in use"):
        tier.reserve(BLOCK, 4)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    space.free()
    tier.reserve(BLOCK, 4).free()
    assert file.exists()


def test_a_new_file_is_not_overwritten_while_it_is_used(folder: Path) -> None:
    file = folder / "blocks"
    space = nvme(file, MIB, overwrite=True).reserve(BLOCK, 4)
    with pytest.raises(Conflict, match="is in use"):
        nvme(file, MIB, overwrite=True).reserve(BLOCK, 4)
    assert file.exists()
    space.free()
    assert not file.exists()


def test_the_room_that_a_file_has_is_not_asked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "blocks"
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, MIB)
    full = list(os.statvfs(folder))
    full[4] = 0  # f_bavail
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(full))
    nvme(file, MIB, overwrite=True).reserve(BLOCK, MIB // BLOCK).free()
    with pytest.raises(NoRoom, match="0 bytes free"):
        nvme(file, 2 * MIB, overwrite=True).reserve(BLOCK, 2 * MIB // BLOCK)


def test_each_block_of_a_batch_is_where_direct_io_takes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "direct_alignment", lambda fd: (4096, 512))
    assert nvme(folder, MIB).facts.granule_bytes == 4096


@pytest.mark.parametrize(
    ("path", "told"),
    [("/nowhere/at/all", "No such file"), ("/proc/version", "there already"), ("/proc", "proc")],
)
def test_a_place_that_cannot_be_is_named(path: str, told: str) -> None:
    with pytest.raises(TierdError, match=told) as raised:
        nvme(path, MIB)
    assert path in str(raised.value)


def test_a_file_has_no_capacity_of_its_own(folder: Path) -> None:
    with pytest.raises(TierdError, match="is no device, so it has no capacity"):
        nvme(folder)


def test_more_than_the_disk_has_is_not_tried(folder: Path) -> None:
    tier = nvme(folder, 1 << 60)
    with pytest.raises(NoRoom, match="bytes free"):
        tier.reserve(BLOCK, (1 << 60) // BLOCK)
    assert list(folder.iterdir()) == []


def test_a_quota_is_met_when_room_is_taken(folder: Path) -> None:
    tier = nvme(folder / "blocks", MIB)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, before[1]))
    try:
        with pytest.raises(NoRoom, match="File too large"):
            tier.reserve(BLOCK, MIB // BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(folder.iterdir()) == []


def test_a_disk_that_gives_less_has_failed(folder: Path) -> None:
    tier, space = tier_and_space(folder)
    space.store(np.arange(8), blocks(8))
    os.ftruncate(space.fd, 6 * BLOCK)
    with pytest.raises(OSError, match="2 blocks were not read: 0 bytes of 4096"):
        space.load(np.arange(8), blocks(8))
    assert tier.health() is Health.FAILED
    space.free()


@pytest.mark.parametrize("by_uring", [True, False])
def test_an_error_of_the_disk_is_named(
    folder: Path, by_uring: bool, request: pytest.FixtureRequest
) -> None:
    if not by_uring:
        request.getfixturevalue("without_uring")
    tier, space = tier_and_space(folder)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, space.fd)
    os.close(null)
    with pytest.raises(OSError, match="3 blocks were not written: Bad file descriptor"):
        space.store(np.arange(3), blocks(3))
    assert tier.health() is Health.FAILED
    space.free()


def test_an_arena_fences_a_disk_that_fails(folder: Path) -> None:
    tier = nvme(folder / "blocks", 64 * BLOCK)
    with Arena(BLOCK, [dram(16 * BLOCK), tier], checksums=True) as arena:
        data = blocks(40)
        arena.write(np.arange(40), data)
        arena.demote(np.arange(40))
        arena.wait(np.arange(40))
        gone = np.flatnonzero(arena.places(np.arange(40)) == 1)
        os.truncate(folder / "blocks", 0)

        with pytest.raises(TierFailed, match="were not read"):
            arena.read(gone)

        assert "were not read" in arena.fenced["nvme"]
        stayed = np.setdiff1d(np.arange(40), gone)
        np.testing.assert_array_equal(arena.read(stayed), data[stayed])


HANGS = f"""
import threading
import numpy as np
from tierd.arena import Arena
from tierd.kernel.uring import OneByOne
from tierd.tiers import nvme as module
from tierd.tiers.memory import dram

class Hangs(OneByOne):
    def write(self, fd, offsets, data):
        threading.Event().wait()

module.best_parts = Hangs
arena = Arena({BLOCK}, [dram({8 * BLOCK}), module.nvme({ON_DISK!r}, {MIB})], deadline_s=0.1)
arena.write(np.arange(4), np.ones((4, {BLOCK}), np.uint8))
arena.demote(np.arange(4))
arena.wait(np.arange(4))
print(arena.fenced["nvme"])
assert (arena.read(np.arange(4)) == 1).all()
"""


def test_a_disk_that_hangs_keeps_no_program_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no answer in 0.1 s" in done.stdout


@given(writes=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 255)), min_size=1, max_size=80))
def test_blocks_keep_their_contents_between_memory_and_disk(writes: list[tuple[int, int]]) -> None:
    """Memory has room for a quarter of the blocks; whatever is written last is read."""
    with Arena(BLOCK, [dram(16 * BLOCK), nvme(ON_DISK, 64 * BLOCK)], checksums=True) as arena:
        last = {}
        for block, value in writes:
            arena.write([block], np.full((1, BLOCK), value, np.uint8))
            last[block] = value
        ids = np.array(sorted(last))
        arena.demote(ids[::2])
        found = arena.read(ids)
    expected = np.array([last[block] for block in ids.tolist()], np.uint8)
    assert (found == expected[:, None]).all()
