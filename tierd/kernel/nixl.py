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
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierd.errors import TierdError, TierFailed
from tierd.kernel.placed import place

_SHORT_S, _LONG_S = 5e-6, 1e-3
"""Between two looks at a copy that is under way, at first and at last."""

_BY_TCP = {"UCX_TCP_TX_SEG_SIZE": "64K", "UCX_TCP_RX_SEG_SIZE": "64K"}
"""For UCX, unless the environment says otherwise: by its own 8K reads take twice as long."""

_POLL_US = 50_000
"""Between two looks of an agent's thread, which copies wake too; UCX can miss to do so
(nixlUcxSharedThread in NIXL's ucx_backend.cpp).
"""

Bytes: TypeAlias = NDArray[np.uint8]


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
        self._agent = _agent(is_lent=True)
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
        self._agent = _agent(is_lent=False)
        self._own: list[_Registered] = []
        self._staged = place(staged * block_bytes).reshape(staged, block_bytes)
        """What is read passes through here: nobody else's memory is written to, however late."""
        self.adopt(self._staged)
        try:
            peer = self._agent.add_remote_agent(ticket)
            self._there = self._agent.prep_xfer_dlist(
                peer, _rows(address, block_bytes, slots), "DRAM"
            )
        except Exception as error:
            raise TierFailed(f"NIXL does not reach it: {error}") from error

    @property
    def staged(self) -> int:
        return len(self._staged)

    def adopt(self, buffer: Bytes) -> None:
        """Is told of memory that write() gets parts of, so that it need not pass through here.

        Args:
            buffer: whole blocks, shape (count, block_bytes), contiguous, that stay until end().
        """
        try:
            parts = self._agent.register_memory(_whole(buffer), "DRAM")
            rows = _rows(buffer.ctypes.data, buffer.shape[1], len(buffer))
            named = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")
        except Exception as error:
            raise TierFailed(f"NIXL does not register memory: {error}") from error
        self._own.append(_Registered(buffer, named, parts))

    def write(self, slots: NDArray[np.int64], data: Bytes, deadline_s: float) -> None:
        for first in range(0, len(slots), len(self._staged)):
            part = slots[first : first + len(self._staged)]
            blocks = data[first : first + len(part)]
            found = self._find(blocks)
            if found is None:
                self._staged[: len(part)] = blocks
                found = self._own[0], 0
            self._copy(Way.WRITE, *found, part, deadline_s)

    def read(self, slots: NDArray[np.int64], into: Bytes, deadline_s: float) -> None:
        for first in range(0, len(slots), len(self._staged)):
            part = slots[first : first + len(self._staged)]
            self._copy(Way.READ, self._own[0], 0, part, deadline_s)
            into[first : first + len(part)] = self._staged[: len(part)]

    def _find(self, data: Bytes) -> "tuple[_Registered, int] | None":
        """Returns what NIXL knows these blocks by, and which is the first one."""
        for own in self._own:
            first = own.find(data)
            if first is not None:
                return own, first
        return None

    def _copy(
        self, way: Way, own: "_Registered", at: int, slots: NDArray[np.int64], deadline_s: float
    ) -> None:
        """Copies between blocks from `at` on of memory of this process, and slots."""
        until_s, pause_s = time.monotonic() + deadline_s, _SHORT_S
        try:
            here = np.arange(at, at + len(slots), dtype=np.int32)
            handle = self._agent.make_prepped_xfer(
                way.value, own.named, here, self._there, slots.astype(np.int32)
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
        """Lets go of it, also while a copy is under way, and also again."""
        self._own.clear()
        self._there = self._agent = None


@dataclass(frozen=True, slots=True)
class _Registered:
    """Blocks that NIXL copies from and to, what it names them, and that it has registered them."""

    blocks: Bytes
    named: Any
    parts: Any

    def find(self, data: Bytes) -> int | None:
        """Returns which of the blocks `data` begins with; None where it lies elsewhere."""
        first, rest = divmod(data.ctypes.data - self.blocks.ctypes.data, self.blocks.shape[1])
        is_inside = data.flags.c_contiguous and 0 <= first <= len(self.blocks) - len(data)
        return first if is_inside and not rest else None


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
    for name, value in _BY_TCP.items():
        os.environ.setdefault(name, value)
    _rest_between_looks(nixl)
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


def _rest_between_looks(nixl: Any) -> None:
    """Has the threads of agents sleep while there is nothing to do.

    NIXL's nixl_agent sets 0 microseconds between two looks (_api.py: `pthrDelay = 0`), by which
    each agent takes a CPU of its own for as long as it is there.
    """
    config, name = nixl.nixlBind.nixlAgentConfig, "PatientAgentConfig"
    if config.__name__ == name:
        return  # it was done before

    def set_attribute(self: object, attribute: str, value: object) -> None:
        config.__setattr__(self, attribute, _POLL_US if attribute == "pthrDelay" else value)

    nixl.nixlBind.nixlAgentConfig = type(name, (config,), {"__setattr__": set_attribute})


def _agent(*, is_lent: bool) -> Any:
    """Returns an agent: of who lends with a thread; who copies looks itself how far it is."""
    nixl = load_nixl()
    try:
        config = nixl.nixl_agent_config(enable_prog_thread=is_lent, backends=["UCX"])
        return nixl.nixl_agent(uuid.uuid4().hex, config)
    except Exception as error:
        raise TierdError(f"NIXL does not start: {error}") from error


def _whole(memory: Bytes) -> list[tuple[int, int, int, str]]:
    return [(memory.ctypes.data, memory.nbytes, 0, "")]


def _rows(address: int, block_bytes: int, count: int) -> NDArray[np.uint64]:
    """Spells blocks one after the other as NIXL does: address, length, device, stride, count."""
    return np.array([[address, block_bytes, 0, block_bytes, count]], np.uint64)
