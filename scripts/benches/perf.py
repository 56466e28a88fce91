# SPDX-License-Identifier: Apache-2.0
"""Decoding of a full ring of sampled accesses: the shim, and memcpy of the same bytes, in turn."""

import ctypes
import struct

import numpy as np

from benches.figure import Figure
from benches.ring import best_of
from tierd.kernel import accesses
from tierd.kernel.accesses import ACCESS, ACCESS_BYTES

RING_BYTES = 1 << 20
SAMPLES = RING_BYTES // ACCESS_BYTES
ROUNDS = 15
SAMPLE = struct.Struct("<IHHIIQQQQQ")  # perf's header, and the fields in its order


def run() -> list[Figure]:
    stream = a_stream()
    data = stream.ljust(RING_BYTES, b"\0")
    into = np.empty(SAMPLES, ACCESS)
    target = ctypes.create_string_buffer(len(stream))

    def decode() -> int:
        return len(accesses.decode(data, head=len(stream), tail=0, into=into).records)

    assert decode() == SAMPLES
    decoding, copying = [], []
    for _ in range(ROUNDS):
        decoding.append(best_of(5, decode))
        copying.append(best_of(5, lambda: ctypes.memmove(target, stream, len(stream))))
    return [
        Figure.of_rounds(
            "samples decoded",
            [SAMPLES / seconds / 1e6 for seconds in decoding],
            "million/s",
            at_least=10,
        ),
        Figure.of_rounds(
            "slower than memcpy of the same bytes",
            [own / copy for own, copy in zip(decoding, copying, strict=True)],
            "times",
        ),
    ]


def a_stream() -> bytes:
    """A ring full of samples, as the kernel lays them out."""
    return b"".join(
        SAMPLE.pack(9, 0, ACCESS_BYTES, 640, 640, i, 0x7F00_0000_0000 + i * 4096, 300, 7, i * 64)
        for i in range(SAMPLES)
    )
