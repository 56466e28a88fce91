# SPDX-License-Identifier: Apache-2.0
"""What CXL devices tell of errors, from the kernel's tracepoints through perf rings.

Follows drivers/cxl/core/trace.h: what a device logs (general media, DRAM, memory module), what its
poison list has when somebody reads it (trigger_poison_list), and what AER tells of its link. Where
the kernel knows the region it gives the host's physical address too. As perf shows some::

    cxl_poison: memdev=mem0 ... trace_type=List region=region0 ... hpa=0x691000000 dpa=0x1000000
        dpa_length=0x40 source=Internal flags= overflow_time=0
    cxl_general_media: memdev=mem0 ... log=Failure : ... dpa=3000000 ... descriptor='UNCORRECTABLE_
        EVENT|THRESHOLD_EVENT' ... hpa=693000000 region=region0 ...

They come on any CPU, so there is a ring on each, which all tracepoints write to. They are rare, and
of as many layouts as tracepoints and kernels, so each record is read by its `format` file.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UnsupportedKernel
from tierd.kernel import text, tracepoint
from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib
from tierd.kernel.cxl import DEVICES
from tierd.kernel.ring import Decoded, PerfRing, decoded
from tierd.kernel.tracepoint import Field, Format
from tierd.kernel.tunable import KernelFiles

TRACE = np.dtype(
    [
        ("time_ns", "u8"),  # CLOCK_MONOTONIC
        ("lost", "u4"),  # records lost between the previous one and this
        ("bytes", "u4"),  # how many of data are its own
        ("data", "V1024"),
    ]
)
"""A record as the kernel wrote it."""

RING_BYTES = 1 << 16
"""Some 400 records of a CPU between two rounds; what is lost of more is counted."""

MOST_TRACES = 512
"""Of a CPU, read at once; the rest waits in the ring."""

_ONLINE = Path("sys/devices/system/cpu/online")
_NAME = re.compile(rb"[\w:.\-]{1,64}")
_UNKNOWN = (1 << 64) - 1
_CHUNK_BYTES = 64
"""What a device's errors are told by (CXL 3.1, 8.2.9.2.1): an address is of so many bytes."""

_UNCORRECTABLE = 1
"""In an event's descriptor: CXL_GMER_EVT_DESC_UNCORECTABLE_EVENT."""

_CLEARED = 2
"""In a poison's trace_type: CXL_POISON_TRACE_CLEAR."""


class Kind(StrEnum):
    """What an event is about."""

    POISON = "poison"
    """Data of a device's memory that are lost."""
    CLEARED = "poison_cleared"
    """Somebody had the device forget of some poison, and the data."""
    GENERAL_MEDIA = "general_media"
    DRAM = "dram"
    MEMORY_MODULE = "memory_module"
    """The device's health has changed."""
    LINK = "link"
    """An error of CXL's protocol, which AER tells."""
    OVERFLOW = "overflow"
    """The device's log was full: it has lost events."""


