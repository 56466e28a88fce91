# SPDX-License-Identifier: Apache-2.0
"""tierd_move_folios() against a model of the kernel: refusals, failed runs, a full destination."""

import errno
import os
import shlex
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierd.kernel.pages import FOLIO, UNASKED
from tierd.model import PAGE_BYTES

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
MODEL = """
struct model_page { int node; int kind; int head; int tails; int isolated; };
struct model {
    struct model_page *pages; int room; int lives; int refusal; int moves; int needless;
};
extern struct model model;
"""
SLOW, FAST = 1, 0
PLENTY = 1 << 20


class Kind(IntEnum):
    PLAIN = 0
    ABSENT = 1
    ZERO = 2
    SHARED = 3
    BUSY = 4
    PINNED = 5
    FLEETING = 6


@dataclass(frozen=True, slots=True)
class Folio:
    kind: Kind = Kind.PLAIN
    pages: int = 1
    node: int = SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    folios: NDArray[np.void]
    nodes: list[int]  # by page, as the model has them
    tally: dict[str, int]
    moves: int
    needless: int


class Kernel:
    """native/pages.c on top of the model."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self._ffi = ffi
        self._lib = lib

    def move(
        self,
        world: list[Folio],
        *,
        batch_pages: int = 4096,
        room: int = PLENTY,
        lives: int = PLENTY,
        refusal: int = 0,
        move_all: bool = False,
        asked: bool = True,
    ) -> Result:
        count = sum(folio.pages for folio in world)
        pages = self._ffi.new("struct model_page[]", _pages(world))
        self._lib.model = (pages, room, lives, refusal, 0, 0)
        folios = _listed(world, asked=asked)
        tally = self._ffi.new("struct tierd_tally *")
        result = self._lib.tierd_move_folios(
            1,
            FAST,
            batch_pages,
            int(move_all),
            self._ffi.from_buffer("struct tierd_folio[]", folios, require_writable=True),
            len(folios),
            tally,
        )
        assert result == 0
        return Result(
            folios=folios,
            nodes=[pages[i].node for i in range(count)],
            tally={name: getattr(tally, name) for name in dir(tally)},
            moves=self._lib.model.moves,
            needless=self._lib.model.needless,
        )


def _pages(world: list[Folio]) -> list[dict[str, int]]:
    pages: list[dict[str, int]] = []
    for folio in world:
        page = {"node": folio.node, "kind": folio.kind, "head": len(pages)}
        pages += [{**page, "tails": folio.pages - 1}, *([page] * (folio.pages - 1))]
    return pages


def _listed(world: list[Folio], *, asked: bool) -> NDArray[np.void]:
    """The world as PAGEMAP_SCAN lists it: tails of folios that no PMD maps count one each."""
    pages = [folio for folio in world for _ in range(folio.pages)]
    folios = np.zeros(len(pages), FOLIO)
    folios["addr"] = (np.arange(len(pages)) + 1) * PAGE_BYTES
    folios["pages"] = 1
    folios["node"] = [_answer(folio) for folio in pages] if asked else UNASKED
    return folios


def _answer(folio: Folio) -> int:
    return {Kind.ABSENT: -errno.ENOENT, Kind.ZERO: -errno.EFAULT}.get(folio.kind, folio.node)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    library = tmp_path_factory.mktemp("model") / "model.so"
    gcc = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-Dsyscall=model_syscall", "-Wall", "-Werror"]
    gcc += [*shlex.split(os.environ.get("CFLAGS", "")), "-shared", "-fPIC", f"-I{NATIVE}"]
    sources = [NATIVE / "pages.c", HERE / "model_kernel.c"]
    subprocess.run([*gcc, "-o", library, *sources], check=True)
    ffi = FFI()
    header = (NATIVE / "tierd.h").read_text()
    ffi.cdef(header.split("/* cffi: begin */")[1].split("/* cffi: end */")[0] + MODEL)
    # Kept loaded to the end, so that a leak report can name it.
    return Kernel(ffi, ffi.dlopen(str(library), os.RTLD_NOW | os.RTLD_NODELETE))


folios = st.builds(
    Folio,
    st.sampled_from(Kind),
    st.sampled_from([1, 1, 1, 2, 4, 16]),
    st.sampled_from([SLOW, FAST]),
)
worlds = st.lists(folios, max_size=40)
batches = st.integers(1, 50)


def outcome(folio: Folio, *, move_all: bool = False) -> str:
    if folio.kind is Kind.ABSENT:
        return "absent"
    if folio.kind is Kind.ZERO:
        return "unmovable"
    if folio.node == FAST:
        return "resident"
    if folio.kind is Kind.FLEETING:
        return "absent"
    if folio.kind is Kind.SHARED and not move_all:
        return "shared"
    return "busy" if folio.kind in (Kind.BUSY, Kind.PINNED) else "moved"


@given(world=worlds, batch_pages=batches, move_all=st.booleans(), asked=st.booleans())
def test_each_page_meets_its_own_outcome(
    kernel: Kernel, world: list[Folio], batch_pages: int, move_all: bool, asked: bool
) -> None:
    result = kernel.move(world, batch_pages=batch_pages, move_all=move_all, asked=asked)
    due = dict.fromkeys(result.tally, 0)
    for folio in world:
        due[outcome(folio, move_all=move_all)] += folio.pages
    assert result.tally == due
    assert [node == FAST for node in result.folios["node"]] == [
        outcome(folio, move_all=move_all) in ("moved", "resident")
        for folio in world
        for _ in range(folio.pages)
    ]


@given(world=worlds, batch_pages=batches)
def test_residents_are_never_passed_in(
    kernel: Kernel, world: list[Folio], batch_pages: int
) -> None:
    single = [Folio(folio.kind, 1, folio.node) for folio in world]
    assert kernel.move(single, batch_pages=batch_pages).needless == 0


@given(world=worlds, batch_pages=batches, room=st.integers(0, 100))
def test_a_full_destination_ends_the_work(
    kernel: Kernel, world: list[Folio], batch_pages: int, room: int
) -> None:
    result = kernel.move(world, batch_pages=batch_pages, room=room)
    arrived = sum(
        node == FAST != folio.node
        for node, folio in zip(result.nodes, _by_page(world), strict=True)
    )
    assert result.tally["moved"] == arrived <= room
    assert (result.tally["no_memory"] > 0) == (result.tally["stopped"] == -errno.ENOMEM)
    assert sum(v for k, v in result.tally.items() if k != "stopped") == len(result.nodes)


def test_no_call_follows_the_one_that_found_no_memory(kernel: Kernel) -> None:
    result = kernel.move([Folio()] * 100, batch_pages=10, room=15)
    assert result.moves == 2
    assert (result.tally["moved"], result.tally["no_memory"]) == (15, 85)


@given(world=worlds, batch_pages=batches, lives=st.integers(0, 6))
def test_an_exit_in_mid_batch_is_a_result(
    kernel: Kernel, world: list[Folio], batch_pages: int, lives: int
) -> None:
    result = kernel.move(world, batch_pages=batch_pages, lives=lives)
    arrived = sum(
        node == FAST != folio.node
        for node, folio in zip(result.nodes, _by_page(world), strict=True)
    )
    assert result.tally["moved"] <= arrived
    assert (result.tally["left"] > 0) <= (result.tally["stopped"] == -errno.ESRCH)
    assert sum(v for k, v in result.tally.items() if k != "stopped") == len(result.nodes)


@pytest.mark.parametrize("refusal", [errno.EACCES, errno.EPERM, errno.ENODEV])
def test_a_refusal_of_all_is_told_apart_from_one_of_a_page(kernel: Kernel, refusal: int) -> None:
    world = [Folio(), Folio(Kind.SHARED), Folio(node=FAST)]
    result = kernel.move(world, refusal=refusal)
    assert result.tally["stopped"] == -refusal
    assert (result.tally["left"], result.tally["resident"], result.tally["shared"]) == (2, 1, 0)


def test_pages_behind_a_failed_run_are_tried(kernel: Kernel) -> None:
    world = [Folio(), Folio(Kind.PINNED), Folio(Kind.BUSY), *[Folio()] * 1000]
    result = kernel.move(world)
    assert result.tally["moved"] == 1001
    assert result.tally["busy"] == 2
    assert result.moves == 2


def test_a_batch_holds_as_many_pages_as_asked(kernel: Kernel) -> None:
    assert kernel.move([Folio()] * 100, batch_pages=30).moves == 4


def _by_page(world: list[Folio]) -> list[Folio]:
    return [folio for folio in world for _ in range(folio.pages)]
