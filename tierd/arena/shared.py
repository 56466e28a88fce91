# SPDX-License-Identifier: Apache-2.0
"""The memory that an arena shares with the daemon: a sealed memfd, by the layout of docs/arena.md.

The program writes, the daemon reads. Neither relies on what is in it: the program keeps what has to
be right in memory of its own, and the daemon checks all that it takes from here.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.errors import Damaged
from tierd.kernel.arena import MAX_TIERS, NOWHERE
from tierd.model import PAGE_BYTES, TierKind

MAGIC = b"tierdarn"
VERSION = 1

TIER = np.dtype(
    [("name", "S24"), ("kind", "S8"), ("slots", "<u8"), ("latency_ns", "<u4"), ("flags", "<u4")]
)
GIVES_BACK = 1
"""A flag: the memory of free slots can be given back."""

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("tiers", "<u4"),
        ("block_bytes", "<u8"),
        ("blocks", "<u8"),
        ("counts_at", "<u8"),
        ("places_at", "<u8"),
        ("bytes", "<u8"),
        ("reserved", "<u8"),
        ("tier", TIER, (MAX_TIERS,)),
    ]
)
"""At its start. `counts_at` and `places_at` are bytes from there, each the start of a page."""

MOST_BLOCKS = 1 << 30
MOST_BYTES = 1 << 60

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""So that nobody who has it mapped meets its end (SIGBUS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTier:
    """A tier as the daemon is told of it; its place among the others is its rank."""

    name: str
    kind: TierKind
    slots: int
    latency_ns: int | None = None
    gives_back: bool = False


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Shared:
    """An arena's shared memory.

    `counts` are accesses of each block, u4, modulo 2^32; `places` the number of its tier, u1,
    NOWHERE where it was never written.
    """

    def __init__(self, fd: int, memory: mmap.mmap, header: NDArray[np.void]) -> None:
        self.fd = fd
        self.block_bytes = int(header["block_bytes"])
        self.tiers = _tiers(header)
        blocks, counts_at = int(header["blocks"]), int(header["counts_at"])
        self.counts = np.frombuffer(memory, np.uint32, blocks, counts_at)
        self.places = np.frombuffer(memory, np.uint8, blocks, int(header["places_at"]))

    @classmethod
    def create(cls, block_bytes: int, blocks: int, tiers: Sequence[SharedTier]) -> Self:
        """Makes it, for others to map; `fd` is closed with the last reference to it."""
        header = np.zeros((), HEADER)
        header["magic"], header["version"] = MAGIC, VERSION
        header["block_bytes"], header["blocks"] = block_bytes, blocks
        header["counts_at"] = _pages(HEADER.itemsize)
        header["places_at"] = header["counts_at"] + _pages(4 * blocks)
        header["bytes"] = header["places_at"] + _pages(blocks)
        header["tiers"] = len(tiers)
        for rank, tier in enumerate(tiers):
            header["tier"][rank] = _tier(tier)
        fd = os.memfd_create("tierd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, int(header["bytes"]))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, int(header["bytes"]))
        memory[: HEADER.itemsize] = header.tobytes()
        made = cls(fd, memory, header)
        weakref.finalize(made, os.close, fd)
        return made


class Copies:
    """Copies of what another process says is an arena's, taken by pread(2), now and then.

    Nothing of it is mapped: reading its holes takes no memory of ours, and a page of it that is bad
    is an error and no signal. `fd` stays the caller's.

    Raises:
        Damaged: it is none, or not as docs/arena.md has it.
    """

    def __init__(self, fd: int) -> None:
        size_bytes = _sealed_bytes(fd)
        header = np.zeros(1, HEADER)
        _read(fd, header, 0)
        _check(header[0], size_bytes)
        self.block_bytes, self.tiers = int(header[0]["block_bytes"]), _tiers(header[0])
        self._counts_at, self._places_at = (int(header[0][k]) for k in ("counts_at", "places_at"))
        self.blocks = int(header[0]["blocks"])

    def counts(self, fd: int, into: NDArray[np.uint32]) -> None:
        """Copies the counts.

        Raises:
            Damaged: they cannot be read.
        """
        _read(fd, into, self._counts_at)

    def places(self, fd: int, into: NDArray[np.uint8]) -> None:
        """Copies the places; one that cannot be is NOWHERE. Raises as counts()."""
        _read(fd, into, self._places_at)
        into[into >= len(self.tiers)] = NOWHERE


def _read(fd: int, into: NDArray[Any], at: int) -> None:
    buffer = into.view(np.uint8).data
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(fd, [buffer[done:]], at + done)
        except OSError as error:
            raise Damaged(f"an arena's memory cannot be read: {error.strerror}") from error
        if not got:
            raise Damaged("an arena's memory ends too early")
        done += got


def accesses(before: NDArray[np.uint32], now: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Returns what was counted between two copies of the counts, also where they went round."""
    return now - before


def _sealed_bytes(fd: int) -> int:
    """Returns the size of a memfd that cannot change.

    Raises:
        Damaged: it is none, or could, or is too small.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise Damaged(f"not an arena's memory: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise Damaged("an arena's memory is not sealed: its size could change")
    size_bytes = os.fstat(fd).st_size
    if size_bytes < HEADER.itemsize:
        raise Damaged(f"an arena's memory has {size_bytes} bytes, less than its header")
    return size_bytes


def _check(header: NDArray[np.void], size_bytes: int) -> None:
    if header["magic"] != MAGIC:
        raise Damaged("not an arena's memory: it begins otherwise")
    if header["version"] != VERSION:
        raise Damaged(
            f"an arena's memory is of version {header['version']}",
            hint=f"this tierd knows version {VERSION}: use the same release in the program",
        )
    blocks = int(header["blocks"])
    if not 0 < blocks <= MOST_BLOCKS or not 0 < int(header["block_bytes"]) <= 1 << 40:
        raise Damaged("an arena of impossible size")
    if blocks * int(header["block_bytes"]) > MOST_BYTES:
        raise Damaged("an arena of impossible size")
    if not 0 < int(header["tiers"]) <= MAX_TIERS:
        raise Damaged(f"an arena with {header['tiers']} tiers")
    counts_at = _pages(HEADER.itemsize)
    places_at = counts_at + _pages(4 * blocks)
    expected = (counts_at, places_at, places_at + _pages(blocks))
    if expected != tuple(int(header[key]) for key in ("counts_at", "places_at", "bytes")):
        raise Damaged("an arena's arrays are not where they belong")
    if expected[-1] != size_bytes:
        raise Damaged(f"an arena's memory has {size_bytes} bytes of {expected[-1]}")


def _tier(tier: SharedTier) -> tuple[bytes, str, int, int, int]:
    flags = GIVES_BACK if tier.gives_back else 0
    latency_ns = min(tier.latency_ns or 0, np.iinfo(np.uint32).max)
    return tier.name.encode(), tier.kind.value, tier.slots, latency_ns, flags


def _tiers(header: NDArray[np.void]) -> tuple[SharedTier, ...]:
    told = header["tier"][: int(header["tiers"])]
    try:
        return tuple(
            SharedTier(
                name=tier["name"].decode(),
                kind=TierKind(tier["kind"].decode()),
                slots=int(tier["slots"]),
                latency_ns=int(tier["latency_ns"]) or None,
                gives_back=bool(tier["flags"] & GIVES_BACK),
            )
            for tier in told
        )
    except ValueError as error:
        raise Damaged(f"an arena's tiers: {error}") from error
