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
from tierd.arena.wire import COMMAND, GIVE_BACK, MOST_MBPS, limit_command
from tierd.bulk import Target
from tierd.decide.bandwidth import by_tenant, wanted
from tierd.decide.blocks import NOWHERE, Groups, commands, copied, groups, retry_s, take_in
from tierd.decide.heat import COLD_PER_PAGE_S
from tierd.decide.placement import EVERYBODY, plan
from tierd.decide.shares import Elsewhere, nothing_elsewhere
from tierd.errors import Damaged
from tierd.model import PAGE_BYTES, Pid, Policy, Rank, Tenant, Tier, TierKind, TierRoom

SPARE_SLOTS = 2
"""Of each tier but the fastest, an arena's movers keep so many."""

MOST_TRIES = 15

GIVING_ROUNDS = 10
"""For so long after an arena had too much of a tier, what it frees there is left to others."""

MIB = 1 << 20

SAME_LIMIT = 0.05
"""A limit that differs by less is not sent."""

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
class Far:
    """What an arena copies to and from a tier without addresses, in MiB a second."""

    used_mbps: float = 0.0
    """Since the last round, as far as it was seen."""
    is_more: bool = False
    """Whether more may have been copied than that."""
    wanted_mbps: float = 0.0
    limit_mbps: int | None = None
    """What the program was told to keep to."""


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
    since_s: float
    """When it was seen first; what was used before is not known."""
    used: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Blocks on each of its tiers."""
    due: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """The same once all have come to where they were sent."""
    warm: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of these, such as are used at all."""
    giving: dict[int, int] = field(default_factory=dict)
    """For how many rounds more each tier gives back what is free; of one that did once, 0."""
    far: dict[int, Far] = field(default_factory=dict)
    """Of those of its tiers that are far, by their numbers."""
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
        self._see_copies(places, now_s)
        self.counts, self.places, self.at_s = counts, places, now_s
        after = np.where(self.sent_to == NOWHERE, places, self.sent_to)
        is_warm = (self.short + self.long) * np.float32(PAGE_BYTES / 2) >= COLD_PER_PAGE_S
        self.used, self.due, self.warm = (
            np.bincount(where, minlength=NOWHERE + 1)[: len(self.ranks)]
            for where in (places, after, after[is_warm])
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

    def _see_copies(self, places: NDArray[np.uint8], now_s: float) -> None:
        """Sees what was copied to and from far tiers, for whatever reason.

        Where that is half as many blocks as were near, some may have come and gone twice.
        """
        near = int(np.count_nonzero(~np.isin(self.places, [*self.far, NOWHERE])))
        blocks = copied(self.places, places, len(self.ranks))
        seconds = now_s - self.at_s
        for number, far in self.far.items():
            is_seen = seconds > 0  # else it has just come
            size_mib = int(blocks[number]) * self.block_bytes / MIB
            far.used_mbps = size_mib / seconds if is_seen else 0.0
            far.is_more = is_seen and 2 * int(blocks[number]) > near

    def keep_to(self, number: int, mbps: float) -> None:
        """Has the program copy no more than that to and from a tier; inf ends it."""
        far = self.far[number]
        limit = None if np.isinf(mbps) else min(max(int(mbps), 1), MOST_MBPS)
        if _is_same(far.limit_mbps, limit):
            return
        if self.lease.send(limit_command(number, limit)):
            far.limit_mbps = limit

    def free_slots(self) -> list[int]:
        """Returns how many blocks more each of its tiers can take."""
        return [
            max(0, tier.slots - int(used) - (SPARE_SLOTS if rank else 0))
            for rank, (tier, used) in enumerate(
                zip(self.lease.copies.tiers, np.maximum(self.used, self.due), strict=True)
            )
        ]

    def due_bytes(self, number: int) -> int:
        """Returns what it has on one of its tiers once all have come to where they were sent."""
        return int(self.due[number]) * self.block_bytes

    def leaves(self, number: int) -> int:
        """Returns what of that it could leave to others."""
        return self.due_bytes(number) if self.lease.copies.tiers[number].gives_back else 0

    def idle(self, number: int, long_s: float) -> int:
        """Returns what it could leave of that and has not used for `long_s`, as far as is known."""
        if self.at_s - self.since_s < long_s:
            return 0
        return min(self.leaves(number), int((self.due - self.warm)[number]) * self.block_bytes)

    def wants(self, number: int) -> tuple[int, int]:
        """Returns how many blocks that are used are on one of its tiers, and could come there."""
        room = self.lease.copies.tiers[number].slots - int(self.due[number])
        return int(self.warm[number]), max(min(int(self.warm[number + 1 :].sum()), room), 0)

    def far_of(self, kind: TierKind) -> list[int]:
        """Returns the numbers of its far tiers of a kind."""
        return [number for number in self.far if self.lease.copies.tiers[number].kind is kind]

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

    def maximum(self, most: Mapping[Rank, float]) -> dict[Rank, int]:
        """Returns how many bytes it may have on those of its own tiers where it has too many."""
        return {
            Rank(number): max(self.due_bytes(number) + int(most[rank]), 0)
            for number, rank in enumerate(self.ranks)
            if rank is not None and most.get(rank, 0.0) < 0
        }

    def give_back(self, most: Mapping[Rank, float]) -> None:
        """Has the program leave what is free on tiers to others, where it has or had too much."""
        for number, (tier, rank) in enumerate(
            zip(self.lease.copies.tiers, self.ranks, strict=True)
        ):
            if not tier.gives_back or rank is None:
                continue
            if most.get(rank, 0.0) < 0:
                self.giving[number] = GIVING_ROUNDS
            if self.giving.get(number):
                self.giving[number] -= 1
                self.lease.send(np.array([(GIVE_BACK, number)], COMMAND))


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

    def elsewhere(
        self, tenants: int, tenant_of: Callable[[Steered], int | None], long_s: float
    ) -> Elsewhere:
        """Returns what tenants have, or are to have, in arenas on each of the machine's tiers.

        Args:
            tenants: how many there are.
            tenant_of: tells whose an arena is; None where it is counted otherwise.
            long_s: what was not used for so long is idle.
        """
        found = nothing_elsewhere(tenants)
        for arena in self._known.values():
            tenant = tenant_of(arena)
            for number, rank in enumerate(arena.ranks):
                if tenant is None or rank is None:
                    continue
                warm, rising = arena.wants(number)
                found.has[tenant, rank] += arena.due_bytes(number)
                found.leaves[tenant, rank] += arena.leaves(number)
                found.idle[tenant, rank] += arena.idle(number, long_s)
                found.wants[tenant, rank] += (warm + rising) * arena.block_bytes
                if number in arena.giving:
                    found.rises[tenant, rank] += rising * arena.block_bytes
        return found

    def claim(self, budget_bytes: int) -> int:
        """Returns how much of a budget is not for processes: those that moved lately have parts."""
        active = sum(arena.is_active for arena in self._known.values())
        return budget_bytes * active // (active + 1)

    def limit(
        self,
        totals: Mapping[TierKind, float],
        tenants: Sequence[Tenant],
        tenant_of: Callable[[Steered], int],
    ) -> None:
        """Divides what arenas may copy to and from far tiers, and tells the programs.

        Args:
            totals: by the tiers' kind, MiB a second; no bound where there is none.
            tenants: with their maxima and weights.
            tenant_of: tells whose an arena is.
        """
        weight = np.array([each.weight for each in tenants])
        for kind in (kind for kind in TierKind if kind.is_far):
            parts = [(arena, number) for arena in self.all() for number in arena.far_of(kind)]
            total = totals.get(kind, np.inf)
            maximum = np.array([each.far_mbps.get(kind, np.inf) for each in tenants])
            tenant = np.array([tenant_of(arena) for arena, _ in parts], np.intp)
            wants = _wanted(
                [arena.far[n] for arena, n in parts], np.minimum(maximum, total)[tenant]
            )
            shares = by_tenant(total, tenant=tenant, wanted=wants, maximum=maximum, weight=weight)
            for (arena, number), share in zip(parts, shares.tolist(), strict=True):
                arena.keep_to(number, share)

    def unlimit(self) -> None:
        """Ends all limits."""
        for arena in self._known.values():
            for number in arena.far:
                arena.keep_to(number, np.inf)

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
            may_have = most(arena)
            left -= _place(arena, tiers, policy, now_s, part, promotable, may_have, moves=moves)
            if moves:
                arena.give_back(may_have)


def may_have(
    arena: Steered,
    *,
    has: NDArray[np.float64],
    share: NDArray[np.float64],
    maximum: Mapping[Rank, float],
    owed: NDArray[np.float64],
    leaves: NDArray[np.float64],
    rooms: NDArray[np.float64],
) -> Mapping[Rank, float]:
    """Returns how many bytes more an arena may have of each tier; below 0 it has too many.

    Args:
        arena: of several of a tenant each leaves its part of what they are to leave.
        has: what its tenant has of each tier; the same of `share` and `owed`, of a plan.
        share: empty where there is one tenant alone.
        maximum: what the tenant may have at most.
        owed: empty where it has nothing to leave.
        leaves: what the tenant's arenas could leave, all together.
        rooms: what the tiers can take. What an arena has left to others it gets only of that.
    """
    most = {Rank(r): max(size - has[r], 0.0) for r, size in enumerate(share)}
    for number, rank in enumerate(arena.ranks):
        if rank is None:
            continue
        if number in arena.giving:
            most[rank] = min(rooms[rank], most.get(rank, np.inf))
        if rank < len(owed) and min(owed[rank], arena.leaves(number)) > 0:
            most[rank] = -float(owed[rank]) * arena.leaves(number) / leaves[rank]
    for rank, size in maximum.items():
        left = size - has[rank]
        most[rank] = min(left, most.get(rank, left))
    return most


def _wanted(parts: Sequence[Far], most: NDArray[np.float64]) -> NDArray[np.float64]:
    """Takes in what arenas want of bandwidth now."""
    limits = (far.limit_mbps for far in parts)
    wants = wanted(
        np.array([far.used_mbps for far in parts], np.float64),
        np.array([np.inf if limit is None else limit for limit in limits], np.float64),
        np.array([far.wanted_mbps for far in parts], np.float64),
        most,
        np.array([far.is_more for far in parts], np.bool_),
    )
    for far, want in zip(parts, wants.tolist(), strict=True):
        far.wanted_mbps = want
    return wants


def _is_same(before: int | None, after: int | None) -> bool:
    """Tells whether two limits differ by so little that a program need not know."""
    if before is None or after is None:
        return before is after
    return abs(after - before) <= SAME_LIMIT * before


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
        since_s=now_s,
        far={number: Far() for number, tier in enumerate(lease.copies.tiers) if tier.kind.is_far},
    )
    lease.copy(arena.counts, arena.places)  # what was counted before is of a time unknown
    return arena


