# SPDX-License-Identifier: Apache-2.0
"""When the kernel has something to sort."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.test_decide import pieces, rooms
from tierd.bulk import Target
from tierd.decide.below import below
from tierd.decide.look import Look, Pace
from tierd.decide.unsorted import (
    FIRST_BYTES,
    FIRST_S,
    NOBODY_S,
    PATIENCE_S,
    RESTS_MOST_S,
    RESTS_S,
    SETTLES_S,
    STRAY,
    WAITS_MOST_S,
    WORSE_S,
    YOUNG_S,
    Sorting,
)
from tierd.model import PAGE_BYTES, KernelMoves, Pid, TierRoom

HOT = 10 / PAGE_BYTES


def target(*places: tuple[int, int, float, Sequence[float]], pid: int = 1) -> Target:
    return Target(pid=Pid(pid), pieces=pieces(*places), ceiling=np.inf)


SORTED = target((0, 100, HOT, [1]), (100, 300, 0.0, [0, 1]))
UNSORTED = target((0, 100, HOT, [0, 1]), (100, 300, 0.0, [1]))


def rounds(
    targets: Sequence[Target], sorting: Sorting, *, begin_s: int, until_s: int
) -> list[bool]:
    """Whether the kernel sorts, each second."""
    told = []
    for now_s in range(begin_s, until_s):
        sorting = sorting.after(targets, {target.pid for target in targets}, now_s=now_s)
        told.append(sorting.is_due)
    return told


def seen(*targets: Target, watched: Collection[Pid] = (Pid(1),)) -> Sorting:
    """What is known at 0 s of targets that are not new any more."""
    return Sorting().after(targets, watched, now_s=-YOUNG_S).after(targets, watched, now_s=0)


def test_it_begins_at_once_and_ends_when_all_is_sorted() -> None:
    assert Sorting().is_due
    assert seen().is_due
    assert seen(UNSORTED).is_due
    assert not seen(SORTED).is_due
    assert seen(SORTED, UNSORTED).is_due


def test_it_goes_on_after_a_while_in_which_regions_alone_were_moved() -> None:
    at_rest = seen(SORTED)
    last = 1 + int(PATIENCE_S)
    told = rounds([UNSORTED], at_rest, begin_s=1, until_s=last + 1)
    assert told == [False] * int(PATIENCE_S) + [True]
    again = at_rest.after([UNSORTED], [Pid(1)], now_s=1).after([SORTED], [Pid(1)], now_s=5)
    assert not any(rounds([UNSORTED], again, begin_s=6, until_s=6 + int(PATIENCE_S)))


def test_between_few_and_many_it_stays_as_it_is() -> None:
    some = target((0, 96, HOT, [1]), (96, 4, HOT, [0, 1]))
    assert seen(some).is_due
    assert not any(rounds([some], seen(SORTED), begin_s=1, until_s=30))


def test_first_samples_end_nothing() -> None:
    """What was looked at by then may be code alone, all of it in fast memory."""
    young = math.ceil(YOUNG_S)
    told = rounds([SORTED], Sorting(), begin_s=3, until_s=3 + young + 1)
    assert told == [True] * young + [False]
    beside = [SORTED, target((0, 100, HOT, [1]), pid=2)]
    assert rounds(beside, seen(SORTED), begin_s=1, until_s=2 + young) == [True] * young + [False]


def test_it_ends_with_what_was_moved_since() -> None:
    due, at_rest = seen(UNSORTED), seen(SORTED)
    assert not due.once_moved([SORTED.pieces], now_s=0).is_due
    assert due.once_moved([SORTED.pieces, UNSORTED.pieces], now_s=0).is_due
    assert due.once_moved([], now_s=0).is_due
    assert at_rest.once_moved([UNSORTED.pieces], now_s=0) is at_rest
    new = Sorting().after([UNSORTED], [Pid(1)], now_s=0)
    assert new.once_moved([SORTED.pieces], now_s=0).is_due, "the first samples end nothing"


def test_a_new_target_is_sorted_at_once() -> None:
    new = target((0, 100, HOT, [0, 1]), pid=2)
    at_rest = seen(SORTED)
    assert at_rest.after([SORTED, new], [Pid(1), Pid(2)], now_s=1).is_due
    unseen = at_rest.after([], [Pid(1)], now_s=1)
    assert not unseen.after([SORTED], [Pid(1)], now_s=2).is_due, "it was only not looked at"


def test_without_a_target_it_ends_after_a_while_and_goes_on_with_the_next() -> None:
    """Whoever else runs pays for it."""
    some_s = int(NOBODY_S)
    assert rounds([], Sorting(), begin_s=0, until_s=some_s + 2) == [True] * some_s + [False] * 2
    left = seen(UNSORTED).after([], [], now_s=1)
    assert rounds([], left, begin_s=2, until_s=some_s + 3) == [True] * (some_s - 1) + [False] * 2
    alone = left.after([], [], now_s=1 + NOBODY_S)
    assert (alone.is_due, alone.alone_s) == (False, 1)
    found = alone.after([], [Pid(2)], now_s=1000)
    assert (found.is_due, found.promotes, found.alone_s) == (True, True, math.inf)


def test_once_all_is_sorted_it_does_not_begin_for_nobody() -> None:
    assert not any(rounds([], seen(SORTED), begin_s=1, until_s=30))


WARM = target((0, 100, HOT, [0.5, 0.5]))
"""A quarter of its accesses go below, whatever is moved."""
WARMER = target((0, 100, HOT, [0.2, 0.8]))


EXCHANGED = KernelMoves(promoted=100, demoted=100)


def turns(*targets: Target, sorting: Sorting, begin_s: int, until_s: int) -> list[int]:
    """When turns of the kernel begin and end, while what it takes up has others make way."""
    told, pids = [], {target.pid for target in targets}
    for now_s in range(begin_s, until_s):
        before = sorting
        sorting = sorting.once_taken_up(EXCHANGED, now_s=now_s).after(targets, pids, now_s=now_s)
        if sorting.is_due != before.is_due:
            told.append(now_s)
    return told


def test_it_rests_once_pages_make_way_and_has_further_turns_ever_later() -> None:
    told = turns(WARM, sorting=seen(WARM), begin_s=1, until_s=5000)
    rests = [begin - end for end, begin in zip(told[::2], told[1::2], strict=False)]
    assert rests == [min(RESTS_S * 2**n, RESTS_MOST_S) for n in range(len(rests))]
    assert len(rests) >= 3
    lasts = [end - begin for begin, end in zip(told[1::2], told[2::2], strict=False)]
    assert lasts == [1] * len(lasts)


def test_what_makes_way_while_there_is_no_target_ends_nothing() -> None:
    sorting = Sorting()
    for now_s in range(20):
        sorting = sorting.once_taken_up(EXCHANGED, now_s=now_s).after([], [], now_s=now_s)
    assert (sorting.is_due, sorting.is_filled, sorting.taken) == (True, False, KernelMoves())


def test_while_there_is_room_it_goes_on() -> None:
    assert all(rounds([WARM], seen(WARM), begin_s=1, until_s=500))


@pytest.mark.parametrize(
    ("promoted", "demoted", "goes_on"),
    [(100, 0, True), (100, 50, True), (100, 51, False), (0, 0, True), (0, 100, True)],
)
def test_the_tier_is_full_where_most_of_what_rises_displaces_others(
    promoted: int, demoted: int, goes_on: bool
) -> None:
    """What the kernel demotes for allocations, with nothing taken up, tells nothing of that."""
    moved = seen(WARM)
    for step in (KernelMoves(promoted=promoted), KernelMoves(demoted=demoted)):
        moved = moved.once_taken_up(step, now_s=1)
    assert moved.after([WARM], [WARM.pid], now_s=1).is_due is goes_on


def test_a_full_tier_ends_a_turn_before_anything_is_known_of_the_targets() -> None:
    """What is left is what their first samples tell."""
    new = Sorting().after([], [WARM.pid], now_s=0)
    full = new.once_taken_up(EXCHANGED, now_s=1).after([], [WARM.pid], now_s=1)
    assert not full.is_due
    assert not any(rounds([WARM], full, begin_s=2, until_s=int(RESTS_S)))
    known = full.after([], [WARM.pid], now_s=2).after([WARM], [WARM.pid], now_s=3)
    assert known.left == pytest.approx(below(WARM.pieces))


FOUND = KernelMoves(faults=200, candidates=200, promoted=150)
"""A step of a look of the kernel's that finds hot pages."""
OVER = KernelMoves(faults=200, candidates=5)
"""One of its end: pages that it has unmapped are accessed late."""


