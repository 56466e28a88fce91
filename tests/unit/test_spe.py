# SPDX-License-Identifier: Apache-2.0
"""Decoding of what Arm's SPE writes, well-formed and not.

No machine of ours has SPE: the bytes are made by hand, by the packets' definition in the Arm
Architecture Reference Manual and by the kernel's own decoder. One record was printed by a machine:
it stands in the message of the kernel's commit ffd3d18c20b8.
"""

import struct
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.test_ring import RING_BYTES, after, captured, perf, tails, u32, u64
from tierd.kernel import accesses
from tierd.kernel._shim import ffi, lib  # noqa: TID251  # a ring without the kernel
from tierd.kernel.accesses import ACCESS, SPE_BYTES
from tierd.kernel.ring import Decoded

KERNEL_BIT = 1 << 55
ADDRESS_BITS = (1 << 56) - 1
LOAD, STORE = 2, 4  # PERF_MEM_OP_{LOAD,STORE}
OF_MEMORY = 0xD << 33  # PERF_MEM_LVLNUM_RAM
END, PAD = b"\x01", b"\x00"
LIMIT = 100

PRINTED = bytes.fromhex(
    "4900"  # LD
    "b2c03b290f0000ffff"  # VA 0xffff00000f293bc0
    "b3c0eb24fb00000080"  # PA 0xfb24ebc0 ns=1
    "9a0000"  # LAT 0 XLAT
    "4216"  # EV RETIRED L1D-ACCESS TLB-ACCESS
    "b000c415080000ffff"  # PC 0xff00000815c400 el3 ns=1
    "980000"  # LAT 0 TOT
    "71366c212c09000000"  # TS 39395093558
)


@dataclass(frozen=True, slots=True)
class Operation:
    """A record; `level` is the context's, `extended` gives addresses headers of two bytes."""

    tid: int
    addr: int
    phys_addr: int
    cycles: int
    store: bool = False
    source: int = 0
    level: int = 2
    timed: bool = False
    extended: bool = False

    def encode(self) -> bytes:
        """With its padding."""
        packets = [
            self._address(0, 0x40_0000),
            bytes([0x63 + self.level]) + struct.pack("<I", self.tid),
            bytes([0x49, self.store]),
            bytes([0x52]) + struct.pack("<H", 0x16),
            bytes([0x99]) + struct.pack("<H", 7),
            bytes([0x98]) + struct.pack("<H", self.cycles),
            self._address(2, self.addr),
            self._address(3, self.phys_addr | 1 << 63),
            bytes([0x43, self.source]),
            bytes([0x71]) + struct.pack("<Q", 39395093558) if self.timed else END,
        ]
        return b"".join(packets).ljust(SPE_BYTES, PAD)

    def _address(self, index: int, value: int) -> bytes:
        header = [0x20, 0xB0 + index] if self.extended else [0xB0 + index]
        return bytes(header) + struct.pack("<Q", value % 2**64)

    @property
    def row(self) -> tuple[int, ...]:
        """What it becomes, all but what was lost before it."""
        what = STORE if self.store else LOAD
        return (0, self.addr & ADDRESS_BITS, self.phys_addr, what, 0, self.tid, self.cycles)


