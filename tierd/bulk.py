# SPDX-License-Identifier: Apache-2.0
"""The values that pass between the stages and hold arrays, and the dtypes of these.

Apart from tierd/model.py, since NumPy takes longer to load than all else that a command needs
(docs/decisions/0068). The same units hold here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierd.model import MAX_TIERS, Kept, Outcome, Pid, Topology

Floats: TypeAlias = NDArray[np.float64]

Flags: TypeAlias = bool | NDArray[np.bool_]
"""One for all pieces of a target, or one for each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeMap:
    """Which node physical memory is of.

    `nodes[i]` is the id from `edges[i - 1]` up to `edges[i]`, -1 where that is no memory or more
    than one node's, as a block may be where nodes meet.
    """

    edges: NDArray[np.uint64]
    nodes: NDArray[np.int16]

    def at(self, addresses: NDArray[np.uint64]) -> NDArray[np.int16]:
        """Returns the nodes that some addresses are of, -1 for none."""
        return self.nodes[np.searchsorted(self.edges, addresses, "right")]


def rank_nodes(topology: Topology) -> NDArray[np.int8]:
    """Returns a lookup table from node id to rank, -1 where a node is in no tier."""
    table = np.full(max((n.id for n in topology.nodes), default=0) + 1, -1, np.int8)
    for tier in topology.tiers:
        table[list(tier.nodes)] = tier.rank
    return table


def map_nodes(topology: Topology) -> NodeMap:
    """Returns a lookup table from physical address to node."""
    blocks = [(block, node.id) for node in topology.nodes for block in node.blocks]
    bounds = np.array([(block.start, block.stop) for block, _ in blocks], np.uint64)
    edges = np.unique(bounds)
    nodes, claims = np.full(len(edges) + 1, -1, np.int16), np.zeros(len(edges) + 1, np.intp)
    parts = np.searchsorted(edges, bounds) + 1
    for (first, last), (_, node) in zip(parts, blocks, strict=True):
        nodes[first:last] = node
        claims[first:last] += 1
    nodes[claims > 1] = -1
    return NodeMap(edges=edges, nodes=nodes)


REGION = np.dtype([("start", "u8"), ("end", "u8"), ("nr_accesses", "u4"), ("age", "u4")])
"""One DAMON region of one aggregation. nr_accesses is out of aggregation / sampling interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accesses:
    """One complete snapshot of one target, regions sorted and disjoint (dtype REGION).

    A `zoomed` one is of a range of the target alone, whose pages were looked at one by one. The
    counts of a `relative` one tell pages apart, but not how often they are accessed in a second.
    """

    pid: Pid
    at_s: float
    sample_s: float
    aggregation_s: float
    regions: NDArray[np.void]
    zoomed: bool = False
    relative: bool = False

    @property
    def max_accesses(self) -> int:
        return max(1, round(self.aggregation_s / self.sample_s))


LOAD = np.dtype([("address", "u8"), ("cycles", "u4")])
"""A load that memory has served: its physical address, and the cycles of its CPU that it took."""

NO_LOADS = np.zeros(0, LOAD)

HIT = np.dtype([("page", "u8"), ("weight", "f8")])
"""A sampled access of a page, by its address, and how many reads it counts for."""

PIECE = np.dtype(
    [
        ("start", "u8"),
        ("end", "u8"),
        ("probed_s", "f8"),  # when residence was last looked at, -inf for never
        ("held_until_s", "f8"),  # moved or refused lately: not to be moved before this instant
        ("moved_s", "f8"),  # when it was moved last, -inf for never
        ("zoomed_s", "f8"),  # when its pages were looked at one by one, -inf for never or long ago
        ("short", "f4"),  # accesses per byte and second, averaged over seconds
        ("long", "f4"),  # the same, averaged over tens of seconds
        ("owed", "f4"),  # accesses per byte that a move up and one down have still to win back
        ("resident", "f4", (MAX_TIERS,)),  # share of the piece's bytes on each tier
        ("refusals", "u2"),  # refused moves in a row
        ("rose", "i1"),  # 1 where that move was up, -1 down, 0 where it is long ago
        ("swings", "u1"),  # how often in a row it was soon moved down still owing
        ("huge", "?"),  # mostly mapped by huge pages, each accessed as a whole as far as is seen
        ("kept", "u1"),  # why the last plan left hot bytes of it, KEPT_CODE; 0 where it did not
    ],
    align=True,  # NumPy copies what is not before it reckons with it
)
"""A range of a target whose heat, place and history are alike: the unit that decide works on."""

NEVER = ("probed_s", "held_until_s", "moved_s", "zoomed_s")
"""Fields of PIECE that are -inf at first."""


MOVE = np.dtype(
    [
        ("target", "u4"),  # index into Plan.pids
        ("source", "i1"),  # ranks
        ("destination", "i1"),
        ("start", "u8"),
        ("end", "u8"),
        ("bytes", "u8"),  # at most so many of the range's bytes
        ("gain", "f4"),  # heat per byte won (promotion) or given up (demotion)
    ]
)


PINNED = np.dtype([("start", "u8"), ("end", "u8"), ("pin", "u1")])
"""A range of a target that is pinned, whole pages; `pin` is a PIN_CODE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process and its pieces (dtype PIECE), sorted and disjoint.

    `ceiling` is the heat above which its samples cannot tell pieces apart. What is `pinned` counts
    as hotter than all else, and makes way for nobody; what is `fixed` is not moved at all. What
    `awaits_look` is about to be looked at page by page. What is `unsorted` is left to the kernel's
    promotions, but where it `fills` free room, what is `spare` gains next to nothing in the fastest
    tier, and of a target that `rests` nothing but what is pinned is moved up. `tenant` is an index
    into those that the plan is for.
    """

    pid: Pid
    pieces: NDArray[np.void]
    ceiling: float
    pinned: Flags = False
    fixed: Flags = False
    awaits_look: Flags = False
    unsorted: Flags = False
    fills: Flags = False
    spare: Flags = False
    rests: bool = False
    tenant: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Moves in the order they are to be made (dtype MOVE), demotions before the promotions.

    `gaps_ns` is what an access to each tier but the fastest costs more than one a tier up. `shares`
    is what each tenant may have of each tier but the slowest, in bytes; empty of one alone. `owed`
    is what it has elsewhere and is to leave to others, which lack so much of their shares. `lacks`
    is how much more room on each tier but the slowest there is a use for, in bytes. `kept`
    counts the hot bytes that stay in a slower tier, by reason; `kept_codes` has the reason of each
    piece of each target, one target after the other.
    """

    pids: tuple[Pid, ...]
    moves: NDArray[np.void]
    gaps_ns: tuple[float, ...] = ()
    shares: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    owed: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    lacks: tuple[int, ...] = ()
    kept: Mapping[Kept, int] = field(default_factory=dict)
    kept_codes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a plan.

    `pages[i, o]` counts the base pages of move i that met Outcome o, as far as its range was
    walked: up to the address `reached[i]`. `busy_ns` is the time that the kernel took to move
    them, so that the next move's cost can be weighed.
    """

    plan: Plan
    pages: NDArray[np.int64]
    reached: NDArray[np.uint64]
    busy_ns: int

    @property
    def moved_pages(self) -> int:
        return int(self.pages[:, Outcome.MOVED].sum())
