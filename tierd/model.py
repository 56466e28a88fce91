# SPDX-License-Identifier: Apache-2.0
"""The values that pass between the stages, and the dtypes of bulk data.

Addresses and sizes are in bytes, instants in seconds of CLOCK_MONOTONIC unless a name says
otherwise. Unknown is None, never 0. Ranks count from 0, the fastest tier.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

NodeId = NewType("NodeId", int)
Pid = NewType("Pid", int)
Rank = NewType("Rank", int)

PAGE_BYTES = 4096
"""The base page of x86-64 and of arm64 as Debian builds it; DAMON and move_pages count in it."""

MAX_TIERS = 8


class TierKind(StrEnum):
    HBM = "hbm"
    DRAM = "dram"
    CXL = "cxl"
    RDMA = "rdma"
    SWAP = "swap"

    @property
    def is_far(self) -> bool:
        """Whether what is there has no addresses, and is copied to memory to be used."""
        return self in (TierKind.RDMA, TierKind.SWAP)


class Online(StrEnum):
    """What becomes of the memory of a new region."""

    MOVABLE = "movable"
    """It is online, and can be taken offline again."""
    NORMAL = "normal"
    """It is online and the kernel may use it itself: it stays until the next boot."""
    NONE = "none"
    """It is left offline."""

    @property
    def policy(self) -> str:
        """What auto_online_blocks has to hold when the blocks come."""
        return {"movable": "online_movable", "normal": "online_kernel", "none": "offline"}[self]


class Backing(StrEnum):
    """What a node's memory is made of, as far as the kernel tells."""

    DRAM = "dram"
    CXL = "cxl"
    PMEM = "pmem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """Figures from the nearest initiator to a node, by HMAT and CDAT; what they leave out is None.

    What a MB is they don't tell; it is 2^20 bytes by QEMU, and where tierd measures.
    """

    read_latency_ns: int | None = None
    write_latency_ns: int | None = None
    read_bandwidth_mbps: int | None = None
    write_bandwidth_mbps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    id: NodeId
    cpus: tuple[int, ...]
    total_bytes: int
    distances: Mapping[NodeId, int]
    any_initiator: Performance | None
    cpu_initiator: Performance | None
    kernel_tier: int | None
    backing: Backing
    memdevs: tuple[str, ...] = ()
    dax_devices: tuple[str, ...] = ()
    blocks: tuple[range, ...] = ()
    """The physical addresses of its memory blocks."""

    @property
    def latency_ns(self) -> int | None:
        """Read latency seen from a CPU, else from any initiator."""
        for performance in (self.cpu_initiator, self.any_initiator):
            if performance is not None and performance.read_latency_ns is not None:
                return performance.read_latency_ns
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Memory of one speed. A dram or cxl tier is a set of nodes."""

    rank: Rank
    name: str
    kind: TierKind
    nodes: tuple[NodeId, ...]
    capacity_bytes: int
    latency_ns: int | None = None
    bandwidth_mbps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memdev:
    """A CXL memory device. `node` is the node its PCI function hangs off, not the one it backs.

    `bridge` is the number by which root decoders' `targets` have its host bridge, and `route` are
    the ports from there down to its endpoint; None and empty while the kernel has no endpoint.
    """

    name: str
    serial: int | None
    ram_bytes: int
    pmem_bytes: int
    node: NodeId | None
    firmware: str | None
    bridge: str | None = None
    route: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What maps a range of addresses: of a root (a host's window), a switch or an endpoint.

    `modes` are what a root may map, `ram` and `pmem`; `targets` the numbers of what a root or a
    switch interleaves over. An endpoint's has a `mode`, and of its `memdev` the capacity from
    `dpa_start`.
    """

    name: str
    kind: str
    start: int | None
    size_bytes: int
    interleave_ways: int | None
    interleave_granularity_bytes: int | None
    region: str | None
    locked: bool | None
    mode: str | None = None
    modes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    memdev: str | None = None
    dpa_start: int | None = None
    dpa_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CxlRegion:
    """Addresses of a root decoder that devices answer, by their `decoders`, in their order."""

    name: str
    start: int | None
    size_bytes: int
    mode: str | None
    interleave_ways: int
    interleave_granularity_bytes: int | None
    memdevs: tuple[str, ...]
    committed: bool
    root: str | None = None
    decoders: tuple[str, ...] = ()
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBlock:
    """Memory that can be taken online and offline; `zones` are those that it is in or may be."""

    number: int
    start: int
    size_bytes: int
    state: str
    zones: tuple[str, ...]
    node: NodeId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaxDevice:
    """`region` is CXL's or the NVDIMM bus's, as `backing` tells; `start` is physical."""

    name: str
    size_bytes: int
    target_node: NodeId | None
    driver: str | None
    region: str | None
    backing: Backing = Backing.UNKNOWN
    start: int | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What discover found. `tiers` is ordered by rank; a node may be in no tier."""

    nodes: tuple[Node, ...]
    tiers: tuple[Tier, ...]
    memdevs: tuple[Memdev, ...] = ()
    decoders: tuple[Decoder, ...] = ()
    regions: tuple[CxlRegion, ...] = ()
    dax_devices: tuple[DaxDevice, ...] = ()
    warnings: tuple[str, ...] = ()

    def names(self) -> Mapping[Rank, str]:
        """Returns the tiers' names."""
        return {tier.rank: tier.name for tier in self.tiers}

    def rank_of_node(self) -> NDArray[np.int8]:
        """Returns a lookup table from node id to rank, -1 where a node is in no tier."""
        table = np.full(max((n.id for n in self.nodes), default=0) + 1, -1, np.int8)
        for tier in self.tiers:
            table[list(tier.nodes)] = tier.rank
        return table

    def node_map(self) -> NodeMap:
        """Returns a lookup table from physical address to node."""
        blocks = [(block, node.id) for node in self.nodes for block in node.blocks]
        bounds = np.array([(block.start, block.stop) for block, _ in blocks], np.uint64)
        edges = np.unique(bounds)
        nodes, claims = np.full(len(edges) + 1, -1, np.int16), np.zeros(len(edges) + 1, np.intp)
        parts = np.searchsorted(edges, bounds) + 1
        for (first, last), (_, node) in zip(parts, blocks, strict=True):
            nodes[first:last] = node
            claims[first:last] += 1
        nodes[claims > 1] = -1
        return NodeMap(edges=edges, nodes=nodes)


class KernelMoves(NamedTuple):
    """What the kernel's own placement comes to, in pages, since boot or within a while."""

    faults: int = 0
    """Those of its looks at what is accessed (numa_hint_faults)."""
    candidates: int = 0
    """Those that it found hot enough to promote."""
    promoted: int = 0
    demoted: int = 0
    """In its need: by kswapd, or in an allocation."""


class NodeRoom(NamedTuple):
    """What a node can take before the kernel reclaims, in bytes.

    `aside_bytes` are free too, but single CPUs keep them for themselves, for some seconds. In
    `cache_bytes` is page cache that is inactive, which the kernel has make way first.
    """

    free_bytes: int = 0
    aside_bytes: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRoom:
    """A tier's memory at this moment.

    `free_bytes` is what the kernel's free lists hold above the zones' high watermarks, so filling
    it wakes neither kswapd nor the OOM killer. `aside_bytes` come on top in some seconds, as
    NodeRoom's: a plan counts them, or it would have too much make way, and moves wait for them.
    `cache_bytes` are NodeRoom's: only who lets the kernel reclaim counts them.
    `loaded_cycles` is what loads from it take lately, with what else the machine does; None where
    that is not known.
    """

    rank: Rank
    capacity_bytes: int
    free_bytes: int
    headroom_bytes: int
    latency_ns: int | None
    aside_bytes: int = 0
    cache_bytes: int = 0
    loaded_cycles: float | None = None

    @property
    def spare_bytes(self) -> int:
        """What a plan may fill; below 0, what is missing of the headroom."""
        return self.free_bytes + self.aside_bytes - self.headroom_bytes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The few parameters that placement turns on. docs/policy.md tells what each is for."""

    short_s: float = 1.0
    long_s: float = 10.0
    hysteresis: float = 1.5
    horizon_s: float = 30.0
    room_horizon_s: float = 30.0
    payback: float = 2.0
    dwell_s: float = 5.0
    retry_s: float = 10.0
    retry_most_s: float = 600.0
    regret_percent: float = 50.0
    stall_percent: float = 10.0
    latency_gap_ns: float = 100.0
    move_cost_ns: float = 4000.0


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


class Pin(StrEnum):
    """What is said about memory, before its heat."""

    FASTEST = "fastest"
    """It comes first wherever there is room, and makes way for nobody."""
    HERE = "here"
    """It stays where it is."""


PIN_CODE: Mapping[Pin, int] = {pin: code for code, pin in enumerate(Pin, 1)}

PINNED = np.dtype([("start", "u8"), ("end", "u8"), ("pin", "u1")])
"""A range of a target that is pinned, whole pages; `pin` is a PIN_CODE."""

Floats: TypeAlias = NDArray[np.float64]

Flags: TypeAlias = bool | NDArray[np.bool_]
"""One for all pieces of a target, or one for each."""


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


class TenantClass(StrEnum):
    """Who comes before whom, whatever the weights; the first here comes first."""

    LATENCY = "latency"
    NORMAL = "normal"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 for who comes first."""
        return list(TenantClass).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Processes whose memory competes as one with that of others.

    `guaranteed_bytes` and `maximum_bytes` are of tiers; of those that are not in them nothing is
    guaranteed, and all may be had. `far_mbps` is what its arenas together may copy at most to and
    from tiers of a kind, in MiB a second.
    """

    name: str
    class_: TenantClass = TenantClass.NORMAL
    weight: float = 100.0
    guaranteed_bytes: Mapping[Rank, int] = field(default_factory=dict)
    maximum_bytes: Mapping[Rank, int] = field(default_factory=dict)
    far_mbps: Mapping[TierKind, float] = field(default_factory=dict)


class Kept(StrEnum):
    """Why hot bytes are left in a slower tier."""

    NO_ROOM = "no room, and nothing colder to make way"
    BUDGET = "the round's budget is spent"
    HELD = "moved or refused lately"
    SWINGS = "moved up and down again for nothing"
    RESTS = "moves of its process did not pay, and it rests"
    SHARE = "its tenant has its share"
    LOADED = "the faster tier is the slower one under its load"
    PINNED = "it is pinned where it is"
    LOOK = "its pages are to be looked at one by one first"
    SORTS = "the kernel is to sort its pages first"
    SPARE = "its process has few accesses there, and far more of other pages"


KEPT_CODE: Mapping[Kept, int] = {why: code for code, why in enumerate(Kept, 1)}
"""How a piece says why."""


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


class Action(StrEnum):
    """What DAMON does with the regions of a scheme, by the kernel's names."""

    STAT = "stat"
    """It counts them."""
    PROMOTE = "migrate_hot"
    DEMOTE = "migrate_cold"


class NodeShare(StrEnum):
    """A share of a node's memory that DAMON can steer by, by the kernel's names."""

    USED = "node_mem_used_bp"
    FREE = "node_mem_free_bp"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaGoal:
    """A scheme rests once `what` of `node` is so much of it, in hundredths of a percent."""

    what: NodeShare
    node: NodeId
    least_bp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A scheme moves at most `bytes` in each `interval_ms`, and nothing while its goal is met.

    Where that is not enough for all that match, it goes on where it ended, or where `by_accesses`
    begins with those that match best.
    """

    bytes: int
    interval_ms: int
    goal: QuotaGoal
    by_accesses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What DAMON is to do with the regions that match.

    `least_accesses` and `most_accesses` are of an aggregation's samples, `least_age` counts
    aggregations; no `most_accesses` is no limit. `destination` and `quota` are of those that move.
    """

    action: Action
    least_accesses: int = 0
    most_accesses: int | None = None
    least_age: int = 0
    destination: NodeId | None = None
    quota: Quota | None = None


COUNT_ALL = Scheme(action=Action.STAT)
"""Every region, for its tried_regions."""


class Outcome(IntEnum):
    """What became of a page of a move. The value indexes Report's counts."""

    MOVED = 0
    RESIDENT = 1  # not in the source tier (any more), nothing to do
    ABSENT = 2  # not present: never touched, swapped out, or device memory
    BUSY = 3  # isolated, under writeback or pinned
    SHARED = 4  # mapped by another process too
    UNMOVABLE = 5  # special mapping, zero page, guard
    NO_ROOM = 6  # the destination is at half of its headroom
    LOCKED = 7  # mlocked, and left alone as configured
    CPUSET = 8  # the destination lies outside the target's cpuset
    MEMPOLICY = 9  # the destination lies outside the range's mempolicy
    DENIED = 10  # no permission to move this process's pages
    GONE = 11  # the process has exited
    LATER = 12  # the round's budget of bytes or time was spent
    FAILED = 13  # any other errno
    OFFLINE = 14  # the destination has no memory any more

    @property
    def is_refusal(self) -> bool:
        """True where trying again next round would most likely be refused again."""
        return self in _REFUSALS

    @property
    def label(self) -> str:
        return self.name.lower()


_REFUSALS = frozenset(
    {
        Outcome.BUSY,
        Outcome.SHARED,
        Outcome.UNMOVABLE,
        Outcome.LOCKED,
        Outcome.CPUSET,
        Outcome.MEMPOLICY,
        Outcome.DENIED,
        Outcome.FAILED,
    }
)


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
