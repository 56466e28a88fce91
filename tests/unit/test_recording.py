# SPDX-License-Identifier: Apache-2.0
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tierd.observe.recording import (
    BadRecording,
    Frame,
    Kind,
    encode,
    preamble,
    read,
)

HEAD_BYTES = 20
START = 12
"""Of the first frame."""


def written(tmp_path: Path, *data: bytes) -> Path:
    path = tmp_path / "recording"
    path.write_bytes(preamble() + b"".join(data))
    return path


def a_frame(rows: int = 3) -> Frame:
    regions = np.zeros(rows, Kind.ACCESSES.dtype)
    regions["start"] = np.arange(rows) * 4096
    regions["end"] = regions["start"] + 4096
    regions["nr_accesses"] = 7
    return Frame(kind=Kind.ACCESSES, text={"pid": 640}, rows=regions)


@given(
    kind=st.sampled_from(Kind),
    text=st.dictionaries(st.text(), st.integers() | st.text() | st.none()),
    data=st.data(),
)
def test_what_is_read_is_what_was_written(
    kind: Kind,
    text: dict[str, object],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows = None
    if kind.dtype is not None:
        elements = hnp.from_dtype(kind.dtype, allow_nan=False)
        rows = data.draw(hnp.arrays(kind.dtype, st.integers(0, 5), elements=elements))
    frame = Frame(kind=kind, text=text, rows=rows)
    path = written(tmp_path_factory.mktemp("recording"), encode(frame))
    (found,) = read(path)
    assert (found.kind, found.text) == (kind, text)
    if rows is None:
        assert found.rows is None
    else:
        assert found.rows is not None
        assert found.rows.dtype == kind.dtype
        assert np.array_equal(found.rows, rows)


def test_a_file_cut_anywhere_gives_what_is_whole(tmp_path: Path) -> None:
    frames = [encode(a_frame()), encode(a_frame(5))]
    whole = preamble() + b"".join(frames)
    ends = [START, START + len(frames[0]), len(whole)]
    path = tmp_path / "recording"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        found, damaged = [], False
        try:
            for frame in read(path):
                found.append(frame)
        except BadRecording:
            damaged = True
        assert damaged is (size not in ends)
        assert len(found) == sum(size >= end for end in ends[1:])


def test_a_bit_that_has_turned_is_found(tmp_path: Path) -> None:
    whole = bytearray(preamble() + encode(a_frame()))
    path = tmp_path / "recording"
    for bit in range(8 * len(whole)):
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        if START < bit // 8 < START + 4:
            assert len(list(read(path))) == 1, "nothing is in the bytes that fill up"
            continue
        try:
            found = list(read(path))
        except BadRecording:
            continue
        assert [frame.kind for frame in found] != [Kind.ACCESSES], "only the kind has no checksum"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no recording"),
        (b"PK\3\4 something else altogether", "no recording"),
        (struct.pack("<8sHH", b"tierdrec", 2, 0x0102), "version 2; this tierd reads version 1"),
        (struct.pack(">8sHH", b"tierdrec", 1, 0x0102), "another byte order"),
    ],
)
def test_what_is_no_recording_of_ours_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(BadRecording, match=message):
        list(read(path))


def framed(whole: bytes, text_bytes: int, *, says: int | None = None) -> bytes:
    stored = zlib.compress(whole)
    size = len(whole) if says is None else says
    head = struct.pack("<B3xIIII", Kind.ACCESSES, text_bytes, size, len(stored), zlib.crc32(stored))
    return head + stored


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (framed(b"{}" + bytes(1 << 20), 2, says=26), "another size than it says"),
        (framed(b"{}" + bytes(24), 2, says=60), "another size than it says"),
        (framed(b"{}" + bytes(23), 2), "rows of another size"),
        (framed(b"[]", 2), "no object"),
        (framed(b"{", 1), "a text of 1 bytes"),
        (framed(b"{}", 9), "a text of 9 bytes"),
        (framed(b"[" * 100_000, 100_000), "damaged"),
        (framed(b"{}", 2, says=1 << 30), "a frame of 1,073,741,824 bytes"),
        (struct.pack("<B3xIIII", 99, 2, 2, 10, zlib.crc32(zlib.compress(b"{}"))), "ends within"),
    ],
)
def test_a_frame_that_lies_is_named(tmp_path: Path, frame: bytes, message: str) -> None:
    with pytest.raises(BadRecording, match=message) as caught:
        list(read(written(tmp_path, encode(a_frame()), frame)))
    assert f"at byte {START + len(encode(a_frame()))}" in str(caught.value)
