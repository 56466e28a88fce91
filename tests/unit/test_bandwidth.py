# SPDX-License-Identifier: Apache-2.0
"""Limits of bandwidth in an arena: what passes in a time, who waits, and what ends a wait."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.clock import Clock
from tests.unit.drawer import Drawer
from tests.unit.test_leases import until
from tierd.arena import Arena
from tierd.arena.bandwidth import BURST_S, MIB, Bandwidth, Setter
from tierd.bucket import Bucket
from tierd.errors import NotFound, TierdError
from tierd.tiers.memory import dram

BLOCK = 4096
FAST, SLOW = 8, 16

rates = st.floats(1, 1e9)
sizes = st.lists(st.integers(1, 10_000_000), min_size=1, max_size=40)
rests = st.lists(st.floats(0, 100), min_size=40, max_size=40)


@given(rate=rates, burst=st.floats(1, 1e7), sizes=sizes, rests=rests)
def test_no_more_passes_than_the_rate_and_a_burst(
    rate: float, burst: float, sizes: list[int], rests: list[float]
) -> None:
    bucket, at_s, now_s = Bucket(rate, burst, 0.0), [], 0.0
    for size, rest_s in zip(sizes, rests, strict=False):
        now_s = max(now_s + rest_s, bucket.due_s(size))
        bucket.take(size, now_s)
        at_s.append(now_s)
    for first in range(len(sizes)):
        for last in range(first, len(sizes)):
            passed = sum(sizes[first : last + 1])
            allowed = rate * (at_s[last] - at_s[first]) + max(burst, sizes[last])
            assert passed <= allowed * (1 + 1e-6) + 1e-6


@given(rate=rates, burst=st.floats(1, 1e7), sizes=sizes)
def test_who_takes_all_that_is_due_gets_the_rate(
    rate: float, burst: float, sizes: list[int]
) -> None:
    """And nobody waits for longer than what was taken before, and a burst, come in at the rate."""
    bucket, now_s, passed = Bucket(rate, burst, 0.0), 0.0, 0
    for size in sizes:
        due_s = max(now_s, bucket.due_s(size))
        assert due_s <= (passed + min(size, burst)) / rate * (1 + 1e-6)
        now_s = due_s
        bucket.take(size, now_s)
        passed += size
        assert passed >= rate * now_s * (1 - 1e-6)


@given(
    burst_s=st.floats(0.01, 1),
    changes=st.lists(st.tuples(rates, st.integers(1, 1_000_000), st.floats(0, 10)), max_size=30),
)
def test_a_changed_rate_holds_from_then_on(
    burst_s: float, changes: list[tuple[float, int, float]]
) -> None:
    bucket, now_s = Bucket(1e6, 1e6 * burst_s, 0.0), 0.0
    passed, allowed, largest = 0, 1e6 * burst_s, 0
    for rate, size, rest_s in changes:
        bucket.change(rate, rate * burst_s, now_s)
        then_s, now_s = now_s, max(now_s + rest_s, bucket.due_s(size))
        bucket.take(size, now_s)
        allowed += rate * (now_s - then_s)
        passed, largest = passed + size, max(largest, size)
        assert passed <= (allowed + largest) * (1 + 1e-6)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def held_back(bandwidth: Bandwidth, size_bytes: int) -> tuple[threading.Thread, list[bool]]:
    """A mover that waits until so much may pass, and what came of it."""
    came: list[bool] = []
    mover = threading.Thread(target=lambda: came.append(bandwidth.wait(size_bytes)), daemon=True)
    mover.start()
    until(lambda: bandwidth.is_held_back)
    assert not came
    return mover, came


def limited(clock: Clock, mbps: float) -> Bandwidth:
    bandwidth = clock.bandwidth()
    bandwidth.limit(Setter.PROGRAM, mbps)
    assert bandwidth.wait(MIB), "what is larger than the bucket passes when that is full"
    return bandwidth


ENDS: dict[str, tuple[Callable[[Bandwidth], None], bool]] = {
    "raised": (lambda bandwidth: bandwidth.limit(Setter.PROGRAM, 1 << 40), True),
    "removed": (lambda bandwidth: bandwidth.limit(Setter.PROGRAM, None), True),
    "closed": (Bandwidth.stop, False),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_wait_ends_with_the_limit(clock: Clock, how: str) -> None:
    """Of an hour, at the limit that was."""
    bandwidth = limited(clock, 1 / 3600)
    mover, came = held_back(bandwidth, MIB)
    end, passes = ENDS[how]
    end(bandwidth)
    clock.pass_by(1e-6)
    mover.join(20)
    assert came == [passes]


def test_a_lower_limit_holds_for_those_that_wait(clock: Clock) -> None:
    bandwidth = limited(clock, 1)
    mover, came = held_back(bandwidth, MIB)
    bandwidth.limit(Setter.DAEMON, 0.5)
    clock.pass_by(1.5)
    until(lambda: bandwidth.is_held_back)
    assert not came
    clock.pass_by(1)
    mover.join(20)
    assert came == [True]


def test_of_two_limits_the_lower_one_holds(clock: Clock) -> None:
    bandwidth = clock.bandwidth()
    told = []
    for setter, mbps in (
        *((Setter.PROGRAM, 3), (Setter.DAEMON, 5), (Setter.DAEMON, 2)),
        *((Setter.PROGRAM, None), (Setter.DAEMON, None)),
    ):
        bandwidth.limit(setter, mbps)
        told.append(bandwidth.mbps)
    assert told == [3, 3, 2, 2, None]
    assert bandwidth.burst_bytes == float("inf")


def test_small_ones_do_not_pass_by_a_large_one(clock: Clock) -> None:
    bandwidth = limited(clock, 1)
    large, came = held_back(bandwidth, MIB)
    late: list[bool] = []
    small = threading.Thread(target=lambda: late.append(bandwidth.wait(1)), daemon=True)
    small.start()
    clock.pass_by(0.99)  # the small one could go on, but for the large one
    until(lambda: bandwidth.is_held_back)
    assert not late
    clock.pass_by(0.11)
    large.join(20)
    clock.pass_by(1)
    small.join(20)
    assert (came, late) == ([True], [True])


@pytest.fixture
def arena(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """Memory above a tier without addresses, with nothing in it yet."""
    clock.drives(monkeypatch)
    with Arena(BLOCK, [dram(FAST * BLOCK), Drawer(SLOW, BLOCK)], movers=1) as arena:
        yield arena


def mbps_of(blocks: float) -> float:
    """The limit whose burst is so many blocks."""
    return blocks * BLOCK / BURST_S / MIB


def filled(arena: Arena, blocks: int) -> np.typing.NDArray[np.int64]:
    ids = np.arange(blocks)
    arena.write(ids, np.ones((blocks, BLOCK), np.uint8))
    return ids


def limit(arena: Arena, clock: Clock, mbps: float) -> None:
    """Limits it, and has the mover begin its next batch by that."""
    arena.limit("drawer", mbps)
    last = np.array([FAST - 1])
    for move in (arena.demote, arena.prefetch):
        move(last)
        assert not arena.wait(last).any()
        clock.pass_by(BLOCK / MIB / mbps * 2)


def test_a_block_is_copied_when_it_is_due(arena: Arena, clock: Clock) -> None:
    """Both ways together."""
    ids = filled(arena, FAST)
    limit(arena, clock, mbps_of(2))
    assert arena.limits == {"drawer": pytest.approx(mbps_of(2))}
    before = arena.moves().moved
    arena.demote(ids[:6])
    for moved in (2, 4):
        until(lambda: clock.bandwidths[1].is_held_back)
        assert arena.moves().moved - before == moved
        clock.pass_by(BURST_S * 1.001)
    assert not arena.wait(ids).any()
    arena.prefetch(ids[:2])
    until(lambda: clock.bandwidths[1].is_held_back)
    assert arena.moves().moved - before == 6
    clock.pass_by(BURST_S * 1.001)
    assert not arena.wait(ids).any()
    assert arena.moves().moved - before == 8


def test_what_is_waited_for_goes_first(arena: Arena, clock: Clock) -> None:
    ids = filled(arena, FAST)
    arena.demote(ids)
    assert not arena.wait(ids).any()
    limit(arena, clock, mbps_of(1))  # the last one is near now
    arena.prefetch(ids[:6])
    until(lambda: clock.bandwidths[1].is_held_back)  # one has come, one is under way
    program = threading.Thread(target=lambda: arena.acquire(ids[6:7]).release(), daemon=True)
    program.start()
    until(lambda: arena.moves().queued == 5)
    for _ in range(2):
        clock.pass_by(BURST_S * 1.001)
        until(lambda: clock.bandwidths[1].is_held_back)
    program.join(20)
    assert np.flatnonzero(arena.places(ids) == 0).tolist() == [0, 1, 6, 7]


def test_a_limit_ends_where_it_is_removed(arena: Arena, clock: Clock) -> None:
    ids = filled(arena, FAST)
    limit(arena, clock, 1e-9)
    arena.demote(ids)
    until(lambda: clock.bandwidths[1].is_held_back)
    arena.limit("drawer", None)
    assert not arena.wait(ids).any()
    assert (arena.places(ids) == 1).all()
    assert arena.limits == {}


def test_close_does_not_wait_for_a_limit() -> None:
    """Of years, by the real clock."""
    with Arena(BLOCK, [dram(FAST * BLOCK), Drawer(SLOW, BLOCK)]) as arena:
        ids = filled(arena, FAST)
        arena.limit("drawer", 1e-300)
        for some in (ids[:1], ids[1:]):  # the first one passes
            arena.demote(some)
            arena.wait(ids[:1])
        until(lambda: arena._bandwidths[1].is_held_back)
    assert arena.moves().busy, "what waits stays where it is"


@pytest.mark.parametrize("mbps", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_cannot_be(arena: Arena, mbps: float) -> None:
    with pytest.raises(TierdError, match="of drawer: MiB a second, above 0"):
        arena.limit("drawer", mbps)


def test_tiers_that_have_no_limit(arena: Arena) -> None:
    with pytest.raises(TierdError, match="blocks on dram have addresses"):
        arena.limit("dram", 5)
    with pytest.raises(NotFound, match="no tier 'rdma'"):
        arena.limit("rdma", 5)
