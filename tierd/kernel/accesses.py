# SPDX-License-Identifier: Apache-2.0
"""Accesses that hardware samples, from perf rings; see perf_event_open(2).

Which event tells addresses is the CPU's matter (tierd.kernel.pmu). Where there is none, page faults
come the same way. Arm's SPE writes packets into an area of its own beside the ring, told by whole
pages and when the period changes. They tell no time, and the thread rather than the process, that
where the kernel has CONFIG_PID_IN_CONTEXTIDR and for who has CAP_PERFMON.
"""

import mmap
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib
from tierd.kernel.ring import Decoded, PerfRing, decoded, ring_bytes
from tierd.model import Pid

ACCESS = np.dtype(
    [
        ("time_ns", "u8"),  # CLOCK_MONOTONIC, 0 where it is not known
        ("addr", "u8"),  # virtual, 0 where it is not known
        ("phys_addr", "u8"),  # likewise
        ("source", "u8"),  # what served it, as union perf_mem_data_src; 0 where not known
        ("pid", "u4"),  # 0 where it is not known
        ("tid", "u4"),  # likewise
        ("weight", "u4"),  # what it took, in the event's unit
        ("lost", "u4"),  # samples lost between the previous one and this
    ]
)
"""One sampled access."""

_LOAD, _STORE = 2, 4
_LEVEL_SHIFT, _LEVEL_NUMBER_SHIFT, _LEVEL_NUMBER_MASK = 5, 33, 15
_RAM_LEVELS = (0x80 | 0x100 | 0x200) << _LEVEL_SHIFT
_RAM_NUMBERS = (0x09, 0x0D, 0x0E)
"""What union perf_mem_data_src has of PERF_MEM_OP_{LOAD,STORE}, PERF_MEM_LVL_{LOC_RAM,REM_RAM1,
REM_RAM2} and PERF_MEM_LVLNUM_{CXL,RAM,PMEM}."""

ACCESS_BYTES = 56
"""What a sample takes in the ring."""

SPE_BYTES = 64
"""What a record of SPE takes, with the padding that Arm's cores give it."""
_SPE_LEAST_PAGES = 4

PAGE_FAULTS = (1, 2)
"""Type and config of the software event that every machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What is sampled, as struct tierd_event has it; each `period`-th is.

    `spe` is for an event of Arm's SPE, `spe_sources` where its data sources are those of Neoverse.
    """

    type: int
    config: int
    period: int
    config1: int = 0
    config2: int = 0
    leader: int = 0
    precise: int = 0
    excludes_kernel: bool = True
    spe: bool = False
    spe_sources: bool = False

    def every(self, period: int) -> "Event":
        """Returns the same of another period."""
        return replace(self, period=period)

    @property
    def fields(self) -> dict[str, int]:
        """As struct tierd_event names them."""
        names = ("config", "config1", "config2", "period", "leader", "type", "precise")
        return {name: getattr(self, name) for name in names} | {"flags": self._flags}

    @property
    def _flags(self) -> int:
        flags = lib.TIERD_EXCLUDE_KERNEL if self.excludes_kernel else 0
        flags |= lib.TIERD_SPE if self.spe else 0
        return flags | (lib.TIERD_SPE_SOURCES if self.spe_sources else 0)

    def buffer_bytes(self, samples: int) -> int:
        """Returns the size of what holds so many samples."""
        if not self.spe:
            return ring_bytes(samples, ACCESS_BYTES)
        # The kernel leaves the page alone that it would fill up.
        return max(ring_bytes(samples, SPE_BYTES), _SPE_LEAST_PAGES * mmap.PAGESIZE)


def decode(data: bytes, *, head: int, tail: int, into: NDArray[np.void]) -> Decoded:
    """Decodes a ring that was captured.

    Args:
        data: the data area; its size is a power of two.
        head: bytes ever written, as perf counts them.
        tail: bytes consumed of these.
        into: where the accesses go (dtype ACCESS). What does not fit stays in the ring: the
            result's `tail` says where to go on.
    """
    cursor = ffi.new("struct tierd_cursor *", {"tail": tail})
    count = lib.tierd_decode_accesses(
        ffi.from_buffer("uint8_t[]", data),
        len(data),
        head,
        len(into),
        cursor,
        ffi.from_buffer("struct tierd_access[]", into, require_writable=True),
    )
    return decoded(into[: check(count, "decode")], cursor)


