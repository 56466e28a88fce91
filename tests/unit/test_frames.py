# SPDX-License-Identifier: Apache-2.0
"""Physical pages, from files as procfs has them."""

import os
import struct
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.kernel import frames
from tierd.kernel.pages import FOLIO
from tierd.model import PAGE_BYTES, Pid

PID = Pid(640)
BASE = 0x7F0000000000
FREE, HEAD, TAIL, HUGE, POISONED = (1 << bit for bit in (10, 15, 16, 17, 19))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / f"proc/{PID}").mkdir(parents=True)
    return tmp_path


def map_pages(root: Path, *mappings: list[int | None]) -> None:
    """A process whose mappings, a page apart, have these frames."""
    lines, address = [], BASE
    with (root / f"proc/{PID}/pagemap").open("wb") as pagemap:
        pagemap.write(bytes(8))
        for mapping in mappings:
            end = address + len(mapping) * PAGE_BYTES
            lines.append(f"{address:x}-{end:x} rw-p 00000000 00:00 0 \n")
            pagemap.seek(address // PAGE_BYTES * 8)
            for frame in mapping:
                pagemap.write(struct.pack("<Q", 0 if frame is None else 1 << 63 | frame))
            address = end + PAGE_BYTES
    (root / f"proc/{PID}/maps").write_text("".join(lines))


def set_flags(root: Path, flags: dict[int, int]) -> None:
    with (root / "proc/kpageflags").open("wb") as file:
        for frame, value in flags.items():
            file.seek(frame * 8)
            file.write(struct.pack("<Q", value))


def pages(first: int, count: int) -> tuple[int, int]:
    start = BASE + first * PAGE_BYTES
    return start, start + count * PAGE_BYTES


def test_pages_of_the_frames_are_found_but_for_those_left_out(root: Path) -> None:
    map_pages(root, [100, 101, 7, None, 102, 103, 104], [105, 106, 8, 101])
    found, following = frames.find_in(
        PID, range(100, 106), frames.join([range(103, 104)]), root=root
    )
    assert found.tolist() == [pages(0, 2), pages(4, 1), pages(6, 1), pages(8, 1), pages(11, 1)]
    assert following is None


def test_a_long_process_is_looked_through_in_parts(root: Path) -> None:
    map_pages(root, [*range(100, 110)], [*range(110, 120)])
    cursor: int | None = 0
    found = []
    while cursor is not None:
        part, cursor = frames.find_in(PID, range(104, 114), cursor=cursor, most=3, root=root)
        found += part.tolist()
    assert sum(end - start for start, end in found) == 10 * PAGE_BYTES
    assert (found[0][0], found[-1][1]) == (pages(4, 1)[0], pages(14, 1)[1])


@pytest.mark.parametrize("most", [1, 4, 9])
def test_pages_of_a_range_of_frames_are_counted(
    root: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is mapped twice counts twice; 0 is no frame, as others than root read it."""
    monkeypatch.setattr(frames, "find_in", partial(frames.find_in, most=most))
    map_pages(root, [100, 101, 7, None, 102, 0, 104], [105, 101, *range(200, 220), 106])
    assert frames.count_in(PID, range(101, 106), root) == 5
    assert frames.count_in(Pid(641), range(101, 106), root) == 0


def test_a_call_reads_no_more_than_it_is_to(root: Path) -> None:
    """Be it for small pages far from each other, or for huge ones."""
    folios = np.zeros(6, FOLIO)
    folios["addr"] = BASE + np.array([0, 1, 100, 10_000, 10_512, 11_024]) * PAGE_BYTES
    folios["pages"] = [1, 1, 1, 512, 512, 1]
    assert frames._entries_of(folios).tolist() == [1, 99, 513, 512, 512, 1]


def test_a_process_that_has_gone_has_none(root: Path) -> None:
    found, following = frames.find_in(Pid(641), range(100), root=root)
    assert (len(found), following) == (0, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="frames are told to root alone")
def test_our_own_pages_are_found_where_the_kernel_has_them() -> None:
    found, _ = frames.find_in(Pid(os.getpid()), range(1, 1 << 52))
    assert len(found)


@pytest.mark.parametrize(
    ("flags", "is_free", "is_poisoned"),
    [(FREE, True, False), (POISONED, False, True), (0, True, False), (1 << 5, False, False)],
)
def test_what_a_frame_is_used_for(root: Path, flags: int, is_free: bool, is_poisoned: bool) -> None:
    set_flags(root, {700: flags})
    assert frames.is_free(700, root) is is_free
    assert frames.is_poisoned(700, root) is is_poisoned


def test_a_frame_behind_the_last_has_no_flags(root: Path) -> None:
    set_flags(root, {0: POISONED})
    assert not frames.is_poisoned(700, root)


def test_a_huge_page_moves_as_one(root: Path) -> None:
    huge = {512: HEAD} | dict.fromkeys(range(513, 1024), TAIL)
    small = {1024: HEAD, 1025: TAIL, 1026: TAIL, 1027: TAIL, 1028: HEAD, 1029: TAIL, 1030: 1 << 5}
    set_flags(root, huge | small)
    assert frames.folio_of(800, root) == range(512, 1024)
    assert frames.folio_of(512, root) == range(512, 1024)
    assert frames.folio_of(1026, root) == range(1024, 1028)
    assert frames.folio_of(1028, root) == range(1028, 1030)
    assert frames.folio_of(1030, root) == range(1030, 1031)


def test_a_huge_page_of_hugetlb_may_be_larger(root: Path) -> None:
    set_flags(root, {1024: HEAD | HUGE} | dict.fromkeys(range(1025, 3072), TAIL | HUGE))
    assert frames.folio_of(3000, root) == range(1024, 3072)


def test_huge_pages_at_the_ends_of_what_is_bad_are_left_out_too(root: Path) -> None:
    huge = {512: HEAD} | dict.fromkeys(range(513, 1024), TAIL)
    set_flags(root, huge | {1024: 1 << 5, 2048: HEAD, 2049: TAIL, 2050: 1 << 5})
    bad = frames.join([range(700, 1025), range(2049, 2050)])
    assert frames.parts_of(frames.whole_folios(bad, root)) == [range(512, 1025), range(2048, 2050)]


PARTS = st.lists(
    st.builds(
        lambda first, count: range(first, first + count), st.integers(0, 300), st.integers(0, 40)
    ),
    max_size=20,
)


@given(parts=PARTS)
def test_a_set_of_ranges_is_as_one_of_frames(parts: list[range]) -> None:
    naive = {frame for part in parts for frame in part}
    joined = frames.join(parts)
    told = frames.parts_of(joined)
    assert [frame for part in told for frame in part] == sorted(naive)
    assert all(a.stop < b.start for a, b in pairwise(told))
    assert frames.count(joined) == len(naive)
    asked = np.arange(400, dtype=np.uint64)
    assert asked[frames.among(asked, joined)].tolist() == sorted(naive)


@given(parts=PARTS, most=st.integers(1, 8))
def test_too_many_parts_are_taken_as_fewer_larger_ones(parts: list[range], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "MOST_PARTS", most)
        few = frames.parts_of(frames.join(parts))
    assert len(few) <= most
    held = {frame for part in few for frame in part}
    assert held >= {frame for part in parts for frame in part}


def test_gigabytes_are_as_cheap_as_a_page() -> None:
    lost = frames.join(range(n << 20, (n << 20) + (1 << 19)) for n in range(1000))
    assert lost.nbytes == 16_000
    assert frames.count(lost) == 1000 << 19


def test_without_flags_it_may_be_all_of_a_huge_page(root: Path) -> None:
    assert frames.folio_of(1000, root) == range(512, 1024)
