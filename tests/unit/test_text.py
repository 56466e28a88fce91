# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.kernel import text
from tierd.kernel.text import UnexpectedContent


@pytest.mark.parametrize(
    ("content", "ids"),
    [("", ()), ("0", (0,)), ("0-3,5", (0, 1, 2, 3, 5)), ("7,0-1\n", (0, 1, 7)), ("3-3", (3,))],
)
def test_list_of_ids(content: str, ids: tuple[int, ...]) -> None:
    assert text.parse_ids(content) == ids


@pytest.mark.parametrize("content", ["a", "-", "1-", "-1", "3-1", "0-2:1/2", "1 2", "0-4294967295"])
def test_what_is_no_list_of_ids(content: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        text.parse_ids(content)


@given(st.sets(st.integers(0, 2000)))
def test_list_reads_back_as_the_kernel_prints_it(ids: set[int]) -> None:
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    printed = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    assert text.parse_ids(printed) == tuple(sorted(ids))


@given(st.text(alphabet="0123456789,- x\n", max_size=30))
def test_any_text_is_ids_or_a_value_error(content: str) -> None:
    try:
        ids = text.parse_ids(content)
    except ValueError:
        ids = ()
    assert list(ids) == sorted(set(ids))


@pytest.mark.parametrize(
    ("content", "number"), [("12\n", 12), ("0x10000000\n", 1 << 28), ("", None)]
)
def test_number(tmp_path: Path, content: str, number: int | None) -> None:
    path = tmp_path / "attribute"
    path.write_text(content)
    assert text.read_int(path) == number


def test_absent_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    assert text.read(path) is None
    assert text.read_int(path) is None
    assert text.read_ids(path) is None
    assert text.entries(path) == ()


def test_garbled_content_names_the_file_and_what_was_wanted(tmp_path: Path) -> None:
    path = tmp_path / "attribute"
    path.write_text("one two")
    with pytest.raises(UnexpectedContent, match=r"attribute holds 'one two', not a number"):
        text.read_int(path)
    with pytest.raises(UnexpectedContent, match=r"attribute holds 'one two', not a list such as"):
        text.read_ids(path)


def test_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "attribute"
    path.write_bytes(b"\xff" * (text.ATTRIBUTE_BYTES + 1))
    with pytest.raises(UnexpectedContent, match="not at most 4096 bytes"):
        text.read(path)
    path.write_bytes(b"x" * text.ATTRIBUTE_BYTES)
    assert text.read(path) == "x" * text.ATTRIBUTE_BYTES


def test_file_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        text.read(tmp_path)


def test_large_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "many"
    path.write_text("0123456789\n" * 1000)
    assert text.read_bytes(path, 11_000) == path.read_bytes()
    assert list(text.lines(path, 11_000)) == [b"0123456789\n"] * 1000
    with pytest.raises(UnexpectedContent, match="not at most 10999 bytes"):
        list(text.lines(path, 10_999))


@pytest.mark.parametrize(
    ("content", "address"),
    [("0x690000000\n", 0x690000000), ("0xffffffffffffffff\n", None), ("0x0\n", 0)],
)
def test_address(tmp_path: Path, content: str, address: int | None) -> None:
    path = tmp_path / "resource"
    path.write_text(content)
    assert text.read_address(path) == address


def test_name_of_what_a_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "driver").symlink_to("../../drivers/kmem")
    (tmp_path / "plain").write_text("")
    assert text.link_name(tmp_path / "driver") == "kmem"
    assert text.link_name(tmp_path / "plain") is None
    assert text.link_name(tmp_path / "absent") is None
