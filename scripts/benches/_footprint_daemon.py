# SPDX-License-Identifier: Apache-2.0
"""`tierd run` with two of its collaborators replaced, for the footprint benchmark.

The sampler is a fake that plays tests/data/hotset-records.npy.xz again and again at its own pace:
no DAMON, and no ring. The topology has the machine's first node as the fast tier, and a slow one on
a node that isn't there. All else is real.

Usage: python -m benches._footprint_daemon run ...
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import tierd.cli.daemon
import tierd.startup
from tests.unit.replay import Replay, recorded
from tierd.config import DamonConfig, TierConfig
from tierd.discover import hotplug
from tierd.discover.topology import discover
from tierd.journal import Journal
from tierd.model import NodeId, Rank, Tier, TierKind, Topology


def two_tiers(declared: Sequence[TierConfig], *_: object, **__: object) -> Topology:
    """All memory that there is in the fast tier: what is hot has no way to go."""
    found = discover(declared)
    here = found.nodes[0]
    missing = replace(here, id=NodeId(here.id + 1), cpus=())

    def tier(rank: int, kind: TierKind, node: NodeId) -> Tier:
        return Tier(
            rank=Rank(rank),
            name=kind,
            kind=kind,
            nodes=(node,),
            capacity_bytes=here.total_bytes,
        )

    tiers = (tier(0, TierKind.DRAM, here.id), tier(1, TierKind.CXL, missing.id))
    return replace(found, nodes=(here, missing), tiers=tiers)


class Played(Replay):
    """In the place of a Session, which hands nothing to DAMON here."""

    def __init__(self, config: DamonConfig, journal: Journal, *, schemes: None) -> None:
        super().__init__(recorded(), time.monotonic, loop=True)

    def require_schemes(self) -> None:
        pass


def main() -> None:
    """Replaces them, then is `tierd`."""
    replaced: tuple[tuple[ModuleType, str, Any], ...] = (
        (tierd.startup, "Session", Played),
        (tierd.startup, "discover", two_tiers),
        (hotplug, "discover", two_tiers),
    )
    for module, name, value in replaced:
        setattr(module, name, value)
    tierd.cli.daemon.main()


if __name__ == "__main__":
    main()
