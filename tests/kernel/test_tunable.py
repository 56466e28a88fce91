# SPDX-License-Identifier: Apache-2.0
"""Ranges that the shim writes into folders of a start and an end, as DAMON's regions have them."""

from pathlib import Path

import pytest

from tests.kernel.test_pages import grown_bytes
from tierd.kernel.tunable import KernelFiles

PAGE = 4096
START = (1 << 64) - 16 * PAGE
"""As far up as addresses go."""


def folders(root: Path, count: int) -> Path:
    for index in range(count):
        (root / str(index)).mkdir()
        (root / str(index) / "start").touch()
        (root / str(index) / "end").touch()
    return root


def read(root: Path, count: int) -> list[tuple[int, int]]:
    return [
        (int((root / str(i) / "start").read_text()), int((root / str(i) / "end").read_text()))
        for i in range(count)
    ]


def test_ranges_adjoin(tmp_path: Path) -> None:
    KernelFiles().write_ranges(folders(tmp_path, 12), START, PAGE, 12)
    starts = [START + index * PAGE for index in range(12)]
    assert read(tmp_path, 12) == [(start, start + PAGE) for start in starts]


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        KernelFiles().write_ranges(folders(tmp_path, 2), START, PAGE, 3)
    assert read(tmp_path, 2)[1] == (START + PAGE, START + 2 * PAGE)
    with pytest.raises(FileNotFoundError):
        KernelFiles().write_ranges(tmp_path / "none", START, PAGE, 1)


def test_what_the_kernel_refuses_is_an_error(tmp_path: Path) -> None:
    """A full device stands for a file of sysfs that doesn't take the number."""
    folders(tmp_path, 1)
    (tmp_path / "0/end").unlink()
    (tmp_path / "0/end").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        KernelFiles().write_ranges(tmp_path, START, PAGE, 1)


def test_writing_leaks_nothing(tmp_path: Path) -> None:
    folders(tmp_path, 4)
    (tmp_path / "3/end").unlink()

    def fails_at_the_last() -> None:
        with pytest.raises(FileNotFoundError):
            KernelFiles().write_ranges(tmp_path, START, PAGE, 4)

    assert grown_bytes(fails_at_the_last, calls=500) < 1 << 20
