# SPDX-License-Identifier: Apache-2.0
"""The policy as schemes of DAMOS."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.machine import CXL, DRAM, topology
from tierd.bulk import REGION, Accesses
from tierd.decide.heat import ceiling, rate_of
from tierd.decide.schemes import WHOLE_BP, Terms, schemes, unfit, with_gap
from tierd.decide.worth import hot_from
from tierd.model import (
    PAGE_BYTES,
    Action,
    NodeId,
    NodeShare,
    Pid,
    Policy,
    Quota,
    Rank,
    Scheme,
    Tier,
)

FAST, SLOW = NodeId(0), NodeId(2)
TERMS = Terms(
    policy=Policy(),
    fast=FAST,
    slow=SLOW,
    fast_bytes=100 << 30,
    headroom_bytes=2 << 30,
    withheld_bytes=1 << 30,
    budget_bytes=256 << 20,
    interval_s=1.0,
)


def made(terms: Terms = TERMS, *, targets: int = 1) -> tuple[Scheme, Scheme]:
    return schemes(terms, sample_s=0.02, aggregation_s=0.4, targets=targets)


def quotas(terms: Terms, targets: int = 1) -> tuple[Quota, Quota]:
    promote, demote = (scheme.quota for scheme in made(terms, targets=targets))
    assert promote is not None
    assert demote is not None
    return promote, demote


def test_the_policy_as_shipped() -> None:
    promote, demote = made()
    assert (promote.action, promote.destination) == (Action.PROMOTE, FAST)
    assert (demote.action, demote.destination) == (Action.DEMOTE, SLOW)
    # 2.7 accesses a page and second are worth a move; of 20 samples, 6 are that beyond doubt, and
    # for those 14.8 a second memory of up to 9.5 makes way: 3 of 20.
    assert (promote.least_accesses, promote.most_accesses) == (6, None)
    assert (demote.least_accesses, demote.most_accesses) == (0, 3)
    assert (promote.least_age, demote.least_age) == (0, 5)  # twice short_s
    up, down = quotas(TERMS)
    assert (up.bytes, up.interval_ms) == (down.bytes, down.interval_ms)
    assert (up.bytes, up.interval_ms) == (int(0.2 * (256 << 20)), 400)
    assert (up.by_accesses, down.by_accesses) == (False, True)
    assert (up.goal.what, up.goal.node, up.goal.least_bp) == (NodeShare.USED, FAST, 9800)
    assert (down.goal.what, down.goal.node, down.goal.least_bp) == (NodeShare.FREE, FAST, 300)


POLICIES = st.builds(
    Policy,
    payback=st.floats(0, 1000),
    move_cost_ns=st.floats(0, 1_000_000),
    latency_gap_ns=st.floats(1, 100_000),
    horizon_s=st.floats(1, 3600),
    hysteresis=st.floats(1, 100),
)


@given(policy=POLICIES, sample_us=st.integers(1000, 1_000_000), samples=st.integers(5, 1000))
def test_what_rises_is_worth_it_and_nothing_rises_and_sinks(
    policy: Policy, sample_us: int, samples: int
) -> None:
    sample_s = sample_us / 1e6
    promote, demote = schemes(
        replace(TERMS, policy=policy),
        sample_s=sample_s,
        aggregation_s=samples * sample_s,
        targets=1,
    )
    assert 1 <= promote.least_accesses <= samples
    assert demote.most_accesses is not None
    assert 0 <= demote.most_accesses < promote.least_accesses
    seen = Accesses(
        pid=Pid(1),
        at_s=0.0,
        sample_s=sample_s,
        aggregation_s=samples * sample_s,
        regions=np.zeros(0, REGION),
    )
    worth = hot_from(ceiling(seen), policy)
    assert rate_of(promote.least_accesses, seen) >= worth * (1 - 1e-5)
    if demote.most_accesses:
        rises, sinks = (
            rate_of(count, seen) for count in (promote.least_accesses, demote.most_accesses)
        )
        assert sinks <= min(rises / policy.hysteresis, rises - 2 * worth) * (1 + 1e-4)


@given(
    fast_mib=st.integers(64, 10_000_000),
    headroom=st.floats(0, 0.5),
    withheld=st.floats(0, 1),
)
def test_the_goals_are_never_both_met(fast_mib: int, headroom: float, withheld: float) -> None:
    fast_bytes = fast_mib << 20
    terms = replace(
        TERMS,
        fast_bytes=fast_bytes,
        headroom_bytes=int(headroom * fast_bytes),
        withheld_bytes=int(withheld * fast_bytes),
    )
    up, down = (quota.goal.least_bp for quota in quotas(terms))
    assert 1 <= up <= WHOLE_BP
    assert 1 <= down <= WHOLE_BP
    assert (WHOLE_BP - up) < down or down == WHOLE_BP


@given(budget_bytes=st.integers(1, 1 << 40), targets=st.integers(1, 32))
def test_all_targets_together_keep_to_the_budget(budget_bytes: int, targets: int) -> None:
    terms = replace(TERMS, budget_bytes=budget_bytes)
    up, down = quotas(terms, targets)
    assert up.interval_ms == down.interval_ms
    budget = max(
        budget_bytes * up.interval_ms / 1000, 2 * targets * PAGE_BYTES
    )  # 0 would be no quota
    assert 0 < targets * (up.bytes + down.bytes) <= budget


@given(withheld_bytes=st.integers(1 << 20, 1 << 30), targets=st.integers(1, 32))
def test_no_promotion_goes_far_beyond_the_goal(withheld_bytes: int, targets: int) -> None:
    terms = replace(TERMS, headroom_bytes=0, withheld_bytes=withheld_bytes, budget_bytes=1 << 40)
    up, _ = quotas(terms, targets)
    assert targets * up.bytes <= withheld_bytes / 2


def tier(rank: int, *nodes: int, latency_ns: int | None = None) -> Tier:
    shape = topology(1 << 30).tiers[0]
    ids = tuple(map(NodeId, nodes))
    return replace(shape, rank=Rank(rank), name=f"t{rank}", nodes=ids, latency_ns=latency_ns)


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        ([tier(0, 0), tier(1, 1)], None),
        ([tier(0, 0)], None),
        ([tier(0, 0), tier(1, 1), tier(2, 2)], "there are 3 tiers, and DAMOS places between two"),
        ([tier(0, 0, 1), tier(1, 2)], "tier t0 has nodes 0, 1, and DAMOS moves to one"),
    ],
)
def test_tiers_that_damos_cannot_place_between(tiers: list[Tier], why: str | None) -> None:
    assert unfit(tiers) == why


@pytest.mark.parametrize(
    ("fast_ns", "slow_ns", "gap_ns"), [(90, 250, 160.0), (None, 250, 100.0), (250, 90, 100.0)]
)
def test_the_gap_is_the_tiers_where_it_is_known(
    fast_ns: int | None, slow_ns: int, gap_ns: float
) -> None:
    fast, slow = tier(DRAM, 0, latency_ns=fast_ns), tier(CXL, 1, latency_ns=slow_ns)
    assert with_gap(Policy(), fast, slow).latency_gap_ns == gap_ns
