# SPDX-License-Identifier: Apache-2.0
"""The policy as two schemes of DAMOS: the kernel then moves by itself what placement would move.

Follows Documentation/mm/damon/design.rst, "Operation Schemes". A scheme knows a region by the
samples of one aggregation and by how long they have been alike, so doubt is weighed over that time:
memory rises that is hot enough by two deviations. It sinks where it may make way for the least of
what rises, and has been so for as long as the short average looks back; the coldest first.

What rises has no such order: DAMON does not know what is up already, and the hottest would be tried
again and again before anything else.

The goals overlap. Promotion rests when half of the headroom is left, demotion when all of it is
free; in between both go on, so that hot memory takes the place of cold in a node that is full. Were
both the same free memory, the two would rest there, whatever is hot. Where nothing is cold or
nothing is hot, one of them has nothing to do and the other comes to rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierd.decide.steps import HEADROOM_LOW
from tierd.decide.worth import hot_from
from tierd.model import (
    PAGE_BYTES,
    Action,
    NodeId,
    NodeShare,
    Policy,
    Quota,
    QuotaGoal,
    Scheme,
    Tier,
)

WHOLE_BP = 10_000

COLD_TIMES = 2
"""Memory is cold for so many times short_s before it sinks: an exponential average weighs like a
plain one over that. Of longer times age tells nothing: it begins anew whenever memory that was
touched is not, or the reverse (mm/damon/core.c, damon_merge_regions_of)."""

NEVER_IN_DOUBT = 0.5
"""Share of the samples' ceiling from which memory is hot beyond doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the schemes are made of besides how a target is sampled.

    Args:
        policy: with the latency gap between the two nodes.
        fast: the node to promote to, of `fast_bytes`.
        slow: the node to demote to.
        headroom_bytes: what is to stay free of the fast node, above `withheld_bytes`.
        withheld_bytes: what the kernel keeps free of it.
        budget_bytes: what may be moved in `interval_s`, of all targets, both ways together.
    """

    policy: Policy
    fast: NodeId
    slow: NodeId
    fast_bytes: int
    headroom_bytes: int
    withheld_bytes: int
    budget_bytes: int
    interval_s: float


def unfit(tiers: Sequence[Tier]) -> str | None:
    """Returns why DAMOS cannot place memory between these tiers, None where it can."""
    if len(tiers) > 2:
        return f"there are {len(tiers)} tiers, and DAMOS places between two"
    for tier in tiers:
        if len(tier.nodes) > 1:
            nodes = ", ".join(map(str, tier.nodes))
            return f"tier {tier.name} has nodes {nodes}, and DAMOS moves to one"
    return None


def with_gap(policy: Policy, fast: Tier, slow: Tier) -> Policy:
    """Returns the policy with the tiers' latency gap, where both latencies are known."""
    if fast.latency_ns is None or slow.latency_ns is None or slow.latency_ns <= fast.latency_ns:
        return policy
    return replace(policy, latency_gap_ns=float(slow.latency_ns - fast.latency_ns))


def schemes(
    terms: Terms, *, sample_s: float, aggregation_s: float, targets: int
) -> tuple[Scheme, Scheme]:
    """Returns what promotes and what demotes, for the kdamond of one target.

    Args:
        terms: of all targets.
        sample_s: how often the target's regions are sampled.
        aggregation_s: how often their samples are counted.
        targets: how many there are, which share the budget.
    """
    hot, cold = _bounds(terms.policy, sample_s, max(1, round(aggregation_s / sample_s)))
    promote = Scheme(
        action=Action.PROMOTE,
        least_accesses=hot,
        destination=terms.fast,
        quota=_quota(terms, targets, aggregation_s, NodeShare.USED, _used_bp(terms)),
    )
    demote = Scheme(
        action=Action.DEMOTE,
        most_accesses=cold,
        least_age=math.ceil(COLD_TIMES * terms.policy.short_s / aggregation_s),
        destination=terms.slow,
        quota=_quota(terms, targets, aggregation_s, NodeShare.FREE, _free_bp(terms)),
    )
    return promote, demote


def _bounds(policy: Policy, sample_s: float, samples: int) -> tuple[int, int]:
    """Returns in how many of the samples hot memory is seen at least, and cold at most."""
    ceiling = math.log(2 * samples) / sample_s
    worth = hot_from(ceiling / PAGE_BYTES, policy) * PAGE_BYTES
    deviation = 2 / math.sqrt(samples * sample_s)
    beyond_doubt = ((deviation + math.sqrt(deviation**2 + 4 * worth)) / 2) ** 2
    rises = min(max(worth, beyond_doubt), NEVER_IN_DOUBT * ceiling)
    hot = min(samples, max(1, math.ceil(_seen(rises, sample_s, samples))))
    makes_way = max(0.0, min(rises / policy.hysteresis, rises - 2 * worth))
    cold = math.floor(_seen(makes_way, sample_s, samples))
    return hot, min(cold, hot - 1)


def _seen(per_page_s: float, sample_s: float, samples: int) -> float:
    """Returns in how many samples a page of that rate is found accessed; see heat.rates()."""
    return -samples * math.expm1(-per_page_s * sample_s)


def _used_bp(terms: Terms) -> int:
    """Returns the use of the fast node at which promotions rest."""
    return max(1, math.floor(WHOLE_BP * (1 - _least_free_bytes(terms) / terms.fast_bytes)))


def _free_bp(terms: Terms) -> int:
    """Returns the free share of the fast node at which demotions rest, beyond the other goal."""
    kept = terms.withheld_bytes + terms.headroom_bytes
    wanted = math.ceil(WHOLE_BP * kept / terms.fast_bytes)
    return min(WHOLE_BP, max(wanted, WHOLE_BP - _used_bp(terms) + 1))


def _least_free_bytes(terms: Terms) -> float:
    """Returns what promotions leave of the fast node."""
    return terms.withheld_bytes + HEADROOM_LOW * terms.headroom_bytes


def _quota(
    terms: Terms, targets: int, aggregation_s: float, what: NodeShare, least_bp: int
) -> Quota:
    """Divides the budget evenly: a target's schemes know nothing of what the others move.

    The goal is looked at when a quota begins, and schemes are applied once an aggregation, so that
    is how long a quota holds; and it is no more than half of what is to stay free, so that no
    promotion goes far beyond the goal.
    """
    budget = terms.budget_bytes * aggregation_s / terms.interval_s / 2
    most = min(budget, _least_free_bytes(terms) / 2) / max(1, targets)
    return Quota(
        bytes=max(PAGE_BYTES, int(most)),
        interval_ms=max(1, round(aggregation_s * 1000)),
        goal=QuotaGoal(what=what, node=terms.fast, least_bp=least_bp),
        by_accesses=what is NodeShare.FREE,
    )
