# SPDX-License-Identifier: Apache-2.0
"""Physical pages: which of them a process has, and what the kernel uses them for.

Follows Documentation/admin-guide/mm/pagemap.rst. An entry of /proc/PID/pagemap has the frame's
number in bits 0-54 and in bit 63 whether there is one; /proc/kpageflags has 64 flags a frame. Both
tell frames to CAP_SYS_ADMIN alone, and 0 to others.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.kernel import process
from tierd.kernel.pages import FOLIO, Pagemap
from tierd.kernel.process import RANGE
from tierd.model import PAGE_BYTES, Pid

MOST_ENTRIES = 1 << 17
"""Of a page map, read in one call: some milliseconds."""

MOST_PARTS = 4096
"""Of a set of frames; what has more is taken as larger, the narrowest gaps closed."""

_ENTRY_BYTES = 8
_PRESENT = np.uint64(1 << 63)
_FRAME = np.uint64((1 << 55) - 1)
_GAP_PAGES = 512
"""What is not there is read over up to such a gap, rather than with a system call more."""

_FREE, _MAPPED = 1 << 10, 1 << 11
_HEAD, _TAIL, _HUGETLB, _POISONED = (1 << bit for bit in (15, 16, 17, 19))
"""KPF_BUDDY, KPF_MMAP, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_HUGE, KPF_HWPOISON."""

_MOST_FOLIO_PAGES, _MOST_HUGETLB_PAGES = 512, 1 << 18

Frames = NDArray[np.uint64]
"""A set of frames, as the edges of its parts: first, end, first, end, ..., each larger than the one
before. So a frame is in the set where an odd number of edges is not above it."""

NONE: Frames = np.empty(0, np.uint64)


def join(parts: Iterable[range]) -> Frames:
    """Returns the frames of some ranges, which may overlap, in MOST_PARTS parts at most."""
    pairs = np.array([(part.start, part.stop) for part in parts if part], np.uint64).reshape(-1, 2)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(pairs[:, 1])
    gaps = pairs[1:, 0].astype(np.int64) - ends[:-1].astype(np.int64)
    if np.count_nonzero(gaps > 0) >= MOST_PARTS:
        gaps[np.argsort(gaps)[: len(gaps) - (MOST_PARTS - 1)]] = 0
    cuts = np.flatnonzero(gaps > 0)
    firsts = pairs[np.append(0, cuts + 1)[: len(pairs)], 0]
    return np.column_stack((firsts, ends[np.append(cuts, -1)[: len(firsts)]])).ravel()


def parts_of(frames: Frames) -> list[range]:
    """Returns the ranges that a set is made of, in ascending order."""
    return [range(first, end) for first, end in frames.reshape(-1, 2).tolist()]


def count(frames: Frames) -> int:
    """Returns how many frames a set has."""
    return int(frames[1::2].sum() - frames[::2].sum())


def among(numbers: NDArray[np.uint64], frames: Frames) -> NDArray[np.bool_]:
    """Tells of each number whether it is in the set."""
    return (np.searchsorted(frames, numbers, "right") & 1).astype(np.bool_)


def find_in(
    pid: Pid,
    frames: range,
    but: Frames = NONE,
    *,
    cursor: int = 0,
    most: int = MOST_ENTRIES,
    root: Path = Path("/"),
) -> tuple[NDArray[np.void], int | None]:
    """Lists where a process has mapped some of these frames.

    Args:
        pid: the process.
        frames: numbers of frames in a row.
        but: those of them to leave out.
        cursor: the address from which on.
        most: entries of the page map that are read, or those of one folio; the next call goes on
            where this one ended.
        root: where /proc is.

    Returns:
        The addresses (dtype RANGE) in ascending order, and where to go on, None when all is done,
        as for a process that has exited, or that we may not look into.
    """
    try:
        mapped = process.read_mapped(pid, root)
        if mapped is None:
            return np.empty(0, RANGE), None
        with Pagemap(pid, root) as pagemap:
            folios, following = _folios_of(pagemap, mapped, cursor, most)
            return _of_frames(pagemap.fileno(), folios, frames, but), following
    except (ProcessLookupError, PermissionError):
        return np.empty(0, RANGE), None


def count_in(pid: Pid, frames: range, root: Path = Path("/")) -> int:
    """Returns how many pages of these frames a process has mapped: some 10 ms a GiB of its."""
    found = 0
    cursor: int | None = 0
    while cursor is not None:
        ranges, cursor = find_in(pid, frames, cursor=cursor, root=root)
        found += int((ranges["end"] - ranges["start"]).sum()) // PAGE_BYTES
    return found


def _folios_of(
    pagemap: Pagemap, mapped: NDArray[np.void], cursor: int, most: int
) -> tuple[NDArray[np.void], int | None]:
    """Lists folios from an address on, of so many entries, and tells where to go on."""
    found = [np.empty(0, FOLIO)]
    for start, end in mapped[mapped["end"] > cursor].tolist():
        folios, cursor = pagemap.folios(max(start, cursor), end, most)
        entries = np.cumsum(_entries_of(folios))
        kept = int(np.searchsorted(entries, most)) + 1
        if kept < len(folios):
            folios, cursor = folios[:kept], int(folios["addr"][kept])
        found.append(folios)
        most -= int(entries[len(folios) - 1]) if len(folios) else 0
        if cursor < end or most <= 0:
            return np.concatenate(found), cursor
    return np.concatenate(found), None


def _entries_of(folios: NDArray[np.void]) -> NDArray[np.int64]:
    """Returns how many entries of the page map are read for each, with a gap that follows."""
    pages = folios["pages"].astype(np.int64)
    pages[:-1] = np.minimum(
        np.diff(folios["addr"]).astype(np.int64) // PAGE_BYTES, pages[:-1] + _GAP_PAGES
    )
    return pages


def _of_frames(
    pagemap: int, folios: NDArray[np.void], frames: range, but: Frames
) -> NDArray[np.void]:
    """Returns the addresses whose frames are wanted (dtype RANGE)."""
    found = [np.empty(0, RANGE)]
    for stretch in _stretches(folios):
        held = _read(pagemap, stretch)
        hit = (held >= frames.start) & (held < frames.stop) & ~among(held, but)
        found.append(_runs(stretch.start, hit))
    return np.concatenate(found)


def _stretches(folios: NDArray[np.void]) -> Iterator[range]:
    """Yields the addresses from folio to folio, split where there is a gap."""
    if not len(folios):
        return
    starts = folios["addr"]
    ends = starts + folios["pages"].astype(np.uint64) * np.uint64(PAGE_BYTES)
    cuts = np.flatnonzero(starts[1:] > ends[:-1] + np.uint64(_GAP_PAGES * PAGE_BYTES))
    firsts, lasts = starts[np.append(0, cuts + 1)], ends[np.append(cuts, -1)]
    yield from map(range, firsts.tolist(), lasts.tolist())


def _read(pagemap: int, addresses: range) -> NDArray[np.uint64]:
    """Returns the frame of each page, 0 where there is none; nothing of a process that has gone."""
    entries = _entries(pagemap, addresses.start // PAGE_BYTES, len(addresses) // PAGE_BYTES)
    return np.where(entries & _PRESENT, entries & _FRAME, np.uint64(0))


def _entries(file: int, first: int, count: int) -> NDArray[np.uint64]:
    data = os.pread(file, count * _ENTRY_BYTES, first * _ENTRY_BYTES)
    return np.frombuffer(data[: len(data) // _ENTRY_BYTES * _ENTRY_BYTES], np.uint64)


def _runs(start: int, hit: NDArray[np.bool_]) -> NDArray[np.void]:
    """Returns the addresses of pages in a row that are hit (dtype RANGE)."""
    edges = np.flatnonzero(np.diff(hit, prepend=False, append=False)).reshape(-1, 2)
    runs = np.empty(len(edges), RANGE)
    runs["start"] = np.uint64(start) + edges[:, 0].astype(np.uint64) * np.uint64(PAGE_BYTES)
    runs["end"] = np.uint64(start) + edges[:, 1].astype(np.uint64) * np.uint64(PAGE_BYTES)
    return runs


def read_entries(file: Path, frames: range) -> NDArray[np.uint64]:
    """Reads what /proc/kpageflags or kpagecgroup have of some frames, up to the last there is.

    Raises:
        OSError: it is out of reach.
    """
    with file.open("rb", 0) as opened:
        return _entries(opened.fileno(), frames.start, len(frames))


def is_free(frame: int, root: Path = Path("/")) -> bool:
    """Tells whether no process and no file has a frame.

    One that lies in a CPU's list of free ones has no flag; neither has what the kernel took for
    itself, which is nothing in blocks whose zone is Movable.

    Raises:
        OSError: /proc/kpageflags is out of reach.
    """
    flags = int(_flags(range(frame, frame + 1), root)[0])
    return not flags or bool(flags & _FREE)


def is_poisoned(frame: int, root: Path = Path("/")) -> bool:
    """Tells whether the kernel knows that a frame is bad, and gives it to nobody.

    Raises:
        OSError: /proc/kpageflags is out of reach.
    """
    return bool(_flags(range(frame, frame + 1), root)[0] & _POISONED)


def count_mapped(frames: range, but: Frames, root: Path = Path("/")) -> int:
    """Returns how many of some frames processes have mapped, those of `but` left out.

    Raises:
        OSError: /proc/kpageflags is out of reach.
    """
    mapped = (_flags(frames, root) & _MAPPED) != 0
    numbers = np.flatnonzero(mapped).astype(np.uint64) + np.uint64(frames.start)
    return int(np.count_nonzero(~among(numbers, but)))


def folio_of(frame: int, root: Path = Path("/")) -> range:
    """Returns the frames that move together with one, as a huge page's.

    Where /proc/kpageflags is out of reach these are as many as it may be, but for hugetlb.
    """
    try:
        flags = int(_flags(range(frame, frame + 1), root)[0])
    except OSError:
        return _aligned(frame, _MOST_FOLIO_PAGES)
    if not flags & (_HEAD | _TAIL):
        return range(frame, frame + 1)
    whole = _aligned(frame, _MOST_HUGETLB_PAGES if flags & _HUGETLB else _MOST_FOLIO_PAGES)
    around = _flags(whole, root)
    heads = np.flatnonzero(around[: frame - whole.start + 1] & _HEAD)
    first = int(heads[-1]) if len(heads) else 0
    others = np.flatnonzero((around[first + 1 :] & _TAIL) == 0)
    end = first + 1 + int(others[0]) if len(others) else len(whole)
    return range(whole.start + first, whole.start + end)


def whole_folios(frames: Frames, root: Path = Path("/")) -> Frames:
    """Returns the frames that move together with any of some."""
    return join(
        range(folio_of(part[0], root).start, folio_of(part[-1], root).stop)
        for part in parts_of(frames)
    )


def _aligned(frame: int, count: int) -> range:
    """Returns so many frames, of which it is one: a folio is aligned to its size."""
    first = frame // count * count
    return range(first, first + count)


def _flags(frames: range, root: Path) -> NDArray[np.uint64]:
    """Returns the flags of frames, 0 of those that there are none of."""
    flags = np.zeros(len(frames), np.uint64)
    read = read_entries(root / "proc/kpageflags", frames)
    flags[: len(read)] = read
    return flags
