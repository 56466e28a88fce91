# SPDX-License-Identifier: Apache-2.0
"""Decoding of a full ring of DAMON's records: the shim, a Python loop, and memcpy, in turn."""

import ctypes
import struct
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benches.figure import Figure
from tierd.kernel import ring
from tierd.kernel.ring import Layout

RING_BYTES = 1 << 20
RECORDS = RING_BYTES // ring.RECORD_BYTES
ROUNDS = 15
SAMPLE = struct.Struct("<IHHQI8xQI4xQQII4x")  # perf's header, time and size; common fields; DAMON's


def run() -> list[Figure]:
    stream = a_stream()
    data = stream.ljust(RING_BYTES, b"\0")
    records = np.empty(RECORDS, ring.RECORD)
    target = ctypes.create_string_buffer(len(stream))
    assert decode(data, records) == RECORDS
    assert len(unpack(stream)) == RECORDS
    decoding, unpacking, copying = [], [], []
    for _ in range(ROUNDS):
        decoding.append(best_of(5, lambda: decode(data, records)))
        unpacking.append(best_of(3, lambda: unpack(stream)))
        copying.append(best_of(5, lambda: ctypes.memmove(target, stream, len(stream))))
    return [
        Figure.of_rounds(
            "faster than a loop over struct.iter_unpack",
            [loop / own for loop, own in zip(unpacking, decoding, strict=True)],
            "times",
            at_least=50,
        ),
        Figure.of_rounds(
            "slower than memcpy of the same bytes",
            [own / copy for own, copy in zip(decoding, copying, strict=True)],
            "times",
            at_most=10,
        ),
        Figure.of_rounds("a record", [seconds / RECORDS * 1e9 for seconds in decoding], "ns"),
    ]


def a_stream() -> bytes:
    """A ring full of records, as the kernel lays them out."""
    place = range(0x7F00_0000_0000, 0x7F00_0000_0000 + RECORDS * 4096, 4096)
    return b"".join(
        SAMPLE.pack(9, 0, ring.RECORD_BYTES, i, 52, 0, RECORDS, at, at + 4096, i % 20, i)
        for i, at in enumerate(place)
    )


def decode(data: bytes, records: NDArray[np.void]) -> int:
    """Decodes into the same array again and again, as the reader of a live ring does."""
    head = RECORDS * ring.RECORD_BYTES
    return len(ring.decode(data, head=head, tail=0, layout=Layout(), into=records).records)


def unpack(stream: bytes) -> list[tuple[int, ...]]:
    """What one would write without the shim."""
    records: list[tuple[int, ...]] = []
    for _, _, _, at_ns, _, target, count, start, end, accesses, age in SAMPLE.iter_unpack(stream):
        records.append((at_ns, start, end, target, count, accesses, age, 0))
    return records


def best_of(count: int, call: Callable[[], object]) -> float:
    """The shortest of so many runs, in seconds."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.min(times))
