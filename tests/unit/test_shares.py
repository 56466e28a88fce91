# SPDX-License-Identifier: Apache-2.0
"""Shares of tenants: how a tier is divided, and that simulated neighbours get theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.test_decide import PLACES, on_three_tiers, pieces, rooms
from tests.unit.world import AGGREGATION_S, World, mapped, window
from tierd.bulk import Plan, Target
from tierd.decide.heat import COLD_PER_PAGE_S, ceiling, fold, score
from tierd.decide.placement import plan
from tierd.decide.settle import settle
from tierd.decide.shares import by_weight, divide, nothing_elsewhere
from tierd.decide.sharing import SLACK
from tierd.model import PAGE_BYTES, Pid, Policy, Rank, Tenant, TenantClass, TierRoom

Floats = np.typing.NDArray[np.float64]

POLICY = Policy()
PAGES = 2048
FAST, SLOW = Rank(0), Rank(1)
MINUTE = round(60 / AGGREGATION_S)

amounts = st.floats(0, 1e6)


@st.composite
def tenants(draw: st.DrawFn) -> dict[str, np.typing.NDArray[np.float64]]:
    count = draw(st.integers(1, 6))

    def each(of: st.SearchStrategy[float]) -> np.typing.NDArray[np.float64]:
        return np.array(draw(st.lists(of, min_size=count, max_size=count)))

    guaranteed, wanted = each(amounts), each(amounts)
    return {
        "guaranteed": guaranteed,
        "maximum": guaranteed + each(amounts | st.just(np.inf)),
        "weight": each(st.floats(1, 1000)),
        "used": wanted + each(amounts),
        "wanted": wanted,
    }


@given(of=tenants(), capacity=st.floats(1, 1e6))
def test_a_tier_is_divided_whole_and_no_more(
    of: dict[str, np.typing.NDArray[np.float64]], capacity: float
) -> None:
    share = divide(capacity, **of)
    assert (share >= 0).all()
    assert share.sum() <= capacity * (1 + 1e-9)
    promised = np.minimum(of["guaranteed"], of["used"])
    if promised.sum() <= capacity:
        assert (share >= promised * (1 - 1e-9)).all()
    assert (share <= of["maximum"] * (1 + 1e-9)).all()
    asked = np.maximum(promised, np.minimum(of["wanted"], of["maximum"]))
    assert share.sum() == pytest.approx(min(capacity, asked.sum())), "nothing is left unused"


@given(of=tenants(), capacity=st.floats(1, 1e6), seed=st.integers(0, 99))
def test_the_order_of_tenants_does_not_matter(
    of: dict[str, np.typing.NDArray[np.float64]], capacity: float, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(of["weight"]))
    moved = {name: values[order] for name, values in of.items()}
    assert divide(capacity, **moved) == pytest.approx(divide(capacity, **of)[order], abs=1e-3)


classes = st.integers(0, 2)


@given(of=tenants(), capacity=st.floats(1, 1e6), data=st.data())
def test_a_class_has_all_it_wants_before_the_next_has_what_is_not_guaranteed(
    of: dict[str, np.typing.NDArray[np.float64]], capacity: float, data: st.DataObject
) -> None:
    count = len(of["weight"])
    class_ = np.array(data.draw(st.lists(classes, min_size=count, max_size=count)))
    share = divide(capacity, **of, class_=class_)
    promised = np.minimum(of["guaranteed"], of["used"])
    asked = np.maximum(promised, np.minimum(of["wanted"], of["maximum"]))
    assert share.sum() == pytest.approx(min(capacity, asked.sum())), "nothing is left unused"
    if promised.sum() <= capacity:
        assert (share >= promised * (1 - 1e-9)).all()
    has_more = share > promised * (1 + 1e-9) + 1e-3
    for first in class_[~(share >= asked * (1 - 1e-9) - 1e-3)]:
        assert (class_[has_more] <= first).all()


@given(of=tenants(), capacity=st.floats(1, 1e6), class_=classes)
def test_one_class_alone_is_as_none(
    of: dict[str, np.typing.NDArray[np.float64]], capacity: float, class_: int
) -> None:
    """To the last bit: the formula without classes."""
    same = np.full(len(of["weight"]), class_)
    promised = np.minimum(of["guaranteed"], np.maximum(of["used"], of["wanted"]))
    if promised.sum() > capacity:
        expected = promised * (capacity / promised.sum())
    else:
        missing = np.maximum(np.minimum(of["wanted"], of["maximum"]) - promised, 0.0)
        expected = promised + by_weight(capacity - promised.sum(), missing, of["weight"])
    assert divide(capacity, **of, class_=same).tolist() == expected.tolist()


class Neighbours:
    """Simulated processes, each of a tenant of its own, in a fast tier that they share."""

    def __init__(
        self, rates: Sequence[np.typing.NDArray[np.float64]], of: Sequence[Tenant], fast_pages: int
    ) -> None:
        self.capacities = [fast_pages, len(rates) * PAGES]
        self.worlds = [
            World(rate, np.ones(PAGES, int), self.capacities, seed)
            for seed, rate in enumerate(rates)
        ]
        self.tenants = of
        self.promotable = 1.0

    def rooms(self) -> list[TierRoom]:
        used = np.sum([np.bincount(world.tier, minlength=2) for world in self.worlds], axis=0)
        rooms = self.worlds[0].rooms()
        return [
            replace(room, free_bytes=int(self.capacities[rank] - used[rank]) * PAGE_BYTES)
            for rank, room in enumerate(rooms)
        ]

    def round(self, budget_pages: int = 1 << 20) -> Plan:
        targets = []
        for index, world in enumerate(self.worlds):
            world.now_s += AGGREGATION_S
            seen = world.sample()
            world.pieces = fold(world.pieces, [seen], mapped(PAGES), world.policy)
            world.probe()
            most = ceiling(seen)
            targets.append(Target(pid=Pid(index), pieces=world.pieces, ceiling=most, tenant=index))
        world = self.worlds[0]
        made = plan(
            targets,
            self.rooms(),
            world.policy,
            now_s=world.now_s,
            budget_bytes=budget_pages * PAGE_BYTES,
            promotable=self.promotable,
            tenants=self.tenants,
        )
        for index, world in enumerate(self.worlds):
            mine = made.moves[made.moves["target"] == index]
            mine["target"] = 0
            own = replace(made, pids=(Pid(index),), moves=mine)
            world.pieces = settle(world.pieces, world.move(own), 0, world.policy, now_s=world.now_s)
        assert self.fast_pages().sum() <= self.capacities[0]
        return made

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def fast_pages(self) -> np.typing.NDArray[np.int64]:
        """What each has in the fast tier."""
        return np.array([np.sum(world.tier == FAST) for world in self.worlds])


BARELY_HOT = 5.0
"""Accesses a page and second whose average is worth a move, and few samples of which are not."""


def tenant(
    name: str,
    *,
    guaranteed: int = 0,
    maximum: int | None = None,
    weight: float = 100,
    class_: TenantClass = TenantClass.NORMAL,
) -> Tenant:
    return Tenant(
        name=name,
        class_=class_,
        weight=weight,
        guaranteed_bytes={FAST: guaranteed * PAGE_BYTES},
        maximum_bytes={} if maximum is None else {FAST: maximum * PAGE_BYTES},
    )


def thrash(neighbours: Neighbours, index: int, minutes: int) -> list[float]:
    """Has one neighbour's hot window move each 5 s; returns what the first's hot pages have."""
    held = []
    first = neighbours.worlds[0]
    hot = first.rate > 1
    for round_ in range(minutes * MINUTE):
        start = 640 * (round_ // 12 % 3)
        neighbours.worlds[index].rate = window(PAGES, start, 640, hot=1000, rest=0.1)
        neighbours.round()
        held.append(first.fast_share(hot))
    return held


def test_what_goes_the_same_way_is_one_move() -> None:
    """A neighbour's memory makes way for another's and for its own hotter pages at once."""
    rates = [window(PAGES, 0, 600, hot=50, rest=0.1), window(PAGES, 0, 640, hot=1000, rest=0.1)]
    of = [tenant("db", guaranteed=700), tenant("batch", weight=10_000)]
    neighbours = Neighbours(rates, of, 1000)
    for round_ in range(MINUTE):
        neighbours.worlds[1].rate = window(PAGES, 100 * (round_ % 14), 640, hot=1000, rest=5)
        neighbours.worlds[0].rate = window(PAGES, 0, 100 + 50 * (round_ % 11), hot=50, rest=0.1)
        moves = neighbours.round().moves[["target", "start", "source", "destination"]]
        assert len(np.unique(moves)) == len(moves)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 99))
def test_a_guarantee_holds_while_the_neighbour_thrashes(seed: int) -> None:
    rates = [window(PAGES, seed, 300, hot=20, rest=0.0), np.zeros(PAGES)]
    quiet = Neighbours(rates, [tenant("db", guaranteed=320), tenant("batch")], 640)
    quiet.rounds(MINUTE)
    assert min(thrash(quiet, 1, 3)) >= 0.98


def test_of_a_guarantee_no_page_is_too_few_to_make_way_for() -> None:
    """Twelve pages of a tier of three thousand: less than what shares by weight are moved for."""
    rates = [window(PAGES, 0, 300, hot=20, rest=0.0), *[np.full(PAGES, 500.0)] * 2]
    of = [tenant("db", guaranteed=320), tenant("batch"), tenant("more")]
    neighbours = Neighbours(rates, of, 3000)
    for world, fast in zip(neighbours.worlds, (288, 1356, 1356), strict=True):
        world.tier[:fast] = FAST
    neighbours.rounds(MINUTE)
    assert neighbours.fast_pages()[0] >= 300


def test_without_a_guarantee_the_weightier_one_has_it() -> None:
    rates = [window(PAGES, 0, 300, hot=20, rest=0.0), np.zeros(PAGES)]
    neighbours = Neighbours(rates, [tenant("db"), tenant("batch", weight=1000)], 640)
    neighbours.rounds(MINUTE)
    assert min(thrash(neighbours, 1, 3)) < 0.5


def test_what_one_does_not_use_is_the_others() -> None:
    rates = [np.zeros(PAGES), window(PAGES, 0, 900, hot=500, rest=0.0)]
    neighbours = Neighbours(rates, [tenant("db", guaranteed=600), tenant("batch")], 1000)
    neighbours.rounds(MINUTE)
    assert neighbours.fast_pages()[1] >= 880
    neighbours.worlds[0].rate = window(PAGES, 0, 590, hot=20, rest=0.0)
    neighbours.rounds(MINUTE)
    assert neighbours.fast_pages()[0] >= 0.98 * 590, "and comes back when it is wanted"


def test_a_maximum_is_kept_though_there_is_room() -> None:
    rates = [np.zeros(PAGES), window(PAGES, 0, 900, hot=500, rest=0.0)]
    neighbours = Neighbours(rates, [tenant("db"), tenant("batch", maximum=200)], 1000)
    neighbours.worlds[1].tier[:500] = FAST
    neighbours.rounds(MINUTE)
    assert 190 <= neighbours.fast_pages()[1] <= 200


@pytest.mark.parametrize(
    ("held_until_s", "refusals", "goes"), [(1.0, 0, None), (1.0, 1, "hot"), (0.0, 0, "warm")]
)
def test_beyond_a_maximum_what_rests_is_waited_for(
    held_until_s: float, refusals: int, goes: str | None
) -> None:
    """Hot memory does not go in place of the colder, unless that is refused."""
    hot, warm = (0, 200, 1.0, [1.0]), (200, 200, 0.1, [1.0])
    held = pieces(hot, warm)
    held["held_until_s"][1], held["refusals"][1] = held_until_s, refusals
    made = plan(
        [Target(pid=Pid(0), pieces=held, ceiling=np.inf)],
        rooms(500, 500),
        Policy(),
        now_s=0.5,
        budget_bytes=1 << 30,
        tenants=[tenant("batch", maximum=300), tenant("db")],
    )
    starts = {None: [], "hot": held["start"][:1].tolist(), "warm": held["start"][1:].tolist()}
    assert made.moves["start"].tolist() == starts[goes]


@given(
    has=st.lists(st.integers(0, 1000), min_size=2, max_size=2),
    wants=st.lists(st.integers(0, 2000), min_size=2, max_size=2),
    hot=st.lists(st.integers(1, 600), min_size=2, max_size=2),
    free=st.integers(0, 500),
    can_leave=st.lists(st.booleans(), min_size=2, max_size=2),
)
def test_what_is_owed_is_what_others_lack_of_their_shares(
    has: list[int], wants: list[int], hot: list[int], free: int, can_leave: list[bool]
) -> None:
    """Of two tenants with something elsewhere, and hot pages in the slow tier."""
    elsewhere = nothing_elsewhere(2)
    elsewhere.has[:, FAST] = np.multiply(has, PAGE_BYTES)
    elsewhere.wants[:, FAST] = np.multiply(wants, PAGE_BYTES)
    elsewhere.leaves[:, FAST] = elsewhere.has[:, FAST] * can_leave
    targets = [
        Target(pid=Pid(n), pieces=pieces((0, pages, 1.0, [0.0, 1.0])), ceiling=np.inf, tenant=n)
        for n, pages in enumerate(hot)
    ]
    of = [tenant("a"), tenant("b")]
    made = plan(
        targets,
        rooms(free, 5000),
        Policy(),
        now_s=0.0,
        budget_bytes=1 << 40,
        tenants=of,
        elsewhere=elsewhere,
    )
    owed, share = made.owed[:, FAST] / PAGE_BYTES, made.shares[:, FAST] / PAGE_BYTES
    lacking = np.minimum(hot, np.maximum(share - has, 0.0))
    beyond = np.minimum(np.maximum(has - share, 0.0), np.multiply(has, can_leave))
    assert (owed <= beyond + 1e-6).all()
    assert owed.sum() <= max(lacking.sum() - free, 0.0) + 1e-6
    tier = sum(has) + free
    if lacking.sum() - free > SLACK * tier:
        assert owed.sum() == pytest.approx(min(lacking.sum() - free, beyond.sum()), abs=1)


def test_nobody_makes_way_while_nothing_may_rise() -> None:
    rates = [window(PAGES, 0, 300, hot=20, rest=0.0), window(PAGES, 0, 700, hot=500, rest=0.0)]
    neighbours = Neighbours(rates, [tenant("db", guaranteed=320), tenant("batch")], 640)
    neighbours.worlds[1].tier[:600] = FAST
    neighbours.promotable = 0.0
    neighbours.rounds(MINUTE)
    assert neighbours.fast_pages().tolist() == [0, 600]
    neighbours.promotable = 1.0
    neighbours.rounds(MINUTE)
    assert neighbours.fast_pages()[0] >= 0.98 * 300


def test_weights_divide_what_all_want() -> None:
    rates = [window(PAGES, 0, 900, hot=hot, rest=0.0) for hot in (50, 500)]
    of = [tenant("db", weight=300), tenant("batch", weight=100)]
    neighbours = Neighbours(rates, of, 800)
    neighbours.rounds(2 * MINUTE)
    assert neighbours.fast_pages() == pytest.approx([600, 200], abs=24)
    before = sum(world.moved_pages for world in neighbours.worlds)
    neighbours.rounds(MINUTE)
    moved = sum(world.moved_pages for world in neighbours.worlds) - before
    assert moved <= 0.05 * 800, "and then they rest"


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 99))
@example(seed=13)  # where cold memory is held, and hot memory made way for it
@pytest.mark.parametrize("hot", [20, BARELY_HOT])
def test_a_class_is_kept_from_those_behind_it_however_weighty(hot: float, seed: int) -> None:
    rates = [window(PAGES, seed, 300, hot=hot, rest=0.0), np.zeros(PAGES)]
    of = [
        tenant("web", class_=TenantClass.LATENCY, weight=1),
        tenant("etl", class_=TenantClass.BATCH, weight=10_000),
    ]
    neighbours = Neighbours(rates, of, 640)
    neighbours.rounds(MINUTE)
    assert min(thrash(neighbours, 1, 3)) >= 0.98
    assert neighbours.fast_pages()[1] >= 300, "what web doesn't want is etl's"


def test_a_guarantee_of_the_last_class_is_kept_from_the_first() -> None:
    rates = [window(PAGES, 0, 300, hot=20, rest=0.0), np.zeros(PAGES)]
    of = [
        tenant("etl", class_=TenantClass.BATCH, guaranteed=320, weight=1),
        tenant("web", class_=TenantClass.LATENCY, weight=10_000),
    ]
    neighbours = Neighbours(rates, of, 640)
    neighbours.rounds(MINUTE)
    assert min(thrash(neighbours, 1, 3)) >= 0.98


def test_the_last_class_makes_way_first() -> None:
    """Of what nobody wants in the fast tier, though that of the other class is colder."""
    rates = [
        window(PAGES, 0, 200, hot=50, rest=0.0),
        np.full(PAGES, 0.0),
        np.full(PAGES, 0.5),
    ]

    def fast_pages(last: TenantClass) -> list[int]:
        of = [tenant("web"), tenant("old"), tenant("etl", class_=last)]
        neighbours = Neighbours(rates, of, 1000)
        for world in neighbours.worlds[1:]:
            world.tier[:500] = FAST
        neighbours.rounds(MINUTE)
        return [int(pages) for pages in neighbours.fast_pages()]

    assert fast_pages(TenantClass.BATCH) == pytest.approx([200, 500, 300], abs=16)
    assert fast_pages(TenantClass.NORMAL) == pytest.approx([200, 300, 500], abs=16)


# Plans of several tenants, each of one process. Fast free memory may be less than none.

PIECES = st.lists(
    st.tuples(st.integers(1, 300), st.floats(0, 100), st.floats(0, 1)), min_size=1, max_size=8
)


@dataclass(frozen=True)
class Drawn:
    """A fast tier between tenants: what plan() is called with."""

    targets: list[Target]
    tenants: list[Tenant]
    free_pages: int
    low_pages: int
    budget_pages: int

    def plan(self, order: Sequence[int] | None = None) -> Plan:
        """With the tenants in another order, if any."""
        order = range(len(self.tenants)) if order is None else order
        return plan(
            [replace(target, tenant=order.index(target.tenant)) for target in self.targets],
            rooms(self.free_pages, self.low_pages),
            POLICY,
            now_s=0,
            budget_bytes=self.budget_pages * PAGE_BYTES,
            tenants=[self.tenants[index] for index in order],
        )

    def pages(self, rank: int, least: float = 0.0) -> Floats:
        """What each tenant has on a tier, of heat `least` on."""
        return np.array(
            [
                np.sum(
                    _pages(t.pieces) * t.pieces["resident"][:, rank] * (score(t.pieces) >= least)
                )
                for t in self.targets
            ]
        )

    def moved(self, made: Plan, source: int, destination: int) -> Floats:
        """How many pages of each tenant go from one tier to another."""
        moves = made.moves
        these = (moves["source"] == source) & (moves["destination"] == destination)
        of = moves["target"][these]
        pages = np.bincount(of, moves["bytes"][these] / PAGE_BYTES, len(self.targets))
        return np.asarray(pages, np.float64)


def _pages(pieces: np.typing.NDArray[np.void]) -> Floats:
    return np.asarray((pieces["end"] - pieces["start"]) / PAGE_BYTES, np.float64)


@st.composite
def drawn(draw: st.DrawFn, classes: st.SearchStrategy[TenantClass]) -> Drawn:
    targets, of = [], []
    for index in range(draw(st.integers(2, 4))):
        first, rows = 0, []
        for count, per_page_s, fast in draw(PIECES):
            rows.append((first, count, per_page_s / PAGE_BYTES, [fast, 1 - fast]))
            first += count
        made = pieces(*rows)
        targets.append(Target(pid=Pid(index + 1), pieces=made, ceiling=np.inf, tenant=index))
        guaranteed = draw(st.integers(0, 500))
        maximum = draw(st.none() | st.integers(guaranteed, 1000))
        weight = draw(st.floats(1, 1000))
        of.append(
            tenant(
                str(index),
                guaranteed=guaranteed,
                maximum=maximum,
                weight=weight,
                class_=draw(classes),
            )
        )
    return Drawn(
        targets=targets,
        tenants=of,
        free_pages=draw(st.integers(-50, 1000)),
        low_pages=draw(st.integers(0, 1000)),
        budget_pages=draw(st.integers(0, 2000)),
    )


ANY_CLASS = st.sampled_from(TenantClass)
ROUNDING = 16
"""Pages: a move of less than one is not made, and there may be one of each piece and way."""


@given(between=drawn(ANY_CLASS))
def test_no_plan_of_tenants_exceeds_budget_or_room(between: Drawn) -> None:
    made = between.plan()
    up, down = (between.moved(made, *way).sum() for way in ((1, 0), (0, 1)))
    slack = len(made.moves) + 1e-6
    assert up + down <= between.budget_pages + slack
    assert down <= between.low_pages + slack
    assert up <= max(between.free_pages, 0) + down + slack


@given(
    places=st.lists(PLACES, min_size=2, max_size=4),
    free=st.tuples(*[st.integers(-20, 200)] * 2),
    headroom=st.integers(0, 100),
    budget=st.integers(0, 1500),
    guaranteed=st.integers(0, 100),
    maximum=st.integers(100, 300),
)
def test_no_plan_of_tenants_on_three_tiers_exceeds_budget_or_room(
    places: list[list[tuple[int, float, int]]],
    free: tuple[int, int],
    headroom: int,
    budget: int,
    guaranteed: int,
    maximum: int,
) -> None:
    """When all are made: those of one piece and way are one, wherever they stand in the plan."""
    of = [tenant(str(index), guaranteed=guaranteed, maximum=maximum) for index in range(4)]
    targets = [
        Target(pid=Pid(index), pieces=on_three_tiers(each), ceiling=np.inf, tenant=index)
        for index, each in enumerate(places)
    ]
    room = rooms(free[0], free[1] + headroom, 2000)
    room[1] = replace(room[1], headroom_bytes=headroom * PAGE_BYTES)
    budget_bytes = budget * PAGE_BYTES
    moves = plan(
        targets, room, Policy(), now_s=0, budget_bytes=budget_bytes, tenants=of[: len(places)]
    ).moves
    slack = (len(moves) + 1) * PAGE_BYTES
    assert moves["bytes"].sum() <= budget_bytes + slack
    free_bytes = [tier.free_bytes for tier in room]
    least = [min(tier.free_bytes, tier.headroom_bytes / 2) for tier in room]
    for move in moves:
        free_bytes[move["source"]] += int(move["bytes"])
        free_bytes[move["destination"]] -= int(move["bytes"])
    assert np.greater_equal(free_bytes, np.subtract(least, slack)).all()


@given(between=drawn(ANY_CLASS))
def test_no_plan_lets_a_tenant_beyond_its_maximum(between: Drawn) -> None:
    made, had = between.plan(), between.pages(FAST)
    has = had + between.moved(made, 1, 0) - between.moved(made, 0, 1)
    maximum = [t.maximum_bytes.get(FAST, np.inf) / PAGE_BYTES for t in between.tenants]
    assert (has <= np.maximum(maximum, had) + len(made.moves)).all()


@given(between=drawn(ANY_CLASS))
def test_no_plan_takes_what_is_guaranteed_and_used(between: Drawn) -> None:
    """However hot, weighty or first in class the neighbours are."""
    made, had = between.plan(), between.pages(FAST)
    has = had + between.moved(made, 1, 0) - between.moved(made, 0, 1)
    used = between.pages(FAST, COLD_PER_PAGE_S / PAGE_BYTES)
    guaranteed = [t.guaranteed_bytes[FAST] / PAGE_BYTES for t in between.tenants]
    if np.sum(guaranteed) <= had.sum() + between.free_pages:
        assert (has >= np.minimum(guaranteed, used) - ROUNDING).all()


@given(between=drawn(ANY_CLASS), seed=st.integers(0, 99))
def test_no_plan_depends_on_the_order_of_tenants(between: Drawn, seed: int) -> None:
    """Where the slow tier has room for all that makes way."""
    between = replace(between, low_pages=10_000)
    order = np.random.default_rng(seed).permutation(len(between.tenants)).tolist()
    made, other = between.plan(), between.plan(order)
    for way in ((1, 0), (0, 1)):
        moved = between.moved(made, *way)
        assert moved == pytest.approx(between.moved(other, *way), abs=ROUNDING)
    assert made.shares[order] == pytest.approx(other.shares, rel=1e-6, abs=1.0)


@given(between=drawn(st.just(TenantClass.NORMAL)), class_=ANY_CLASS)
def test_one_class_alone_changes_no_plan(between: Drawn, class_: TenantClass) -> None:
    alike = replace(between, tenants=[replace(t, class_=class_) for t in between.tenants])
    assert alike.plan().moves.tobytes() == between.plan().moves.tobytes()


def test_of_the_budget_what_one_does_not_need_is_the_others() -> None:
    """Both have their shares; one's own hot pages displace its cold ones, the other rests."""
    hot = 100 / PAGE_BYTES
    busy = pieces((0, 500, 0.0, [1]), (500, 500, hot, [0, 1]))
    at_rest = pieces((0, 500, hot, [1]))
    targets = [
        Target(pid=Pid(1), pieces=busy, ceiling=np.inf, tenant=0),
        Target(pid=Pid(2), pieces=at_rest, ceiling=np.inf, tenant=1),
    ]
    between = Drawn(targets, [tenant("busy"), tenant("at rest")], 0, 1000, 200)
    made = between.plan()
    assert between.moved(made, 1, 0).tolist() == [100, 0]
    assert between.moved(made, 0, 1).tolist() == [100, 0]


def test_of_the_budget_each_has_a_part_by_weight() -> None:
    """Both would swap more than there is budget for; the hotter one is not before the other."""
    targets = [
        Target(
            pid=Pid(index + 1),
            pieces=pieces((0, 500, 0.0, [1]), (500, 500, hot / PAGE_BYTES, [0, 1])),
            ceiling=np.inf,
            tenant=index,
        )
        for index, hot in enumerate((50, 5000))
    ]
    of = [tenant("db", weight=300), tenant("batch", class_=TenantClass.LATENCY)]
    between = Drawn(targets, of, 0, 1000, 400)
    made = between.plan()
    assert between.moved(made, 1, 0).tolist() == [150, 50]
