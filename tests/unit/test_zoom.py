# SPDX-License-Identifier: Apache-2.0
"""What single pages tell, and where they are looked at, over a simulated process."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.world import AGGREGATION_S, BASE, World, snapshot
from tierd.bulk import REGION, Accesses, Target
from tierd.decide.heat import ceiling, is_zoomed, score
from tierd.decide.magnify import magnify
from tierd.decide.zoom import awaits_look, most_doubtful
from tierd.model import PAGE_BYTES, Pid

PAGES, FAST = 4096, 1200
LOOK_S, LOOK_PAGES = 2.0, 512
LOOK_SAMPLE_S = 0.1


class Sparse(World):
    """Hot and cold pages side by side, so that regions are cut blindly; with looks at pages."""

    looked_pages = 0

    def sample(self) -> Accesses:
        return self._seen(np.unique(np.r_[0, self.rng.integers(1, PAGES, 40), PAGES]))

    def _seen(self, edges: NDArray[np.int64]) -> Accesses:
        seen = -np.expm1(-self.rate * 0.02)
        mean = np.add.reduceat(seen, edges[:-1]) / np.diff(edges)
        return snapshot(edges, self.rng.binomial(20, mean), self.now_s)

    def look(self) -> None:
        """Looks at the most doubtful range, at so many pages at once."""
        target = Target(pid=Pid(1), pieces=self.pieces, ceiling=ceiling(self.sample()))
        doubt = most_doubtful([target], self.policy, now_s=self.now_s)
        if doubt is None:
            return
        first = (doubt.start - BASE) // PAGE_BYTES
        last = min(first + LOOK_PAGES, (doubt.end - BASE) // PAGE_BYTES)
        self.looked_pages += last - first
        self.pieces = magnify(self.pieces, self.zoomed(first, last), self.policy)

    def zoomed(self, first: int, last: int) -> Accesses:
        regions = np.zeros(last - first, REGION)
        regions["start"] = BASE + np.arange(first, last) * PAGE_BYTES
        regions["end"] = regions["start"] + PAGE_BYTES
        seen = -np.expm1(-self.rate[first:last] * LOOK_SAMPLE_S)
        regions["nr_accesses"] = self.rng.binomial(round(LOOK_S / LOOK_SAMPLE_S), seen)
        return Accesses(
            pid=Pid(1),
            at_s=self.now_s,
            sample_s=LOOK_SAMPLE_S,
            aggregation_s=LOOK_S,
            regions=regions,
            zoomed=True,
        )


def sparse(seed: int, every: int, hot: float, rest: float) -> tuple[Sparse, NDArray[np.bool_]]:
    is_hot = np.arange(PAGES) % every == 0
    rate = np.where(is_hot, hot, rest)
    return Sparse(rate, np.ones(PAGES, np.int64), (FAST, 2 * PAGES), seed), is_hot


def play(world: Sparse, seconds: float, *, looks: bool) -> None:
    for n in range(round(seconds / AGGREGATION_S)):
        world.round()
        if looks and n % 5 == 4:
            world.look()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("every", "hot", "rest"), [(4, 500.0, 0.0), (4, 100.0, 1.0), (20, 8, 0.0)])
def test_sparse_hot_pages_are_found(seed: int, every: int, hot: float, rest: float) -> None:
    world, is_hot = sparse(seed, every, hot, rest)
    play(world, 60, looks=True)
    assert world.fast_share(is_hot) >= 0.9
    world.moved_pages = 0
    play(world, 30, looks=True)
    assert world.fast_share(is_hot) >= 0.9
    assert world.moved_pages <= 0.2 * is_hot.sum()


@pytest.mark.parametrize(("looks", "hits"), [(True, (0.95, 1.0)), (False, (0.0, 0.6))])
def test_pages_of_many_kinds_are_ranked(hits: tuple[float, float], *, looks: bool) -> None:
    """Ranks at random among the pages, accesses by Zipf's law; hits, of what is possible."""
    share = np.arange(1, PAGES + 1) ** -0.99
    rate = np.random.default_rng(1).permutation(share) * 12 * PAGES / share.sum()
    world = Sparse(rate, np.ones(PAGES, np.int64), (FAST, 2 * PAGES), 1)
    play(world, 60, looks=looks)
    assert hits[0] <= rate[world.tier == 0].sum() / np.sort(rate)[-FAST:].sum() <= hits[1]


def test_region_averages_alone_do_not_find_them() -> None:
    world, is_hot = sparse(0, 4, 500.0, 0.0)
    play(world, 60, looks=False)
    assert world.fast_share(is_hot) < 0.6


def test_where_pages_are_alike_nothing_is_cut() -> None:
    world, _ = sparse(0, 1, 5.0, 0.0)
    play(world, 40, looks=False)
    before = len(world.pieces)
    world.pieces = magnify(world.pieces, world.zoomed(0, PAGES), world.policy)
    assert is_zoomed(world.pieces).all()
    assert len(world.pieces) <= before
    assert score(world.pieces) * PAGE_BYTES == pytest.approx(5.0, rel=0.5)


def test_pages_that_are_seen_nearly_always_are_told_apart_still() -> None:
    """A third of them is accessed three times as often: in 70 and in 97 of a hundred intervals."""
    rate = np.where(np.arange(PAGES) % 3 == 0, 36.0, 12.0)
    world = Sparse(rate, np.ones(PAGES, np.int64), (FAST, 2 * PAGES), 1)
    play(world, 20, looks=False)
    world.pieces = magnify(world.pieces, world.zoomed(0, PAGES), world.policy)
    first = (world.pieces["start"].astype(np.int64) - BASE) // PAGE_BYTES
    heat = np.repeat(score(world.pieces), np.diff(np.r_[first, PAGES]))
    assert heat[rate > 20].mean() > 2 * heat[rate < 20].mean()


def test_what_was_looked_at_or_is_too_small_for_it_awaits_no_look() -> None:
    world, _ = sparse(0, 1, 2.0, 0.0)
    play(world, 10, looks=False)
    world.pieces = magnify(world.pieces, world.zoomed(0, PAGES // 2), world.policy)
    target = Target(pid=Pid(1), pieces=world.pieces, ceiling=ceiling(world.sample()))
    awaits = awaits_look(target, now_s=world.now_s)
    looked = is_zoomed(world.pieces)
    assert not awaits[looked].any()
    assert awaits[~looked].mean() > 0.8
    assert not awaits_look(replace(target, fixed=True), now_s=world.now_s).any()
    assert not awaits_look(replace(target, ceiling=0.0), now_s=world.now_s).any()
    few = world.pieces[-1:].copy()
    few["end"] = few["start"] + 8 * PAGE_BYTES
    assert not awaits_look(replace(target, pieces=few), now_s=world.now_s).any()


def test_a_hot_set_that_has_just_come_awaits_no_look() -> None:
    """By the short average it is sure within a second, which the long one takes ten for."""
    world, _ = sparse(0, 1, 5.0, 0.0)
    play(world, 2, looks=False)
    came = world.pieces.copy()
    came["short"], came["long"] = 0.8 * ceiling(world.sample()), 0
    target = Target(pid=Pid(1), pieces=came, ceiling=ceiling(world.sample()))
    assert not awaits_look(target, now_s=world.now_s).any()
    came["short"], came["long"] = 0, 0.8 * target.ceiling
    assert awaits_look(target, now_s=world.now_s).any()
