# SPDX-License-Identifier: Apache-2.0
"""A tier on a disk: blocks in a file or on a device, past the page cache (docs/arena.md).

What is read is what was just written by the same program: nothing outlives it, nothing is synced.
"""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.errors import Conflict, NoRoom, TierdError
from tierd.kernel.arena import BATCH
from tierd.kernel.placed import place
from tierd.kernel.uring import OneByOne, Parts, Uring, direct_alignment
from tierd.model import PAGE_BYTES, TierKind
from tierd.tiers.plugin import Facts, Health

log = logging.getLogger("tierd")

MOST_BLOCK_BYTES = 1 << 30
"""A call moves 2 GiB at most (MAX_RW_COUNT)."""

_LESS = "ask for a smaller capacity_bytes, or make room"


@dataclass(slots=True, kw_only=True)
class DiskTier:
    """Room in a file of its own for each arena, or a file or device that was there before."""

    facts: Facts
    path: Path
    direct: bool
    overwrite: bool
    memory_align: int
    written_bytes: int = 0
    """What was stored since it is there: what wears a disk."""
    read_bytes: int = 0
    failure: str | None = None

    def health(self) -> Health:
        return Health.GOOD if self.failure is None else Health.FAILED

    def reserve(self, block_bytes: int, slots: int) -> "DiskSpace":
        """Takes room, also on the disk.

        Raises:
            NoRoom: the disk has not so much.
            Conflict: another arena has the file, or somebody else the device.
            OSError: the file cannot be made or opened.
        """
        if block_bytes > MOST_BLOCK_BYTES:
            raise TierdError(f"blocks of {block_bytes} bytes: a disk takes {MOST_BLOCK_BYTES}")
        fd, made = _open(self.path, direct=self.direct, overwrite=self.overwrite)
        try:
            _allocate(fd, self.path, block_bytes * slots)
            return DiskSpace(tier=self, fd=fd, made=made, block_bytes=block_bytes, slots=slots)
        except BaseException:
            _close(fd, made)
            raise


