# SPDX-License-Identifier: Apache-2.0
"""Folios of another process: list them, ask where they are, move them.

Follows Documentation/admin-guide/mm/pagemap.rst for PAGEMAP_SCAN (Linux 6.7), and move_pages(2)
as do_pages_move() in mm/migrate.c has it, which differs from the manual page: a positive return
leaves pages untried, and a run that failed has no statuses. The shim settles both.
"""

import errno
import os
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib
from tierd.model import PAGE_BYTES, NodeId, Pid

FOLIO = np.dtype([("addr", "u8"), ("pages", "u4"), ("node", "i4")])
"""One folio: address of its first mapped page, base pages that it spans, and its NUMA node.

`node` is UNASKED before the first query, and a negative errno of move_pages(2) where there is no
node to tell.
"""

RANGE = np.dtype([("start", "u8"), ("end", "u8"), ("folios", "u8")])
"""A page-aligned range: what is left to list of it, and how many folios were listed last."""

UNASKED = lib.TIERD_UNASKED

BATCH_PAGES = 16_384
"""Base pages a call of move_pages(2): each call drains every CPU's LRU caches, so few are best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What became of the folios of one move, in base pages.

    `stopped` is the errno that ended the work early, 0 when every folio was tried: ESRCH (the
    process has exited), EPERM, EACCES (the destination lies outside the target's cpuset), ENODEV
    (it has no memory) or ENOMEM (it is full). The pages not moved then are in `no_memory` for
    ENOMEM, else in `left`.
    """

    moved: int
    resident: int
    absent: int
    busy: int
    shared: int
    unmovable: int
    no_memory: int
    left: int
    other: int
    stopped: int


class Pagemap:
    """An open /proc/PID/pagemap. It stays with the memory it was opened on, also over an execve.

    Raises:
        ProcessLookupError: the process doesn't exist, has exited, or is a kernel thread.
        PermissionError: we may not look into its memory.
    """

    def __init__(self, pid: Pid, root: Path = Path("/")) -> None:
        process = root / "proc" / str(pid)
        self._scans = True
        with ExitStack() as files:
            self._pagemap = files.enter_context(_open(process / "pagemap"))
            # PAGEMAP_SCAN dereferences null on a kernel thread (Linux 6.12: do_pagemap_scan()),
            # and on such a file pagemap_read() answers nothing.
            if not os.pread(self._pagemap.fileno(), 8, 0):
                raise ProcessLookupError(errno.ESRCH, "no memory", str(process))
            self._maps = files.enter_context(_open(process / "maps"))
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def fileno(self) -> int:
        return self._pagemap.fileno()

    @property
    def scans(self) -> bool:
        """False once the kernel was found without PAGEMAP_SCAN: folios() is then the slower way."""
        return self._scans

    def folios(self, start: int, end: int, limit: int) -> tuple[NDArray[np.void], int]:
        """Lists the folios of a range that have a present page.

        Args:
            start: first byte, rounded down to a page.
            end: first byte behind the range, rounded up to a page.
            limit: at most so many folios; the next call goes on where this one ended.

        Returns:
            The folios (dtype FOLIO, by rising address, node UNASKED), and where to go on, at or
            above `end` when the range is done. A huge page that the range cuts is listed whole.
            There are none once the process has exited.
            Without PAGEMAP_SCAN every base page of the range is listed, present or not.
        """
        ranges = _one_range(start // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES)
        folios, _ = self.list_ranges(ranges, limit)
        return folios, int(ranges["start"][0])

    def list_ranges(self, ranges: NDArray[np.void], limit: int) -> tuple[NDArray[np.void], int]:
        """Lists the folios of one range after the other, as folios() does of one.

        Args:
            ranges: dtype RANGE, contiguous, none of them empty. Of those that are come to, what
                was listed is set, and `start` to where to go on: from `end` on nothing is left.
            limit: at most so many folios; no range is begun once as many base pages are listed.

        Returns:
            The folios of them, and how many ranges were come to.
        """
        if self._scans:
            try:
                return self._scan(ranges, limit)
            except OSError as error:
                if error.errno != errno.ENOTTY:
                    raise
                self._scans = False
        return every_page_of(ranges, limit)

    def find_huge(self, folios: NDArray[np.void]) -> None:
        """Sets `pages` of single addresses to what the huge page there spans, if one is mapped.

        Before Linux 6.7 nothing tells, and none is found.

        Raises:
            ProcessLookupError: the process has exited.
        """
        if not self._scans:
            return
        array = ffi.from_buffer("struct tierd_folio[]", folios, require_writable=True)
        result = lib.tierd_find_huge(self._pagemap.fileno(), array, len(array))
        if result == -errno.ENOTTY:
            self._scans = False
        else:
            check(result, "ioctl(PAGEMAP_SCAN)")

    def _scan(self, ranges: NDArray[np.void], limit: int) -> tuple[NDArray[np.void], int]:
        folios, count = np.empty(limit, FOLIO), ffi.new("uint64_t *")
        result = lib.tierd_list_ranges(
            self._pagemap.fileno(),
            self._maps.fileno(),
            ffi.from_buffer("struct tierd_range[]", ranges, require_writable=True),
            len(ranges),
            limit,
            ffi.from_buffer("struct tierd_folio[]", folios, require_writable=True),
            count,
        )
        if result == -errno.ESRCH:  # exited since it was opened; before Linux 6.15: no mappings
            ranges["start"], ranges["folios"] = ranges["end"], 0
            return folios[:0], len(ranges)
        check(result, "ioctl(PAGEMAP_SCAN)")
        return folios[: int(ranges["folios"][: count[0]].sum())], count[0]


def _one_range(start: int, end: int) -> NDArray[np.void]:
    return np.array([(start, max(start, end), 0)], RANGE)


def _open(file: Path) -> FileIO:
    try:
        return FileIO(file)
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, "no such process", str(file)) from None


