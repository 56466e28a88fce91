# SPDX-License-Identifier: Apache-2.0
"""Processes that begin, change or end, as events: the kernel's process connector.

Follows drivers/connector/cn_proc.c (CONFIG_PROC_EVENTS); it wants CAP_NET_ADMIN. pyroute2
subscribes, the shim reads: a machine may start thousands of processes a second.
"""

import socket
import sys
from importlib.util import find_spec, module_from_spec
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib

EVENT = np.dtype([("pid", "i4"), ("kind", "u4")])
"""An event of a process, not of a single thread: its pid, and CHANGED or ENDED.

CHANGED is a fork, an execve(2), another user or another name; ENDED the end of its first thread.
"""

CHANGED, ENDED = lib.TIERD_PROC_CHANGED, lib.TIERD_PROC_ENDED

QUEUE_BYTES = 16 << 20
"""What may wait to be read: the kernel counts some 700 bytes an event."""

_BATCH = 4096
_RCVBUFFORCE = 33  # SO_RCVBUFFORCE in asm-generic/socket.h; Python has no name for it


class ProcEvents:
    """A context that listens to the process connector.

    Args:
        queue_bytes: what may wait to be read.

    Raises:
        OSError: the kernel has none, or we may not listen.
    """

    def __init__(self, queue_bytes: int = QUEUE_BYTES) -> None:
        self._socket = _proc_event_socket()
        try:
            self._socket.bind()
            self._socket.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, queue_bytes)
            self._socket.control(listen=True)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> tuple[NDArray[np.void], bool]:
        """Returns the events (dtype EVENT) since the last call, and whether some were lost."""
        parts, any_lost = [], False
        events, lost = np.empty(_BATCH, EVENT), ffi.new("uint32_t *")
        array = ffi.from_buffer("struct tierd_proc_event[]", events, require_writable=True)
        count = _BATCH
        while count > _BATCH - 64:
            count = lib.tierd_read_proc_events(self._socket.fileno(), _BATCH, array, lost)
            check(count, "recvmmsg")
            any_lost |= bool(lost[0])
            parts.append(events[:count].copy())
        return np.concatenate(parts), any_lost


def _proc_event_socket() -> Any:
    """Returns a socket of pyroute2's for process events.

    The package imports all of its protocols, which take 12 MiB that the daemon would hold for good.
    So a bare package of its name stands in while this one is imported.
    """
    name = "pyroute2"
    spec = None if name in sys.modules else find_spec(name)
    if spec is not None:
        sys.modules[name] = module_from_spec(spec)
    try:
        from pyroute2.netlink.connector.cn_proc import ProcEventSocket
    finally:
        if spec is not None:
            del sys.modules[name]
    return ProcEventSocket()
