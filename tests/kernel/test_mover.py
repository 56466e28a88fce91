# SPDX-License-Identifier: Apache-2.0
"""The mover towards a node that has gone since the plan was made."""

import time

import numpy as np
import pytest

from tests.kernel.holder import Kind, holding
from tierd.bulk import MOVE, PIECE, Plan
from tierd.decide.settle import settle
from tierd.kernel.process import RANGE
from tierd.migrate.limits import Limits
from tierd.migrate.mover import Mover
from tierd.model import NodeId, Outcome, Policy, Rank, Tier, TierKind, Topology

HERE, GONE = NodeId(0), NodeId(900)  # an id below MAX_NUMNODES that no test machine has
PAGES_PRESENT = 1024


def tier(rank: int, kind: TierKind, node: NodeId) -> Tier:
    return Tier(rank=Rank(rank), name=kind, kind=kind, nodes=(node,), capacity_bytes=1 << 30)


@pytest.fixture
def mover() -> Mover:
    tiers = (tier(0, TierKind.DRAM, HERE), tier(1, TierKind.CXL, GONE))
    return Mover(
        topology=Topology(nodes=(), tiers=tiers),
        room=lambda node: 1 << 40,
        limits=lambda pid: Limits(nodes=None, locked=np.empty(0, RANGE), bound=()),
        batch_pages=256,
    )


def test_pages_stay_and_are_told_as_refused_by_an_offline_node(mover: Mover) -> None:
    with holding(Kind.PLAIN) as held:
        moves = np.zeros(1, MOVE)
        moves["source"], moves["destination"] = 0, 1
        moves["start"], moves["end"] = held.start, held.end
        moves["bytes"] = held.end - held.start
        plan = Plan(pids=(held.pid,), moves=moves)
        report = mover.run(plan, deadline_s=time.monotonic() + 60)
    told = {outcome: int(n) for outcome, n in zip(Outcome, report.pages[0], strict=True) if n}
    assert Outcome.MOVED not in told
    assert told[Outcome.OFFLINE] >= PAGES_PRESENT
    assert told.keys() <= {Outcome.OFFLINE, Outcome.ABSENT}
    assert report.reached[0] == held.start, "nothing was walked"

    pieces = np.zeros(1, PIECE)
    pieces["start"], pieces["end"], pieces["resident"][:, 0] = held.start, held.end, 1
    after = settle(pieces, report, 0, Policy(), now_s=0.0)
    assert (after == pieces).all(), "what is known of the pieces holds still"
