# SPDX-License-Identifier: Apache-2.0
"""What the daemon reads of an arena, from a program that it need not trust."""

import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.arena import Arena
from tierd.arena.shared import HEADER, MAGIC, Copies, Shared, SharedTier, accesses
from tierd.errors import Damaged
from tierd.model import TierKind
from tierd.tiers.memory import cxl, dram

TIERS = [
    SharedTier(name="dram", kind=TierKind.DRAM, slots=4),
    SharedTier(name="far", kind=TierKind.CXL, slots=9, latency_ns=400),
]


@pytest.fixture
def shared() -> Shared:
    return Shared.create(4096, 12, TIERS)


def forge(
    header: bytes, size_bytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
) -> int:
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    os.pwrite(fd, header[:size_bytes], 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header_of(shared: Shared) -> Any:
    return np.frombuffer(os.pread(shared.fd, HEADER.itemsize, 0), HEADER)[0].copy()


def test_the_daemon_reads_what_the_program_has_written(shared: Shared) -> None:
    seen = Copies(shared.fd)
    shared.counts[3] += 5
    shared.places[3] = 1
    counts, places = np.empty(12, np.uint32), np.empty(12, np.uint8)
    seen.counts(shared.fd, counts)
    seen.places(shared.fd, places)
    assert (seen.block_bytes, seen.blocks, list(seen.tiers)) == (4096, 12, TIERS)
    assert (counts[3], places[3]) == (5, 1)


def test_nobody_can_change_its_size(shared: Shared) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(shared.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.fd, 1 << 20)


def test_counts_that_go_round(shared: Shared) -> None:
    shared.counts[:2] = (1 << 32) - 3, 7
    before = shared.counts.copy()
    shared.counts[:2] += 10
    assert accesses(before, shared.counts)[:3].tolist() == [10, 10, 0]


def test_places_that_cannot_be(shared: Shared) -> None:
    shared.places[:4] = 0, 1, 2, 254
    places = np.empty(12, np.uint8)
    Copies(shared.fd).places(shared.fd, places)
    assert places[:4].tolist() == [0, 1, 255, 255]


LIES = {
    "magic": b"tierdARN",
    "version": 2,
    "tiers": 9,
    "block_bytes": 0,
    "blocks": 1 << 40,
    "counts_at": 8,
    "places_at": 1 << 63,
    "bytes": 4096,
}


@pytest.mark.parametrize("key", LIES)
def test_a_header_that_lies(shared: Shared, key: str) -> None:
    header = header_of(shared)
    size_bytes = int(header["bytes"])
    Copies(forge(header.tobytes(), size_bytes))
    header[key] = LIES[key]
    with pytest.raises(Damaged):
        Copies(forge(header.tobytes(), size_bytes))


@pytest.mark.parametrize("tier", [("dram", "gold"), (b"\xff\xfe", "dram")])
def test_a_tier_that_cannot_be(shared: Shared, tier: tuple[object, object]) -> None:
    header = header_of(shared)
    header["tier"][0]["name"], header["tier"][0]["kind"] = tier
    with pytest.raises(Damaged, match="an arena's tiers"):
        Copies(forge(header.tobytes(), int(header["bytes"])))


def test_one_that_is_not_sealed_or_too_short(shared: Shared, tmp_path: Path) -> None:
    header = header_of(shared)
    size_bytes = int(header["bytes"])
    for seals in (0, fcntl.F_SEAL_GROW):
        with pytest.raises(Damaged, match="not sealed"):
            Copies(forge(header.tobytes(), size_bytes, seals))
    for size in (0, 100, size_bytes - 4096, size_bytes + 1):
        with pytest.raises(Damaged):
            Copies(forge(header.tobytes(), size))
    with (tmp_path / "file").open("wb") as file, pytest.raises(Damaged, match="not an arena's"):
        Copies(file.fileno())


@given(st.binary(min_size=HEADER.itemsize - len(MAGIC), max_size=HEADER.itemsize))
def test_any_bytes_are_an_arena_or_damaged(noise: bytes) -> None:
    fd = forge(MAGIC + noise, 3 * mmap.PAGESIZE)
    try:
        Copies(fd)
    except Damaged:
        pass
    finally:
        os.close(fd)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(64, [dram(64 * 8), cxl(64 * 16)], checksums=True) as arena:
        yield arena


def test_what_is_written_there_harms_no_block(arena: Arena) -> None:
    """Whoever has the memfd writes to all of it, while blocks move."""
    hostile = mmap.mmap(arena.shared.fd, 0)
    ids = np.arange(arena.blocks)
    data = np.random.default_rng(1).integers(0, 256, (len(ids), 64), dtype=np.uint8)
    arena.write(ids, data)
    for byte in (0, 1, 0x55, 0xFF):
        hostile[:] = bytes([byte]) * len(hostile)
        arena.prefetch(ids[::-1])
        arena.wait(ids)
        assert (arena.read(ids) == data).all()
    assert sum(arena.moves().used) == len(ids)
    del hostile


def test_the_document_has_the_layout() -> None:
    text = (Path(__file__).parents[2] / "docs/arena.md").read_text()
    told = re.findall(r"^\| (\d+) \| (\d+)(?: each)? \|", text, re.MULTILINE)
    fields = (HEADER.fields or {}).values()
    assert [(int(at), int(size)) for at, size in told] == [
        (field[1], field[0].base.itemsize) for field in fields
    ]


def test_the_documents_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs/arena.md").read_text()
    first, second, third = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(first, "docs/arena.md", "exec"), {})
    assert capsys.readouterr().out.startswith(f"{10 * (64 << 10)} [1 1 1")
    exec(compile(second, "docs/arena.md", "exec"), {})
    assert re.match(r"Foresight\(ready=\d+, late=\d+, strayed=0, ", capsys.readouterr().out)
    exec(compile(third, "docs/arena.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Steered(by_daemon=False, why_not=")