@dataclass(slots=True, kw_only=True)
class DiskSpace:
    """Slots, one after the other from the beginning of a file.

    `made` is the file, where it is to be removed.
    """

    tier: DiskTier
    fd: int
    made: Path | None
    block_bytes: int
    slots: int
    memory: None = None
    parts: Parts = field(init=False)
    _aligned: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        self.parts = best_parts()

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        for some in _batches(len(slots)):
            part, bounce = data[some], self._bounce(data[some])
            if bounce is not None:
                bounce[:] = part
            source = part if bounce is None else bounce
            self._expect(self.parts.write(self.fd, self._offsets(slots[some]), source), "written")
        self.tier.written_bytes += len(slots) * self.block_bytes
        return len(slots)

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        for some in _batches(len(slots)):
            part, bounce = into[some], self._bounce(into[some])
            target = part if bounce is None else bounce
            self._expect(self.parts.read(self.fd, self._offsets(slots[some]), target), "read")
            if bounce is not None:
                part[:] = bounce
        self.tier.read_bytes += len(slots) * self.block_bytes
        return len(slots)

    def free(self) -> None:
        self.parts.close()
        _close(self.fd, self.made)

    def _offsets(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return slots * self.block_bytes

    def _bounce(self, data: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Returns memory for these blocks that direct I/O takes, None where theirs is such."""
        if data.flags.c_contiguous and data.ctypes.data % self.tier.memory_align == 0:
            return None
        if self._aligned is None:
            self._aligned = place(BATCH * self.block_bytes).reshape(BATCH, self.block_bytes)
        return self._aligned[: len(data)]

    def _expect(self, done: NDArray[np.int32], what: str) -> None:
        """Checks that each block was moved whole.

        Raises:
            OSError: one was not; the tier has failed then.
        """
        bad = np.flatnonzero(done != self.block_bytes)
        if not len(bad):
            return
        first = int(done[bad[0]])
        number = -first if first < 0 else errno.EIO
        how = os.strerror(number) if first < 0 else f"{first} bytes of {self.block_bytes}"
        self.tier.failure = f"{len(bad)} blocks were not {what}: {how}"
        raise OSError(number, self.tier.failure, str(self.tier.path))


def nvme(
    path: str | Path,
    capacity_bytes: int | None = None,
    *,
    direct: bool = True,
    overwrite: bool = False,
    name: str = "nvme",
) -> DiskTier:
    """Makes a tier on a disk.

    Args:
        path: a folder, for a file without a name; a file that is not there yet, and goes at the
            end; or, with `overwrite`, a file or a block device, whose contents are lost.
        capacity_bytes: by default that of the device.
        direct: past the page cache (O_DIRECT). Without, what is on the tier takes memory, too.
        overwrite: whether what is there may be lost.
        name: of the tier.

    Raises:
        TierdError: there is no such place, it is not to be overwritten, direct I/O is not to be had
            there, or no capacity is given.
    """
    place_ = Path(path)
    try:
        is_device = place_.exists() and stat.S_ISBLK(place_.stat().st_mode)
        if place_.exists() and not place_.is_dir() and not overwrite:
            raise TierdError(
                f"{place_} is there already, and what is in it would be lost",
                hint="name a folder or a new file, or say overwrite=True",
            )
        memory_align, granule = _alignment(place_) if direct else (1, 1)
        if is_device and capacity_bytes is None:
            capacity_bytes = _device_bytes(place_)
    except OSError as error:
        raise TierdError(
            f"{place_}: {error.strerror}",
            hint="it has to be a folder, a new file in one, or a file or block device to overwrite",
        ) from error
    if capacity_bytes is None:
        raise TierdError(
            f"{place_} is no device, so it has no capacity of its own", hint="say capacity_bytes="
        )
    facts = Facts(
        name=name,
        kind=TierKind.SWAP,
        capacity_bytes=capacity_bytes,
        granule_bytes=max(granule, memory_align),  # blocks lie beside each other in memory, too
    )
    return DiskTier(
        facts=facts, path=place_, direct=direct, overwrite=overwrite, memory_align=memory_align
    )


def _batches(count: int) -> Iterator[slice]:
    return (slice(begin, begin + BATCH) for begin in range(0, count, BATCH))


def best_parts() -> Parts:
    """Returns io_uring, or what does the same slower, which is told."""
    try:
        return Uring(BATCH)
    except OSError as error:
        log.warning("no io_uring (%s): blocks go to disk and back one by one", error.strerror)
        return OneByOne()


def _open(path: Path, *, direct: bool, overwrite: bool) -> tuple[int, Path | None]:
    """Opens where blocks are to be; returns the file too where it is to be removed at the end."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    if path.is_dir():
        return os.open(path, flags | os.O_TMPFILE, 0o600), None
    is_new = not (overwrite and path.exists())
    # Of a device the kernel tells whether it is mounted or in use (open(2)). It is not locked, as
    # udev locks it too for a moment, whenever who could write to it has closed it.
    is_device = not is_new and path.is_block_device()
    fd = -1
    try:
        if is_new:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        else:
            fd = os.open(path, flags | (os.O_EXCL if is_device else 0))
        if not is_device:  # also a new one: another arena may be told to overwrite it
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno not in (errno.EBUSY, errno.EWOULDBLOCK):
            raise
        raise Conflict(
            f"{path} is in use", hint="unmount it, or end the other program that has it"
        ) from error
    return fd, path if is_new else None


def _allocate(fd: int, path: Path, size_bytes: int) -> None:
    """Takes the room now, so that none is missing later."""
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        there = os.lseek(fd, 0, os.SEEK_END)
        if there < size_bytes:
            raise NoRoom(f"{path} has {there} bytes, {size_bytes} are asked for", hint=_LESS)
        return
    disk = os.fstatvfs(fd)
    free_bytes = disk.f_bavail * disk.f_frsize
    has_bytes = 512 * os.fstat(fd).st_blocks  # what is overwritten has its room already
    if size_bytes - has_bytes > free_bytes:  # which is not filled to find that out
        raise NoRoom(f"{path} has {free_bytes} bytes free, {size_bytes} are asked for", hint=_LESS)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise NoRoom(
            f"no room for {size_bytes} bytes at {path}: {error.strerror}", hint=_LESS
        ) from error


def _close(fd: int, made: Path | None) -> None:
    if made is not None:  # before it is unlocked: then it may be another's
        made.unlink(missing_ok=True)
    os.close(fd)


def _device_bytes(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def _alignment(path: Path) -> tuple[int, int]:
    """Returns what memory and blocks have to be multiples of there, by trying it.

    Raises:
        TierdError: there is no direct I/O.
        OSError: nothing can be made or opened there.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    where = path if path.exists() else path.parent
    try:
        if where.is_dir():
            fd = os.open(where, flags | os.O_TMPFILE | os.O_DIRECT, 0o600)
        else:
            fd = os.open(where, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise _no_direct(path) from error
    try:
        told = direct_alignment(fd)
    finally:
        os.close(fd)
    if told is None:
        return PAGE_BYTES, PAGE_BYTES
    if 0 in told:
        raise _no_direct(path)
    return told


def _no_direct(path: Path) -> TierdError:
    return TierdError(
        f"{path} is on a file system without direct I/O",
        hint="choose another disk, or say direct=False, which takes memory for the page cache",
    )
