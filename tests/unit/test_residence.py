# SPDX-License-Identifier: Apache-2.0
import errno
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierd.bulk import PIECE
from tierd.kernel import pages
from tierd.model import PAGE_BYTES, Pid
from tierd.sample import residence

PID = Pid(77)
RANKS = np.array([0, 1, -1], np.int8)
"""Nodes 0 and 1 are tiers 0 and 1; node 2 is in none."""

NodeOf = Callable[[NDArray[np.uint64]], NDArray[np.int32]]


def made(*sizes_pages: int, probed_s: float = -np.inf) -> NDArray[np.void]:
    """Pieces of these sizes with a page between them."""
    pieces = np.zeros(len(sizes_pages), PIECE)
    ends = np.cumsum(np.array(sizes_pages) + 1) * PAGE_BYTES
    pieces["end"] = ends
    pieces["start"] = ends - np.array(sizes_pages) * PAGE_BYTES
    pieces["probed_s"] = probed_s
    return pieces


def probe(
    pieces: NDArray[np.void], node_of: NodeOf, *, budget: int = 1000, seed: int = 1
) -> list[NDArray[np.uint64]]:
    """Probes with an imagined kernel; returns the addresses of each query."""
    asked = []

    def query(pid: Pid, folios: NDArray[np.void]) -> None:
        assert pid == PID
        asked.append(folios["addr"].copy())
        folios["node"] = node_of(folios["addr"])

    rng = np.random.default_rng(seed)
    residence.probe(PID, pieces, RANKS, budget_pages=budget, now_s=5.0, rng=rng, query=query)
    return asked


def on_node(node: int) -> NodeOf:
    return lambda addresses: np.full(len(addresses), node, np.int32)


def test_a_small_piece_is_known_exactly() -> None:
    pieces = made(16)
    first = int(pieces["start"][0]) // PAGE_BYTES

    asked = probe(pieces, lambda at: (at // PAGE_BYTES - first < 4).astype(np.int32))

    assert [int(at) // PAGE_BYTES - first for at in asked[0]] == list(range(16))
    assert pieces["resident"][0, :2].tolist() == [0.75, 0.25]
    assert pieces["probed_s"][0] == 5.0


def test_a_piece_is_huge_where_most_of_it_is() -> None:
    pieces = made(16, 16, 16)
    pieces["huge"][2] = True
    ends = [int(at) + size * PAGE_BYTES for at, size in zip(pieces["start"], (8, 7), strict=False)]

    def query(_: Pid, folios: NDArray[np.void]) -> None:
        for at, end in zip(pieces["start"], ends, strict=False):
            folios["pages"][(folios["addr"] >= at) & (folios["addr"] < end)] = 512

    rng = np.random.default_rng(1)
    residence.probe(PID, pieces, RANKS, budget_pages=48, now_s=5.0, rng=rng, query=query)

    assert pieces["huge"].tolist() == [True, False, False]


@pytest.mark.parametrize("node", [-errno.ENOENT, -errno.EFAULT, 2, 99, pages.UNASKED])
def test_pages_in_no_tier_count_for_none(node: int) -> None:
    pieces = made(8)

    probe(pieces, on_node(node))

    assert pieces["resident"].sum() == 0
    assert pieces["probed_s"][0] == 5.0


def test_the_never_probed_come_first_then_the_longest_ago() -> None:
    pieces = made(16, 16, 16, 16)
    pieces["probed_s"] = [3.0, 1.0, -np.inf, 2.0]

    probe(pieces, on_node(0), budget=50)

    assert pieces["probed_s"].tolist() == [3.0, 5.0, 5.0, 5.0]


def test_a_spent_budget_asks_nothing() -> None:
    assert probe(made(16), on_node(0), budget=15) == []


def test_no_pieces_ask_nothing() -> None:
    assert probe(made(), on_node(0)) == []


def test_a_target_that_is_gone_changes_nothing() -> None:
    pieces = made(16, 400)

    def gone(_: NDArray[np.uint64]) -> NDArray[np.int32]:
        raise ProcessLookupError

    with pytest.raises(ProcessLookupError):
        probe(pieces, gone)
    assert (pieces["probed_s"] == -np.inf).all()


@given(
    sizes=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=40),
    budget=st.integers(1, 600),
    seed=st.integers(0, 5),
)
def test_samples_are_spread_evenly_inside_their_pieces(
    sizes: list[int], budget: int, seed: int
) -> None:
    pieces = made(*sizes)

    asked = probe(pieces, on_node(1), budget=budget, seed=seed)

    addresses = np.concatenate([np.empty(0, np.uint64), *asked])
    assert len(addresses) <= budget
    assert len(np.unique(addresses)) == len(addresses)
    for piece in pieces[pieces["probed_s"] == 5.0]:
        inside = addresses[(addresses >= piece["start"]) & (addresses < piece["end"])]
        size = int(piece["end"] - piece["start"]) // PAGE_BYTES
        stretch = size / min(size, residence.PAGES_PER_PIECE)
        nth = (inside - piece["start"]) // PAGE_BYTES // stretch
        assert len(inside) == min(size, residence.PAGES_PER_PIECE)
        assert (np.abs(nth - np.arange(len(inside))) <= 1).all()
        assert piece["resident"][1] == 1.0


@given(st.floats(0, 1), st.integers(0, 20))
def test_the_share_of_a_large_piece_is_about_right(share: float, seed: int) -> None:
    pieces = made(100_000)
    start, size = int(pieces["start"][0]), 100_000 * PAGE_BYTES

    probe(pieces, lambda at: (at.astype(float) - start >= share * size).astype(np.int32), seed=seed)

    assert abs(pieces["resident"][0, 0] - share) <= 1 / residence.PAGES_PER_PIECE + 1e-6
