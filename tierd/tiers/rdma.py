# SPDX-License-Identifier: Apache-2.0
"""A tier of other hosts' memory: each block on several, so that one may die (docs/remote.md)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Protocol

from tierd.errors import NoRoom, TierdError, TierFailed
from tierd.model import TierKind
from tierd.remote.link import Link
from tierd.remote.places import MOST_DONORS, Donor
from tierd.remote.space import RemoteSpace
from tierd.remote.wire import Keys
from tierd.tiers.plugin import Facts, Health

log = logging.getLogger("tierd")

MOST_REPLICAS = 4


class Listed(Protocol):
    """Donors that come and go: remote.registry.Directory, or what plays one."""

    def roomiest(self) -> Sequence[str]:
        """Tells their addresses, those first that have most to lend."""
        ...


class RemoteTier:
    """Memory of donors, as one tier.

    Args:
        facts: of it; the capacity is what blocks can have, however many replicas.
        donors: tells their addresses, those first that have most to lend.
        replicas: of each block.
        keys: as of a link.
        deadline_s: likewise.
        heal_mbps: as of a space.
    """

    def __init__(
        self,
        facts: Facts,
        donors: Callable[[], Sequence[str]],
        replicas: int,
        keys: Keys,
        deadline_s: float,
        heal_mbps: float,
    ) -> None:
        self.facts = facts
        self._donors, self._replicas, self._keys = donors, replicas, keys
        self._deadline_s, self._heal_mbps = deadline_s, heal_mbps
        self._spaces: list[RemoteSpace] = []

    @property
    def spaces(self) -> tuple[RemoteSpace, ...]:
        """Those that were reserved and not freed yet."""
        self._spaces = [space for space in self._spaces if not space.is_over]
        return tuple(self._spaces)

    def health(self) -> Health:
        """Is always good: a space without donors says so itself, as they may come back."""
        return Health.GOOD

    def reserve(self, block_bytes: int, slots: int) -> RemoteSpace:
        """Leases memory of donors: enough for all to find room again when one is lost.

        Raises:
            NoRoom: fewer donors than replicas lend anything.
            TierdError: a key or an address is wrong, two addresses are of one donor, or there is no
                NIXL.
        """
        donors = self._donors()[:MOST_DONORS]
        sharing = max(1, len(donors) - (len(donors) > self._replicas))
        each = min(slots, -(-slots * self._replicas // sharing))

        def connect(address: str) -> Donor:
            return Link(address, self._keys, block_bytes, each, self._deadline_s)

        links, failures = _leases(donors, connect)
        if len(links) < self._replicas:
            for link in links:
                link.end()
            raise NoRoom(
                f"{self._replicas} replicas need as many donors, and {len(links)} lend: "
                + ("; ".join(failures) or "no others are known"),
                hint="tierctl donor status on their hosts tells what they lend, and to whom",
            )
        room = usable([link.slots for link in links], self._replicas)
        space = RemoteSpace(
            block_bytes,
            min(slots, room),
            self._replicas,
            links,
            connect,
            self._heal_mbps,
            self._donors,
        )
        self._spaces.append(space)
        speeds = [link.speed for link in links]
        self.facts = replace(
            self.facts,
            latency_ns=int(median(speed.latency_ns for speed in speeds)),
            bandwidth_mbps=int(median(speed.bandwidth_mbps for speed in speeds)),
        )
        return space


def _leases(
    donors: Sequence[str], connect: Callable[[str], Donor]
) -> tuple[list[Donor], list[str]]:
    """Returns the donors that lend, and why others do not."""
    links: list[Donor] = []
    failures = []
    try:
        for address in donors:
            try:
                link = connect(address)
            except (TierFailed, NoRoom) as error:
                failures.append(str(error))
                continue
            twins = [other.address for other in links if other.donor == link.donor]
            links.append(link)
            if twins:
                links.pop().end()
                failures.append(f"donors {twins[0]} and {address} are the same one")
    except BaseException:
        for link in links:
            link.end()
        raise
    for failure in failures:
        log.warning("%s", failure)
    return links, failures


def usable(rooms: Sequence[int], replicas: int) -> int:
    """Returns how many blocks find room on so many different donors each."""
    blocks = sum(rooms) // replicas
    while (fit := sum(min(room, blocks) for room in rooms) // replicas) < blocks:
        blocks = fit
    return blocks


def rdma(
    donors: Sequence[str] | Listed,
    capacity_bytes: int,
    *,
    ca: str | Path,
    cert: str | Path,
    key: str | Path,
    replicas: int = 2,
    deadline_s: float = 2.0,
    heal_mbps: float = 64.0,
    name: str = "rdma",
) -> RemoteTier:
    """Returns a tier of other hosts' memory.

    Args:
        donors: host:port of each, of different hosts; or a Directory of them, which stays open for
            as long as the tier is used: who comes is borrowed from, who has gone is forgotten.
        capacity_bytes: of all replicas of a block that of one counts.
        ca: whose donors are believed; a PEM file, as the next two.
        cert: one's own certificate.
        key: of it.
        replicas: 1 to MOST_REPLICAS; with 1, who dies takes its blocks along.
        deadline_s: a donor that takes longer for a batch is away.
        heal_mbps: MiB a second that are copied again when one is away or lost.
        name: of the tier.

    Raises:
        TierdError: this cannot be.
    """
    if not 1 <= replicas <= MOST_REPLICAS:
        raise TierdError(f"{replicas} replicas: from 1 to {MOST_REPLICAS}")
    known = donors.roomiest if not isinstance(donors, Sequence) else _named(donors, replicas)
    if heal_mbps <= 0 or deadline_s <= 0:
        raise TierdError("heal_mbps and deadline_s have to be more than 0")
    facts = Facts(name=name, kind=TierKind.RDMA, capacity_bytes=capacity_bytes)
    keys = Keys(ca=Path(ca), cert=Path(cert), key=Path(key))
    return RemoteTier(facts, known, replicas, keys, deadline_s, heal_mbps)


def _named(donors: Sequence[str], replicas: int) -> Callable[[], Sequence[str]]:
    """Returns what tells of donors that stay the same."""
    names = tuple(donors)
    if len(set(names)) != len(names) or not replicas <= len(names) <= MOST_DONORS:
        raise TierdError(
            f"{len(set(names))} donors for {replicas} replicas of each block",
            hint=f"from {replicas} to {MOST_DONORS}, of different hosts",
        )
    return lambda: names
