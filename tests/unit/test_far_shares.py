# SPDX-License-Identifier: Apache-2.0
"""Shares of bandwidth: how it is divided, and what arenas come to that are limited by it."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierd.decide.bandwidth import IDLE, LEAST_MBPS, SPARE, by_tenant, divide, wanted

Floats = np.typing.NDArray[np.float64]
Drawn = dict[str, Floats]

NEAR = 1 + 1e-9
totals = st.floats(1, 1e6)
amounts = st.floats(0, 1e6)


@st.composite
def several(draw: st.DrawFn, most: int = 6) -> Drawn:
    count = draw(st.integers(1, most))

    def each(of: st.SearchStrategy[float]) -> Floats:
        return np.array(draw(st.lists(of, min_size=count, max_size=count)))

    return {
        "wanted": each(amounts),
        "maximum": each(st.floats(1, 1e6) | st.just(np.inf)),
        "weight": each(st.floats(1, 10_000)),
    }


@given(of=several(), total=totals)
def test_all_of_it_is_given_and_no_more(of: Drawn, total: float) -> None:
    given = divide(total, **of)
    assert (given >= 0).all()
    assert given.sum() <= total * NEAR
    assert (given <= of["maximum"] * NEAR).all()
    assert given.sum() == pytest.approx(min(total, of["maximum"].sum()))


@given(of=several(), total=totals)
def test_what_is_wanted_comes_first_and_by_weight(of: Drawn, total: float) -> None:
    """Who lacks something has for its weight no less than anybody else."""
    given = divide(total, **of)
    lacks = given < np.minimum(of["wanted"], of["maximum"]) * (1 - 1e-9)
    for ratio in (given / of["weight"])[lacks]:
        assert (given / of["weight"] <= ratio * (1 + 1e-6)).all()


@given(of=several(), total=totals, seed=st.integers(0, 99))
def test_the_order_does_not_matter(of: Drawn, total: float, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(of["weight"]))
    moved = {name: values[order] for name, values in of.items()}
    assert divide(total, **moved) == pytest.approx(divide(total, **of)[order], abs=1e-3)


@given(of=several())
def test_without_a_total_each_has_its_maximum(of: Drawn) -> None:
    assert divide(np.inf, **of).tolist() == of["maximum"].tolist()


@given(of=several(4), total=totals, data=st.data())
def test_a_tenant_has_no_more_for_having_more_arenas(
    of: Drawn, total: float, data: st.DataObject
) -> None:
    tenants = len(of["weight"])
    count = data.draw(st.integers(tenants, 9))
    more = data.draw(st.lists(st.integers(0, tenants - 1), min_size=count, max_size=count))
    tenant = np.array([*range(tenants), *more[tenants:]])
    wants = np.array(data.draw(st.lists(amounts, min_size=count, max_size=count)))
    parts = by_tenant(
        total, tenant=tenant, wanted=wants, maximum=of["maximum"], weight=of["weight"]
    )
    of["wanted"] = np.bincount(tenant, wants).astype(np.float64)
    assert np.bincount(tenant, parts) == pytest.approx(divide(total, **of))
    assert (parts >= 0).all()
    order = data.draw(st.permutations(range(count)))
    again = by_tenant(
        total,
        tenant=tenant[order],
        wanted=wants[order],
        maximum=of["maximum"],
        weight=of["weight"],
    )
    assert again == pytest.approx(parts[order], abs=1e-3)


def test_tenants_without_arenas_have_no_part() -> None:
    parts = by_tenant(
        100.0,
        tenant=np.array([2, 2, 0]),
        wanted=np.array([60.0, 10.0, 90.0]),
        maximum=np.full(3, np.inf),
        weight=np.array([1.0, 50.0, 1.0]),
    )
    assert parts.tolist() == [40.0, 10.0, 50.0]


def test_without_a_total_arenas_of_a_tenant_with_a_maximum_divide_that() -> None:
    parts = by_tenant(
        np.inf,
        tenant=np.array([0, 0, 1]),
        wanted=np.array([1.0, 9.0, np.inf]),
        maximum=np.array([10.0, np.inf]),
        weight=np.ones(2),
    )
    assert parts.tolist() == [1.0, 9.0, np.inf]


def once(used: float, limit: float, before: float = 0, *, is_more: bool = False) -> float:
    """What one of ten wants of 1000."""
    used_, limit_, before_, most = (np.full(10, rate) for rate in (used, limit, before, 1000.0))
    return float(wanted(used_, limit_, before_, most, np.full(10, is_more))[0])


def test_what_is_wanted() -> None:
    assert once(0, 100) == 5, "a little, to begin with"
    assert once(50, 100) == 50 * SPARE
    assert once(50 * SPARE / SPARE, 50 * SPARE) == 50 * SPARE, "it stays there"
    assert once(91, 100) == 1000, "it was held back"
    assert once(10, 100, is_more=True) == 1000
    assert once(10, np.inf) == 10 * SPARE
    assert once(0, 100, before=1000) == 500, "it fades"
    assert once(5000, np.inf) == 1000


@given(count=st.integers(1, 50), most=totals)
def test_those_that_want_nothing_keep_little(count: int, most: float) -> None:
    idle = np.zeros(count)
    kept = wanted(idle, np.full(count, np.inf), idle, np.full(count, most), idle > 0)
    assert (kept > 0).all()
    assert kept.sum() <= max(most * IDLE, min(LEAST_MBPS * count, most)) * NEAR


@given(
    demands=st.lists(st.floats(0, 2000), min_size=2, max_size=6),
    weights=st.lists(st.sampled_from([50.0, 100.0, 200.0]), min_size=6, max_size=6),
)
@example(demands=[2000.0, 0.0], weights=[100.0] * 6)
@example(demands=[2000.0, 700.0], weights=[100.0] * 6)
@example(demands=[2000.0, 100.0, 2000.0], weights=[100.0] * 6)
def test_arenas_come_to_their_parts(demands: list[float], weights: list[float]) -> None:
    """Each copies what it needs as far as its limit lets it; then one of them stops."""
    total, count = 1000.0, len(demands)
    needs, weight = np.array(demands), np.array(weights[:count])
    limit, wants, none = np.full(count, np.inf), np.zeros(count), np.full(count, np.inf)
    for stops in range(2):
        for _ in range(12):
            used = np.minimum(needs, limit)
            wants = wanted(used, limit, wants, np.full(count, total), np.zeros(count, np.bool_))
            limit = by_tenant(
                total, tenant=np.arange(count), wanted=wants, maximum=none, weight=weight
            )
            assert limit.sum() <= total * NEAR
        used = np.minimum(needs, limit)
        assert (used >= np.minimum(needs, total * weight / weight.sum()) * (1 - 1e-9)).all()
        assert used.sum() >= min(total, needs.sum()) * (1 - IDLE) / SPARE
        needs[stops] = 0
