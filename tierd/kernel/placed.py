# SPDX-License-Identifier: Apache-2.0
"""Memory that is there before it is needed, on given NUMA nodes."""

import mmap
from collections.abc import Sequence
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
    cuts = [pages * number // max(len(nodes), 1) * PAGE_BYTES for number in range(len(nodes) + 1)]
    try:
        for node, at, end in zip(nodes, cuts, cuts[1:], strict=False):
            placed = lib.tierd_place_buffer(start + at, end - at, node) if end > at else 0
            check(placed, f"memory of node {node}")
    finally:
        ffi.release(start)
    return np.frombuffer(memory, np.uint8)[:size_bytes]
