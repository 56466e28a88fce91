# SPDX-License-Identifier: Apache-2.0
"""Recordings: what the daemon saw, in a file that can be replayed. docs/recordings.md has the form.

A file is a preamble and then frames, each of which can be checked and read by itself:

    preamble  "tierdrec", version (u2), 0x0102 (u2): 0x0201 tells of another byte order
    frame     kind (u1), three zero bytes, bytes of the text, of text and rows, and of what is
              stored (u4 each), CRC-32 of that (u4); then, compressed by zlib, text in JSON and rows

All numbers are little-endian. A frame's rows are a structured array of a dtype that its kind fixes,
stored column by column of bytes, which compresses to a fifth of rows as they are.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tierd.errors import TierdError
from tierd.model import MAX_TIERS

MAGIC, VERSION, BYTE_ORDER = b"tierdrec", 1, 0x0102
_PREAMBLE = struct.Struct("<8sHH")
_HEAD = struct.Struct("<B3xIIII")

MOST_TEXT_BYTES, MOST_FRAME_BYTES = 1 << 20, 1 << 28
"""A frame that says it is larger is none of ours: no daemon has so many regions."""


class Kind(IntEnum):
    """What a frame tells."""

    BEGIN = 1
    """The tiers and the configuration; the first frame, and again where they change."""
    TARGET = 2
    """A process begins to be watched."""
    GONE = 3
    """It is not watched any more."""
    MAPPED = 4
    """What a target has mapped from now on."""
    ACCESSES = 5
    """One snapshot of a target."""
    PLACES = 6
    """Where a target's memory lies, as far as it has been looked at."""
    ROUND = 7
    """The end of what one round has seen; rows are the tiers, by rank."""

    @property
    def dtype(self) -> np.dtype[np.void] | None:
        """The rows' dtype, None of frames without rows."""
        return _DTYPES.get(self)


_DTYPES = {
    Kind.MAPPED: np.dtype([("start", "<u8"), ("end", "<u8")]),
    Kind.ACCESSES: np.dtype(
        [("start", "<u8"), ("end", "<u8"), ("nr_accesses", "<u4"), ("age", "<u4")]
    ),
    Kind.PLACES: np.dtype([("start", "<u8"), ("end", "<u8"), ("resident", "<f4", (MAX_TIERS,))]),
    Kind.ROUND: np.dtype(
        [
            ("capacity_bytes", "<u8"),
            ("free_bytes", "<u8"),  # above the kernel's watermarks
            ("used_bytes", "<u8"),  # by the targets
        ]
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One thing that is told. `text` is as JSON has it, `rows` of the kind's dtype."""

    kind: Kind
    text: Mapping[str, Any] = field(default_factory=dict)
    rows: NDArray[np.void] | None = None


class BadRecording(TierdError):
    """A file that is no recording, or a damaged one: the message says where and what."""


def preamble() -> bytes:
    """Returns what a recording begins with."""
    return _PREAMBLE.pack(MAGIC, VERSION, BYTE_ORDER)


def encode(frame: Frame) -> bytes:
    """Returns a frame as it stands in a file."""
    dtype = frame.kind.dtype
    text = json.dumps(frame.text, separators=(",", ":")).encode()
    whole = text if dtype is None or frame.rows is None else text + _by_column(frame.rows, dtype)
    stored = zlib.compress(whole)
    head = _HEAD.pack(frame.kind, len(text), len(whole), len(stored), zlib.crc32(stored))
    return head + stored


def _by_column(rows: NDArray[np.void], dtype: np.dtype[np.void]) -> bytes:
    whole = np.ascontiguousarray(rows.astype(dtype, copy=False))
    return whole.view(np.uint8).reshape(len(rows), dtype.itemsize).T.tobytes()


def _by_row(data: bytes, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    columns = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(columns.T).view(dtype).ravel()


def read(path: Path) -> Iterator[Frame]:
    """Yields a recording's frames.

    Raises:
        BadRecording: the file is none, or is damaged; frames before the damage have been yielded.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        _check_preamble(path, file)
        while True:
            offset = file.tell()
            try:
                frame = _read_frame(file)
            except (ValueError, RecursionError, zlib.error) as error:
                raise BadRecording(
                    f"{path}: damaged at byte {offset}: {error}",
                    hint="--until-damage takes what is before",
                ) from None
            if frame is None:
                return
            yield frame


def _check_preamble(path: Path, file: BinaryIO) -> None:
    start = file.read(_PREAMBLE.size)
    if len(start) < _PREAMBLE.size or not start.startswith(MAGIC):
        raise BadRecording(f"{path}: no recording of tierd's", hint="tierctl record makes them")
    _, version, order = _PREAMBLE.unpack(start)
    if order != BYTE_ORDER:
        raise BadRecording(f"{path}: of another byte order", hint="they are little-endian")
    if version != VERSION:
        raise BadRecording(
            f"{path}: of version {version}; this tierd reads version {VERSION}",
            hint="replay it with the tierd that made it",
        )


def _read_frame(file: BinaryIO) -> Frame | None:
    """Reads the next frame, None at the end.

    Raises:
        ValueError, RecursionError, zlib.error: it is damaged.
    """
    head = file.read(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise ValueError("it ends within a frame")
    number, text_bytes, whole_bytes, stored_bytes, crc = _HEAD.unpack(head)
    if not 2 <= text_bytes <= min(MOST_TEXT_BYTES, whole_bytes):
        raise ValueError(f"a text of {text_bytes:,} bytes")
    if max(whole_bytes, stored_bytes) > MOST_FRAME_BYTES:
        raise ValueError(f"a frame of {max(whole_bytes, stored_bytes):,} bytes")
    stored = file.read(stored_bytes)
    if len(stored) < stored_bytes:
        raise ValueError("it ends within a frame")
    if zlib.crc32(stored) != crc:
        raise ValueError("the checksum differs")
    return _decode(Kind(number), _inflated(stored, whole_bytes), text_bytes)


def _inflated(stored: bytes, size: int) -> bytes:
    inflating = zlib.decompressobj()
    whole = inflating.decompress(stored, size + 1)
    if len(whole) != size or not inflating.eof:
        raise ValueError("a frame of another size than it says")
    return whole


def _decode(kind: Kind, whole: bytes, text_bytes: int) -> Frame:
    text = json.loads(whole[:text_bytes])
    if not isinstance(text, dict):
        raise ValueError("a text that is no object")
    data, dtype = whole[text_bytes:], kind.dtype
    if len(data) % dtype.itemsize if dtype else data:
        raise ValueError("rows of another size")
    return Frame(kind=kind, text=text, rows=_by_row(data, dtype) if dtype else None)
