# SPDX-License-Identifier: Apache-2.0
"""Replicas on donors that die, lie, leave and come back. The donors are fakes: arrays."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.test_leases import until
from tierd.arena import Arena
from tierd.errors import Busy, Damaged, Lost, TierdError, TierFailed
from tierd.model import TierKind
from tierd.remote import places
from tierd.remote.gaps import Aside
from tierd.remote.link import Speed
from tierd.remote.places import FIRST_WAIT_S, MOST_WAIT_S, SLOW_TIMES, Free, Place, Places
from tierd.remote.space import RemoteSpace
from tierd.tiers import Facts, Health
from tierd.tiers.memory import dram
from tierd.tiers.rdma import rdma, usable

BLOCK = 64


class FakeDonor:
    """A fake lease: its memory is here, and it does what a test has it do."""

    def __init__(self, address: str, slots: int) -> None:
        self.address, self.donor, self.slots = address, address, slots
        self.failure: str | None = None
        self.away: str | None = None
        self.speed = Speed(latency_ns=1000, bandwidth_mbps=1000)
        self.leaves = self.has_ended = False
        self.kept = np.zeros((slots, BLOCK), np.uint8)
        self.written: Callable[[], object] = bool
        self.adopted: list[NDArray[np.uint8]] = []
        self.writes = self.reads = self.looks = 0

    def _look(self) -> None:
        if why := self.failure or self.away:
            raise TierFailed(why)

    def adopt(self, buffer: NDArray[np.uint8]) -> None:
        self.adopted.append(buffer)

    def resume(self) -> None:
        self._look()

    def look(self) -> None:
        self.looks += 1

    def write(
        self, slots: NDArray[np.int64], data: NDArray[np.uint8], *, aside: Aside | None = None
    ) -> None:
        self._look()
        self.writes += len(slots)
        self.kept[slots] = data
        self.written()

    def read(
        self, slots: NDArray[np.int64], into: NDArray[np.uint8], *, aside: Aside | None = None
    ) -> None:
        self._look()
        self.reads += len(slots)
        into[:] = self.kept[slots]

    def end(self) -> None:
        assert not self.has_ended
        self.has_ended = True


def unreachable(address: str) -> FakeDonor:
    raise TierFailed(f"donor {address}: no route to host")


@contextmanager
def space_on(
    donors: Sequence[FakeDonor],
    slots: int = 8,
    replicas: int = 2,
    connect: Callable[[str], FakeDonor] = unreachable,
    heal_mbps: float = 1000.0,
) -> Iterator[RemoteSpace]:
    space = RemoteSpace(BLOCK, slots, replicas, donors, connect, heal_mbps)
    try:
        yield space
    finally:
        space.free()


def some_donors(count: int = 3, slots: int = 8) -> list[FakeDonor]:
    return [FakeDonor(f"host-{number}:7430", slots) for number in range(count)]


def some_blocks(count: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK), dtype=np.uint8)


def loaded(space: RemoteSpace, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
    into = np.zeros((len(slots), BLOCK), np.uint8)
    assert space.load(slots, into) == len(slots)
    return into


ALL = np.arange(8)


def test_each_block_is_on_two_donors() -> None:
    donors, data = some_donors(), some_blocks(8)
    with space_on(donors) as space:
        space.store(ALL, data)
        assert sum(donor.writes for donor in donors) == 16
        assert max(donor.writes for donor in donors) <= 8
        assert space.copies.whole == 8
        assert (loaded(space, ALL) == data).all()
    assert all(donor.has_ended for donor in donors)


def test_one_that_dies_takes_nothing_along_and_is_made_up_for() -> None:
    donors, data = some_donors(slots=12), some_blocks(8)
    with space_on(donors) as space:
        space.store(ALL, data)
        donors[0].failure = "killed"
        assert (loaded(space, ALL) == data).all()
        until(lambda: space.copies.whole == 8)
        assert space.failures == {"host-0:7430": "not reached"}
        assert space.copies.copied_again > 0
        donors[1].failure = "killed too"
        assert (loaded(space, ALL) == data).all()


def test_with_all_donors_lost_it_says_which_blocks() -> None:
    donors = some_donors(2)
    with space_on(donors) as space:
        space.store(ALL, some_blocks(8))
        for donor in donors:
            donor.failure = "the rack is dark"
        with pytest.raises(Lost, match=r"slots \[3\] any more") as raised:
            space.load(np.array([3]), np.empty((1, BLOCK), np.uint8))
        assert raised.value.hint is not None
        assert raised.value.slots.tolist() == [3]
        assert space.copies.lost == 8
        with pytest.raises(Busy, match="no donor has room: host-0:7430: not reached"):
            space.store(ALL[:1], some_blocks(1))


def test_slots_are_used_again_and_again_where_donors_are_full() -> None:
    donors = some_donors(2)
    with space_on(donors) as space:
        for seed in range(5):
            space.store(ALL, some_blocks(8, seed))
        assert (loaded(space, ALL) == some_blocks(8, 4)).all()


def test_second_copies_make_way_for_first_ones() -> None:
    """Of four donors two are left, full of second copies; a block that was lost is stored anew."""
    donors = some_donors(4, 6)
    with space_on(donors) as space:
        space.store(ALL, some_blocks(8))
        for donor in donors[:2]:
            donor.failure = "killed"
        until(lambda: space.copies.whole == min(8 - space.copies.lost, 12 - 8 + space.copies.lost))
        for seed in range(3):
            space.store(ALL, some_blocks(8, seed))
            assert (loaded(space, ALL) == some_blocks(8, seed)).all()
        assert space.copies.lost == 0


def test_a_donor_with_other_contents_is_not_believed() -> None:
    donors, data = some_donors(), some_blocks(8)
    with space_on(donors) as space:
        space.store(ALL, data)
        donors[0].kept[:] = 7
        assert (loaded(space, ALL) == data).all()
        assert (loaded(space, ALL[::-1].copy()) == data[::-1]).all()
        assert space.copies.disbelieved > 0
        donors[1].kept[:], donors[2].kept[:] = 8, 9
        into = np.zeros((8, BLOCK), np.uint8)
        with pytest.raises(Damaged):
            space.load(ALL, into)
        assert not any((into == wrong).all(axis=1).any() for wrong in (7, 8, 9))


def test_one_that_comes_back_is_empty_and_used_again() -> None:
    donors, data = some_donors(2), some_blocks(8)
    back = threading.Event()

    def connect(address: str) -> FakeDonor:
        if not back.is_set():
            return unreachable(address)
        donors.append(FakeDonor(address, 8))
        return donors[-1]

    with space_on(donors, connect=connect) as space:
        space.store(ALL, data)
        donors[0].failure = "restarted"
        assert (loaded(space, ALL) == data).all()
        assert space.copies.thin == 8
        back.set()
        until(lambda: space.copies.whole == 8)
        donors[1].failure = "killed"
        assert (loaded(space, ALL) == data).all()


def test_one_that_is_away_comes_back_with_what_it_had() -> None:
    donors, data = some_donors(2), some_blocks(8)
    with space_on(donors) as space:
        space.store(ALL, data)
        donors[0].away = "no answer in 2 s"
        assert (loaded(space, ALL) == data).all()
        assert (space.copies.thin, space.failures) == (8, {"host-0:7430": "no answer in 2 s"})
        donors[1].away = "no answer in 2 s"
        with pytest.raises(Busy, match=r"donors of slots \[3\] are away: host-0:7430: no answer"):
            loaded(space, np.array([3]))
        with pytest.raises(Busy, match="no donor has room"):
            space.store(ALL[:1], data[:1])
        assert (space.copies.away, space.copies.lost) == (7, 0)
        donors[0].away = donors[1].away = None
        until(lambda: space.copies.whole == 7 and not space.failures)
        assert (loaded(space, ALL[1:]) == data[1:]).all()
        space.store(ALL, data)
        assert space.copies.whole == 8


def test_what_is_away_for_long_is_lost_and_made_up_for() -> None:
    donors, data = some_donors(slots=16), some_blocks(8)
    with space_on(donors) as space:
        space.store(ALL, data)
        donors[0].away = "no answer in 2 s"
        until(lambda: space.copies.whole == 8)
        donors[0].failure = "not heard of for 120 s"
        until(lambda: donors[0].has_ended)
        assert (loaded(space, ALL) == data).all()


def test_copies_tell_of_a_donor_that_was_lost_just_now() -> None:
    donors = some_donors()
    with space_on(donors, heal_mbps=1e-6) as space:
        space.store(ALL, some_blocks(8))
        donors[0].failure = "killed"
        assert space.copies.thin == donors[0].writes > 0


def test_one_that_comes_and_goes_is_looked_for_ever_more_rarely() -> None:
    place = Place("host-0:7430")
    waits = []
    for now_s in range(0, 100, 10):
        place.has(FakeDonor(place.address, 8), now_s)
        place.has_not(now_s + 2.0)
        waits.append(place.try_at_s - now_s - 2)
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    place.has(FakeDonor(place.address, 8), 0.0)
    place.has_not(MOST_WAIT_S)
    assert place.wait_s == FIRST_WAIT_S, "it was well for long"


def test_a_slow_donor_is_read_where_the_others_cannot_be() -> None:
    donors, data = some_donors(), some_blocks(8)
    with space_on(donors, heal_mbps=1e-6) as space:
        space.store(ALL, data)
        donors[0].speed = donors[1].speed.times(2 * SLOW_TIMES)
        before = donors[0].reads
        assert (loaded(space, ALL) == data).all()
        assert donors[0].reads == before
        donors[1].away = donors[2].away = "cut off"
        on_both = np.flatnonzero((space._donor == 0).any(axis=1))
        assert (loaded(space, on_both) == data[on_both]).all()
        assert donors[0].reads == before + len(on_both) > before


def test_nothing_is_stored_on_a_slow_donor_while_others_have_room() -> None:
    donors, data = some_donors(3, 16), some_blocks(8)
    donors[1].speed = donors[0].speed.times(2 * SLOW_TIMES)
    with space_on(donors) as space:
        space.store(ALL, data)
        assert [donor.writes for donor in donors] == [8, 0, 8]
        donors[0].failure = "killed"
        until(lambda: space.copies.whole == 8)
        assert donors[1].writes == 8


def test_a_slow_donor_is_looked_at_and_then_read_again() -> None:
    donors, data = some_donors(2), some_blocks(8)
    first = donors[0].speed
    donors[0].speed = first.times(2 * SLOW_TIMES)
    with space_on(donors) as space:
        space.store(ALL, data)
        until(lambda: donors[0].looks > 0)
        assert donors[1].looks == 0
        donors[0].speed = first
        assert (loaded(space, ALL) == data).all()
        assert donors[0].reads == donors[1].reads == 4


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=6))
def test_the_fastest_is_never_slow(seconds: list[float]) -> None:
    donors = some_donors(len(seconds))
    for donor, each in zip(donors, seconds, strict=True):
        donor.speed = Speed(latency_ns=int(each * 1e9), bandwidth_mbps=1 << 30)
    places = Places(donors, unreachable, None, BLOCK, threading.Lock())
    places.stop()
    is_slow = places.are_slow()
    assert len(is_slow) == len(seconds) + 1
    assert not is_slow[-1]
    assert not is_slow[seconds.index(min(seconds))]
    for each, slow in zip(seconds, is_slow, strict=False):
        assert slow == (int(each * 1e9) > SLOW_TIMES * int(min(seconds) * 1e9))


def is_there(space: RemoteSpace, address: str) -> bool:
    return address in space.donors


class FakeList:
    """Plays a directory: which donors there are, and a connection to each."""

    def __init__(self, donors: Sequence[FakeDonor]) -> None:
        self.known = {donor.address: donor for donor in donors}
        self.asked: list[str] = []

    def roomiest(self) -> Sequence[str]:
        return tuple(self.known)

    def connect(self, address: str) -> FakeDonor:
        self.asked.append(address)
        donor = self.known.get(address)
        return donor if donor is not None else unreachable(address)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIST_EVERY_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(places, name, 0.01)


@contextmanager
def space_of(listed: FakeList, first: int, slots: int = 8) -> Iterator[RemoteSpace]:
    """A space on the first donors of a list."""
    links = [*listed.known.values()][:first]
    space = RemoteSpace(BLOCK, slots, 2, links, listed.connect, 1000.0, listed.roomiest)
    try:
        yield space
    finally:
        space.free()


@pytest.mark.usefixtures("quick")
def test_a_donor_that_comes_takes_the_place_of_one_that_is_lost() -> None:
    donors, data = some_donors(2), some_blocks(8)
    listed = FakeList(donors)
    with space_of(listed, 2) as space:
        space.store(ALL, data)
        new = FakeDonor("host-9:7430", 8)
        listed.known[new.address] = new
        until(lambda: new.address in space.donors)
        del listed.known[donors[0].address]
        donors[0].failure = "killed"
        until(lambda: space.copies.whole == 8)
        assert new.writes == 8
        assert space.failures == {}, "who has gone is not missed"
        donors[1].failure = "killed too"
        assert (loaded(space, ALL) == data).all()
    assert new.has_ended


@pytest.mark.usefixtures("quick")
def test_one_that_is_not_listed_any_more_keeps_what_it_has() -> None:
    """As where etcd has lost its data, or a donor is cut off from etcd and not from us."""
    donors, data = some_donors(2), some_blocks(8)
    listed = FakeList(donors)
    with space_of(listed, 2) as space:
        space.store(ALL, data)
        listed.known.clear()
        new = FakeDonor("host-9:7430", 8)
        listed.known[new.address] = new
        until(lambda: new.address in space.donors)
        donors[0].away = "no answer in 2 s"
        assert (loaded(space, ALL) == data).all()
        donors[0].away = None
        until(lambda: donors[0].address in space.donors)
        donors[1].failure = new.failure = "killed"
        assert (loaded(space, ALL) == data).all()


@pytest.mark.usefixtures("quick")
def test_places_of_donors_that_have_gone_are_used_again() -> None:
    donors = some_donors(2)
    listed = FakeList(donors)
    with space_of(listed, 2) as space:
        space.store(ALL, some_blocks(8))
        for number in range(10, 20):
            new = FakeDonor(f"host-{number}:7430", 8)
            listed.known[new.address] = new
            until(partial(is_there, space, new.address))
            del listed.known[new.address]
            new.failure = "ended"
            until(partial(getattr, new, "has_ended"))
        assert len(space._places.all) == 3
        assert space.copies.whole == 8


@pytest.mark.usefixtures("quick")
def test_a_donor_by_two_addresses_is_used_once() -> None:
    donors = some_donors(2)
    listed = FakeList(donors)
    with space_of(listed, 2) as space:
        twin = FakeDonor("host-0.example:7430", 8)
        twin.donor = donors[0].donor
        listed.known[twin.address] = twin
        until(lambda: twin.has_ended)
        assert twin.address not in space.donors
        listed.known.clear()  # else it is tried again, and a fake ends once


@pytest.mark.usefixtures("quick")
def test_there_are_not_more_donors_than_can_be_looked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "MOST_DONORS", 3)
    listed = FakeList(some_donors(2))
    with space_of(listed, 2) as space:
        for number in range(10, 13):
            listed.known[f"host-{number}:7430"] = FakeDonor(f"host-{number}:7430", 8)
        until(lambda: len(space.donors) == 3)
        space._places.follow(time.monotonic() + 100)
        assert len(space._places.all) == 3


def test_what_is_stored_while_it_is_copied_again_is_not_overwritten() -> None:
    donors, data, other = some_donors(3, 64), some_blocks(8), some_blocks(8, 2)
    started, go_on = threading.Event(), threading.Event()
    with space_on(donors) as space:
        space.store(ALL, data)

        def written() -> None:
            if threading.current_thread() is space._healer:
                started.set()
                assert go_on.wait(10)

        donors[1].written = donors[2].written = written
        donors[0].failure = "killed"
        loaded(space, ALL)
        assert started.wait(10)
        space.store(ALL, other)  # nobody waits for what is copied again
        assert (loaded(space, ALL) == other).all()
        go_on.set()
        until(lambda: space.copies.whole == 8)
        assert (loaded(space, ALL) == other).all()
        frees = [place.free for place in space._places.all[1:]]
        until(lambda: [free and free.count for free in frees] == [64 - 8] * 2)  # none is lost


def test_buffers_are_told_to_donors_that_come_later_too() -> None:
    donors = some_donors(2)
    later = FakeDonor(donors[0].address, 8)
    with space_on(donors, connect=lambda _: later) as space:
        buffer = np.zeros((4, BLOCK), np.uint8)
        space.adopt(buffer)
        assert [len(donor.adopted) for donor in donors] == [1, 1]
        donors[0].failure = "restarted"
        until(lambda: len(later.adopted) == 1)


def test_a_donor_that_asks_is_left() -> None:
    donors, data = some_donors(), some_blocks(8)
    with space_on(donors) as space:
        space.store(ALL, data)
        donors[2].leaves = True
        until(lambda: donors[2].has_ended)
        assert space.copies.whole == 8
        assert (loaded(space, ALL) == data).all()


def test_one_that_fails_in_mid_write_does_not_lose_the_batch() -> None:
    donors, data = some_donors(), some_blocks(8)
    with space_on(donors) as space:

        def die(*_: object, aside: Aside | None = None) -> None:
            donors[0].failure = "killed in mid-write"
            donors[0]._look()

        donors[0].write = die  # type: ignore[assignment,method-assign]
        space.store(ALL, data)
        assert (loaded(space, ALL) == data).all()
        until(lambda: space.copies.whole == 8)


def test_copying_again_keeps_to_its_budget() -> None:
    donors, data = some_donors(slots=512), some_blocks(512)
    with space_on(donors, slots=512, heal_mbps=2 * BLOCK * 10 / (1 << 20)) as space:
        space.store(np.arange(512), data)
        donors[0].failure = "killed"
        begin_s = time.monotonic()
        until(lambda: space.copies.copied_again >= 10)
        copied, took_s = space.copies.copied_again, time.monotonic() - begin_s
        assert copied <= 20 * took_s + 4, "two blocks every tenth of a second"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.lists(st.integers(0, 7), unique=True, min_size=1)),
            st.tuples(st.just("load"), st.lists(st.integers(0, 7), min_size=1, max_size=8)),
            st.tuples(st.just("lose"), st.integers(0, 3)),
            st.tuples(st.just("cut"), st.integers(0, 3)),
            st.tuples(st.just("restore"), st.integers(0, 3)),
            st.tuples(st.just("corrupt"), st.integers(0, 3)),
        ),
        max_size=25,
    )
)
def test_what_is_read_is_what_was_stored_or_an_error(
    steps: list[tuple[str, list[int] | int]],
) -> None:
    donors, expected = some_donors(4, 256), np.zeros((8, BLOCK), np.uint8)
    stored: set[int] = set()
    with space_on(donors) as space:
        for seed, (what, which) in enumerate(steps):
            if isinstance(which, int):
                if what == "lose":
                    donors[which].failure = "lost"
                elif what == "corrupt":
                    donors[which].kept[:] = seed
                else:
                    donors[which].away = "cut off" if what == "cut" else None
                continue
            slots = np.array(which)
            if what == "store":
                data = some_blocks(len(slots), seed)
                try:
                    space.store(slots, data)
                except Busy:
                    assert steps_have(steps[:seed], "lose", "cut")
                    stored -= set(which)
                else:
                    expected[slots] = data
                    stored |= set(which)
            elif set(which) <= stored:
                try:
                    assert (loaded(space, slots) == expected[slots]).all()
                except Lost:
                    assert steps_have(steps[:seed], "lose", "corrupt")
                except Busy:
                    assert steps_have(steps[:seed], "cut")


def steps_have(steps: list[tuple[str, list[int] | int]], *names: str) -> bool:
    return any(what in names for what, _ in steps)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 4))
def test_so_many_blocks_find_room_on_different_donors(rooms: list[int], replicas: int) -> None:
    blocks, left = usable(rooms, replicas), sorted(rooms)
    for _ in range(blocks):
        chosen = sorted(range(len(left)), key=lambda number: -left[number])[:replicas]
        assert len(chosen) == replicas
        for number in chosen:
            left[number] -= 1
        assert min(left) >= 0
    assert sum(room > 0 for room in left) < replicas


@given(st.lists(st.integers(0, 6), max_size=12))
def test_slots_are_taken_once(counts: list[int]) -> None:
    free, taken = Free(10), []
    for count in counts:
        if count <= free.count:
            taken.append(free.take(count))
        elif taken:
            free.give(taken.pop(0))
        held = np.concatenate([*taken, np.zeros(0, np.int64)])
        assert len(np.unique(held)) == len(held) == 10 - free.count


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"donors": ["a:1"]}, "1 donors for 2 replicas"),
        ({"donors": ["a:1", "a:1"]}, "1 donors for 2 replicas"),
        ({"replicas": 0}, "0 replicas: from 1 to 4"),
        ({"replicas": 5}, "5 replicas: from 1 to 4"),
        ({"heal_mbps": 0}, "more than 0"),
    ],
)
def test_a_tier_that_cannot_be(more: dict[str, object], why: str) -> None:
    arguments = {"donors": ["a:1", "b:1"], "ca": "ca", "cert": "cert", "key": "key", **more}
    with pytest.raises(TierdError, match=why):
        rdma(capacity_bytes=1 << 20, **arguments)  # type: ignore[arg-type]


class FakeTier:
    """A fake tier on fake donors, for an arena."""

    def __init__(self, donors: Sequence[FakeDonor]) -> None:
        self.donors = donors
        self.facts = Facts(name="rdma", kind=TierKind.RDMA, capacity_bytes=64 * BLOCK)
        self.space: RemoteSpace | None = None

    def health(self) -> Health:
        return Health.GOOD

    def reserve(self, block_bytes: int, slots: int) -> RemoteSpace:
        assert block_bytes == BLOCK
        self.space = RemoteSpace(BLOCK, slots, 2, self.donors, unreachable, 1000.0)
        return self.space


def test_an_arena_loses_nothing_with_a_donor() -> None:
    donors = some_donors(3, 64)
    tier = FakeTier(donors)
    with Arena(BLOCK, [dram(16 * BLOCK), tier], blocks=64) as arena:
        ids, data = np.arange(64), some_blocks(64)
        arena.write(ids, data)
        space = tier.space
        assert space is not None
        donors[0].failure = "killed"
        assert (arena.read(ids) == data).all()
        until(lambda: space.copies.thin == 0)
        donors[1].failure = "killed"
        assert (arena.read(ids) == data).all()
        assert arena.fenced == {}