def every_page(start: int, end: int, limit: int) -> tuple[NDArray[np.void], int]:
    """Lists every base page of a page-aligned range, as Pagemap.folios() does without a scan."""
    ranges = _one_range(start, end)
    folios, _ = every_page_of(ranges, limit)
    return folios, int(ranges["start"][0])


def every_page_of(ranges: NDArray[np.void], limit: int) -> tuple[NDArray[np.void], int]:
    """Lists every base page of ranges, as Pagemap.list_ranges() does without a scan."""
    pages = ((ranges["end"] - ranges["start"]) // PAGE_BYTES).astype(np.int64)
    first = np.cumsum(pages) - pages
    listed = np.clip(limit - first, 0, pages)
    folios = np.empty(int(listed.sum()), FOLIO)
    within = np.arange(len(folios)) - np.repeat(first, listed)
    folios["addr"] = np.repeat(ranges["start"], listed) + within.astype(np.uint64) * PAGE_BYTES
    folios["pages"] = 1
    folios["node"] = UNASKED
    ranges["folios"] = listed
    ranges["start"] += listed.astype(np.uint64) * PAGE_BYTES
    return folios, int(np.count_nonzero(listed))


def query(pid: Pid, folios: NDArray[np.void]) -> None:
    """Sets each folio's node to the one it is on, or to a negative errno.

    Raises:
        ProcessLookupError: the process has exited, or is a kernel thread.
        PermissionError: we may not look into its memory.
    """
    array = ffi.from_buffer("struct tierd_folio[]", folios, require_writable=True)
    check(lib.tierd_query_nodes(pid, array, len(array)), "move_pages")


def look(pid: Pid, folios: NDArray[np.void]) -> None:
    """Tells of single addresses what query() does, and find_huge().

    Raises:
        ProcessLookupError: the process has exited, or is a kernel thread.
        PermissionError: we may not look into its memory.
    """
    query(pid, folios)
    with Pagemap(pid) as pagemap:
        pagemap.find_huge(folios)


def move(
    pid: Pid,
    folios: NDArray[np.void],
    node: NodeId,
    *,
    batch_pages: int = BATCH_PAGES,
    move_all: bool = False,
) -> Tally:
    """Moves folios to one node, and sets each one's node to that or to a negative errno.

    Folios that the last query found on the destination, or nowhere, are passed over. What the
    kernel refuses is a result, not an error: see Tally.

    Args:
        pid: whose folios.
        folios: dtype FOLIO, contiguous.
        node: the destination.
        batch_pages: at most so many base pages a system call, but at least one folio.
        move_all: move what other processes map too; needs CAP_SYS_NICE.
    """
    array = ffi.from_buffer("struct tierd_folio[]", folios, require_writable=True)
    tally = ffi.new("struct tierd_tally *")
    flags = lib.TIERD_MOVE_ALL if move_all else 0
    check(
        lib.tierd_move_folios(pid, node, batch_pages, flags, array, len(array), tally),
        "move_pages",
    )
    return Tally(
        moved=tally.moved,
        resident=tally.resident,
        absent=tally.absent,
        busy=tally.busy,
        shared=tally.shared,
        unmovable=tally.unmovable,
        no_memory=tally.no_memory,
        left=tally.left,
        other=tally.other,
        stopped=-tally.stopped,
    )