HEADROOM = 100
"""In pages."""


def roomy(free: int, cache: int = 0) -> TierRoom:
    """A tier with so many pages free, and of page cache."""
    return replace(rooms(free, headroom_pages=HEADROOM)[0], cache_bytes=cache * PAGE_BYTES)


def looked(sorting: Sorting, *steps: KernelMoves, now_s: float) -> Sorting:
    for step in steps:
        sorting = sorting.once_taken_up(step, now_s=now_s)
    return sorting


def test_while_it_looks_first_what_promotions_take_is_added_up() -> None:
    looking = seen(UNSORTED)
    for step, held_up_s in ((FOUND, 0.25), (KernelMoves(faults=200, candidates=200), 0.25)):
        looking = looking.once_taken_up(step, now_s=3, passed_s=0.5, held_up_s=0.25)
        assert looking.held_up_s == held_up_s, "what takes up nothing holds nobody up"
        assert looking.held_up_share == (0.5 if step.promoted else 0.0)
    over = looked(looking, OVER, OVER, now_s=3.5)
    assert (over.looked, over.held_up_s, over.held_up_share) == (True, 0, 0)
    assert over.once_taken_up(FOUND, now_s=5, held_up_s=0.25).held_up_s == 0


def test_the_kernel_looks_often_but_for_first_looks() -> None:
    new = Sorting().after([], [Pid(1)], now_s=0)
    assert Sorting().look == Look(first=True)
    assert new.look == Look(first=True, pace=Pace.BY_ITSELF)
    waiting = looked(new, OVER, OVER, now_s=1)
    assert waiting.look is None
    assert waiting.after([UNSORTED], [Pid(1)], now_s=2).look == Look()