def decode_packets(
    data: bytes, *, head: int, tail: int, into: NDArray[np.void], sources: bool = False
) -> Decoded:
    """Decodes what SPE wrote, as decode() a ring.

    Args:
        data: the area; its size is a power of two.
        head: bytes ever written, as perf counts them.
        tail: bytes consumed of these.
        into: where the accesses go (dtype ACCESS).
        sources: whether a data source has Neoverse's meaning.
    """
    cursor = ffi.new("struct tierd_cursor *", {"tail": tail})
    count = lib.tierd_decode_packets(
        ffi.from_buffer("uint8_t[]", data),
        len(data),
        head,
        lib.TIERD_SPE_SOURCES if sources else 0,
        len(into),
        cursor,
        ffi.from_buffer("struct tierd_access[]", into, require_writable=True),
    )
    return decoded(into[: check(count, "decode")], cursor)


def are_stores(accesses: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tells the stores (of dtype ACCESS); what may be either, as page faults, is none."""
    return np.asarray(accesses["source"] & np.uint64(_STORE) != 0, np.bool_)


def served_by_memory(accesses: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tells the loads (of dtype ACCESS) that no cache has served.

    Either field of the level is enough: Intel's remote memory has the number of L3
    (pebs_data_source, arch/x86/events/intel/ds.c), AMD's CXL and PMEM have a number alone
    (g_zen4_data_src, arch/x86/events/amd/ibs.c).
    """
    source = accesses["source"]
    number = (source >> np.uint64(_LEVEL_NUMBER_SHIFT)) & np.uint64(_LEVEL_NUMBER_MASK)
    in_memory = (source & np.uint64(_RAM_LEVELS) != 0) | np.isin(number, _RAM_NUMBERS)
    return np.asarray((source & np.uint64(_LOAD) != 0) & in_memory, np.bool_)


class AccessRing(PerfRing):
    """Sampled accesses of a process, or of all that runs on a CPU, from when it is opened.

    Args:
        event: what is sampled.
        pid: the process, None for all.
        cpu: the CPU, None for any; one of both must be given.
        samples: how many the ring holds at least.
        wakeup_samples: unread samples from which fileno() polls readable; of SPE, a page of them.

    Raises:
        ProcessLookupError: the process doesn't exist.
        PermissionError: neither CAP_PERFMON nor perf_event_paranoid allows it.
        OSError: the machine has no such event.
    """

    def __init__(
        self,
        event: Event,
        *,
        pid: Pid | None = None,
        cpu: int | None = None,
        samples: int,
        wakeup_samples: int = 1,
    ) -> None:
        super().__init__()
        data_bytes = event.buffer_bytes(samples)
        self._accesses = np.empty(data_bytes // ACCESS_BYTES, ACCESS)
        self._array = ffi.from_buffer(
            "struct tierd_access[]", self._accesses, require_writable=True
        )
        check(
            lib.tierd_open_accesses(
                ffi.new("struct tierd_event *", event.fields),
                -1 if pid is None else pid,
                -1 if cpu is None else cpu,
                data_bytes,
                wakeup_samples * ACCESS_BYTES,
                self._ring,
            ),
            "perf_event_open",
        )

    def read(self) -> NDArray[np.void]:
        """Returns the accesses (dtype ACCESS) that have come since the last read."""
        count = lib.tierd_read_accesses(self._ring, len(self._accesses), self._array)
        return self._accesses[: check(count, "perf ring")].copy()

    def set_period(self, period: int) -> None:
        """Samples each so many events from now on."""
        check(lib.tierd_set_period(self._ring, period), "PERF_EVENT_IOC_PERIOD")
