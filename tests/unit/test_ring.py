# SPDX-License-Identifier: Apache-2.0
"""Decoding of perf rings, well-formed and not, against a plain parser; and snapshots from parts."""

import base64
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierd.kernel import ring
from tierd.kernel.ring import RECORD, Assembler, Decoded, Layout

LAYOUT = Layout()
SAMPLE, LOST, LOST_SAMPLES, THROTTLE = 9, 2, 13, 5
RING_BYTES = 1024
RINGS = Path(__file__).with_name("rings")


@dataclass(frozen=True, slots=True)
class Region:
    """A record of damon_aggregated."""

    time_ns: int
    target_id: int
    nr_regions: int
    start: int
    end: int
    nr_accesses: int
    age: int

    def encode(self) -> bytes:
        raw = struct.pack("<HBBi", 767, 0, 0, 42)
        raw += struct.pack("<QIxxxxQQII", *self._fields())
        return perf(SAMPLE, struct.pack("<QI", self.time_ns, len(raw) + 4) + raw + bytes(4))

    def _fields(self) -> tuple[int, ...]:
        place = (self.target_id, self.nr_regions, self.start, self.end)
        return (*place, self.nr_accesses, self.age)

    def record(self, lost: int) -> tuple[int, ...]:
        place = (self.time_ns, self.start, self.end, self.target_id)
        return (*place, self.nr_regions, self.nr_accesses, self.age, min(lost, 2**32 - 1))


@dataclass(frozen=True, slots=True)
class Loss:
    """The kernel's word for records that found no room."""

    lost: int
    samples: bool

    def encode(self) -> bytes:
        if self.samples:
            return perf(LOST_SAMPLES, struct.pack("<Q", self.lost))
        return perf(LOST, struct.pack("<QQ", 7, self.lost))


@dataclass(frozen=True, slots=True)
class Foreign:
    """A record of another kind."""

    def encode(self) -> bytes:
        return perf(THROTTLE, bytes(24))


def perf(kind: int, body: bytes) -> bytes:
    return struct.pack("<IHH", kind, 0, 8 + len(body)) + body


Record = Region | Loss | Foreign


def captured(stream: bytes, tail: int, size: int = RING_BYTES) -> bytes:
    """The data area of a ring in which a stream was written from position `tail` on."""
    area = np.full(size, 0xAA, np.uint8)
    area[(tail % size + np.arange(len(stream))) % size] = np.frombuffer(stream, np.uint8)
    return area.tobytes()


def decode(stream: bytes, tail: int = 0, limit: int = 100) -> Decoded:
    data = captured(stream, tail)
    head = after(tail, len(stream))
    return ring.decode(data, head=head, tail=tail, layout=LAYOUT, into=np.empty(limit, RECORD))


def after(tail: int, count: int) -> int:
    """Positions are 64 bits wide, and wrap around as the kernel's do."""
    return (tail + count) % 2**64


def expected(records: list[Record]) -> list[tuple[int, ...]]:
    found, gap = [], 0
    for record in records:
        if isinstance(record, Loss):
            gap += record.lost
        if isinstance(record, Region):
            found.append(record.record(gap))
            gap = 0
    return found


u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
regions = st.builds(Region, u64, u64, u32, u64, u64, u32, u32)
losses = st.builds(Loss, u32, st.booleans())
streams = st.lists(st.one_of(regions, regions, losses, st.just(Foreign())), max_size=14)
tails = st.integers(0, 2**61 - 1).map(lambda units: units * 8)


def joined(records: list[Record]) -> bytes:
    return b"".join(record.encode() for record in records)


def test_a_record_takes_what_the_ring_is_sized_for() -> None:
    assert len(Region(0, 0, 0, 0, 0, 0, 0).encode()) == ring.RECORD_BYTES


@given(records=streams, tail=tails)
def test_every_record_comes_through(records: list[Record], tail: int) -> None:
    stream = joined(records)
    got = decode(stream, tail)
    assert got.records.tolist() == expected(records)
    assert got.tail == after(tail, len(stream))
    assert got.lost == sum(record.lost for record in records if isinstance(record, Loss))
    assert got.corrupt == 0


@given(records=streams, tail=tails, limit=st.integers(1, 4))
def test_what_does_not_fit_stays(records: list[Record], tail: int, limit: int) -> None:
    got = decode(joined(records), tail, limit)
    fit = expected(records)[:limit]
    assert got.records.tolist() == fit
    sizes = np.cumsum([len(record.encode()) for record in records], dtype=int).tolist()
    samples = np.cumsum([isinstance(record, Region) for record in records], dtype=int).tolist()
    full = [size for size, count in zip(sizes, samples, strict=True) if count == limit]
    assert got.tail == after(tail, full[0] if full else sum(sizes[-1:]))


def test_no_room_consumes_nothing() -> None:
    got = decode(Region(1, 2, 3, 4, 5, 6, 7).encode(), limit=0)
    assert (len(got.records), got.tail) == (0, 0)