@pytest.mark.parametrize(("stays", "held_up_s"), [(True, 0.25), (False, 0.0)])
def test_a_first_look_goes_on_when_another_target_comes(held_up_s: float, *, stays: bool) -> None:
    looking = Sorting().after([], [Pid(1)], now_s=0)
    looking = looking.once_taken_up(FOUND, now_s=1, held_up_s=0.25)
    both = looking.after([], [Pid(2), *([Pid(1)] if stays else [])], now_s=1)
    assert (both.promotes, both.held_up_s) == (True, held_up_s)


def test_of_several_targets_the_second_look_comes_soon() -> None:
    """For what one has accessed late while another one's hot pages rose."""
    both = Sorting().after([], [Pid(1), Pid(2)], now_s=0)
    assert both.look == Look(first=True, pace=Pace.SOON)
    alone = both.after([], [Pid(2)], now_s=1)
    assert alone.look == Look(first=True, pace=Pace.BY_ITSELF)


@pytest.mark.parametrize(
    ("had", "free", "now_s", "pace"),
    [
        (1000, 201, 2, Pace.ANEW),
        (1000, 200, 2, Pace.OFTEN),
        (0, 1000, 2, Pace.OFTEN),
        (1000, 201, FIRST_S, Pace.OFTEN),
    ],
    ids=["much room", "little", "of no room at first", "for long"],
)
def test_later_looks_begin_anew_at_once_while_there_is_much_room(
    had: int, free: int, now_s: float, pace: Pace
) -> None:
    """Where others may have to make way, they come as the kernel has them come."""
    first = Sorting().with_room(roomy(had)).after([], [Pid(1)], now_s=0)
    over = looked(first.with_room(roomy(had)), OVER, OVER, now_s=1)
    again = over.with_room(roomy(free, 1000)).after([UNSORTED], [Pid(1)], now_s=now_s)
    paces = [sorting.look and sorting.look.pace for sorting in (first, again)]
    assert paces == [Pace.BY_ITSELF, pace]


def test_a_turn_waits_for_a_target_that_accesses_nothing_yet() -> None:
    """A server that is up before its clients are; for minutes, as the kernel sorts for nobody."""
    idle = target((0, 5, HOT, [0, 1]), (5, 95, 0.0, [0, 1]))
    first = Sorting().after([], [idle.pid], now_s=0)
    for now_s, goes_on in ((YOUNG_S, True), (NOBODY_S - 1, True), (NOBODY_S, False)):
        later = first.after([idle], [idle.pid], now_s=now_s)
        assert (later.promotes, later.knows) == (goes_on, False)
        assert later.once_moved([idle.pieces], now_s=now_s).promotes is goes_on
    known = first.after([idle], [idle.pid], now_s=60).after([UNSORTED], [idle.pid], now_s=61)
    assert (known.promotes, known.knows) == (True, True)
    assert not known.after([idle], [idle.pid], now_s=62).is_due
    at_rest = seen(SORTED)
    assert not at_rest.after([idle], [idle.pid], now_s=100).is_due


def test_a_look_waits_for_the_next_round_once_it_has_taken_up_what_had_to_rise() -> None:
    """The kernel begins to count anew each second, and a look may go on for some."""
    first = Sorting().after([], [Pid(1)], now_s=0).after([UNSORTED], [Pid(1)], now_s=2)
    known = first.once_moved([UNSORTED.pieces], now_s=2)
    assert known.lacking_pages == 100
    some = KernelMoves(faults=60, candidates=60, promoted=60)
    assert looked(known, some, now_s=2.1).promotes
    risen = looked(known, some, some, now_s=2.2)
    assert (risen.is_due, risen.promotes) == (True, False)
    again = risen.after([UNSORTED], [Pid(1)], now_s=3).once_moved([UNSORTED.pieces], now_s=3)
    assert (again.promotes, again.lacking_pages) == (True, 100), "samples tell of more"


def test_what_has_risen_before_a_pause_need_not_rise_again() -> None:
    """Until samples tell anew how many pages have to, in the next round."""
    first = Sorting().after([], [Pid(1)], now_s=0).after([UNSORTED], [Pid(1)], now_s=2)
    known = first.once_moved([UNSORTED.pieces], now_s=2)
    some, others = (KernelMoves(faults=n, candidates=n, promoted=n) for n in (60, 40))
    paused = looked(known, some, KernelMoves(), now_s=2.2)
    assert (paused.promotes, paused.lacking_pages) == (True, 40)
    assert not looked(paused, others, now_s=2.3).promotes


