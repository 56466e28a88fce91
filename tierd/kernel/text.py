# SPDX-License-Identifier: Apache-2.0
"""Small text files of sysfs and procfs, each read once and with a limit.

The bitmap lists follow Documentation/core-api/kernel-api.rst, "bitmap_parselist", as the kernel
prints them with %*pbl::

    0-3,5

An attribute that is absent is None: which attributes exist depends on the kernel and the firmware.
One that is there and holds something else than documented raises UnexpectedContent.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tierd.errors import TierdError

ATTRIBUTE_BYTES = 4096
"""A sysfs attribute is at most a page (Documentation/filesystems/sysfs.rst)."""

LARGEST_ID = 1 << 16
"""Above any node, CPU or memory block list that is worth taking: a garbled range ends here."""

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV, errno.ENXIO})
"""What the files of a process, device or node that is not there, or no longer, answer."""

_NO_ADDRESS = (1 << 64) - 1


class UnexpectedContent(TierdError):
    """A file of the kernel that does not hold what its documentation says."""

    def __init__(self, path: Path, content: str, wanted: str) -> None:
        super().__init__(
            f"{path} holds {content[:80]!r}, not {wanted}",
            hint="report this with the output of uname -a: this kernel's format is new to tierd",
        )
        self.path = path
        self.content = content


def read(path: Path, limit: int = ATTRIBUTE_BYTES) -> str | None:
    """Returns what the file holds less surrounding white space, or None where there is no file.

    Raises:
        UnexpectedContent: more than `limit` bytes.
        OSError: the file is there and cannot be read.
    """
    content = read_bytes(path, limit)
    return None if content is None else content.decode(errors="replace").strip()


def read_bytes(path: Path | str, limit: int) -> bytes | None:
    """As read(), as it stands. A process or device that goes away in mid-read is None too.

    Without a Python file object, which would cost more than the read of a small file.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = _read_all(file, limit + 1)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
    if len(content) > limit:
        shown = content[:80].decode(errors="replace")
        raise UnexpectedContent(Path(path), shown, f"at most {limit} bytes")
    return content


def _read_all(file: int, most: int) -> bytes:
    """Reads to the end or so many bytes: procfs gives a page or so at a time."""
    content = b""
    while len(content) < most and (part := os.read(file, most - len(content))):
        content += part
    return content


def lines(path: Path, limit: int) -> Iterator[bytes]:
    """Yields the lines of a file that may be large; none of a file that is absent.

    A process that exits in mid-read ends the lines.

    Raises:
        UnexpectedContent: more than `limit` bytes.
        OSError: the file is there and cannot be read.
    """
    try:
        with path.open("rb") as file:
            left = limit
            for line in file:
                left -= len(line)
                if left < 0:
                    raise UnexpectedContent(
                        path, line.decode(errors="replace"), f"at most {limit} bytes"
                    )
                yield line
    except OSError as error:
        if error.errno not in GONE:
            raise


def link_name(path: Path) -> str | None:
    """Returns the last part of what a link points to, or None where there is no link."""
    try:
        return path.readlink().name
    except OSError as error:
        if error.errno in GONE or error.errno == errno.EINVAL:
            return None
        raise


def entries(folder: Path) -> tuple[Path, ...]:
    """Returns what lies in a folder, by name; nothing where there is no folder."""
    try:
        return tuple(sorted(folder.iterdir()))
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return ()


def read_int(path: Path) -> int | None:
    """Reads a decimal or 0x number; an empty file is None, as an absent one."""
    content = read(path)
    if not content:
        return None
    try:
        return int(content, 0)
    except ValueError:
        raise UnexpectedContent(path, content, "a number") from None


def read_address(path: Path) -> int | None:
    """Reads a physical address; None where it is not set (all ones), or told to root alone."""
    try:
        address = read_int(path)
    except PermissionError:
        return None
    return None if address == _NO_ADDRESS else address


def read_ids(path: Path) -> tuple[int, ...] | None:
    """Reads a list such as 0-3,5; an empty list is ()."""
    content = read(path)
    if content is None:
        return None
    try:
        return parse_ids(content)
    except ValueError:
        raise UnexpectedContent(path, content, "a list such as 0-3,5") from None


def parse_ids(content: str) -> tuple[int, ...]:
    """Parses a list such as 0-3,5 into ascending ids.

    Raises:
        ValueError: anything else, also an id of LARGEST_ID and above.
    """
    ids: set[int] = set()
    for part in filter(None, content.strip().split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ValueError(f"not a list of ids: {content[:80]!r}")
        start, end = int(first), int(last or first)
        if not start <= end < LARGEST_ID:
            raise ValueError(f"not a range of ids: {part[:80]!r}")
        ids.update(range(start, end + 1))
    return tuple(sorted(ids))
