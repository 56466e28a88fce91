# SPDX-License-Identifier: Apache-2.0
"""The arenas that are connected, from round to round: how hot their blocks are, and what is asked.

Each is placed by itself, over its own slots: no process's page and no other arena can have these.
What all have in common are the round's budget and the tenants' shares; docs/arena.md.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.arena.shared import Copies, accesses
from tierd.arena.wire import COMMAND
from tierd.decide.blocks import NOWHERE, Groups, commands, groups, retry_s, take_in
from tierd.decide.placement import plan
from tierd.errors import Damaged
from tierd.model import MAX_TIERS, Pid, Policy, Rank, Target, Tier, TierKind, TierRoom

SPARE_SLOTS = 2
"""Of each tier but the fastest, an arena's movers keep so many."""

MOST_TRIES = 15

OUTCOMES = ("asked", "moved", "unmoved", "dropped")
"""Of blocks: told to go to another tier; come there; not come there in time; and not told to, since
the program does not read what it is told."""

FAR_NS: Mapping[TierKind, int] = {TierKind.RDMA: 3_000, TierKind.SWAP: 100_000}
NEAR_NS: Mapping[TierKind, int] = {TierKind.HBM: 50, TierKind.DRAM: 100, TierKind.CXL: 300}
"""What an access takes where nobody has measured it. Of near tiers it is taken beside far ones."""