@pytest.mark.parametrize(
    ("pages", "idle", "rests"),
    [(100, 51, True), (100, 50, False), (STRAY - 1, STRAY - 1, False)],
    ids=["of that alone", "of others too", "strays"],
)
def test_a_look_rests_for_the_round_where_it_is_at_a_target_that_lacks_nothing(
    pages: int, idle: int, *, rests: bool
) -> None:
    other = replace(SORTED, pid=Pid(2))
    sorting = Sorting().after([], [Pid(1), Pid(2)], now_s=0)
    sorting = sorting.after([UNSORTED, other], [Pid(1), Pid(2)], now_s=2)
    assert sorting.served == {Pid(2)}
    step = KernelMoves(faults=pages, candidates=pages, promoted=pages)
    after = sorting.once_taken_up(step, now_s=2.1, idle_pages=idle)
    assert (after.is_due, after.promotes) == (True, not rests)
    assert after.after([UNSORTED, other], [Pid(1), Pid(2)], now_s=3).promotes


def test_a_few_stray_faults_are_no_look() -> None:
    new = Sorting().with_room(roomy(1000)).after([], [Pid(1)], now_s=0)
    stray = KernelMoves(faults=STRAY - 1)
    assert not looked(new, stray, now_s=1).looked
    assert looked(new, stray, KernelMoves(faults=1), now_s=1).looked


def test_a_later_look_is_for_memory_as_hot_as_what_has_to_rise() -> None:
    """Three accesses of its coldest page are nearly sure to be one at least."""
    some = target((0, 20, 2 * HOT, [0, 1]), (20, 100, HOT / 1000, [0, 1]))
    new = Sorting().after([], [some.pid], now_s=0).after([some], [some.pid], now_s=2)
    first = new.once_moved([some.pieces], now_s=2).look
    assert first is not None
    assert first == Look(pace=Pace.BY_ITSELF, seen_s=first.seen_s), "its first goes on"
    assert first.seen_s == pytest.approx(3 / 20, rel=1 / 32)
    lukewarm = some.pieces.copy()
    lukewarm["short"], lukewarm["long"] = HOT / 100, HOT / 100
    risen = new.once_moved([some.pieces], now_s=2).once_moved([lukewarm], now_s=2).look
    assert risen == first, "what is left of it is no colder than it was"
    later = looked(new, OVER, OVER, now_s=2).once_moved([some.pieces], now_s=2)
    assert later.look is not None
    assert later.look.within_s == pytest.approx(3 / 20 + 20 * 100e-6, rel=1 / 32)
    both = later.once_moved([some.pieces, UNSORTED.pieces], now_s=2).look
    assert both is not None
    assert both.within_s == pytest.approx(3 / 10 + 120 * 100e-6, rel=1 / 32), "of all targets"
    slow = later.once_moved([some.pieces], now_s=2, move_cost_ns=1e6).look
    assert slow is not None
    assert slow.within_s == pytest.approx(3 / 20 + 20 * 2e-3, rel=1 / 32), "what it promotes late"


def test_before_samples_tell_it_is_added_up_for_the_first_pages_alone() -> None:
    new, each = Sorting().after([], [Pid(1)], now_s=0), FIRST_BYTES // 4 // PAGE_BYTES
    step, told = KernelMoves(faults=each, candidates=each, promoted=each), list[float]()
    for _ in range(5):
        new = new.once_taken_up(step, now_s=1, held_up_s=0.25)
        told.append(new.held_up_s)
    assert told == [0.25, 0.5, 0.75, 0, 0]
    assert new.promotes, "that the look goes on is the kernel's to tell"
    assert replace(new, knows=True).once_taken_up(step, now_s=1, held_up_s=0.25).held_up_s == 0.25


def test_after_its_first_look_at_a_new_target_the_kernel_waits_for_samples() -> None:
    new = Sorting().after([], [Pid(1)], now_s=0)
    assert looked(new, FOUND, FOUND, now_s=0.2).promotes
    assert looked(new, FOUND, OVER, now_s=0.2).promotes, "there are some in the last two steps"
    waits = looked(new, FOUND, OVER, OVER, now_s=0.3)
    assert (waits.is_due, waits.promotes) == (True, False)
    assert not looked(waits, FOUND, now_s=0.4).promotes
    early = waits.after([UNSORTED], [Pid(1)], now_s=1)
    assert (early.is_due, early.promotes) == (True, False), "the first samples tell little"
    assert early.after([UNSORTED], [Pid(1)], now_s=2).promotes
    few = early.after([SORTED], [Pid(1)], now_s=2)
    assert not few.is_due
    assert few.after([SORTED], [Pid(1), Pid(2)], now_s=9).promotes, "it waits no more"
    moved = early.once_moved([SORTED.pieces], now_s=2)
    assert not moved.is_due, "before its next look"