GOOD = Operation(640, 0x7F00_0000_1234, 0x1000, 310)
addresses = st.integers(1, KERNEL_BIT - 1)
operations = st.builds(
    Operation,
    u32,
    addresses,
    addresses,
    st.integers(0, 2**16 - 1),
    store=st.booleans(),
    source=st.integers(0, 255),
    level=st.sampled_from([1, 2]),
    timed=st.booleans(),
)
streams = st.lists(operations, max_size=RING_BYTES // SPE_BYTES)
positions = tails.map(lambda tail: tail * 8 % 2**64)


def decode(stream: bytes, tail: int = 0, limit: int = LIMIT, *, sources: bool = False) -> Decoded:
    data, head = captured(stream, tail), after(tail, len(stream))
    into = np.empty(limit, ACCESS)
    return accesses.decode_packets(data, head=head, tail=tail, into=into, sources=sources)


def joined(records: list[Operation]) -> bytes:
    return b"".join(record.encode() for record in records)


def rows(found: NDArray[np.void]) -> list[tuple[int, ...]]:
    return [row[:-1] for row in found.tolist()]


def test_a_record_takes_what_the_area_is_sized_for() -> None:
    assert len(GOOD.encode()) == len(replace(GOOD, timed=True).encode()) == SPE_BYTES


@given(records=streams, tail=positions)
def test_every_access_comes_through(records: list[Operation], tail: int) -> None:
    got = decode(joined(records), tail)
    assert rows(got.records) == [record.row for record in records]
    assert (got.tail, got.corrupt) == (after(tail, len(joined(records))), 0)
    assert not got.records["lost"].any()


@given(records=streams, tail=positions, limit=st.integers(0, 4))
def test_what_does_not_fit_stays(records: list[Operation], tail: int, limit: int) -> None:
    got = decode(joined(records), tail, limit)
    assert rows(got.records) == [record.row for record in records[:limit]]
    rest = captured(joined(records), tail)
    head = after(tail, len(joined(records)))
    again = accesses.decode_packets(rest, head=head, tail=got.tail, into=np.empty(LIMIT, ACCESS))
    assert rows(again.records) == [record.row for record in records[limit:]]


@given(
    data=st.integers(3, 9).flatmap(lambda n: st.binary(min_size=1 << n, max_size=1 << n)),
    tail=u64,
    unread=u64,
    sources=st.booleans(),
)
@example(data=b"\x20\x00" * 4, tail=7, unread=8, sources=False)
@example(data=b"\x20\xb2" * 4, tail=7, unread=8, sources=False)
@example(data=b"\x23\xb7" * 4, tail=6, unread=8, sources=False)
@example(data=b"\xb2" * 8, tail=0, unread=1, sources=False)
def test_any_bytes_end_at_the_head(data: bytes, tail: int, unread: int, *, sources: bool) -> None:
    head, into = after(tail, unread), np.empty(LIMIT, ACCESS)
    got = accesses.decode_packets(data, head=head, tail=tail, into=into, sources=sources)
    assert got.tail == head
    assert got.corrupt <= len(data)


@given(
    records=streams,
    tail=positions,
    at=st.integers(0, RING_BYTES - 1),
    byte=st.integers(0, 255),
)
def test_a_changed_byte_harms_its_record_and_the_next(
    records: list[Operation], tail: int, at: int, byte: int
) -> None:
    stream = bytearray(joined(records))
    if at < len(stream):
        stream[at] = byte
    got = decode(bytes(stream), tail)
    before, beyond = records[: at // SPE_BYTES], records[at // SPE_BYTES + 2 :]
    found = rows(got.records)
    assert found[: len(before)] == [record.row for record in before]
    assert found[len(found) - len(beyond) :] == [record.row for record in beyond]
    assert len(found) <= len(records) + 1
    assert got.tail == after(tail, len(stream))


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"\x80", b"\xb2\xff", b"\x20\x42\x05"])
def test_after_garbage_records_are_read_again(garbage: bytes) -> None:
    broken = garbage + GOOD.encode()
    got = decode(GOOD.encode() + broken + GOOD.encode())
    assert rows(got.records) == [GOOD.row, GOOD.row], "of the broken one nothing is trusted"
    assert got.records["lost"].tolist() == [0, 1]
    assert got.corrupt == 1


def test_of_two_records_in_one_neither_is_trusted() -> None:
    """The last before a loss of data may lack its end (PERF_AUX_FLAG_PARTIAL)."""
    cut = GOOD.encode()[:30] + PAD * 34
    got = decode(cut + replace(GOOD, tid=7).encode() + GOOD.encode())
    assert rows(got.records) == [GOOD.row]
    assert got.corrupt == 1


@pytest.mark.parametrize("size", range(1, len(GOOD.encode().rstrip(PAD))))
def test_a_record_cut_by_the_head_is_corrupt(size: int) -> None:
    got = decode(GOOD.encode()[:size])
    assert (len(got.records), got.corrupt, got.tail) == (0, 1, size)


