# SPDX-License-Identifier: Apache-2.0
"""Parts of a file read and written in batches, by io_uring, or one by one where there is none.

Where the kernel has no io_uring for us (before 5.6, kernel.io_uring_disabled, a seccomp filter),
preadv(2) and pwritev(2) do the same with one part under way at a time.
"""

import errno
import os
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.kernel._errors import check
from tierd.kernel._shim import ffi, lib


class Parts(Protocol):
    """What moves parts of a file. Nothing is under way when a call returns.

    Both calls take the file, the parts' offsets (bytes), and memory, shape (len(offsets), part
    bytes), contiguous; they return what was moved of each, in bytes, or a negative errno.
    """

    name: str

    def read(
        self, fd: int, offsets: NDArray[np.int64], into: NDArray[np.uint8]
    ) -> NDArray[np.int32]: ...

    def write(
        self, fd: int, offsets: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> NDArray[np.int32]: ...

    def close(self) -> None: ...


class Uring:
    """Parts by io_uring.

    Args:
        most: parts of a call.

    Raises:
        OSError: there is no io_uring for us.
    """

    name = "io_uring"

    def __init__(self, most: int) -> None:
        opened = ffi.new("struct tierd_uring **")
        check(lib.tierd_open_uring(most, opened), "io_uring_setup")
        self._uring = ffi.gc(opened[0], lib.tierd_close_uring)

    def read(
        self, fd: int, offsets: NDArray[np.int64], into: NDArray[np.uint8]
    ) -> NDArray[np.int32]:
        return self._run(fd, offsets, into, is_write=False)

    def write(
        self, fd: int, offsets: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> NDArray[np.int32]:
        return self._run(fd, offsets, data, is_write=True)

    def close(self) -> None:
        ffi.release(self._uring)

    def _run(
        self, fd: int, offsets: NDArray[np.int64], data: NDArray[np.uint8], *, is_write: bool
    ) -> NDArray[np.int32]:
        results = np.empty(len(offsets), np.int32)
        done = lib.tierd_run_uring(
            self._uring,
            fd,
            is_write,
            data.shape[1],
            ffi.from_buffer("int64_t[]", offsets),
            len(offsets),
            ffi.from_buffer("uint8_t[]", data),
            ffi.from_buffer("int32_t[]", results, require_writable=True),
        )
        check(done, "io_uring_enter")
        return results


class OneByOne:
    """Parts by preadv(2) and pwritev(2)."""

    name = "preadv"

    def read(
        self, fd: int, offsets: NDArray[np.int64], into: NDArray[np.uint8]
    ) -> NDArray[np.int32]:
        done = (
            _moved(os.preadv, fd, part, at) for at, part in zip(offsets.tolist(), into, strict=True)
        )
        return np.fromiter(done, np.int32, len(offsets))

    def write(
        self, fd: int, offsets: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> NDArray[np.int32]:
        done = (
            _moved(os.pwritev, fd, part, at)
            for at, part in zip(offsets.tolist(), data, strict=True)
        )
        return np.fromiter(done, np.int32, len(offsets))

    def close(self) -> None:
        """Nothing is open."""


def _moved(call: Callable[..., int], fd: int, part: NDArray[np.uint8], at: int) -> int:
    try:
        return call(fd, [part], at)
    except OSError as error:
        return -(error.errno or errno.EIO)


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """Returns what memory, and offsets and sizes, have to be multiples of (bytes) with O_DIRECT.

    (0, 0) where the file cannot be read and written so; None where the kernel does not tell, as
    before Linux 6.1.
    """
    memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    try:
        check(lib.tierd_tell_direct(fd, memory, offset), "statx")
    except OSError:
        return None
    return int(memory[0]), int(offset[0])