def test_it_waits_for_what_comes_alone() -> None:
    """Where nothing is new, and nothing told of it soon, looks follow each other as they do."""
    assert looked(Sorting(), OVER, OVER, now_s=0).promotes, "there is no target"
    assert looked(seen(UNSORTED), OVER, OVER, now_s=0.3).promotes, "it is known"
    waits = looked(Sorting().after([], [Pid(1)], now_s=0), OVER, OVER, now_s=0.3)
    assert waits.after([], [Pid(1)], now_s=WAITS_MOST_S).promotes
    assert waits.after([], [Pid(1), Pid(2)], now_s=2).promotes, "another one comes"
    at_rest = seen(SORTED)
    assert looked(at_rest, OVER, OVER, now_s=0.3) is at_rest


def test_a_later_look_is_for_what_has_to_rise() -> None:
    """As many pages as samples tell of; what tierd has moved itself is not among them."""
    some = target((0, 10, HOT, [0, 1]), (10, 100, HOT, [1]), (110, 100, HOT / 100, [0, 1]))
    first = Sorting().after([], [some.pid], now_s=0)
    young = first.after([some], [some.pid], now_s=1).once_moved([some.pieces], now_s=1)
    assert (young.promotes, young.lacking_pages) == (True, math.inf), "they tell little yet"
    known = young.after([some], [some.pid], now_s=2).once_moved([some.pieces], now_s=2)
    assert (known.promotes, known.lacking_pages) == (True, 10)
    risen = some.pieces.copy()
    risen["resident"][0, :2] = 0.5
    both = known.once_moved([risen, UNSORTED.pieces], now_s=2)
    assert both.lacking_pages == 105


def test_where_there_was_room_later_looks_are_for_what_there_is_of_it() -> None:
    """And for what may make way, once samples tell of that, beyond the headroom."""
    first = Sorting().with_room(roomy(1000)).after([], [Pid(1)], now_s=0)
    assert looked(first, FOUND, now_s=0.1).promotes
    young = looked(first.with_room(roomy(60)), OVER, OVER, now_s=0.2)
    young = young.after([UNSORTED], [Pid(1)], now_s=1).once_moved([UNSORTED.pieces], now_s=1)
    assert young.lacking_pages == math.inf, "they tell nothing yet"
    known = young.after([UNSORTED], [Pid(1)], now_s=2).once_moved([UNSORTED.pieces], now_s=2)
    assert (known.promotes, known.lacking_pages) == (True, 60)
    some = KernelMoves(faults=5, candidates=5, promoted=5)
    assert looked(known, some, now_s=2.1).lacking_pages == 60, "the kernel counts these itself"
    assert looked(known, some, OVER, now_s=2.1).lacking_pages == 55
    assert looked(known.with_room(roomy(70)), some, OVER, now_s=2.1).lacking_pages == 55
    some_cold = known.with_room(roomy(60), HEADROOM * PAGE_BYTES)
    assert some_cold.once_moved([UNSORTED.pieces], now_s=2).lacking_pages == 60
    cold = known.with_room(roomy(60), (HEADROOM + 30) * PAGE_BYTES)
    cold = cold.once_moved([UNSORTED.pieces], now_s=2)
    assert cold.lacking_pages == 90
    little = target((0, 10, HOT, [0, 1]), (10, 100, HOT, [1]))
    assert cold.once_moved([little.pieces], now_s=2).lacking_pages == 10


def test_a_first_look_that_takes_place_meanwhile_is_not_cut_short() -> None:
    first = Sorting().with_room(roomy(1000)).after([], [Pid(1)], now_s=0)
    known = first.after([], [Pid(1)], now_s=1).after([UNSORTED], [Pid(1)], now_s=2)
    assert known.once_moved([UNSORTED.pieces], now_s=2).lacking_pages == 100


def test_a_look_ends_before_the_room_does() -> None:
    first = Sorting().with_room(roomy(1000)).after([], [Pid(1)], now_s=0)
    enough = 2 * FOUND.promoted
    assert looked(first.with_room(roomy(enough)), FOUND, now_s=0.1).promotes
    assert not looked(first.with_room(roomy(enough - 1)), FOUND, now_s=0.1).promotes
    cache = HEADROOM + FOUND.promoted
    assert looked(first.with_room(roomy(0, cache)), FOUND, now_s=0.1).promotes, "it makes way"
    assert not looked(first.with_room(roomy(0, cache - 1)), FOUND, now_s=0.1).promotes
    full = Sorting().with_room(roomy(HEADROOM - 10, 10)).after([], [Pid(1)], now_s=0)
    assert looked(full, FOUND, now_s=0.1).promotes, "others make way, whatever they are"


