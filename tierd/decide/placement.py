# SPDX-License-Identifier: Apache-2.0
"""Placement: which bytes to move between tiers, so that the hottest lie in the fastest.

Tiers are taken in neighbouring steps, from the fastest down. At each step the bytes below it that
are worth a move, hottest first, meet the bytes on it, coldest first. A byte moves up where there
is room, or where it is hotter by a margin than the byte that makes way for it. What need not move
stays: cold bytes in fast memory are left there until somebody needs the room.

What rises is taken at the heat it has beyond doubt, and still has now; what makes way at the heat
it seems to have. The margin between them has two parts. A move must pay back its cost within a
horizon (both moves' cost, where one makes way for the other); and a byte must be `hysteresis` times
as hot as the one it displaces, so that near-equals don't swap places. How hot the hottest bytes
really are, sampling cannot tell; so a byte near that ceiling is worth a move whatever the move
costs.

Where not all that rises finds room, what is about to be looked at page by page waits for that,
unless it is clearly hotter than what is left out: its best pages rise then, and need not make way
for each other.

Room beyond what hot bytes have taken lately is for warm ones: nobody makes way for these, so that
they have longer to pay back their moves, and need not be hot beyond doubt.

Where the kernel promotes single pages meanwhile, of which faults tell it, a piece that lies on
several tiers has been sorted by it. Its pages are then taken to be of all heats from none to twice
the mean, the hottest of them in the fastest tier: what is a mixture to a region's average stays as
the kernel has sorted it, and what is alike throughout is moved as ever.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import MOVE, PIECE, Flags, Plan, Target
from tierd.decide.heat import concatenate
from tierd.decide.latency import Way
from tierd.decide.shares import Elsewhere, nothing_elsewhere
from tierd.decide.sharing import SharedSteps
from tierd.decide.steps import Steps
from tierd.decide.stock import Batch
from tierd.model import MAX_TIERS, PAGE_BYTES, Pid, Policy, Tenant, TierRoom

EVERYBODY = Tenant(name="")
"""The tenant of everybody where there are no others."""

_NOTHING = Target(pid=Pid(0), pieces=np.zeros(0, PIECE), ceiling=np.inf)
"""In place of targets where there are none, but tenants with something elsewhere."""


def plan(
    targets: Sequence[Target],
    rooms: Sequence[TierRoom],
    policy: Policy,
    *,
    now_s: float,
    budget_bytes: int,
    promotable: float = 1.0,
    closed: frozenset[Way] = frozenset(),
    tenants: Sequence[Tenant] = (EVERYBODY,),
    sorted_by_kernel: bool = False,
    elsewhere: Elsewhere | None = None,
) -> Plan:
    """Returns the moves worth making now.

    Args:
        targets: processes with fresh samples; the others' memory is not to be moved.
        rooms: the tiers, by rank.
        policy: margins and costs; `move_cost_ns` is what moving a page was found to cost.
        now_s: the instant that `held_until_s` is compared with.
        budget_bytes: at most so many bytes are moved, both directions together.
        promotable: share of the budget that may be used to move up.
        closed: the ways up that nothing goes but what is pinned.
        tenants: whose the targets are; of one alone, heat decides everything.
        sorted_by_kernel: whether the kernel promotes single pages, and keeps some room for that.
        elsewhere: what counts for the tenants' shares besides, and is placed by others.
    """
    if not targets and elsewhere is not None:
        targets = [_NOTHING]
    lengths = [len(t.pieces) for t in targets]
    if (not sum(lengths) and elsewhere is None) or len(rooms) < 2:
        return Plan(
            pids=tuple(target.pid for target in targets),
            moves=np.zeros(0, MOVE),
            kept_codes=np.zeros(sum(lengths), np.uint8),
        )
    pieces = concatenate([target.pieces for target in targets])
    owner = np.repeat(np.arange(len(targets)), lengths)
    ceiling = np.repeat([t.ceiling for t in targets], lengths)
    steps = Steps if len(tenants) == 1 else SharedSteps
    step = steps(
        pieces=pieces,
        ceiling=ceiling,
        pinned=_by_piece([t.pinned for t in targets], lengths),
        awaits_look=_by_piece([t.awaits_look for t in targets], lengths),
        unsorted=_by_piece([t.unsorted for t in targets], lengths),
        fills=_by_piece([t.fills for t in targets], lengths),
        spare=_by_piece([t.spare for t in targets], lengths),
        rests=np.repeat([t.rests for t in targets], lengths),
        tenant=np.repeat([t.tenant for t in targets], lengths),
        tenants=tenants,
        rooms=rooms,
        closed=closed,
        policy=policy,
        now_s=now_s,
        budget_bytes=float(budget_bytes),
        rising_bytes=budget_bytes * promotable,
        sorted_by_kernel=sorted_by_kernel,
        elsewhere=nothing_elsewhere(len(tenants)) if elsewhere is None else elsewhere,
    )
    if any(np.any(t.fixed) for t in targets):
        step.leave_out(_by_piece([t.fixed for t in targets], lengths))
    for rank in range(len(rooms) - 1):
        step.fill(rank)
    return Plan(
        pids=tuple(target.pid for target in targets),
        moves=_moves(pieces, owner, step.demotions[::-1] + step.promotions),
        gaps_ns=tuple(map(step.gap_ns, range(len(rooms) - 1))),
        shares=np.array(step.shares).reshape(-1, len(tenants)).T,
        owed=np.array(step.owed).reshape(-1, len(tenants)).T,
        lacks=tuple(map(int, step.lacks)),
        kept={why: int(size) for why, size in step.kept.items() if size >= PAGE_BYTES},
        kept_codes=step.kept_codes,
    )


def _by_piece(flags: Sequence[Flags], lengths: Sequence[int]) -> NDArray[np.bool_]:
    """Returns the targets' flags as one for each piece."""
    return np.concatenate([np.full(n, flag) for flag, n in zip(flags, lengths, strict=True)])


def _moves(
    pieces: NDArray[np.void], owner: NDArray[np.intp], batches: Sequence[Batch]
) -> NDArray[np.void]:
    """Returns the batches as moves, one for all that goes the same way of a piece."""
    batches = [batch for batch in batches if batch.size.any()]
    if not batches:
        return np.zeros(0, MOVE)
    piece, tier, destination, size, heat = (
        np.concatenate(column)
        for column in zip(
            *((b.stock.piece, b.stock.tier, b.destination, b.size, b.stock.heat) for b in batches),
            strict=True,
        )
    )
    made = np.flatnonzero(size)
    same = (piece[made] * MAX_TIERS + tier[made]) * MAX_TIERS + destination[made]
    _, first, which = np.unique(same, return_index=True, return_inverse=True)
    row = made[first]
    moves = np.zeros(len(row), MOVE)
    moves["target"] = owner[piece[row]]
    moves["source"], moves["destination"] = tier[row], destination[row]
    moves["start"], moves["end"] = pieces["start"][piece[row]], pieces["end"][piece[row]]
    moves["bytes"] = np.bincount(which, size[made], len(row))
    moves["gain"] = heat[row]
    return moves[np.argsort(first)]
