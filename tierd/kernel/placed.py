# SPDX-License-Identifier: Apache-2.0
"""Memory that is there before it is needed, on given NUMA nodes."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib
from tierd.model import PAGE_BYTES, NodeId

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap has no name for."""


def place(size_bytes: int, nodes: Sequence[NodeId] = ()) -> NDArray[np.uint8]:
    """Returns memory, an equal part of it on each node, or wherever the kernel has it without.

    It is freed with the last array that shows it.

    Raises:
        OSError: a node has no memory or is not ours (EINVAL), was full (EIO), or there is no memory
            at all (ENOMEM, EFAULT).
    """
    pages = -(-size_bytes // PAGE_BYTES)
    memory = mmap.mmap(-1, pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not nodes:
        with suppress(OSError):  # slower pages are as right
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_POPULATE_WRITE)
    start = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
    try:
        for node, at, size in _parts(pages, nodes):
            check(lib.tierd_place_buffer(start + at, size, node), f"memory of node {node}")
    finally:
        ffi.release(start)
    return np.frombuffer(memory, np.uint8)[:size_bytes]


def give_back(
    memory: NDArray[np.uint8], blocks: NDArray[np.int64], nodes: Sequence[NodeId] = ()
) -> None:
    """Frees the pages of blocks; they are of zeros, and take memory again when they are used.

    Then it comes from the same nodes, or where these are full from others: nobody is killed for it.

    Args:
        memory: what place() has returned, as an array (blocks, whole pages).
        blocks: which.
        nodes: as of place().

    Raises:
        OSError: EINVAL before Linux 5.18.
    """
    start = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
    try:
        for node, at, size in _parts(-(-memory.nbytes // PAGE_BYTES), nodes):
            check(lib.tierd_prefer_node(start + at, size, node), f"memory of node {node}")
        pointer = ffi.from_buffer("int64_t[]", blocks)
        check(lib.tierd_free_pages(start, memory.shape[1], pointer, len(blocks)), "memory")
    finally:
        ffi.release(start)


def _parts(pages: int, nodes: Sequence[NodeId]) -> Iterator[tuple[NodeId, int, int]]:
    """Yields each node with where its part begins, and its size, in bytes."""
    cuts = [pages * number // max(len(nodes), 1) * PAGE_BYTES for number in range(len(nodes) + 1)]
    for node, at, end in zip(nodes, cuts, cuts[1:], strict=False):
        if end > at:
            yield node, at, end - at
