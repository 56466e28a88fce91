# SPDX-License-Identifier: Apache-2.0
"""Files of sysfs and procfs that hold one value, read and written whole.

Follows Documentation/filesystems/sysfs.rst: a value is written by one write(2), and the kernel
answers with an errno. Nothing is ever created: a file that is missing is an error.

    $ cat /sys/module/damon_stat/parameters/enabled
    Y
    $ cat /proc/sys/kernel/random/boot_id
    6b2c5a0e-5f0d-4c1e-9d3c-0d2f5c7b8a11
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tierd.kernel._errors import check
from tierd.kernel._shim import lib


class Files(Protocol):
    """How one-value files are reached: the kernel's own, or a fake of them in a test."""

    def read(self, path: Path) -> str:
        """Returns the value without its newline; raises OSError."""
        ...

    def write(self, path: Path, value: str) -> None:
        """Writes the value at once; raises OSError that names the path."""
        ...

    def write_ranges(self, folder: Path, start: int, size: int, count: int) -> None:
        """Writes adjoining ranges into `start` and `end` of the folders 0, 1, ...; raises OSError.

        Args:
            folder: where those are.
            start: where the first range begins, bytes.
            size: of each, bytes.
            count: how many there are.
        """
        ...

    def exists(self, path: Path) -> bool: ...

    def names(self, path: Path) -> list[str]:
        """Returns what is in a folder; raises OSError."""
        ...


class KernelFiles:
    """The files of the running kernel."""

    def read(self, path: Path) -> str:
        return path.read_text().strip()

    def write(self, path: Path, value: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        finally:
            os.close(fd)

    def write_ranges(self, folder: Path, start: int, size: int, count: int) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            check(lib.tierd_write_ranges(fd, start, size, count), f"write of {folder}")
        finally:
            os.close(fd)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def names(self, path: Path) -> list[str]:
        return [entry.name for entry in path.iterdir()]


class ToldFiles:
    """Files of which each write is told before it is made, by its path and value."""

    def __init__(self, files: Files, tell: Callable[[Path, str], None]) -> None:
        self._files, self._tell = files, tell
        self.read, self.exists, self.names = files.read, files.exists, files.names
        self.write_ranges = files.write_ranges

    def write(self, path: Path, value: str) -> None:
        self._tell(path, value)
        self._files.write(path, value)


def boot_id(root: Path) -> str:
    """Returns the id of the current boot, another one after each."""
    return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
