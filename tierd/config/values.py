# SPDX-License-Identifier: Apache-2.0
"""The values that a configuration holds, with their defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from keyword import iskeyword
from pathlib import Path
from typing import Any

from tierd.errors import Problem
from tierd.model import NodeId, Online, Pid, Pin, Policy, TenantClass, TierKind


class Mode(StrEnum):
    """What the daemon does with a plan."""

    PLACE = "place"
    OBSERVE = "observe"

    @property
    def moves(self) -> bool:
        return self is Mode.PLACE


class Rival(StrEnum):
    """What is done about the kernel's own page placement."""

    IGNORE = "ignore"
    OBSERVE = "observe"
    REFUSE = "refuse"
    TAKE_OVER = "take_over"
    COOPERATE = "cooperate"
    """It is turned on: the kernel promotes single pages, tierd what is hot throughout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConflictsConfig:
    numa_balancing: Rival = Rival.OBSERVE


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """`metrics_listen` is where metrics are told over TCP too, ADDRESS:PORT; empty for nowhere."""

    metrics_listen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaConfig:
    """Whether programs may connect arenas, and how many each user's may be, in all.

    `far_mbps` is what all of them together may copy to and from tiers of a kind in a second.
    """

    enabled: bool = False
    max_arenas: int = 64
    max_blocks: int = 4_000_000
    far_mbps: Mapping[TierKind, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """`nice` is by how much tierd gives way to programs, as nice(1) has it.

    Its kdamonds do too, where it may have them do so.
    """

    interval_s: float = 1.0
    nice: int = 5
    state_dir: Path = Path("/var/lib/tierd")
    runtime_dir: Path = Path("/run/tierd")


@dataclass(frozen=True, slots=True, kw_only=True)
class DamonConfig:
    """`cpu_percent` is what kdamonds may use of one core."""

    sample_us: int = 20_000
    aggregation_us: int = 400_000
    min_regions: int = 100
    max_regions: int = 1000
    cpu_percent: float = 2.0
    zoom: bool = False
    take_over: bool = False


class Samples(StrEnum):
    """What samples the addresses of accesses."""

    AUTO = "auto"
    PAGE_FAULTS = "page-faults"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """`cpu_percent` is what samples may cost of one core."""

    samples: Samples = Samples.AUTO
    cpu_percent: float = 1.0


class Provision(StrEnum):
    """Which new CXL devices are made memory of by themselves."""

    NO = "no"
    VOLATILE = "volatile"
    """Those of volatile memory alone that nothing uses yet."""


class OnError(StrEnum):
    """What the daemon does when a CXL device has lost data."""

    TELL = "tell"
    EVACUATE = "evacuate"
    """All pages are moved out of the block of memory that it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CxlConfig:
    """What `tierctl cxl provision` does, which udev has run for each new device.

    With `on_error` "evacuate" the nodes of a device that has had `fence_after` uncorrected errors
    in a day are emptied, and nothing is placed there.
    """

    provision: Provision = Provision.NO
    online: Online = Online.MOVABLE
    on_error: OnError = OnError.TELL
    fence_after: int = 10


class PolicyName(StrEnum):
    """Named sets of the policy's keys; see NAMED."""

    BALANCED = "balanced"
    LATENCY = "latency"
    CAPACITY = "capacity"
    OBSERVE = "observe"


NAMED: Mapping[PolicyName, Mapping[str, Any]] = {
    PolicyName.BALANCED: {},
    PolicyName.LATENCY: {
        "short_s": 0.5,
        "long_s": 5.0,
        "payback": 1.0,
        "hysteresis": 1.2,
        "dwell_s": 2.0,
    },
    PolicyName.CAPACITY: {
        "long_s": 30.0,
        "payback": 6.0,
        "hysteresis": 2.5,
        "dwell_s": 15.0,
    },
    PolicyName.OBSERVE: {"mode": Mode.OBSERVE},
}
"""What each has in place of the defaults, by the keys of [policy]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """`headroom_percent` of a tier's capacity is left free, above the kernel's watermarks.

    A store that is sampled counts for `write_weight` reads.
    `name` has given the values of the keys that are not set themselves. `placement` holds what
    decide takes; in the file its fields stand in [policy] with the others.
    """

    name: PolicyName = PolicyName.BALANCED
    mode: Mode = Mode.PLACE
    headroom_percent: float = 2.0
    write_weight: float = 1.0
    placement: Policy = field(default_factory=Policy)


class Engine(StrEnum):
    """Who moves."""

    MOVE_PAGES = "move_pages"
    """tierd decides, and moves by move_pages(2)."""
    DAMOS = "damos"
    """The kernel's DAMON moves, by schemes that tierd makes of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateConfig:
    """`round_percent` is the share of daemon.interval_s that may be spent in moving."""

    engine: Engine = Engine.MOVE_PAGES
    budget_mbps: float = 256.0
    batch_pages: int = 16_384
    round_percent: float = 50.0
    move_locked: bool = False
    demote_cache: bool = False


def attribute(key: str) -> str:
    """Returns how Python spells a key of an entry: `class` is a word of its own there."""
    return f"{key}_" if iskeyword(key) else key


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One [[tier]]; the first in the file is the fastest. `place` is where the file says so."""

    name: str
    kind: TierKind
    nodes: tuple[NodeId, ...]
    latency_ns: int | None = None
    bandwidth_mbps: int | None = None
    place: "Place"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverConfig:
    """Which processes are worth watching. Those named by their pid always are."""

    min_mib: float = 16.0
    min_age_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """One [[target]]: a pid alone, or at least one of the others, of which all must hold.

    `cgroup` takes in what is below it; `unit` is of systemd, `container` the beginning of its id.
    `pin` tells by the names of mappings, as in /proc/PID/maps, how these are pinned.
    """

    pid: Pid | None = None
    command: str | None = None
    cgroup: str | None = None
    unit: str | None = None
    container: str | None = None
    user: str | None = None
    pin: Mapping[str, Pin] | None = None
    place: "Place"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One [[tenant]]: what the processes of a cgroup and of those below it have together.

    The sizes are by the tier's name, `far_mbps` is by the kind. Processes of no [[tenant]] are one
    together.
    """

    cgroup: str
    class_: TenantClass = TenantClass.NORMAL
    weight: float = 100.0
    guaranteed_mib: Mapping[str, float] = field(default_factory=dict)
    maximum_mib: Mapping[str, float] = field(default_factory=dict)
    far_mbps: Mapping[TierKind, float] = field(default_factory=dict)
    place: "Place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in which file something was said, for what only shows when the machine is looked at."""

    file: str
    line: int | None
    key: str

    def problem(self, message: str) -> Problem:
        return Problem(file=self.file, line=self.line, key=self.key, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    daemon: DaemonConfig = field(default_factory=DaemonConfig)
    conflicts: ConflictsConfig = field(default_factory=ConflictsConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    arena: ArenaConfig = field(default_factory=ArenaConfig)
    discover: DiscoverConfig = field(default_factory=DiscoverConfig)
    damon: DamonConfig = field(default_factory=DamonConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    cxl: CxlConfig = field(default_factory=CxlConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    migrate: MigrateConfig = field(default_factory=MigrateConfig)
    tiers: tuple[TierConfig, ...] = ()
    targets: tuple[TargetConfig, ...] = ()
    tenants: tuple[TenantConfig, ...] = ()