@pytest.mark.parametrize(
    ("steps", "least", "others_stay"),
    [((FOUND, OVER), 50, True), ((FOUND,), 10, True), ((EXCHANGED,), 10, False)],
)
def test_where_there_was_room_the_tier_is_full_once_there_is_none(
    steps: Sequence[KernelMoves], least: int, others_stay: bool
) -> None:
    """Not yet when some make way: page cache does too. A look that goes on ends with the room.

    What is cold is room until others make way: the kernel does not know which are as cold. Of both
    some hot pages would make way as well, where they are no more than the headroom.
    """
    new = Sorting().with_room(roomy(1000)).after([], [WARM.pid], now_s=0)
    known = new.after([WARM], [WARM.pid], now_s=1).after([WARM], [WARM.pid], now_s=2)
    filled = looked(known, *steps, now_s=3)
    for free, goes_on in (least, False), (least + 1, True):
        after = filled.with_room(roomy(free)).after([WARM], [WARM.pid], now_s=3)
        assert (after.is_due, after.is_filled) == (goes_on, not goes_on)
        for more in 0, HEADROOM:
            cached = filled.with_room(roomy(free - 5, more + 5))
            assert cached.after([WARM], [WARM.pid], now_s=3).is_due is (goes_on and more > 0)
            cold = filled.with_room(roomy(free - 5), (more + 5) * PAGE_BYTES)
            stays = goes_on and others_stay and more > 0
            assert cold.after([WARM], [WARM.pid], now_s=3).is_due is stays


def test_before_samples_tell_the_tier_is_full_where_others_make_way() -> None:
    new = Sorting().with_room(roomy(1000)).after([], [WARM.pid], now_s=0)
    for free, step, goes_on in (50, FOUND, True), (51, EXCHANGED, True), (10, EXCHANGED, False):
        filled = looked(new, step, now_s=0.5).with_room(roomy(free))
        assert filled.after([], [WARM.pid], now_s=1).is_due is goes_on


def test_what_tierd_has_moved_itself_takes_room_from_the_kernel() -> None:
    """For good, as what has been demoted for it then makes no new room either."""
    new = Sorting().with_room(roomy(1000)).after([], [WARM.pid], now_s=0)
    known = looked(new, OVER, OVER, now_s=0.1).after([WARM], [WARM.pid], now_s=2)
    assert known.once_moved([WARM.pieces], now_s=2).filling.left_bytes == 1000 * PAGE_BYTES
    moved = known.once_moved([WARM.pieces], now_s=2, room=roomy(300))
    assert moved.with_room(roomy(600)).filling.left_bytes == 300 * PAGE_BYTES
    freed = known.once_moved([WARM.pieces], now_s=2, room=roomy(1200)).filling
    assert freed.left_bytes == 1000 * PAGE_BYTES, "it has moved some down"
    anew = replace(known, filling=known.filling.in_later_turn())
    assert anew.once_moved([WARM.pieces], now_s=2, room=roomy(300)).filling.left_bytes is None


def test_page_cache_that_becomes_inactive_is_room_until_anybody_makes_way() -> None:
    """A program that begins has read its files, which the kernel has as active at first."""
    new = Sorting().with_room(roomy(1000)).after([], [WARM.pid], now_s=0)

    def left_pages(sorting: Sorting) -> int | None:
        left_bytes = sorting.filling.left_bytes
        return left_bytes and left_bytes // PAGE_BYTES

    began = new.with_room(roomy(1000, 300))
    assert left_pages(began) == 1300
    assert left_pages(began.with_room(roomy(900, 400))) == 1300, (
        "what has been read since took room"
    )
    assert left_pages(began.with_room(roomy(1200, 300))) == 1300, "what somebody else has freed"
    step = KernelMoves(faults=900, candidates=900, promoted=900, demoted=100)
    assert left_pages(looked(began, step, now_s=1).with_room(roomy(100, 500))) == 400


def test_what_is_demoted_for_it_makes_no_new_room() -> None:
    """Once the kernel has taken up what there was room for, others would make way for the rest."""
    new = Sorting().with_room(roomy(1000)).after([], [WARM.pid], now_s=0)
    known = looked(new, OVER, OVER, now_s=0.1).after([WARM], [WARM.pid], now_s=2)
    step = KernelMoves(faults=900, candidates=900, promoted=900, demoted=900)
    taken = looked(known.with_room(roomy(1000)), step, OVER, now_s=2.1)
    assert (taken.lacking_pages, taken.after([WARM], [WARM.pid], now_s=3).is_due) == (100, True)
    again = step._replace(promoted=95)
    filled = looked(taken.with_room(roomy(1000)), again, now_s=3.1)
    filled = filled.after([WARM], [WARM.pid], now_s=4)
    assert (filled.is_due, filled.is_filled) == (False, True)


@pytest.mark.parametrize(
    ("promoted", "demoted", "left"),
    [(0, 0, None), (0, 50, None), (90, 0, 60), (900, 810, 0), (90, 90, None)],
)
def test_what_is_taken_up_before_a_target_is_seen_counts(
    promoted: int, demoted: int, left: int | None
) -> None:
    """A look takes half a second; the room may have been filled by then, and more."""
    taken = KernelMoves(promoted=promoted, demoted=demoted)
    before = Sorting().after([], [], now_s=0).once_taken_up(taken, now_s=0.9)
    new = before.with_room(roomy(60)).after([], [Pid(1)], now_s=1)
    assert new.filling.left_bytes == (None if left is None else left * PAGE_BYTES)
    assert new.filling.look_bytes == promoted * PAGE_BYTES


