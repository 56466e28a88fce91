# SPDX-License-Identifier: Apache-2.0
"""Decoding of sampled accesses, well-formed and not, against a plain parser."""

import struct
from dataclasses import astuple, dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.test_ring import (
    LOST,
    RING_BYTES,
    SAMPLE,
    THROTTLE,
    Foreign,
    Loss,
    after,
    captured,
    losses,
    perf,
    tails,
    u32,
    u64,
)
from tierd.kernel import accesses
from tierd.kernel.accesses import ACCESS, ACCESS_BYTES
from tierd.kernel.ring import Decoded


@dataclass(frozen=True, slots=True)
class Access:
    """A sample, in perf's order."""

    pid: int
    tid: int
    time_ns: int
    addr: int
    weight: int
    source: int
    phys_addr: int

    def encode(self) -> bytes:
        return perf(SAMPLE, struct.pack("<IIQQQQQ", *astuple(self)))

    def row(self, lost: int) -> tuple[int, ...]:
        what = (self.time_ns, self.addr, self.phys_addr, self.source)
        return (*what, self.pid, self.tid, self.weight % 2**32, min(lost, 2**32 - 1))


Record = Access | Loss | Foreign

samples = st.builds(Access, u32, u32, u64, u64, u64, u64, u64)
streams = st.lists(st.one_of(samples, samples, losses, st.just(Foreign())), max_size=14)


def decode(stream: bytes, tail: int = 0, limit: int = 100) -> Decoded:
    data, head = captured(stream, tail), after(tail, len(stream))
    return accesses.decode(data, head=head, tail=tail, into=np.empty(limit, ACCESS))


def joined(records: list[Record]) -> bytes:
    return b"".join(record.encode() for record in records)


def expected(records: list[Record]) -> list[tuple[int, ...]]:
    found, gap = [], 0
    for record in records:
        if isinstance(record, Loss):
            gap += record.lost
        if isinstance(record, Access):
            found.append(record.row(gap))
            gap = 0
    return found


def test_a_sample_takes_what_the_ring_is_sized_for() -> None:
    assert len(Access(0, 0, 0, 0, 0, 0, 0).encode()) == ACCESS_BYTES


@given(records=streams, tail=tails)
def test_every_sample_comes_through(records: list[Record], tail: int) -> None:
    got = decode(joined(records), tail)
    assert got.records.tolist() == expected(records)
    assert got.tail == after(tail, len(joined(records)))
    assert got.lost == sum(record.lost for record in records if isinstance(record, Loss))
    assert got.corrupt == 0
    assert got.throttled == sum(isinstance(record, Foreign) for record in records)


@given(
    data=st.integers(3, 9).flatmap(lambda n: st.binary(min_size=1 << n, max_size=1 << n)),
    tail=u64,
    unread=u64,
)
@example(data=struct.pack("<IHH", SAMPLE, 0, 8), tail=0, unread=8)
@example(data=struct.pack("<IHH", LOST, 0, 8), tail=0, unread=8)
@example(data=struct.pack("<IHH", THROTTLE, 0, 8), tail=0, unread=8)
def test_any_bytes_end_at_the_head(data: bytes, tail: int, unread: int) -> None:
    head = after(tail, unread)
    got = accesses.decode(data, head=head, tail=tail, into=np.empty(100, ACCESS))
    assert got.tail == head
    assert len(got.records) * ACCESS_BYTES <= len(data)


@given(records=streams, tail=tails, at=st.integers(0, RING_BYTES - 1), byte=st.integers(0, 255))
def test_a_changed_byte_is_counted_or_harmless(
    records: list[Record], tail: int, at: int, byte: int
) -> None:
    stream = bytearray(joined(records))
    if at < len(stream):
        stream[at] = byte
    got = decode(bytes(stream), tail)
    assert got.tail == after(tail, len(stream))
    assert len(got.records) <= len(stream) // ACCESS_BYTES


@pytest.mark.parametrize("size", [ACCESS_BYTES - 8, ACCESS_BYTES + 8])
def test_a_sample_of_another_form_is_corrupt(size: int) -> None:
    good = Access(1, 2, 3, 4, 5, 6, 7)
    got = decode(perf(SAMPLE, bytes(size - 8)) + good.encode())
    assert got.records.tolist() == [good.row(1)]
    assert got.corrupt == 1
