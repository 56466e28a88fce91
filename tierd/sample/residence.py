# SPDX-License-Identifier: Apache-2.0
"""Where the pieces of a target are: a look at some of their pages, never at all of them.

One query of move_pages(2) for all the pages of a round, which costs about 1/40 of moving them, and
one of PAGEMAP_SCAN for each 2 MiB that they lie in, whether that is a huge page.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierd.kernel import pages
from tierd.model import MAX_TIERS, PAGE_BYTES, Pid

MOSTLY = 0.5
"""A piece is huge where at least so much of it is."""
PAGES_PER_PIECE = 16
"""Looked at in each piece: a share is known to 1/16, and a piece of no more pages exactly."""


def probe(
    pid: Pid,
    pieces: NDArray[np.void],
    rank_of_node: NDArray[np.int8],
    *,
    budget_pages: int,
    now_s: float,
    rng: np.random.Generator,
    query: Callable[[Pid, NDArray[np.void]], None] = pages.look,
) -> None:
    """Sets `resident`, `huge` and `probed_s` of the pieces most in need, in place.

    The pieces never looked at come first, then those looked at longest ago, as many as the budget
    has pages for.

    Args:
        pid: the target.
        pieces: dtype PIECE.
        rank_of_node: as of bulk.rank_nodes(). Pages on other nodes count for no tier.
        budget_pages: at most so many pages are asked for.
        now_s: CLOCK_MONOTONIC.
        rng: where in its stretch of a piece each page is taken.
        query: tells where the pages are, and which are part of huge ones.

    Raises:
        ProcessLookupError: the target has exited; no piece was changed.
        PermissionError: we may not look into it.
    """
    counts = np.minimum(_page_counts(pieces), PAGES_PER_PIECE)
    order = np.argsort(pieces["probed_s"], kind="stable")
    chosen = np.sort(order[np.cumsum(counts[order]) <= budget_pages])
    if not len(chosen):
        return
    piece, addresses = _sample(pieces[chosen], counts[chosen], rng)
    folios = np.empty(len(addresses), pages.FOLIO)
    folios["addr"], folios["pages"], folios["node"] = addresses, 1, pages.UNASKED
    query(pid, folios)
    pieces["resident"][chosen] = _shares(
        piece, _ranks(folios["node"], rank_of_node), counts[chosen]
    )
    huge = np.bincount(piece, folios["pages"] > 1, len(chosen))
    pieces["huge"][chosen] = huge >= MOSTLY * counts[chosen]
    pieces["probed_s"][chosen] = now_s


def _page_counts(pieces: NDArray[np.void]) -> NDArray[np.int64]:
    first = pieces["start"] // PAGE_BYTES
    behind = -(-pieces["end"].astype(np.int64) // PAGE_BYTES)
    return np.asarray(behind - first.astype(np.int64), np.int64)


def _sample(
    pieces: NDArray[np.void], counts: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
    """Takes pages of each piece, one from every equal stretch of it.

    Returns:
        each page's piece and address, by piece.
    """
    piece = np.repeat(np.arange(len(pieces)), counts)
    nth = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    size, count = _page_counts(pieces)[piece], counts[piece]
    first, behind = nth * size // count, (nth + 1) * size // count
    page = (first + (rng.random(len(piece)) * (behind - first)).astype(np.int64)).astype(np.uint64)
    return piece, (pieces["start"][piece] // PAGE_BYTES + page) * np.uint64(PAGE_BYTES)


def _ranks(nodes: NDArray[np.int32], rank_of_node: NDArray[np.int8]) -> NDArray[np.int8]:
    """Returns each page's rank, -1 where it isn't present or its node is in no tier."""
    is_known = (nodes >= 0) & (nodes < len(rank_of_node))
    return np.where(is_known, rank_of_node[np.where(is_known, nodes, 0)], -1).astype(np.int8)


def _shares(
    piece: NDArray[np.intp], ranks: NDArray[np.int8], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns for each piece the share of its pages on each rank."""
    placed = ranks >= 0
    cells = piece[placed] * MAX_TIERS + ranks[placed]
    found = np.bincount(cells, minlength=len(counts) * MAX_TIERS)
    return found.reshape(len(counts), MAX_TIERS) / counts[:, None]
