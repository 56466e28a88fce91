# SPDX-License-Identifier: Apache-2.0
"""Copies to and from another process's memory, which it takes no part in: NIXL, by UCX.

Over TCP a thread of NIXL's in that process does the other half, over RDMA its card. Which of them
is UCX's choice, by UCX_TLS and UCX_NET_DEVICES in the environment. A copy from a process that is
stopped never ends; it is given up here, and with it all that it may still write to.

NIXL is loaded when it is first used. pip would have torch come with it, which it does not need:
`pip install --no-deps nixl-cu12`.
"""

import ctypes
import logging
import os
import time
import uuid
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import TierdError, TierFailed
from tierd.kernel.placed import place

_SHORT_S, _LONG_S = 5e-6, 1e-3
"""Between two looks at a copy that is under way, at first and at last."""


class Way(StrEnum):
    """As NIXL names it."""

    READ = "READ"
    WRITE = "WRITE"


class Lent:
    """Memory that one other process copies to and from, by the ticket, until end().

    It has an agent of its own: when that ends, a process that was stopped meanwhile writes nowhere
    when it goes on.

    Args:
        memory: contiguous, and nobody else's until then.

    Raises:
        TierdError: there is no NIXL, or it cannot register the memory.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._agent = _agent()
        self._memory = memory
        self.address = memory.ctypes.data
        try:
            self._parts = self._agent.register_memory(_whole(memory), "DRAM")
            self.ticket: bytes = self._agent.get_partial_agent_metadata(self._parts, True)
        except Exception as error:  # NIXL's have no base of their own
            raise TierdError(f"NIXL does not register memory: {error}") from error

    def end(self) -> None:
        """Has nobody reach it any more."""
        with suppress(Exception):  # it is gone with its agent at the latest
            self._agent.deregister_memory(self._parts)
        self._agent = None


class Reached:
    """Slots of another process's memory, from here.

    Args:
        ticket: of its Lent.
        address: of the first slot, there.
        slots: how many.
        block_bytes: of each.
        staged: at most so many are copied at once.

    Raises:
        TierdError: there is no NIXL.
        TierFailed: of each call too: the other one cannot be reached. Nothing is to be done with it
            any more but end().
    """

    def __init__(
        self, ticket: bytes, address: int, slots: int, block_bytes: int, staged: int
    ) -> None:
        self._agent = _agent()
        self._staged = place(staged * block_bytes).reshape(staged, block_bytes)
        """What is copied passes through here: nobody else's memory is written to, however late."""
        try:
            self._parts = self._agent.register_memory(_whole(self._staged), "DRAM")
            peer = self._agent.add_remote_agent(ticket)
            self._here = self._agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", _rows(self._staged.ctypes.data, block_bytes, staged), "DRAM"
            )
            self._there = self._agent.prep_xfer_dlist(
                peer, _rows(address, block_bytes, slots), "DRAM"
            )
        except Exception as error:
            raise TierFailed(f"NIXL does not reach it: {error}") from error

    def write(self, slots: NDArray[np.int64], data: NDArray[np.uint8], deadline_s: float) -> None:
        for first in range(0, len(slots), len(self._staged)):
            part = slots[first : first + len(self._staged)]
            self._staged[: len(part)] = data[first : first + len(part)]
            self._copy(Way.WRITE, part, deadline_s)

    def read(self, slots: NDArray[np.int64], into: NDArray[np.uint8], deadline_s: float) -> None:
        for first in range(0, len(slots), len(self._staged)):
            part = slots[first : first + len(self._staged)]
            self._copy(Way.READ, part, deadline_s)
            into[first : first + len(part)] = self._staged[: len(part)]

    def _copy(self, way: Way, slots: NDArray[np.int64], deadline_s: float) -> None:
        until_s, pause_s = time.monotonic() + deadline_s, _SHORT_S
        try:
            here = np.arange(len(slots), dtype=np.int32)
            handle = self._agent.make_prepped_xfer(
                way.value, self._here, here, self._there, slots.astype(np.int32)
            )
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < until_s:
                time.sleep(pause_s)
                pause_s = min(1.1 * pause_s, _LONG_S)
                state = self._agent.check_xfer_state(handle)
            handle.release()
        except Exception as error:
            raise TierFailed(f"NIXL: {error}") from error
        if state != "DONE":
            why = f"no answer in {deadline_s:g} s" if state == "PROC" else "a copy has failed"
            raise TierFailed(f"NIXL: {why}")

    def end(self) -> None:
        """Lets go of it, also while a copy is under way."""
        self._here = self._there = self._agent = None


def load_nixl() -> Any:
    """Returns NIXL's module.

    Raises:
        TierdError: there is none.
    """
    try:
        from nixl_cu12 import _api as nixl  # takes half a second, and is an extra
    except ImportError as error:
        raise TierdError(
            f"remote memory needs NIXL: {error}",
            hint="pip install --no-deps nixl-cu12; it works without torch",
        ) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    _part_netlinks(Path(nixl.__file__).parents[1] / "nixl_cu12.libs")
    return nixl


def _part_netlinks(libraries: Path) -> None:
    """Binds libnl-route, the host's and the one that NIXL brings, each to itself.

    UCX loads both where the host has libibverbs. One that is bound to the other's list of names
    finds its own taken there, and when the process ends it takes out what it never put in: a
    SIGSEGV in rtnl_tc_unregister (libnl's lib/route/tc.c).
    """
    for library in ("libnl-route-3.so.200", *map(str, libraries.glob("libnl-route-3-*"))):
        with suppress(OSError):  # the host has none, or NIXL is of another make
            ctypes.CDLL(library, os.RTLD_NOW | os.RTLD_DEEPBIND)


def _agent() -> Any:
    nixl = load_nixl()
    try:
        return nixl.nixl_agent(uuid.uuid4().hex, nixl.nixl_agent_config(backends=["UCX"]))
    except Exception as error:
        raise TierdError(f"NIXL does not start: {error}") from error


def _whole(memory: NDArray[np.uint8]) -> list[tuple[int, int, int, str]]:
    return [(memory.ctypes.data, memory.nbytes, 0, "")]


def _rows(address: int, block_bytes: int, count: int) -> NDArray[np.uint64]:
    """Spells blocks one after the other as NIXL does: address, length, device, stride, count."""
    return np.array([[address, block_bytes, 0, block_bytes, count]], np.uint64)
