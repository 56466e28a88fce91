# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tierd.kernel import tracepoint
from tierd.kernel.ring import Layout

FORMAT = """\
name: damon_aggregated
ID: 767
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned long target_id;\toffset:8;\tsize:8;\tsigned:0;
\tfield:unsigned int nr_regions;\toffset:16;\tsize:4;\tsigned:0;
\tfield:unsigned long start;\toffset:24;\tsize:8;\tsigned:0;
\tfield:unsigned long end;\toffset:32;\tsize:8;\tsigned:0;
\tfield:unsigned int nr_accesses;\toffset:40;\tsize:4;\tsigned:0;
\tfield:unsigned int age;\toffset:44;\tsize:4;\tsigned:0;

print fmt: "target_id=%lu nr_regions=%u %lu-%lu: %u %u", REC->target_id, REC->nr_regions
"""
"""As Linux 6.12, 6.18 and 7.2 show it."""


def put(root: Path, tracefs: str, text: str = FORMAT) -> None:
    event = root / tracefs / "events/damon/damon_aggregated"
    event.mkdir(parents=True)
    (event / "format").write_text(text)
    (event / "id").write_text("767\n")


@pytest.mark.parametrize("tracefs", tracepoint.TRACEFS)
def test_the_tracepoint_is_found_in_either_place(tmp_path: Path, tracefs: str) -> None:
    put(tmp_path, tracefs)

    found = tracepoint.find(tmp_path)

    assert found is not None
    assert found.id == 767
    assert found.layout == Layout(
        target_id=8, nr_regions=16, start=24, end=32, nr_accesses=40, age=44
    )


def test_an_empty_tracefs_is_none(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/tracing").mkdir(parents=True)

    assert tracepoint.find(tmp_path) is None


def test_moved_fields_are_followed(tmp_path: Path) -> None:
    put(tmp_path, tracepoint.TRACEFS[0], FORMAT.replace("offset:24", "offset:48"))

    found = tracepoint.find(tmp_path)

    assert found is not None
    assert found.layout.start == 48


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("field:unsigned int age", "field:unsigned int years"),
        ("offset:44;\tsize:4", "offset:44;\tsize:8"),
        (FORMAT, "nonsense"),
    ],
)
def test_a_layout_that_the_reader_does_not_know_is_none(
    tmp_path: Path, before: str, after: str
) -> None:
    put(tmp_path, tracepoint.TRACEFS[0], FORMAT.replace(before, after))

    assert tracepoint.find(tmp_path) is None