class Severity(StrEnum):
    """What became of the data."""

    CORRECTED = "corrected"
    UNCORRECTED = "uncorrected"
    NONE = "none"
    """It is about no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CxlEvent:
    """One of them.

    `device` is a memdev, or the port whose link it is about. `start` is the host's physical address
    where the kernel knows it, and `dpa` the device's own, each of `size_bytes` of the device.
    """

    kind: Kind
    severity: Severity
    device: str
    region: str | None = None
    start: int | None = None
    dpa: int | None = None
    size_bytes: int = 0


_KINDS: Mapping[str, tuple[Kind, Severity]] = {
    "cxl_poison": (Kind.POISON, Severity.UNCORRECTED),
    "cxl_general_media": (Kind.GENERAL_MEDIA, Severity.CORRECTED),
    "cxl_dram": (Kind.DRAM, Severity.CORRECTED),
    "cxl_memory_module": (Kind.MEMORY_MODULE, Severity.NONE),
    "cxl_overflow": (Kind.OVERFLOW, Severity.NONE),
    "cxl_aer_uncorrectable_error": (Kind.LINK, Severity.UNCORRECTED),
    "cxl_aer_correctable_error": (Kind.LINK, Severity.CORRECTED),
    "cxl_port_aer_uncorrectable_error": (Kind.LINK, Severity.UNCORRECTED),
    "cxl_port_aer_correctable_error": (Kind.LINK, Severity.CORRECTED),
}
"""By the tracepoints, of which a kernel has the first seven or all. An event of the media that says
so is of data that could not be corrected."""

EVENTS: Sequence[str] = tuple(_KINDS)


def parse(event: str, fields: Mapping[str, Field], data: bytes) -> CxlEvent | None:
    """Returns what a tracepoint's record tells, None where it is cut short or names no device."""
    kind, severity = _KINDS[event]
    device = _name(fields.get("memdev") or fields.get("device"), data)
    if device is None:
        return None
    dpa = _number(fields.get("dpa"), data)
    size_bytes = _number(fields.get("dpa_length"), data)
    if kind is Kind.POISON and _number(fields.get("trace_type"), data) == _CLEARED:
        kind, severity = Kind.CLEARED, Severity.NONE
    elif (_number(fields.get("descriptor"), data) or 0) & _UNCORRECTABLE:
        severity = Severity.UNCORRECTED
    return CxlEvent(
        kind=kind,
        severity=severity,
        device=device,
        region=_name(fields.get("region") or fields.get("region_name"), data),
        start=_number(fields.get("hpa"), data),
        dpa=dpa,
        size_bytes=(size_bytes or _CHUNK_BYTES) if dpa is not None else 0,
    )


def _number(field: Field | None, data: bytes) -> int | None:
    """Returns a field's number, None where there is none, or where it is not known (all ones)."""
    if field is None or field.is_array or field.is_dynamic or field.size not in (1, 2, 4, 8):
        return None
    part = data[field.offset : field.offset + field.size]
    if len(part) < field.size:
        return None
    value = int.from_bytes(part, "little", signed=field.is_signed)
    return None if value == _UNKNOWN else value


def _name(field: Field | None, data: bytes) -> str | None:
    """Returns a name of sysfs, None where there is none or it is garbled."""
    if field is None or not field.is_dynamic or field.size != 4:
        return None
    place = int.from_bytes(data[field.offset : field.offset + 4], "little")
    offset, length = place & 0xFFFF, place >> 16
    if not length or offset + length > len(data):
        return None
    name = data[offset : offset + length].partition(b"\0")[0]
    return name.decode() if _NAME.fullmatch(name) else None


def decode(data: bytes, *, head: int, tail: int, into: NDArray[np.void]) -> Decoded:
    """Decodes a ring that was captured, as tierd.kernel.ring.decode() does.

    Args:
        data: the data area; its size is a power of two.
        head: bytes ever written, as perf counts them.
        tail: bytes consumed of these.
        into: where the records go (dtype TRACE).
    """
    cursor = ffi.new("struct tierd_cursor *", {"tail": tail})
    count = lib.tierd_decode_traces(
        ffi.from_buffer("uint8_t[]", data),
        len(data),
        head,
        len(into),
        cursor,
        ffi.from_buffer("struct tierd_trace[]", into, require_writable=True),
    )
    return decoded(into[: check(count, "decode")], cursor)


class _CpuRing(PerfRing):
    """The tracepoints' hits on one CPU, all in one ring."""

    def __init__(self, cpu: int, events: Iterable[int]) -> None:
        super().__init__()
        first, *others = events
        self._joined: list[int] = []
        check(lib.tierd_open_traces(first, cpu, RING_BYTES, self._ring), "perf_event_open")
        try:
            for event in others:
                joined = lib.tierd_join_traces(event, cpu, self._ring)
                self._joined.append(check(joined, "perf_event_open"))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        while self._joined:
            os.close(self._joined.pop())
        super().close()

    def read(self, into: NDArray[np.void]) -> NDArray[np.void]:
        """Returns the records that have come since the last read, in place (dtype TRACE)."""
        array = ffi.from_buffer("struct tierd_trace[]", into, require_writable=True)
        return into[: check(lib.tierd_read_traces(self._ring, len(into), array), "perf ring")]