@given(
    data=st.integers(3, 9).flatmap(lambda n: st.binary(min_size=1 << n, max_size=1 << n)),
    tail=u64,
    unread=u64,
)
@example(data=bytes(8), tail=0, unread=8)
@example(data=struct.pack("<IHH", SAMPLE, 0, 8), tail=0, unread=8)
@example(data=struct.pack("<IHH", LOST, 0, 8), tail=0, unread=8)
@example(data=struct.pack("<IHH", LOST_SAMPLES, 0, 8), tail=0, unread=8)
@example(data=struct.pack("<IHH", SAMPLE, 0, 65528), tail=0, unread=8)
def test_any_bytes_end_at_the_head(data: bytes, tail: int, unread: int) -> None:
    head = after(tail, unread)
    got = ring.decode(data, head=head, tail=tail, layout=LAYOUT, into=np.empty(100, RECORD))
    assert got.tail == head
    assert len(got.records) * ring.RECORD_BYTES <= len(data)


@given(records=streams, tail=tails, at=st.integers(0, RING_BYTES - 1), byte=st.integers(0, 255))
def test_a_changed_byte_is_counted_or_harmless(
    records: list[Record], tail: int, at: int, byte: int
) -> None:
    stream = bytearray(joined(records))
    if at < len(stream):
        stream[at] = byte
    got = decode(bytes(stream), tail)
    assert got.tail == after(tail, len(stream))
    assert len(got.records) <= len(stream) // ring.RECORD_BYTES


@pytest.mark.parametrize("size", [0, 4, 12, 1000, 65528])
def test_a_size_that_cannot_be_gives_up_the_rest(size: int) -> None:
    good = Region(1, 2, 3, 4, 5, 6, 7)
    broken = struct.pack("<IHH", SAMPLE, 0, size) + bytes(64)
    got = decode(good.encode() + broken + good.encode())
    assert got.records.tolist() == [good.record(0)]
    assert got.corrupt == 1
    assert got.tail == 3 * ring.RECORD_BYTES


def test_a_sample_too_short_for_the_layout_tears_the_snapshot() -> None:
    good = Region(1, 2, 3, 4, 5, 6, 7)
    short = perf(SAMPLE, struct.pack("<QI", 1, 12) + bytes(12))
    got = decode(short + good.encode())
    assert got.records.tolist() == [good.record(1)]
    assert got.corrupt == 1


@pytest.mark.parametrize("raw_bytes", [47, 53])
def test_raw_data_that_cannot_be_are_refused(raw_bytes: int) -> None:
    sample = bytearray(Region(1, 2, 3, 4, 5, 6, 7).encode())
    sample[16:20] = struct.pack("<I", raw_bytes)
    got = decode(bytes(sample))
    assert (len(got.records), got.corrupt) == (0, 1)


@pytest.mark.parametrize("kind", [SAMPLE, LOST, LOST_SAMPLES])
def test_a_record_without_its_body_is_refused(kind: int) -> None:
    good = Region(1, 2, 3, 4, 5, 6, 7)
    got = decode(perf(kind, b"") + good.encode())
    assert got.records.tolist() == [good.record(1)]
    assert (got.lost, got.corrupt) == (0, 1)


def test_the_size_of_raw_data_is_not_taken_from_the_next_record() -> None:
    got = decode(perf(SAMPLE, bytes(8)) + perf(52, bytes(80)))
    assert (len(got.records), got.corrupt) == (0, 1)


@pytest.mark.parametrize("size", [0, 4, 24, 1000])
def test_a_ring_that_is_no_power_of_two_is_refused(size: int) -> None:
    with pytest.raises(OSError, match="decode: Invalid argument"):
        ring.decode(bytes(size), head=0, tail=0, layout=LAYOUT, into=np.empty(1, RECORD))


def test_a_layout_beyond_any_record_is_refused() -> None:
    with pytest.raises(OSError, match="decode: Invalid argument"):
        ring.decode(bytes(8), head=0, tail=0, layout=Layout(age=4096), into=np.empty(1, RECORD))


def test_fields_are_read_where_the_layout_says() -> None:
    moved = Layout(target_id=32, nr_regions=44, start=8, end=24, nr_accesses=16, age=40)
    sample = Region(1, 2, 3, 4, 5, 6, 7).encode()
    got = ring.decode(captured(sample, 0), head=72, tail=0, layout=moved, into=np.empty(1, RECORD))
    assert got.records.tolist() == [(1, 2, 4, 5, 7, 3, 6, 0)]


# Snapshots


def aggregation(at: int, *sizes: int) -> NDArray[np.void]:
    """The records of one aggregation of targets with so many regions."""
    records = [
        (at, 1000 * target + 10 * i, 1000 * target + 10 * i + 10, target, size, at % 20, at, 0)
        for target, size in enumerate(sizes)
        for i in range(size)
    ]
    return np.array(records, RECORD)


