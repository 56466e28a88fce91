# SPDX-License-Identifier: Apache-2.0
"""Memory that comes and goes while tierd runs."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tierd.config import TierConfig
from tierd.discover.advice import lost_memory
from tierd.discover.topology import discover
from tierd.kernel import nodes
from tierd.model import Node, NodeId, Tier, Topology

LOOK_S = 5.0
"""The nodes' sizes are looked at so often where no events tell of changes."""


class Events(Protocol):
    """Tells whether something about memory may have changed (tierd.kernel.uevents)."""

    def read(self) -> bool: ...


class Hotplug:
    """Looks at the machine again when its memory may have changed.

    It does so the first time anyway, for what has changed before the events were listened to.

    Args:
        topology: as it was found last.
        declared: the tiers as the configuration has them.
        events: None where there are none; the nodes' sizes are then looked at now and then.
        root: where /sys and /proc are.
        clock_s: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        topology: Topology,
        declared: Sequence[TierConfig],
        events: Events | None,
        *,
        root: Path = Path("/"),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topology = topology
        self._declared, self._events, self._root, self._clock_s = declared, events, root, clock_s
        self._sizes: Mapping[NodeId, int] | None = None
        self._look_at_s = float("-inf")
        self._due = True
        self._kernel_tiers: dict[NodeId, int] = {}
        self._remember(topology)

    def poll(self) -> Topology | None:
        """Returns the topology if it is another than before; costs next to nothing if not.

        Nodes that the configuration names need not be there any more. After a change, or an error,
        the next call looks again: what is coming or going may not have come to its end.

        Raises:
            UnexpectedContent: the kernel tells something in a format that is new to tierd.
            OSError: something cannot be read.
        """
        changed, self._due = self._may_have_changed() or self._due, True
        found = self._look() if changed else self.topology
        self._due = found != self.topology
        if not self._due:
            return None
        self.topology = found
        self._remember(found)
        return found

    def _look(self) -> Topology:
        known = self._kernel_tiers
        return discover(self._declared, self._root, strict=False, kernel_tiers=known)

    def _remember(self, topology: Topology) -> None:
        """Keeps the kernel's tier of each node for good: it is the same when the node is back."""
        tiers = {node.id: node.kernel_tier for node in topology.nodes}
        self._kernel_tiers |= {id: tier for id, tier in tiers.items() if tier is not None}

    def _may_have_changed(self) -> bool:
        if self._events is not None:
            return self._events.read()
        now_s = self._clock_s()
        if now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + LOOK_S
        before, self._sizes = self._sizes, nodes.read_sizes(self._root)
        return self._sizes != before


def differences(before: Topology, after: Topology) -> Iterator[str]:
    """Yields a sentence for each device, node and tier that has come, gone or changed."""
    yield from _devices(before, after)
    told = set(lost_memory(before))
    yield from (line for line in lost_memory(after) if line not in told)
    yield from _nodes(before, after)
    yield from _tiers(before.tiers, after.tiers)


def _devices(before: Topology, after: Topology) -> Iterator[str]:
    yield from _names(
        "CXL device", (d.name for d in before.memdevs), (d.name for d in after.memdevs)
    )
    yield from _names(
        "CXL region", (r.name for r in before.regions), (r.name for r in after.regions)
    )
    yield from _names(
        "dax device", (d.name for d in before.dax_devices), (d.name for d in after.dax_devices)
    )
    drivers = {dax.name: dax.driver for dax in before.dax_devices}
    for dax in after.dax_devices:
        if drivers.get(dax.name, dax.driver) != dax.driver:
            yield f"dax device {dax.name} has {_driver(dax.driver)} now"


def _names(what: str, before: Iterable[str], after: Iterable[str]) -> Iterator[str]:
    old, new = list(before), list(after)
    yield from (f"{what} {name} has gone" for name in old if name not in new)
    yield from (f"{what} {name} has come" for name in new if name not in old)


def _driver(driver: str | None) -> str:
    return f"the driver {driver}" if driver else "no driver"


def _nodes(before: Topology, after: Topology) -> Iterator[str]:
    old, new = _with_memory(before.nodes), _with_memory(after.nodes)
    for id in sorted(old.keys() | new.keys()):
        was, now = old.get(id), new.get(id)
        if now is None and was is not None:
            had = f"{_mib(was.total_bytes)} ({was.backing})"
            yield f"node {id} has no memory any more, it had {had}"
        elif was is None and now is not None:
            yield f"node {id} has memory now, {_mib(now.total_bytes)} ({now.backing})"
        elif was is not None and now is not None and was.total_bytes != now.total_bytes:
            yield f"node {id} has {_mib(now.total_bytes)} now, it had {_mib(was.total_bytes)}"


def _with_memory(nodes: Iterable[Node]) -> Mapping[NodeId, Node]:
    return {node.id: node for node in nodes if node.total_bytes}


def _mib(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB"


def _tiers(before: Sequence[Tier], after: Sequence[Tier]) -> Iterator[str]:
    old, new = ({tier.name: (tier.rank, tier.nodes) for tier in tiers} for tiers in (before, after))
    yield from (f"tier {name} has gone" for name in old if name not in new)
    for tier in after:
        if old.get(tier.name) != (tier.rank, tier.nodes):
            yield describe(tier)
    if len(before) >= 2 > len(after):
        yield "there are no two tiers any more: nothing is moved until there are"
    elif len(after) >= 2 > len(before):
        yield f"there are {len(after)} tiers now: placing goes on"


def describe(tier: Tier) -> str:
    """Returns what the log says of a tier, such as "tier 1: cxl, nodes 1, 2"."""
    return f"tier {tier.rank}: {tier.name}, nodes {', '.join(map(str, tier.nodes))}"
