# SPDX-License-Identifier: Apache-2.0
"""What the daemon tells of itself after a round; docs/status.md explains each field."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tierd.arenas import OUTCOMES, Far, Steered
from tierd.daemon import Daemon
from tierd.decide.heat import ceiling, score
from tierd.decide.worth import is_hot
from tierd.model import Rank, Tier, TierRoom
from tierd.sample.sampler import Sampler
from tierd.watched import Watched


def account(daemon: Daemon, rooms: Sequence[TierRoom]) -> dict[str, Any]:
    """Returns the status but for what is the service's.

    Args:
        daemon: after a round.
        rooms: the tiers' room before its moves.
    """
    flows = daemon.flows
    return {
        "mode": str(daemon.config.policy.mode),
        "paused": daemon.paused,
        "rounds": daemon.rounds,
        "rounds_s": round(daemon.rounds_s, 3),
        "round_ms": round(daemon.round_s * 1e3, 2),
        "tiers": [_tier(daemon, *pair) for pair in zip(daemon.topology.tiers, rooms, strict=True)],
        "targets": [target(daemon, watched) for watched in daemon.watched.values()],
        "arenas": [_arena(daemon, arena) for arena in daemon.arenas.all()],
        "arena_blocks": {what: daemon.arenas.outcomes()[what] for what in OUTCOMES},
        "tenants": _tenants(daemon),
        "moved": [
            {"from": source, "to": destination, "pages": count}
            for (source, destination), count in sorted(flows.moved.items())
        ],
        "refused": {o.label: count for o, count in sorted(flows.refused.items())},
        "flows": [
            {
                "tenant": flow.tenant,
                "source": flow.source,
                "destination": flow.destination,
                "direction": str(flow.direction),
                "outcome": flow.outcome.label,
                "pages": count,
            }
            for flow, count in sorted(flows.pages.items())
        ],
        "cache_pages": 0 if daemon.cache is None else daemon.cache.moved_pages,
        "schemes": daemon.schemes,
        "kept": {str(why): size for why, size in flows.kept.items()},
        "sampler": _sampler(daemon.sampler),
        "page_cost_ns": round(daemon.cost.page_ns, 1),
        "notes": [
            *daemon.topology.warnings,
            *daemon.targets.unwatched.values(),
            *filter(None, [daemon.stalls]),
            *(daemon.why_closed(way, rooms) for way in sorted(daemon.closed)),
        ],
    }


def _arena(daemon: Daemon, arena: Steered) -> dict[str, Any]:
    tenants = daemon.tenants
    return {
        "name": arena.lease.name,
        "pid": arena.lease.pid,
        "command": arena.lease.command,
        "user": arena.lease.user_id,
        "cgroup": arena.cgroup,
        "tenant": tenants.all[tenants.index(arena.cgroup)].name,
        "block_bytes": arena.block_bytes,
        "blocks": len(arena.places),
        "resident": arena.resident(),
        **_bandwidth((arena.lease.copies.tiers[n].name, far) for n, far in arena.far.items()),
        **{what: arena.outcomes[what] for what in OUTCOMES},
    }


def _bandwidth(parts: Iterable[tuple[str, Far]]) -> dict[str, dict[str, float]]:
    """Tells by name what is copied to and from far tiers, and what may be where it is limited."""
    used: dict[str, float] = {}
    limits: dict[str, float] = {}
    for name, far in parts:
        used[name] = round(used.get(name, 0.0) + far.used_mbps, 1)
        if far.limit_mbps is not None:
            limits[name] = limits.get(name, 0) + far.limit_mbps
    return {"far_used_mbps": used, "far_limit_mbps": limits}


def _tenants(daemon: Daemon) -> list[dict[str, Any]]:
    """Tells what each tenant may have and has, where there are any but one."""
    tenants = daemon.tenants.all
    if len(tenants) == 1:
        return []
    has = daemon.resident_of_tenants()
    known = len(daemon.shares) == len(tenants)
    all_shares = daemon.shares if known else np.zeros((len(tenants), 0))
    far: list[list[tuple[str, Far]]] = [[] for _ in tenants]
    for arena in daemon.arenas.all():
        own = far[daemon.tenants.index(arena.cgroup)]
        own += ((str(arena.lease.copies.tiers[n].kind), each) for n, each in arena.far.items())
    return [
        {
            "name": tenant.name,
            "class": str(tenant.class_),
            "weight": tenant.weight,
            "guaranteed": {daemon.names[r]: s for r, s in tenant.guaranteed_bytes.items()},
            "maximum": {daemon.names[r]: s for r, s in tenant.maximum_bytes.items()},
            "share": {daemon.names[Rank(r)]: int(size) for r, size in enumerate(shares)},
            "resident": {daemon.names[r]: int(has[index, r]) for r in sorted(daemon.names)},
            **_bandwidth(far[index]),
            "far_maximum_mbps": {str(kind): mbps for kind, mbps in tenant.far_mbps.items()},
        }
        for index, (tenant, shares) in enumerate(zip(tenants, all_shares, strict=True))
    ]


def _sampler(sampler: Sampler) -> dict[str, Any]:
    tuning = {str(pid): asdict(tuning) for pid, tuning in sampler.tuning.items()}
    return {
        "way": sampler.way,
        "lost": sampler.losses,
        "zoomed_pages": sampler.zoomed_pages,
        "hardware": None if sampler.sampling is None else asdict(sampler.sampling),
        "tuning": tuning,
    }


def _tier(daemon: Daemon, tier: Tier, room: TierRoom) -> dict[str, Any]:
    backing = {str(node.backing) for node in daemon.topology.nodes if node.id in tier.nodes}
    return {
        "rank": tier.rank,
        "name": tier.name,
        "kind": str(tier.kind),
        "nodes": list(tier.nodes),
        "capacity": room.capacity_bytes,
        "free": room.free_bytes,
        "headroom": room.headroom_bytes,
        "backing": sorted(backing),
        "loads": round(daemon.latencies.loads_of(tier)),
        "loaded_cycles": room.loaded_cycles and round(room.loaded_cycles, 1),
        "closed_to": [daemon.names[low] for up, low in sorted(daemon.closed) if up == tier.rank],
    }


def target(daemon: Daemon, watched: Watched) -> dict[str, Any]:
    """Tells what a target has where, and what of that is hot."""
    pieces = watched.pieces
    length = (pieces["end"] - pieces["start"]).astype(np.float64)
    resident = length[:, None] * pieces["resident"]
    most = np.inf if watched.accesses is None else ceiling(watched.accesses)
    hot = is_hot(pieces, most, daemon.policy(), daemon.gaps_ns)
    rate = (score(pieces)[:, None] * resident).sum(axis=0)
    ranks = sorted(daemon.names)
    return {
        "pid": watched.process.pid,
        "command": watched.process.command,
        "cgroup": watched.process.cgroup,
        "pin": watched.pin and str(watched.pin),
        "pinned": watched.pinned_bytes(),
        "rests": watched.guard.rests(daemon.machine.monotonic()),
        "pieces": len(pieces),
        "resident": {daemon.names[rank]: int(resident[:, rank].sum()) for rank in ranks},
        "hot": {daemon.names[rank]: int(resident[hot, rank].sum()) for rank in ranks},
        "rate": {daemon.names[rank]: round(float(rate[rank]), 1) for rank in ranks},
    }