def test_more_than_the_area_holds_gives_up_the_rest() -> None:
    got = accesses.decode_packets(bytes(64), head=65, tail=0, into=np.empty(1, ACCESS))
    assert (len(got.records), got.corrupt, got.tail) == (0, 1, 65)


@pytest.mark.parametrize("size", [0, 4, 24])
def test_an_area_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(OSError, match="decode"):
        accesses.decode_packets(bytes(size), head=0, tail=0, into=np.empty(1, ACCESS))


def test_a_record_that_a_machine_printed_is_of_the_kernel() -> None:
    got = decode(PRINTED)
    assert (len(got.records), got.corrupt, got.tail) == (0, 0, len(PRINTED))


def test_a_record_that_a_machine_printed_in_user_space() -> None:
    users = PRINTED.replace(bytes.fromhex("0000ffff980000"), bytes.fromhex("0000ffff982c01"))
    users = users.replace(bytes.fromhex("b2c03b290f0000ffff"), bytes.fromhex("b2c03b290f7f000000"))
    got = decode(users)
    assert rows(got.records) == [(0, 0x7F_0F29_3BC0, 0xFB24_EBC0, LOAD, 0, 0, 300)]


def test_a_tag_in_the_top_byte_is_left_out() -> None:
    tagged = replace(GOOD, addr=GOOD.addr | 0xB4 << 56)
    assert rows(decode(tagged.encode()).records) == [GOOD.row]


def test_addresses_of_the_kernel_are_dropped() -> None:
    kernels = replace(GOOD, addr=0xFFFF_0000_0F29_3BC0)
    tagged = replace(GOOD, addr=0x12FF_0000_0F29_3BC0)
    got = decode(kernels.encode() + tagged.encode() + GOOD.encode())
    assert rows(got.records) == [GOOD.row]
    assert got.corrupt == 0


def test_headers_of_two_bytes_and_alignment() -> None:
    extended = replace(GOOD, extended=True, addr=0x1234)
    stream = extended.encode().rstrip(PAD)
    aligned = stream + b"\x23\x00"
    aligned = aligned.ljust((len(aligned) + 15) // 16 * 16, b"\xee")  # skipped, whatever it holds
    got = decode(aligned + GOOD.encode())
    assert rows(got.records) == [extended.row, GOOD.row]
    assert got.corrupt == 0


NO_ACCESS = {
    "branch": "4a01 b10000000000000080 01",
    "other": "4800 01",
    "no address": "4900 01",
    "an address of another kind": "4900 21b23412000000000000 01",
    "no operation": "b23412000000000000 01",
    "nothing": "01",
    "cut": "7100",
}


@pytest.mark.parametrize("packets", NO_ACCESS.values(), ids=NO_ACCESS)
def test_what_is_no_access_is_none(packets: str) -> None:
    assert not len(decode(bytes.fromhex(packets)).records)


def test_a_context_of_either_level_tells_the_thread() -> None:
    both = GOOD.encode().replace(b"\x65\x80\x02\x00\x00", b"\x65\x80\x02\x00\x00\x64" + bytes(4))
    for stream in (both, replace(GOOD, level=1).encode()):
        assert rows(decode(stream).records) == [GOOD.row]
    without = GOOD.encode().replace(b"\x65\x80\x02\x00\x00", b"")
    assert decode(without).records["tid"].tolist() == [0]


def test_what_memory_served_is_told_where_the_codes_are_known() -> None:
    """Of loads: perf knows of no data source of Neoverse's stores."""
    of_memory, of_cache = replace(GOOD, source=0xE), replace(GOOD, source=0xB)
    stream = of_memory.encode() + of_cache.encode() + replace(of_memory, store=True).encode()
    unknown, known = decode(stream).records, decode(stream, sources=True).records
    assert unknown["source"].tolist() == [LOAD, LOAD, STORE]
    assert known["source"].tolist() == [LOAD | OF_MEMORY, LOAD, STORE]
    assert accesses.served_by_memory(known).tolist() == [True, False, False]
    assert accesses.are_stores(known).tolist() == [False, False, True]


# A ring with its area, as perf maps them

PAGE_BYTES, AREA_BYTES = 4096, 1024
AUX = 11  # PERF_RECORD_AUX
TRUNCATED, OVERWRITE, PARTIAL, COLLISION = 1, 2, 4, 8
DATA_HEAD, DATA_OFFSET, AUX_HEAD, AUX_TAIL = 1024, 1040, 1056, 1064
"""Where struct perf_event_mmap_page has them."""


class Mapped:
    """An open event without a kernel: what perf would have mapped, and written to."""

    def __init__(self) -> None:
        self.page, self.area = bytearray(2 * PAGE_BYTES), bytearray(AREA_BYTES)
        self.written, self.noted = 0, 0
        self.set(DATA_OFFSET, PAGE_BYTES)
        self.ring = ffi.new("struct tierd_ring *")
        self.ring.map, self.ring.data_bytes = ffi.from_buffer("uint8_t[]", self.page), PAGE_BYTES
        self.ring.aux, self.ring.aux_bytes = ffi.from_buffer("uint8_t[]", self.area), AREA_BYTES
        self.ring.fd = -1

    def set(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self.page, at, value)

    def get(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self.page, at)[0])

    def write(self, stream: bytes, flags: int = 0) -> None:
        """As perf_aux_output_end() does."""
        for byte in stream:
            self.area[self.written % AREA_BYTES] = byte
            self.written += 1
        self.set(AUX_HEAD, self.written)
        self.note(struct.pack("<QQQ", self.written - len(stream), len(stream), flags))

    def note(self, body: bytes) -> None:
        record = perf(AUX, body)
        start = PAGE_BYTES + self.noted
        self.page[start : start + len(record)] = record
        self.noted += len(record)
        self.set(DATA_HEAD, self.noted)

    def read(self, limit: int = LIMIT) -> NDArray[np.void]:
        into = np.empty(limit, ACCESS)
        array = ffi.from_buffer("struct tierd_access[]", into, require_writable=True)
        return into[: lib.tierd_read_accesses(self.ring, limit, array)]