def lossy(records: NDArray[np.void], lost: NDArray[np.bool_]) -> NDArray[np.void]:
    """Records of which some were lost, as the decoder marks what follows them."""
    kept = np.flatnonzero(~lost)
    left = records[kept].copy()
    left["lost"] = np.diff(kept, prepend=-1) - 1
    return left


aggregations = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=8)


@given(sizes=aggregations, data=st.data())
def test_snapshots_do_not_depend_on_how_they_were_read(
    sizes: list[list[int]], data: st.DataObject
) -> None:
    records = np.concatenate([aggregation(at, *each) for at, each in enumerate(sizes)])
    cuts = data.draw(st.lists(st.integers(0, len(records)), max_size=6).map(sorted))
    assembler = Assembler()
    found = [s for part in np.split(records, cuts) for s in assembler.add(part)]
    due = [(at, target, n) for at, each in enumerate(sizes) for target, n in enumerate(each)]
    assert [(round(s.at_s * 1e9), s.target_id, len(s.regions)) for s in found] == due
    assert assembler.torn == 0
    for snapshot in found:
        first = 1000 * snapshot.target_id
        assert (snapshot.regions["start"] == first + np.arange(len(snapshot.regions)) * 10).all()
        assert (snapshot.regions["age"] == round(snapshot.at_s * 1e9)).all()


@given(sizes=aggregations, data=st.data())
def test_a_snapshot_is_never_stitched(sizes: list[list[int]], data: st.DataObject) -> None:
    records = np.concatenate([aggregation(at, *each) for at, each in enumerate(sizes)])
    flags = st.lists(st.booleans(), min_size=len(records), max_size=len(records))
    lost = np.array(data.draw(flags), np.bool_)
    whole = [
        (at, target)
        for at, each in enumerate(sizes)
        for target in range(len(each))
        if not lost[(records["time_ns"] == at) & (records["target_id"] == target)].any()
    ]
    assembler = Assembler()
    found = assembler.add(lossy(records, lost))
    assert [(round(s.at_s * 1e9), s.target_id) for s in found] == whole


def test_a_torn_snapshot_is_counted_once() -> None:
    first, second = aggregation(1, 4), aggregation(2, 4)
    lost = np.array([0, 0, 1, 1, 1, 1, 0, 0], np.bool_)
    assembler = Assembler()
    assert assembler.add(lossy(np.concatenate([first, second]), lost)) == []
    assert assembler.torn == 1  # the second may still be going on, as far as its end tells
    assert len(assembler.add(aggregation(3, 4))) == 1
    assert assembler.torn == 2


def test_a_snapshot_that_began_before_is_dropped() -> None:
    assembler = Assembler()
    assert assembler.add(aggregation(1, 5)[3:]) == []
    assert [s.target_id for s in assembler.add(aggregation(2, 5))] == [0]
    assert assembler.torn == 1


def test_a_part_is_not_joined_to_an_aggregation_that_lies_above_it() -> None:
    below, above = aggregation(1, 3)[:2], aggregation(2, 2)
    above["start"] += 1000
    above["end"] += 1000
    assembler = Assembler()
    (snapshot,) = assembler.add(np.concatenate([below, above]))
    assert snapshot.regions["start"].tolist() == [1000, 1010]
    assert assembler.torn == 1


def test_nothing_read_is_nothing_found() -> None:
    assembler = Assembler()
    assert assembler.add(np.empty(0, RECORD)) == []
    assert assembler.torn == 0


# Rings captured in guests, mapped with 4096 bytes while a kdamond watched a process, just before
# they were read; `trace` is what tracefs printed of the same records, by trace_clock mono:
# kdamond.0-391 [000] ..... 63.201177: damon_aggregated: target_id=0 nr_regions=12 1-2: 0 7

TRACED = re.compile(
    r" (\d+)\.(\d+): damon_aggregated: target_id=(\d+) nr_regions=(\d+) (\d+)-(\d+): (\d+) (\d+)$"
)


@pytest.mark.parametrize("capture", sorted(RINGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_captured_ring_reads_as_the_kernel_prints_it(capture: Path) -> None:
    told = json.loads(capture.read_text())
    data, layout = base64.b64decode(told["data"]), Layout(**told["layout"])
    assert told["head"] // len(data) != told["tail"] // len(data)  # it wraps around
    got = ring.decode(
        data, head=told["head"], tail=told["tail"], layout=layout, into=np.empty(100, RECORD)
    )
    assert (got.tail, got.lost, got.corrupt) == (told["head"], 0, 0)
    printed = [
        [int(word) for word in traced.groups()]
        for traced in map(TRACED.search, told["trace"])
        if traced
    ]
    fields = ["target_id", "nr_regions", "start", "end", "nr_accesses", "age"]
    assert got.records[fields].tolist() == [tuple(words[2:]) for words in printed]
    printed_us = np.array([seconds * 1_000_000 + us for seconds, us, *_ in printed])
    assert (abs(got.records["time_ns"] / 1000 - printed_us) < 10_000).all()
    (snapshot,) = Assembler().add(got.records)
    assert len(snapshot.regions) == len(told["trace"])