class Lease(Protocol):
    """A connected arena: leases.Lease, or what plays one."""

    name: str
    pid: Pid
    user_id: int
    command: str
    copies: Copies

    def cgroup(self) -> str | None: ...
    def copy(self, counts: NDArray[np.uint32], places: NDArray[np.uint8]) -> bool: ...
    def is_behind(self) -> bool: ...
    def send(self, commands: NDArray[np.void]) -> int: ...
    def end(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Steered:
    """An arena and what is known of it. Arrays have a row for each block."""

    lease: Lease
    cgroup: str | None
    ranks: tuple[Rank | None, ...]
    """The machine's tier that each of its own is of; None where that has none such."""
    counts: NDArray[np.uint32]
    places: NDArray[np.uint8]
    short: NDArray[np.float32]
    long: NDArray[np.float32]
    sent_to: NDArray[np.uint8]
    """The tier that a block is to go to; NOWHERE for none."""
    tries: NDArray[np.uint8]
    held_until_s: NDArray[np.float64]
    at_s: float
    used: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Blocks on each of its tiers."""
    due: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """The same once all have come to where they were sent."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How many blocks came to each of OUTCOMES."""
    is_active: bool = False

    @property
    def block_bytes(self) -> int:
        return self.lease.copies.block_bytes

    def look(self, now_s: float, policy: Policy) -> bool:
        """Takes in what was accessed, and where blocks are; returns False when it is over.

        Raises:
            Damaged: its memory cannot be read.
        """
        counts, places = np.empty_like(self.counts), np.empty_like(self.places)
        if not self.lease.copy(counts, places):
            return False
        counted = accesses(self.counts, counts)
        seconds = max(now_s - self.at_s, 1e-3)
        for average, constant_s in ((self.short, policy.short_s), (self.long, policy.long_s)):
            take_in(average, counted, seconds, constant_s, self.block_bytes)
        self._settle(places, now_s, policy)
        self.counts, self.places, self.at_s = counts, places, now_s
        after = np.where(self.sent_to == NOWHERE, places, self.sent_to)
        self.used, self.due = (
            np.bincount(where, minlength=NOWHERE + 1)[: len(self.ranks)]
            for where in (places, after)
        )
        return True

    def _settle(self, places: NDArray[np.uint8], now_s: float, policy: Policy) -> None:
        """Sees what became of the commands, and leaves what the program has moved for a while."""
        changed = places != self.places
        arrived = changed & (places == self.sent_to)
        late = (self.sent_to != NOWHERE) & ~arrived & (self.held_until_s <= now_s)
        self.outcomes["moved"] += int(np.count_nonzero(arrived))
        self.outcomes["unmoved"] += int(np.count_nonzero(late))
        self.tries[changed] = 0
        self.tries[late] = np.minimum(self.tries[late] + 1, MOST_TRIES)
        self.sent_to[changed | late] = NOWHERE
        self.held_until_s[changed & (self.places != NOWHERE)] = now_s + policy.dwell_s
        self.held_until_s[late] = now_s + retry_s(self.tries[late], policy)

    def free_slots(self) -> list[int]:
        """Returns how many blocks more each of its tiers can take."""
        return [
            max(0, tier.slots - int(used) - (SPARE_SLOTS if rank else 0))
            for rank, (tier, used) in enumerate(
                zip(self.lease.copies.tiers, np.maximum(self.used, self.due), strict=True)
            )
        ]

    def resident(self) -> dict[str, int]:
        """Returns what it has on each of its tiers, in bytes, by their names."""
        names = (tier.name for tier in self.lease.copies.tiers)
        return {
            name: int(used) * self.block_bytes for name, used in zip(names, self.used, strict=True)
        }

    def found(self, now_s: float) -> Groups:
        held = self.held_until_s > now_s
        return groups(self.short, self.long, self.places, held, self.block_bytes)

    def ask(self, ids: NDArray[np.int64], tiers: NDArray[np.uint8], until_s: float) -> None:
        """Has the program bring blocks to tiers.

        Of one that is behind with what it was told before nothing is sent down: what rises is
        worth more.
        """
        wanted = np.zeros(len(ids), COMMAND)
        wanted["block"], wanted["tier"] = ids, tiers
        if self.lease.is_behind():
            wanted = wanted[tiers < self.places[ids]]
        sent = wanted[: self.lease.send(wanted)]
        self.outcomes["asked"] += len(sent)
        self.outcomes["dropped"] += len(ids) - len(sent)
        self.sent_to[sent["block"]] = sent["tier"]
        self.held_until_s[sent["block"]] = until_s


class Arenas:
    """The arenas of now.

    Args:
        leases: lists those that are connected.
    """

    def __init__(self, leases: Callable[[], Sequence[Lease]] = tuple) -> None:
        self._leases = leases
        self._known: dict[int, Steered] = {}
        self._gone: Counter[str] = Counter()
        self._turn = 0

    def all(self) -> list[Steered]:
        return [*self._known.values()]

    def outcomes(self) -> Counter[str]:
        """Returns how many blocks came to each of OUTCOMES, of arenas that have gone too."""
        return sum((arena.outcomes for arena in self._known.values()), self._gone.copy())

    def look(self, tiers: Sequence[Tier], now_s: float, policy: Policy) -> None:
        """Takes in what their programs have counted since the last round."""
        leases = {id(lease): lease for lease in self._leases()}
        known, self._known = self._known, {}
        for number, lease in leases.items():
            arena = known.get(number)
            if arena is None or arena.lease is not lease:
                arena = _begin(lease, now_s)
            arena.cgroup = lease.cgroup()
            arena.ranks = _ranks(lease.copies, tiers)
            try:
                if arena.look(now_s, policy):
                    self._known[number] = arena
            except Damaged:
                lease.end()
        for number, arena in known.items():
            if self._known.get(number) is not arena:
                self._gone.update(arena.outcomes)

    def resident(self, tenants: int, tenant_of: Callable[[Steered], int | None]) -> "Bytes":
        """Returns what each tenant has, or is to have, in arenas on each of the machine's tiers.

        Args:
            tenants: how many there are.
            tenant_of: tells whose an arena is; None where it is counted otherwise.
        """
        has = np.zeros((tenants, MAX_TIERS))
        for arena in self._known.values():
            tenant = tenant_of(arena)
            for rank, due in zip(arena.ranks, arena.due, strict=True):
                if tenant is not None and rank is not None:
                    has[tenant, rank] += float(due) * arena.block_bytes
        return has

    def claim(self, budget_bytes: int) -> int:
        """Returns how much of a budget is not for processes: those that moved lately have parts."""
        active = sum(arena.is_active for arena in self._known.values())
        return budget_bytes * active // (active + 1)

    def place(
        self,
        tiers: Sequence[Tier],
        policy: Policy,
        *,
        now_s: float,
        budget_bytes: int,
        promotable: float,
        most: Callable[[Steered], Mapping[Rank, float]],
        moves: bool,
    ) -> None:
        """Decides what is to go where, and tells the programs.

        Args:
            tiers: the machine's.
            policy: as of plan().
            now_s: likewise.
            budget_bytes: of all arenas together.
            promotable: as of plan().
            most: how many bytes more an arena may have of the machine's tiers; below 0 it has
                too many.
            moves: False to decide only.
        """
        arenas, left = self.all(), budget_bytes
        self._turn += 1
        first = self._turn % max(len(arenas), 1)
        for done, arena in enumerate([*arenas[first:], *arenas[:first]]):
            # A block that is larger than what there is in a round waits for its turn.
            part = max(left // (len(arenas) - done), min(left, 2 * arena.block_bytes))
            left -= _place(arena, tiers, policy, now_s, part, promotable, most(arena), moves=moves)


Bytes = NDArray[np.float64]


def _begin(lease: Lease, now_s: float) -> Steered:
    blocks = lease.copies.blocks
    arena = Steered(
        lease=lease,
        cgroup=None,
        ranks=(),
        counts=np.zeros(blocks, np.uint32),
        places=np.full(blocks, NOWHERE, np.uint8),
        short=np.zeros(blocks, np.float32),
        long=np.zeros(blocks, np.float32),
        sent_to=np.full(blocks, NOWHERE, np.uint8),
        tries=np.zeros(blocks, np.uint8),
        held_until_s=np.full(blocks, -np.inf),
        at_s=now_s,
    )
    lease.copy(arena.counts, arena.places)  # what was counted before is of a time unknown
    return arena


def _ranks(copies: Copies, tiers: Sequence[Tier]) -> tuple[Rank | None, ...]:
    """Returns the machine's tier of each of an arena's: that of its name, or else of its kind."""
    by_kind = {tier.kind: tier.rank for tier in reversed(tiers)}
    by_name = {(tier.name, tier.kind): tier.rank for tier in tiers}
    return tuple(by_name.get((own.name, own.kind), by_kind.get(own.kind)) for own in copies.tiers)


def _latencies(arena: Steered, tiers: Sequence[Tier]) -> list[int | None]:
    """Returns what an access takes on each of an arena's tiers, None where that is not known."""
    kinds = [own.kind for own in arena.lease.copies.tiers]
    measured = {tier.rank: tier.latency_ns for tier in tiers}
    known = [None if rank is None else measured.get(rank) for rank in arena.ranks]
    if not any(kind in FAR_NS for kind in kinds):
        return known
    guess = {**NEAR_NS, **FAR_NS}
    return [guess[kind] if ns is None else ns for kind, ns in zip(kinds, known, strict=True)]


def _rooms(
    arena: Steered, tiers: Sequence[Tier], most: Mapping[Rank, float], budget_bytes: int
) -> list[TierRoom]:
    rooms = []
    owns = zip(arena.lease.copies.tiers, arena.free_slots(), arena.ranks, strict=True)
    for number, (own, slots, rank) in enumerate(owns):
        free = float(slots * arena.block_bytes)
        if rank is not None:
            free = min(free, most.get(rank, free))
        if number:
            # What rises from a full tier leaves its slots to what makes way for it.
            free = max(free, 0.0) + budget_bytes
        rooms.append(
            TierRoom(
                rank=Rank(number),
                capacity_bytes=min(own.slots * arena.block_bytes, 1 << 62),
                free_bytes=int(free),
                headroom_bytes=0,
                latency_ns=None,
            )
        )
    latencies = _latencies(arena, tiers)
    return [replace(room, latency_ns=ns) for room, ns in zip(rooms, latencies, strict=True)]


def _place(
    arena: Steered,
    tiers: Sequence[Tier],
    policy: Policy,
    now_s: float,
    budget_bytes: int,
    promotable: float,
    most: Mapping[Rank, float],
    *,
    moves: bool,
) -> int:
    """Plans for one arena, and sends; returns how many bytes it may move for that."""
    found = arena.found(now_s)
    made = plan(
        [Target(pid=arena.lease.pid, pieces=found.pieces, ceiling=np.inf)],
        _rooms(arena, tiers, most, budget_bytes),
        policy,
        now_s=now_s,
        budget_bytes=budget_bytes,
        promotable=promotable,
    )
    ids, to = commands(made.moves, found, arena.free_slots(), arena.block_bytes)
    arena.is_active = bool(len(ids))
    if moves and len(ids):
        arena.ask(ids, to, now_s + policy.dwell_s)
    return min(budget_bytes, int(made.moves["bytes"].sum()))