def test_what_was_written_is_read_once_and_given_back() -> None:
    mapped = Mapped()
    for tid in range(1, 60):
        mapped.write(replace(GOOD, tid=tid).encode())
        assert mapped.read()["tid"].tolist() == [tid]
        assert mapped.get(AUX_TAIL) == mapped.get(AUX_HEAD) == tid * SPE_BYTES
    assert not len(mapped.read())


def test_what_found_no_room_with_the_reader_stays_in_the_area() -> None:
    mapped = Mapped()
    mapped.write(GOOD.encode() * 3)
    assert len(mapped.read(limit=2)) == 2
    assert SPE_BYTES < mapped.get(AUX_TAIL) <= 2 * SPE_BYTES
    assert len(mapped.read(limit=2)) == 1
    assert mapped.get(AUX_TAIL) == 3 * SPE_BYTES


@pytest.mark.parametrize(
    ("flags", "lost", "throttled"),
    [
        (0, 0, 0),
        (OVERWRITE, 0, 0),
        (COLLISION, 1, 0),
        (TRUNCATED, 1, 1),
        (TRUNCATED | PARTIAL | COLLISION, 1, 1),
    ],
)
def test_what_was_lost_is_counted(flags: int, lost: int, throttled: int) -> None:
    mapped = Mapped()
    mapped.write(GOOD.encode(), flags)
    assert mapped.read()["lost"].tolist() == [lost]
    mapped.write(b"", flags)
    assert not len(mapped.read())
    cursor = mapped.ring.cursor
    assert (cursor.lost, cursor.throttled, cursor.corrupt) == (2 * lost, 2 * throttled, 0)
    assert cursor.tail == mapped.noted


def test_a_note_too_short_is_corrupt() -> None:
    mapped = Mapped()
    mapped.note(bytes(16))
    mapped.write(GOOD.encode())
    assert mapped.read()["lost"].tolist() == [1]
    assert mapped.ring.cursor.corrupt == 1