def test_a_look_of_long_ago_counts_for_no_other() -> None:
    looking = seen(UNSORTED).once_taken_up(FOUND, now_s=3).after([SORTED], [Pid(1)], now_s=4)
    new = looking.after([SORTED], [Pid(1), Pid(2)], now_s=9)
    assert (looking.is_due, new.filling.look_bytes) == (False, 0)


def test_what_is_taken_up_while_it_waits_counts_for_no_later_look() -> None:
    first = Sorting().with_room(roomy(1000)).after([], [Pid(1)], now_s=0)
    late = KernelMoves(faults=5, candidates=5, promoted=5)
    waits = looked(first, FOUND, OVER, OVER, late, now_s=0.5).after([UNSORTED], [Pid(1)], now_s=1)
    at_last = looked(waits, late, now_s=2).with_room(roomy(60))
    known = at_last.after([UNSORTED], [Pid(1)], now_s=2)
    assert known.once_moved([UNSORTED.pieces], now_s=2).lacking_pages == 60


def test_a_first_look_ends_with_the_room_before_its_target_is_seen() -> None:
    none = Sorting().with_room(roomy(1000)).after([], [], now_s=0)
    assert looked(none, FOUND, now_s=0.2).promotes
    full = Sorting().with_room(roomy(HEADROOM)).after([], [], now_s=0)
    assert looked(full, FOUND, FOUND, now_s=0.2).promotes, "others make way"
    fills = looked(none.with_room(roomy(200)), FOUND, now_s=0.2)
    assert not fills.promotes
    assert fills.after([], [], now_s=1).promotes, "it was for nobody who counts"
    waits = fills.with_room(roomy(60)).after([], [Pid(1)], now_s=1)
    assert not waits.promotes
    known = waits.with_room(roomy(60)).after([UNSORTED], [Pid(1)], now_s=3)
    known = known.once_moved([UNSORTED.pieces], now_s=3)
    assert (known.promotes, known.lacking_pages) == (True, 60)


def test_later_turns_are_for_what_displaces_others() -> None:
    turn = RESTED.with_room(roomy(0)).after([WARMER], [WARMER.pid], now_s=0)
    assert turn.once_moved([WARMER.pieces], now_s=0).lacking_pages > 0
    assert turn.after([WARMER], [WARMER.pid], now_s=1).is_due


def test_how_much_has_to_rise_is_not_known_when_a_turn_begins() -> None:
    known = replace(RESTED, lacking_pages=1.0).after([WARMER], [WARMER.pid], now_s=0)
    assert (known.is_due, known.promotes) == (True, True)


RESTED = Sorting(
    is_due=False,
    many_s=-PATIENCE_S,
    left=0.25,
    rests_s=500,
    worse_s=-WORSE_S,
    came_s={WARM.pid: -1000},
)
"""At 0 s, in a tier that many turns have filled."""


def test_a_turn_comes_soon_where_more_goes_below_than_was_left() -> None:
    soon = int(WORSE_S)
    rested = replace(RESTED, worse_s=math.inf)
    assert rounds([WARMER], rested, begin_s=0, until_s=soon + 2) == [False] * soon + [True] * 2
    assert not any(rounds([WARM], RESTED, begin_s=0, until_s=20))
    sorting = rested
    for now_s in range(50):  # three rounds of four
        sorting = sorting.after([WARMER if now_s % 4 else WARM], [WARM.pid], now_s=now_s)
        assert not sorting.is_due
    assert turns(WARM, sorting=RESTED, begin_s=0, until_s=500)[0] == 500 - PATIENCE_S


def test_what_a_new_target_is_found_out_to_have_below_was_left_too() -> None:
    """Samples of its first seconds find ever more, until they tell of all."""
    young = replace(RESTED, came_s={WARM.pid: -1.0})
    found = young.after([], [WARM.pid], now_s=0).after([WARMER], [WARM.pid], now_s=1)
    assert found.left == pytest.approx(below(WARMER.pieces))
    assert not any(rounds([WARMER], found, begin_s=2, until_s=100))
    known = replace(RESTED, came_s={WARM.pid: -SETTLES_S})
    assert rounds([WARMER], known, begin_s=0, until_s=1) == [True]
    few = replace(young, left=0.0).after([WARMER], [WARM.pid], now_s=0)
    assert few.left == 0


def test_a_new_target_ends_a_long_rest() -> None:
    new = replace(WARM, pid=Pid(2))
    begins, ends, begins_again = turns(WARM, new, sorting=RESTED, begin_s=0, until_s=300)[:3]
    assert begins == 0
    assert begins_again - ends == RESTS_S


