# SPDX-License-Identifier: Apache-2.0
"""The values that pass between the stages; those with arrays are in tierd/bulk.py.

Addresses and sizes are in bytes, instants in seconds of CLOCK_MONOTONIC unless a name says
otherwise. Unknown is None, never 0. Ranks count from 0, the fastest tier.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

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


class Pin(StrEnum):
    """What is said about memory, before its heat."""

    FASTEST = "fastest"
    """It comes first wherever there is room, and makes way for nobody."""
    HERE = "here"
    """It stays where it is."""


PIN_CODE: Mapping[Pin, int] = {pin: code for code, pin in enumerate(Pin, 1)}


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
    CUT = 15  # of a huge page that lies mostly outside of what makes way

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
        Outcome.CUT,
    }
)
