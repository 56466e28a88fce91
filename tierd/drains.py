# SPDX-License-Identifier: Apache-2.0
"""The nodes that an operator has emptied, and kept empty until they are used again."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Report
from tierd.daemon import Daemon
from tierd.decide.evacuate import hottest_first
from tierd.errors import NotFound, TierdError
from tierd.kernel import nodes, process
from tierd.kernel.free import FreeMemory
from tierd.migrate.drain import Drain, apart, find_mapped
from tierd.migrate.mover import Mover
from tierd.model import PAGE_BYTES, NodeId, Pid, Rank, Topology
from tierd.observe.events import event
from tierd.observe.flows import OTHERS

log = logging.getLogger("tierd")

FindOn = Callable[[NodeId, Pid, int], tuple[NDArray[np.void], int | None]]


@dataclass(slots=True, kw_only=True)
class Drains:
    """The work on all of them, between the daemon's rounds.

    Args:
        daemon: places nothing while a drain has work; what drains move is among its flows.
        free: keeps the nodes closed for moves of others.
        make_mover: makes what moves pages between the tiers of a topology.
        find_on: lists what of a process a drain of a node is to look at, as Drain's find_in.
        is_bad: tells whether some of a node's memory must not be moved, and find_on leaves it out.
    """

    daemon: Daemon
    free: FreeMemory
    make_mover: Callable[[Topology], Mover]
    find_on: FindOn = lambda node, pid, cursor: find_mapped(pid, cursor)
    is_bad: Callable[[NodeId], bool] = lambda node: False
    going: dict[NodeId, Drain] = field(default_factory=dict)

    def begin(self, node: NodeId) -> Mapping[str, Any]:
        """Has a node emptied, or tells how far that is.

        Raises:
            NotFound: it is in no tier.
            TierdError: what it holds may not move, or has nowhere to go.
        """
        if node not in self.going:
            self._require_drainable(node)
            self.going[node] = self._make(node)
            self.free.closed.add(node)
            log.info("node %d is being drained", node, extra=event("drain", node=node))
        return _account(self.going[node])

    def fence(self, node: NodeId) -> None:
        """Has a failing node emptied, as far as the others have room, and nothing placed there."""
        if node not in self.going:
            self.going[node] = self._make(node)
            self.free.closed.add(node)

    def end(self, node: NodeId) -> Mapping[str, Any]:
        """Has a node used again.

        Raises:
            NotFound: it is not being drained.
        """
        if node not in self.going:
            raise NotFound(f"node {node} is not being drained")
        self.free.closed.discard(node)
        ended = self.going.pop(node)
        log.info("node %d is used again", node, extra=event("drain.end", node=node))
        return _account(ended)

    def go_on(self) -> None:
        """Goes on within a round's budget; placing rests meanwhile."""
        daemon = self.daemon
        waiting = [drain for drain in self.going.values() if not drain.is_done]
        daemon.yields = bool(waiting)
        if not waiting or daemon.paused or daemon.mover is None:
            return
        share_s = daemon.config.daemon.interval_s * daemon.config.migrate.round_percent / 100
        budget_s = daemon.budget_bytes / PAGE_BYTES * daemon.cost.page_ns / 1e9
        for drain in waiting:
            drain.run(time.monotonic() + min(share_s, budget_s) / len(waiting))
            if drain.is_done:
                left = sum(drain.left.values())
                told = f"; {left} pages could not be moved" if left else ""
                log.info("node %d is drained%s", drain.node, told, extra=event("drain.done"))

    def follow(self) -> None:
        """Begins anew on other tiers; where a node has gone its drain is over.

        So it is where no node is left that could take anything.
        """
        there = {node for tier in self.daemon.topology.tiers for node in tier.nodes}
        going_on = self.going.keys() & there if there - self.going.keys() else set()
        self.free.closed = {*going_on}
        self.going = {node: self._make(node) for node in going_on}

    def accounts(self) -> list[dict[str, Any]]:
        return [_account(drain) for drain in self.going.values()]

    def _require_drainable(self, node: NodeId) -> None:
        tiers = self.daemon.topology.tiers
        known = [other for tier in tiers for other in tier.nodes]
        if node not in known:
            told = ", ".join(map(str, sorted(known)))
            raise NotFound(f"node {node} is in no tier", hint=f"these are: {told}")
        if self.daemon.mover is None:
            raise TierdError(
                "tierd only observes: it moves nothing",
                hint='set mode = "place" in [policy], or: tierctl set policy.mode=place; '
                "tierctl status notes what else is in the way",
            )
        others = [other for other in known if other != node and other not in self.free.closed]
        if not others:
            raise TierdError(f"there is no node that could take what node {node} has")
        room = sum(self.free.room_bytes(other) for other in others)
        needed = nodes.read_in_use(node)
        if needed > room:
            raise TierdError(
                f"node {node} holds {needed >> 20} MiB of programs' memory, and the other nodes "
                f"have room for {room >> 20} MiB",
                hint="end programs, or bring more memory online, and try again",
            )

    def _make(self, node: NodeId) -> Drain:
        whole = self.daemon.topology
        topology = apart(whole, node)
        tier_of = {node: tier for tier in whole.tiers for node in tier.nodes}
        tiers = [tier_of[tier.nodes[0]] for tier in topology.tiers]

        def learn(report: Report) -> None:
            self.daemon.cost.add(report)
            tenants = [process.read_cgroup(pid) or OTHERS for pid in report.plan.pids]
            self.daemon.flows.add(report, tiers, tenants)

        return Drain(
            node=node,
            mover=self.make_mover(topology),
            room=self.free.room_bytes,
            find=process.read_pids,
            find_in=partial(self.find_on, node),
            learn=learn,
            hottest=lambda: self._hottest(node),
        )

    def _hottest(self, node: NodeId) -> list[tuple[Pid, NDArray[np.void]]]:
        """Returns what of a node is known to be hot; nothing where single pages must stay."""
        if self.is_bad(node):
            return []
        daemon = self.daemon
        pieces = {pid: watched.pieces for pid, watched in daemon.watched.items()}
        return hottest_first(pieces, Rank(int(daemon.rank_of_node[node])))


def _account(drain: Drain) -> dict[str, Any]:
    return {
        "node": drain.node,
        "done": drain.is_done,
        "moved_pages": drain.moved_pages,
        "in_use": nodes.read_in_use(drain.node),
        "left": {outcome.label: count for outcome, count in drain.left.items()},
        "passes": drain.passes,
        "processes": drain.processes,
        "processes_left": drain.processes_left,
    }