def left(sorting: Sorting, one: Target) -> list[bool]:
    told: list[bool] = np.broadcast_to(sorting.leaves(one, now_s=1), len(one.pieces)).tolist()
    return told


def test_what_may_have_few_hot_pages_is_left_to_the_kernel_in_its_turns() -> None:
    """Not what most of whose pages are hot, and not a single page."""
    places = ((0, 100, HOT, [0, 1]), (100, 100, 3 * HOT, [0, 1]), (200, 1, HOT, [0, 1]))
    new = replace(target(*places), ceiling=5 * HOT)
    sorting = Sorting().after([new], [Pid(1)], now_s=100)
    assert left(sorting, new) == [True, False, False]
    rests = sorting.after([replace(SORTED, pid=Pid(1))], [Pid(1)], now_s=100 + FIRST_S)
    assert not rests.is_due
    assert left(rests, new) == [False] * 3


def test_what_the_kernel_has_taken_up_in_part_is_not_hot_by_a_few_samples() -> None:
    new = replace(target((0, 100, HOT, [0, 1]), (100, 100, HOT, [0.5, 0.5])), ceiling=4 * HOT)
    new.pieces["short"] = 1.5 * HOT
    new.pieces["long"] = [0.1 * HOT, 0.4 * HOT]
    sorting = Sorting().after([new], [Pid(1)], now_s=0)
    assert left(sorting, new) == [False, True]
    new.pieces["long"] = HOT
    assert left(sorting, new) == [False, False]


def test_what_a_look_has_mostly_taken_up_is_moved_by_regions() -> None:
    """Not in a tier that the kernel has filled, where others would make way for its rest."""
    mostly = target((0, 100, HOT, [0.7, 0.3]), (100, 100, HOT, [0.65, 0.35]))
    some = replace(mostly, ceiling=5 * HOT)
    looking = Sorting().after([some], [Pid(1)], now_s=0)
    assert left(looking, some) == [True, True]
    over = looked(looking, OVER, OVER, now_s=1)
    assert left(over, some) == [False, True]
    assert left(replace(over, is_filled=True), some) == [True, True]


def test_what_a_few_pages_tell_to_be_alike_is_moved_by_regions() -> None:
    """A look that is over has missed what the program accesses late."""
    some = replace(
        target((0, 500, HOT, [0.2, 0.8]), (500, 300, HOT, [0, 1]), (900, 100, HOT, [0, 1])),
        ceiling=5 * HOT,
    )
    some.pieces["zoomed_s"][1] = 0.0
    looking = seen(some)
    assert not looking.tells_alike
    assert left(looking, some) == [True] * 3
    over = looked(looking, OVER, OVER, now_s=1)
    assert over.tells_alike
    assert left(over, some) == [False, False, True]
    filled = replace(over, is_filled=True)
    assert not filled.tells_alike
    assert left(filled, some) == [True] * 3


def test_after_a_while_it_may_take_free_room() -> None:
    new, other = replace(UNSORTED, ceiling=5 * HOT), replace(UNSORTED, pid=Pid(2))
    sorting = Sorting().after([new], [Pid(1)], now_s=100)
    for late_s, fills in (0, False), (FIRST_S - 1, False), (FIRST_S, True):
        assert sorting.fills(new, now_s=100 + late_s) is fills
    beside = sorting.after([new, other], [Pid(1), Pid(2)], now_s=100 + FIRST_S)
    assert beside.fills(new, now_s=101 + FIRST_S)
    assert not beside.fills(other, now_s=101 + FIRST_S)
    assert not replace(beside, is_filled=True).fills(new, now_s=101 + FIRST_S)


def test_what_the_kernel_has_filled_the_tier_with_stays() -> None:
    """Whatever comes beside it, until few go below."""
    mixture = replace(WARM, ceiling=5 * HOT)
    sorting = Sorting()
    for now_s in range(10):
        sorting = sorting.once_taken_up(EXCHANGED, now_s=now_s)
        sorting = sorting.after([mixture], [mixture.pid], now_s=now_s)
    assert not sorting.is_due
    assert left(sorting, mixture) == [True]
    late_s = 10 + 2 * FIRST_S
    beside = sorting.after([mixture], [mixture.pid, Pid(2)], now_s=late_s)
    assert beside.is_due
    assert left(beside, mixture) == [True]
    instead = sorting.after([], [], now_s=late_s).after([], [Pid(2)], now_s=late_s)
    assert not instead.is_filled
    few = sorting.after([SORTED], [SORTED.pid], now_s=10)
    assert not any(left(few, replace(SORTED, ceiling=5 * HOT)))
    again = beside.after([SORTED], [mixture.pid, Pid(2)], now_s=late_s + YOUNG_S)
    assert not any(left(again, replace(SORTED, ceiling=5 * HOT)))


def test_nothing_is_left_to_a_kernel_that_does_not_sort() -> None:
    at_rest = seen(SORTED)
    assert not at_rest.is_due
    assert not any(left(at_rest, replace(SORTED, ceiling=5 * HOT)))