def _ranks(copies: Copies, tiers: Sequence[Tier]) -> tuple[Rank | None, ...]:
    """Returns the machine's tier of each of an arena's: that of its name, or else of its kind."""
    by_kind = {tier.kind: tier.rank for tier in reversed(tiers)}
    by_name = {(tier.name, tier.kind): tier.rank for tier in tiers}
    return tuple(by_name.get((own.name, own.kind), by_kind.get(own.kind)) for own in copies.tiers)


def _latencies(arena: Steered, tiers: Sequence[Tier]) -> list[int | None]:
    """Returns what an access takes on each of an arena's tiers, None where that is not known.

    Of the machine's tiers it is as the machine has it, of others as the program says.
    """
    owns = arena.lease.copies.tiers
    kinds = [own.kind for own in owns]
    measured = {tier.rank: tier.latency_ns for tier in tiers}
    known = [
        own.latency_ns if rank is None else measured.get(rank) or own.latency_ns
        for own, rank in zip(owns, arena.ranks, strict=True)
    ]
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
            free = max(min(free, most.get(rank, free)), 0.0)
        if number:
            # What rises from a full tier leaves its slots to what makes way for it.
            free += budget_bytes
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
    found, maximum = arena.found(now_s), arena.maximum(most)
    made = plan(
        [Target(pid=arena.lease.pid, pieces=found.pieces, ceiling=np.inf)],
        _rooms(arena, tiers, most, budget_bytes),
        policy,
        now_s=now_s,
        budget_bytes=budget_bytes,
        promotable=promotable,
        # Who has too much lets go of hot blocks too; of one tenant alone heat decides everything.
        tenants=(replace(EVERYBODY, maximum_bytes=maximum), EVERYBODY) if maximum else (EVERYBODY,),
    )
    ids, to = commands(made.moves, found, arena.free_slots(), arena.block_bytes)
    arena.is_active = bool(len(ids))
    if moves and len(ids):
        arena.ask(ids, to, now_s + policy.dwell_s)
    return min(budget_bytes, int(made.moves["bytes"].sum()))
