# SPDX-License-Identifier: Apache-2.0
"""What samples of hardware tell of single pages, and the two samplers as one."""

import time
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.replay import Replay, recorded
from tests.unit.world import BASE
from tierd.bulk import HIT, NO_LOADS, PIECE
from tierd.decide.heat import score
from tierd.decide.magnify import is_unequal, magnify
from tierd.model import PAGE_BYTES, Pid, Policy
from tierd.sample.fused import Fused
from tierd.sample.hardware import Hardware, Sampling
from tierd.sample.hits import KEPT_S, MOST_PAGES, Hits

PID = Pid(640)
PAGES = 1024
END = BASE + PAGES * PAGE_BYTES


def pages(*numbers: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    return (BASE + np.concatenate([[], *map(np.atleast_1d, numbers)]) * PAGE_BYTES).astype("u8")


def sampled(rate: NDArray[np.float64], seed: int = 1) -> NDArray[np.uint64]:
    """Samples by these mean counts of each page."""
    counts = np.random.default_rng(seed).poisson(rate)
    return pages(np.repeat(np.arange(len(rate)), counts))


def one_piece() -> NDArray[np.void]:
    piece = np.zeros(1, PIECE)
    piece["start"], piece["end"] = BASE, END
    piece["short"] = piece["long"] = 10 / PAGE_BYTES
    piece["resident"][:, 1] = 1
    piece["zoomed_s"] = piece["held_until_s"] = piece["moved_s"] = -np.inf
    return piece


def test_sparse_hot_pages_part_a_piece() -> None:
    hits, rate = Hits(), np.zeros(PAGES)
    rate[::20] = 30.0
    hits.take_in(sampled(rate), 100.0)
    look = hits.look(PID, BASE, END)
    assert look is not None
    assert is_unequal(look)
    found = magnify(one_piece(), look, Policy())
    hot = found[score(found) > 10 / PAGE_BYTES]
    assert ((hot["start"] - BASE) // PAGE_BYTES).tolist() == list(range(0, PAGES, 20))
    size = (found["end"] - found["start"]).astype(np.float64)
    assert np.average(score(found), weights=size) == pytest.approx(10 / PAGE_BYTES, rel=1e-3)


def test_pages_that_differ_by_accident_are_alike() -> None:
    hits = Hits()
    hits.take_in(sampled(np.full(PAGES, 20.0)), 100.0)
    look = hits.look(PID, BASE, END)
    assert look is not None
    assert not is_unequal(look)
    assert len(magnify(one_piece(), look, Policy())) == 1


@pytest.mark.parametrize("rate", [0.0, 0.1, 2.0])
def test_too_few_samples_tell_nothing(rate: float) -> None:
    hits = Hits()
    hits.take_in(sampled(np.full(PAGES, rate)), 100.0)
    assert hits.look(PID, BASE, END) is None


def test_counts_fade() -> None:
    hits = Hits()
    hits.take_in(pages(np.full(300, 7)), 0.0)
    hits.take_in(pages(8), KEPT_S)
    assert hits.counts.tolist() == pytest.approx([300 / np.e, 1])
    hits.take_in(pages(), 100 * KEPT_S)
    assert len(hits.pages) == 0


def test_no_more_is_remembered_than_the_most_hit() -> None:
    hits = Hits()
    hits.take_in(pages(np.arange(MOST_PAGES), np.arange(MOST_PAGES // 2)), 0.0)
    hits.take_in(pages(np.arange(MOST_PAGES, MOST_PAGES + 9)), 1.0)
    assert len(hits.pages) <= MOST_PAGES
    assert set(pages(np.arange(MOST_PAGES // 2))) <= set(hits.pages)


# Weights


def weighed(
    reads: NDArray[np.float64], writes: NDArray[np.float64], weight: float, seed: int = 1
) -> Hits:
    """Reads and writes by these mean counts of each page, a write counting for so many reads."""
    hits = Hits()
    read, written = sampled(reads, seed), sampled(writes, seed + 1)
    weights = np.r_[np.ones(len(read)), np.full(len(written), weight)]
    hits.take_in(np.concatenate([read, written]), 100.0, weights)
    return hits


@given(st.lists(st.lists(st.integers(0, PAGES - 1), max_size=2000), min_size=1, max_size=4))
def test_where_all_weigh_one_nothing_changes(parts: list[list[int]]) -> None:
    plain, ones = Hits(), Hits()
    for at_s, part in enumerate(parts):
        plain.take_in(pages(np.array(part)), float(at_s))
        ones.take_in(pages(np.array(part)), float(at_s), np.ones(len(part)))
    assert plain.pages.tolist() == ones.pages.tolist()
    assert plain.counts.tolist() == ones.counts.tolist() == ones.squares.tolist()
    looks = plain.look(PID, BASE, END), ones.look(PID, BASE, END)
    told = [None if look is None else look.regions.tolist() for look in looks]
    assert told[0] == told[1]
    if looks[0] is not None:
        counted = looks[0].regions["nr_accesses"]
        assert counted[counted > 0].tolist() == np.round(plain.counts[plain.counts > 0.5]).tolist()


def test_pages_that_are_written_are_hotter_than_those_that_are_read() -> None:
    half = np.arange(PAGES) < PAGES // 2
    look = weighed(np.where(half, 20.0, 0), np.where(half, 0, 20.0), 4).look(PID, BASE, END)
    assert look is not None
    found = magnify(one_piece(), look, Policy())
    size = (found["end"] - found["start"]) // PAGE_BYTES
    heat = np.repeat(score(found), size.astype(np.intp))
    assert heat[~half].mean() == pytest.approx(4 * heat[half].mean(), rel=0.05)


@pytest.mark.parametrize("weight", [0.1, 1.0, 3.0, 20.0])
def test_weights_do_not_make_pages_differ_that_are_alike(weight: float) -> None:
    look = weighed(np.full(PAGES, 20.0), np.full(PAGES, 10.0), weight).look(PID, BASE, END)
    assert look is not None
    assert not is_unequal(look)


def test_what_weighs_more_is_no_more_evidence() -> None:
    few = np.zeros(PAGES)
    few[:32] = 6.0
    assert weighed(few, few * 0, 1).look(PID, BASE, END) is None
    assert weighed(few * 0, few, 10).look(PID, BASE, END) is None
    assert weighed(few * 0, few * 3, 10).look(PID, BASE, END) is not None


def test_what_weighs_nothing_is_forgotten_and_what_weighs_little_adds_up() -> None:
    assert len(weighed(np.zeros(PAGES), np.full(PAGES, 20.0), 0).pages) == 0
    hits = Hits()
    for n in range(300):
        hits.take_in(pages(7), n / 1000, np.array([0.1]))
    assert hits.counts.tolist() == pytest.approx([30], rel=0.01)
    assert hits.look(PID, BASE, END) is not None


# The two samplers as one


class FakeHardware(Hardware):
    """Stands for CPUs with a PMU, which no machine of ours has; all that it samples are stores."""

    def __init__(self, found: NDArray[np.uint64]) -> None:
        self.found, self.loads = found, NO_LOADS
        self.write_weight = 1.0

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            source="fake", period=1, samples=len(self.found), unowned=0, lost=0, throttled=0
        )

    def read(self, pids: Iterable[Pid]) -> dict[Pid, NDArray[np.void]]:
        hits = np.zeros(len(self.found), HIT)
        hits["page"], hits["weight"] = self.found, self.write_weight
        self.found = self.found[:0]
        return dict.fromkeys(pids, hits)

    def close(self) -> None:
        pass


def test_a_look_is_answered_by_samples() -> None:
    rate = np.zeros(PAGES)
    rate[::4] = 20.0
    fused = Fused(Replay(recorded(), time.monotonic), FakeHardware(sampled(rate)))
    fused.watch(PID)
    fused.poll()
    fused.zoom(PID, BASE, END, per_page_s=1.0)
    (look,) = (seen for seen in fused.poll() if seen.zoomed)
    assert look.relative
    assert fused.zoomed_pages == PAGES // 4
    assert not any(seen.zoomed for seen in fused.poll()), "once"


def test_without_samples_it_is_damons_matter() -> None:
    fused = Fused(Replay(recorded(), time.monotonic), FakeHardware(pages()))
    fused.zoom(PID, BASE, END, per_page_s=1.0)
    fused.watch(PID)
    fused.zoom(PID, BASE, END, per_page_s=1.0)
    assert not any(seen.zoomed for seen in fused.poll())


def test_what_a_target_left_is_not_told() -> None:
    rate = np.full(PAGES, 20.0)
    fused = Fused(Replay(recorded(), time.monotonic), FakeHardware(sampled(rate)))
    fused.watch(PID)
    fused.poll()
    fused.zoom(PID, BASE, END, per_page_s=1.0)
    fused.unwatch(PID)
    assert not any(seen.zoomed for seen in fused.poll())


def test_what_is_sampled_weighs_as_it_was_told() -> None:
    fused = Fused(Replay(recorded(), time.monotonic), FakeHardware(sampled(np.full(PAGES, 20.0))))
    fused.watch(PID)
    fused.weigh_writes(0.0)
    fused.poll()
    fused.zoom(PID, BASE, END, per_page_s=1.0)
    assert not any(seen.zoomed for seen in fused.poll())
