# SPDX-License-Identifier: Apache-2.0
"""A daemon whose moves DAMOS makes."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from tests.unit.machine import HOT, NODES, SPAN, FakeSampler, Machine, Memory, half_hot
from tests.unit.test_damon import SETUP
from tierd.config import Config, MigrateConfig
from tierd.daemon import Daemon
from tierd.errors import TierdError
from tierd.handover import UNRESPECTED, Handover
from tierd.kernel.damon import Applied
from tierd.kernel.free import FreeMemory
from tierd.migrate.schemes import KernelSchemes, Make, make_none
from tierd.model import PAGE_BYTES, Action, NodeId, Scheme, Topology

WITHHELD_BYTES = 1 << 20


class FakeKernel:
    """A fake that takes every scheme, and has moved what it is told to have."""

    def __init__(self) -> None:
        self.make: Make = make_none
        self.applied = dict.fromkeys((Action.PROMOTE, Action.DEMOTE), applied(0))

    def hand(self, make: Make) -> None:
        self.make = make

    def schemes(self) -> tuple[Scheme, ...]:
        return self.make(SETUP, 1)


class FakeFree:
    def __init__(self) -> None:
        self.closed: set[NodeId] = set()

    def withheld_bytes(self, node: NodeId) -> int:
        assert node == NODES[0]
        return WITHHELD_BYTES


def applied(pages: int) -> Applied:
    size = pages * PAGE_BYTES
    return Applied(tried_bytes=2 * size, bytes=size, regions=3, over_quota=1)


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def daemon(machine: Machine) -> Daemon:
    machine.start(HOT, Memory(SPAN))
    return machine.daemon(FakeSampler(half_hot(20), machine))


@pytest.fixture
def handover(daemon: Daemon, kernel: FakeKernel) -> Handover:
    handover = Handover(
        daemon=daemon,
        kernel=cast(KernelSchemes, kernel),
        free=cast(FreeMemory, FakeFree()),
    )
    handover.begin()
    return handover


def test_the_daemon_samples_and_leaves_moves_to_the_kernel(
    machine: Machine, daemon: Daemon, handover: Handover, kernel: FakeKernel
) -> None:
    machine.rounds(daemon, 8)

    (target,) = machine.told[-1]["targets"]
    assert target["hot"]["cxl"] > 0
    assert machine.mover.moved == []
    promote, demote = kernel.schemes()
    assert (promote.destination, demote.destination) == NODES


@pytest.mark.parametrize(
    "stop",
    [
        lambda daemon: setattr(daemon, "paused", True),
        lambda daemon: setattr(daemon, "yields", True),
        lambda daemon: setattr(daemon, "mover", None),
    ],
    ids=["paused", "a drain has work", "observes"],
)
def test_while_nothing_may_be_moved_the_kernel_has_no_schemes(
    daemon: Daemon, handover: Handover, kernel: FakeKernel, stop: Callable[[Daemon], None]
) -> None:
    assert kernel.schemes()

    stop(daemon)
    handover.go_on()

    assert kernel.schemes() == ()


def test_a_node_that_was_drained_is_not_filled_again(
    handover: Handover, kernel: FakeKernel
) -> None:
    handover.free.closed.add(NODES[1])
    handover.go_on()
    assert kernel.schemes() == ()

    handover.free.closed.clear()
    handover.go_on()
    assert kernel.schemes()


def test_another_configuration_is_handed_on(
    daemon: Daemon, handover: Handover, kernel: FakeKernel
) -> None:
    daemon.reconfigure(Config(migrate=MigrateConfig(budget_mbps=1.0)), daemon.mover)
    handover.go_on()

    promote, _ = kernel.schemes()
    assert promote.quota is not None
    assert promote.quota.bytes == int(0.4 * (1 << 20) / 2)  # of an aggregation, half of it up


def with_two_fast_nodes(topology: Topology) -> Topology:
    fast, slow = topology.tiers
    return replace(topology, tiers=(replace(fast, nodes=(*fast.nodes, NodeId(1))), slow))


def test_tiers_that_do_not_fit_any_more_are_left_and_told(
    daemon: Daemon,
    handover: Handover,
    kernel: FakeKernel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert handover.notes() == [UNRESPECTED]
    whole = daemon.topology

    daemon.retier(with_two_fast_nodes(whole), daemon.mover)
    with caplog.at_level(logging.WARNING, "tierd"):
        handover.go_on()
        handover.go_on()

    assert kernel.schemes() == ()
    assert "nodes 0, 1, and DAMOS moves to one" in handover.notes()[1]
    assert len(caplog.records) == 1

    daemon.retier(whole, daemon.mover)
    handover.go_on()

    assert kernel.schemes()
    assert handover.notes() == [UNRESPECTED]


def test_where_one_tier_is_left_nothing_is_handed(
    daemon: Daemon, handover: Handover, kernel: FakeKernel
) -> None:
    daemon.retier(replace(daemon.topology, tiers=daemon.topology.tiers[:1]), daemon.mover)
    handover.go_on()

    assert kernel.schemes() == ()


def test_tiers_that_do_not_fit_are_refused_at_first(daemon: Daemon, kernel: FakeKernel) -> None:
    daemon.retier(with_two_fast_nodes(daemon.topology), daemon.mover)
    handover = Handover(
        daemon=daemon, kernel=cast(KernelSchemes, kernel), free=cast(FreeMemory, FakeFree())
    )

    with pytest.raises(TierdError, match="moves to one") as caught:
        handover.begin()

    assert "move_pages" in str(caught.value.hint)


def test_what_the_kernel_has_moved_is_told(
    daemon: Daemon, handover: Handover, kernel: FakeKernel
) -> None:
    kernel.applied[Action.DEMOTE] = applied(7)

    lately = []
    for _ in range(2):
        handover.go_on()
        lately.append(daemon.moved_lately)
    assert lately == [True, False]

    assert daemon.schemes[1] == {
        "action": "migrate_cold",
        "pages": 7,
        "regions": 3,
        "tried_bytes": 14 * PAGE_BYTES,
        "over_quota": 1,
    }
