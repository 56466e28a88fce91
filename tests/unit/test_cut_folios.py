# SPDX-License-Identifier: Apache-2.0
"""How much of a huge page ranges have, beside a set of their pages."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.kernel.pages import FOLIO
from tierd.migrate.mover import pages_within
from tierd.model import PAGE_BYTES

edges = st.lists(st.integers(0, 60), unique=True, min_size=2, max_size=12).map(sorted)
folios = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 16)), max_size=8)


@given(edges, folios, st.randoms())
def test_as_many_pages_as_are_in_the_ranges(
    edges: list[int], folios: list[tuple[int, int]], random: Random
) -> None:
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    random.shuffle(ranges)
    start, end = (np.array([r[i] for r in ranges], np.uint64) * PAGE_BYTES for i in (0, 1))
    inside = {page for first, behind in ranges for page in range(first, behind)}
    asked = np.zeros(len(folios), FOLIO)
    asked["addr"] = [first * PAGE_BYTES for first, _ in folios]
    asked["pages"] = [pages for _, pages in folios]
    expected = [len(inside & set(range(first, first + pages))) for first, pages in folios]
    assert pages_within(asked, start, end).tolist() == expected


def test_a_range_takes_the_pages_that_its_ends_are_in() -> None:
    folio = np.array([(8 * PAGE_BYTES, 4, 0)], FOLIO)
    start, end = (np.array([page * PAGE_BYTES + 1], np.uint64) for page in (9, 10))
    assert pages_within(folio, start, end).tolist() == [2]