class CxlEvents:
    """All that CXL devices tell from now on, on the CPUs that are online; others when they come.

    `amiss` counts what came and could not be read. `deaf` says why some CPU that has come since is
    not heard, None where all are.

    Raises:
        UnsupportedKernel: the kernel has no such tracepoints, or tracefs is out of reach.
        OSError: perf is: neither CAP_PERFMON nor CAP_SYS_ADMIN allows it, or there are too few
            files (LimitNOFILE) for one a CPU and tracepoint.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.amiss = 0
        self.deaf: str | None = None
        self._formats = _read_formats(root)
        self._online = root / _ONLINE
        self._into = np.empty(MOST_TRACES, TRACE)
        self._rings: dict[int, _CpuRing] = {}
        self._lost_before = 0
        try:
            self._follow()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def lost(self) -> int:
        """Records that the kernel had no room for."""
        return self._lost_before + sum(r.lost + r.corrupt for r in self._rings.values())

    def read(self) -> list[CxlEvent]:
        """Returns what has come since the last read, by time."""
        found = [pair for ring in self._rings.values() for pair in self._read(ring)]
        try:
            self._follow()
            self.deaf = None
        except OSError as error:  # tried again by the next read
            self.deaf = str(error)
        return [event for _, event in sorted(found, key=lambda pair: pair[0])]

    def _follow(self) -> None:
        """Has a ring on each CPU that is online, and on no other."""
        online = text.read_ids(self._online) or (0,)
        for cpu in self._rings.keys() - {*online}:
            ring = self._rings.pop(cpu)
            self._lost_before += ring.lost + ring.corrupt
            ring.close()
        ids = [format.id for _, format in self._formats.values()]
        failed: OSError | None = None
        for cpu in online:
            if cpu not in self._rings:
                try:
                    self._rings[cpu] = _CpuRing(cpu, ids)
                except OSError as error:  # the others are heard all the same
                    failed = error
        if failed is not None:
            raise failed

    def _close(self) -> None:
        while self._rings:
            self._rings.popitem()[1].close()

    def _read(self, ring: _CpuRing) -> Iterator[tuple[int, CxlEvent]]:
        for trace in ring.read(self._into):
            event = self._parse(trace["data"].tobytes()[: int(trace["bytes"])])
            if event is None:
                self.amiss += 1
            else:
                yield int(trace["time_ns"]), event

    def _parse(self, data: bytes) -> CxlEvent | None:
        known = self._formats.get(int.from_bytes(data[:2], "little"))
        return None if known is None else parse(known[0], known[1].fields, data)


def _read_formats(root: Path) -> dict[int, tuple[str, Format]]:
    """Returns the tracepoints that there are, with their names, by what records begin with."""
    found = ((event, tracepoint.read_format(f"cxl/{event}", root)) for event in EVENTS)
    formats = {format.id: (event, format) for event, format in found if format is not None}
    if not formats:
        raise UnsupportedKernel(
            "CXL's tracepoints are out of reach, so that errors of devices are not seen",
            hint="load cxl_core, mount tracefs on /sys/kernel/tracing, and run tierd as root",
        )
    return formats


def read_poison(memdevs: Sequence[str], root: Path = Path("/")) -> dict[str, list[CxlEvent]]:
    """Has devices tell their poison lists, and returns what each one has.

    Whoever else listens hears them, too.

    Raises:
        UnsupportedKernel: the kernel has no tracepoint for it, or tracefs is out of reach.
        OSError: a device has no such list, or we may not ask for it.
    """
    found: dict[str, list[CxlEvent]] = {memdev: [] for memdev in memdevs}
    with CxlEvents(root) as events:
        for memdev in memdevs:
            KernelFiles().write(root / DEVICES / memdev / "trigger_poison_list", "1")
            for event in events.read():
                if event.kind is Kind.POISON and event.device == memdev:
                    found[memdev].append(event)
    return found
