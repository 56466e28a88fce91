# SPDX-License-Identifier: Apache-2.0
"""What is on a range of physical memory, and whose it is: /proc/kpageflags and its kin.

Follows Documentation/admin-guide/mm/pagemap.rst and include/uapi/linux/kernel-page-flags.h. Each
file has eight bytes a page::

    kpageflags    a bit a property, at the page's frame number: 1 << 10 is a free page's
    kpagecgroup   the inode of the cgroup that a page is charged to, 0 for none
    PID/pagemap   at the page's address / 4096: the frame's number, and 1 << 63 where it is there

They need root, and CONFIG_PROC_PAGE_MONITOR.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.kernel import process
from tierd.kernel.frames import count_in, read_entries
from tierd.model import PAGE_BYTES, Pid

_SLAB, _BUDDY, _MMAP, _ANON = 1 << 7, 1 << 10, 1 << 11, 1 << 12
_LRU, _HEAD, _TAIL, _HUGE = 1 << 5, 1 << 15, 1 << 16, 1 << 17
_POISON, _NOPAGE, _OFFLINE, _TABLE, _RESERVED = 1 << 19, 1 << 20, 1 << 23, 1 << 26, 1 << 32
_FREE = "free"
_KINDS = (
    (_NOPAGE | _BUDDY, _FREE),
    (_SLAB, "slab"),
    (_TABLE, "page tables"),
    (_HUGE, "hugetlb"),
    (_POISON, "poisoned"),
    (_ANON, "anonymous"),
    (_MMAP, "mapped files"),
    (_LRU, "page cache"),
    (_OFFLINE | _RESERVED, "reserved"),
    (0, "the kernel's own"),
)
"""What a page is, by the first of these that has one of its bits. The last also has those that
wait on a CPU's own list to be handed out again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is on a range of memory, in pages: by kind, by process and by cgroup.

    A page that several processes map counts for each. The cgroups are of all kinds of pages.
    """

    kinds: Mapping[str, int]
    processes: Mapping[Pid, int]
    cgroups: Mapping[str, int]


def read_held(addresses: range, root: Path = Path("/")) -> Held | None:
    """Looks at some whole pages of physical memory; None where the kernel does not tell.

    It reads the page tables of all processes: some 10 ms a GiB of theirs.
    """
    frames = range(addresses.start // PAGE_BYTES, addresses.stop // PAGE_BYTES)
    flags = _read_entries(root / "proc/kpageflags", frames)
    if flags is None:
        return None
    kinds = kinds_of(flags)
    names = [name for _, name in _KINDS]
    found, counts = np.unique(kinds, return_counts=True)
    told = {names[kind]: int(count) for kind, count in zip(found, counts, strict=True)}
    told.pop(_FREE, None)
    charged = _read_entries(root / "proc/kpagecgroup", frames)
    return Held(
        kinds=told,
        processes=_processes(frames, root) if told else {},
        cgroups={} if charged is None else _cgroups(charged[kinds != names.index(_FREE)], root),
    )


def kinds_of(flags: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the index in _KINDS of each page; what follows a head is of the head's kind."""
    masks = np.array([mask for mask, _ in _KINDS[:-1]], np.uint64)
    is_kind = (flags[:, None] & masks) != 0
    kinds = np.where(is_kind.any(axis=1), is_kind.argmax(axis=1), len(masks))
    positions = np.arange(len(flags))
    heads = np.maximum.accumulate(np.where(flags & np.uint64(_HEAD), positions, 0))
    is_plain_tail = ((flags & np.uint64(_TAIL)) != 0) & (kinds == len(masks))
    return np.asarray(np.where(is_plain_tail, kinds[heads], kinds), np.int64)


def _read_entries(path: Path, frames: range) -> NDArray[np.uint64] | None:
    """Reads the entries of some pages; None without the file, or without the right to."""
    try:
        return read_entries(path, frames)
    except OSError:
        return None


def _processes(frames: range, root: Path) -> dict[Pid, int]:
    """Returns how many of some frames each process maps, those with the most first."""
    counts = {pid: count_in(pid, frames, root) for pid in process.read_pids(root)}
    found = sorted(counts.items(), key=lambda item: -item[1])
    return {pid: count for pid, count in found if count}


def _cgroups(inodes: NDArray[np.uint64], root: Path) -> dict[str, int]:
    """Returns how many pages are charged to each cgroup, the root's left out, the most first."""
    found, counts = np.unique(inodes[inodes != 0], return_counts=True)
    pages = dict(zip(found.tolist(), counts.tolist(), strict=True))
    told = {name: pages[inode] for name, inode in _folders(root) if inode in pages and name != "/"}
    return dict(sorted(told.items(), key=lambda item: -item[1]))


def _folders(root: Path) -> Iterable[tuple[str, int]]:
    """Yields the cgroups with their inodes."""
    top = root / "sys/fs/cgroup"
    for folder, _, _ in os.walk(top):
        with contextlib.suppress(OSError):
            yield (
                "/" + str(Path(folder).relative_to(top)).removeprefix("."),
                Path(folder).stat().st_ino,
            )
