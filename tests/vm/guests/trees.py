# SPDX-License-Identifier: Apache-2.0
"""The guests whose trees the unit tests read, and how they are captured; see capture.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from guests import topology
from guests.boot import boot
from guests.guest import REPOSITORY
from guests.kernels import Kernel
from guests.topology import Emulator, Topology

FOLDER = REPOSITORY / "tests" / "unit" / "trees"


@dataclass(frozen=True, slots=True)
class Source:
    """A guest to capture."""

    topology: Topology
    kernel: Kernel = Kernel.LATEST


TWO_TIERS = topology.cxl(256, 256, emulator=Emulator.FAST, latencies_ns=(100, 500))

SOURCES = {
    "cxl-7.2": Source(topology.cxl()),
    "cxl-6.12": Source(topology.cxl(), Kernel.LTS),
    "cxl-two-regions": Source(topology.cxl(256, 512)),
    "cxl-two-tiers-7.2": Source(TWO_TIERS),
    "cxl-two-tiers-6.12": Source(TWO_TIERS, Kernel.LTS),
    "cxl-interleaved": Source(topology.cxl(256, 256, interleaved=True)),
    "slow-node-7.2": Source(topology.slow_node()),
    "slow-node-6.12": Source(topology.slow_node(), Kernel.LTS),
    "numa": Source(topology.numa()),
    "hmat": Source(topology.numa(hmat=True)),
    "flat": Source(topology.flat()),
}


def main() -> None:
    """Captures the named guests, or all."""
    for name in sys.argv[1:] or SOURCES:
        if name not in SOURCES:
            raise SystemExit(f"no guest {name}; there are {', '.join(SOURCES)}")
        capture(SOURCES[name], FOLDER / f"{name}.json")


def capture(source: Source, into: Path) -> None:
    """Boots a guest and writes its tree."""
    with boot(source.topology, source.kernel) as guest:
        tree = guest.run(["python3", Path(__file__).with_name("capture.py")]).stdout
    into.parent.mkdir(exist_ok=True)
    into.write_text(f"{tree}\n")


if __name__ == "__main__":
    main()
