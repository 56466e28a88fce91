# SPDX-License-Identifier: Apache-2.0
"""What each key may hold: as a check of what tomllib gives, and as JSON Schema for editors.

A check returns the value as the dataclass wants it, or raises a ValueError that tells what is
allowed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tierd.config.values import Engine, Mode, OnError, PolicyName, Provision, Rival, Samples
from tierd.model import NodeId, Online, Pin, TenantClass, TierKind

_COMM_BYTES = 15  # TASK_COMM_LEN less the final NUL
_UNIT = re.compile(r"[^/\s]+\.(service|scope|slice)")
_CONTAINER = re.compile(r"[0-9a-f]{12,64}")
_USER = re.compile(r"[0-9]{1,10}|[A-Za-z_][A-Za-z0-9_.@-]{0,254}")
_LISTEN = re.compile(r"^(?:([0-9.]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5}))?$")
_LAST_PORT = 65_535
_TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One key's rule. `schema` is as JSON Schema draft 2020-12 has it."""

    check: Callable[[Any], Any]
    schema: Mapping[str, Any]

    def __call__(self, value: Any) -> Any:
        return self.check(value)


def _number(low: float, high: float) -> Rule:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"a number from {low:g} to {high:g}")
        if not low <= value <= high:
            raise ValueError(f"from {low:g} to {high:g}")
        return float(value)

    return Rule(check, {"type": "number", "minimum": low, "maximum": high})


def _whole(low: int, high: int) -> Rule:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"a whole number from {low} to {high}")
        if not low <= value <= high:
            raise ValueError(f"from {low} to {high}")
        return value

    return Rule(check, {"type": "integer", "minimum": low, "maximum": high})


def _choice(*members: StrEnum) -> Rule:
    def check(value: Any) -> StrEnum:
        for member in members:
            if value == member.value:
                return member
        raise ValueError("one of " + ", ".join(f'"{member}"' for member in members))

    return Rule(check, {"enum": [member.value for member in members]})


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _absolute_path(value: Any) -> Path:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ValueError("an absolute path")
    return Path(value)


def _tier_name(value: Any) -> str:
    if not isinstance(value, str) or not _TIER_NAME.fullmatch(value):
        raise ValueError("a name of a-z, 0-9, - and _ that begins with a letter, at most 32 long")
    return value


def _nodes(value: Any) -> tuple[NodeId, ...]:
    ids = value if isinstance(value, list) else []
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError("a list of node numbers such as [1, 2]")
    return tuple(map(NodeId, ids))


def _command(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a command's name as in /proc/PID/comm")
    if len(value.encode()) > _COMM_BYTES:
        kept = value.encode()[:_COMM_BYTES].decode(errors="ignore")
        raise ValueError(f'at most {_COMM_BYTES} bytes, all that the kernel keeps: "{kept}"')
    return value


def _cgroup(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or ".." in value.split("/"):
        raise ValueError('a cgroup below the root, such as "/system.slice/redis.service"')
    return "/" + value.strip("/")


def _unit(value: Any) -> str:
    if not isinstance(value, str) or not _UNIT.fullmatch(value):
        raise ValueError('a systemd unit with its suffix, such as "redis-server.service"')
    return value


def _container(value: Any) -> str:
    if not isinstance(value, str) or not _CONTAINER.fullmatch(value):
        raise ValueError("the first 12 to 64 digits of a container's id, in lower case")
    return value


def _user(value: Any) -> str:
    if not isinstance(value, str) or not _USER.fullmatch(value):
        raise ValueError('a user\'s name, or number as in "1000"')
    return value


def _listen(value: Any) -> str:
    found = _LISTEN.fullmatch(value) if isinstance(value, str) else None
    if found is None or int(found[2] or 0) > _LAST_PORT:
        raise ValueError('"" for none, or an address and a port such as "127.0.0.1:9464"')
    return found[0]


def _pattern(whole: re.Pattern[str]) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^({whole.pattern})$"}


def _sizes(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("a table of sizes by tier, such as { dram = 512 }")
    try:
        return {_tier_name(name): _MIB(size) for name, size in value.items()}
    except ValueError as error:
        raise ValueError(f"sizes by tier, each named and {error}") from None


def _rates(value: Any) -> dict[TierKind, float]:
    if not isinstance(value, dict):
        raise ValueError("a table of MiB a second by kind of tier, such as { rdma = 1000 }")
    rates = {}
    for name, rate in value.items():
        try:
            kind = TierKind(_FAR_KIND(name))
        except ValueError as error:
            raise ValueError(f"by kind of tier, {error}") from None
        try:
            rates[kind] = _MBPS(rate)
        except ValueError as error:
            raise ValueError(f"MiB a second, {error}") from None
    return rates


def _pins(value: Any) -> dict[str, Pin]:
    if not isinstance(value, dict) or not 0 < len(value) <= _MOST_PINS:
        raise ValueError(
            f'a table of 1 to {_MOST_PINS} mappings, such as {{ "[heap]" = "fastest" }}'
        )
    for name in value:
        if not _MAPPING.fullmatch(name):
            raise ValueError(
                "mappings named as in /proc/PID/maps: a path, [heap], [stack] or [anon:NAME]"
            )
    try:
        return {name: _PIN(pin) for name, pin in value.items()}
    except ValueError as error:
        raise ValueError(f"mappings, each pinned as {error}") from None


_MOST_PINS = 64
_MAPPING = re.compile(
    r"/[^\x00-\x1f]{0,4095}|\[(?:heap|stack|anon(?:_shmem)?:[^\x00-\x1f]{1,80})\]"
)
_PIN = _choice(*Pin)
_PINS = Rule(
    _pins,
    {
        "type": "object",
        "propertyNames": {"pattern": f"^({_MAPPING.pattern})$"},
        "additionalProperties": dict(_PIN.schema),
        "minProperties": 1,
        "maxProperties": _MOST_PINS,
    },
)
_MIB = _number(0, 1_000_000_000)
_SIZES = Rule(
    _sizes,
    {
        "type": "object",
        "propertyNames": {"pattern": f"^{_TIER_NAME.pattern}$"},
        "additionalProperties": dict(_MIB.schema),
    },
)
_FAR_KIND = _choice(*(kind for kind in TierKind if kind.is_far))
_MBPS = _number(1, 1_000_000)
_RATES = Rule(
    _rates,
    {
        "type": "object",
        "propertyNames": dict(_FAR_KIND.schema),
        "additionalProperties": dict(_MBPS.schema),
    },
)
_FLAG = Rule(_flag, {"type": "boolean"})
_PATH = Rule(_absolute_path, {"type": "string", "pattern": "^/"})

TABLES: Mapping[str, Mapping[str, Rule]] = {
    "daemon": {
        "interval_s": _number(0.1, 60),
        "nice": _whole(0, 19),
        "state_dir": _PATH,
        "runtime_dir": _PATH,
    },
    "conflicts": {"numa_balancing": _choice(*Rival)},
    "api": {"metrics_listen": Rule(_listen, {"type": "string", "pattern": _LISTEN.pattern})},
    "arena": {
        "enabled": _FLAG,
        "max_arenas": _whole(1, 10_000),
        "max_blocks": _whole(1, 1 << 30),
        "far_mbps": _RATES,
    },
    "discover": {
        "min_mib": _number(0, 1_000_000),
        "min_age_s": _number(0, 3600),
    },
    "damon": {
        "sample_us": _whole(1000, 1_000_000),
        "aggregation_us": _whole(5000, 60_000_000),
        "min_regions": _whole(3, 10_000),
        "max_regions": _whole(10, 100_000),
        "cpu_percent": _number(0.1, 100),
        "zoom": _FLAG,
        "take_over": _FLAG,
    },
    "hardware": {
        "samples": _choice(*Samples),
        "cpu_percent": _number(0.1, 100),
    },
    "cxl": {
        "provision": _choice(*Provision),
        "online": _choice(*Online),
        "on_error": _choice(*OnError),
        "fence_after": _whole(1, 10_000),
    },
    "policy": {
        "name": _choice(*PolicyName),
        "mode": _choice(*Mode),
        "headroom_percent": _number(0, 50),
        "write_weight": _number(0, 100),
        "short_s": _number(0.1, 600),
        "long_s": _number(1, 3600),
        "hysteresis": _number(1, 100),
        "horizon_s": _number(1, 3600),
        "room_horizon_s": _number(1, 86_400),
        "payback": _number(0, 1000),
        "dwell_s": _number(0, 3600),
        "retry_s": _number(0.1, 3600),
        "retry_most_s": _number(1, 86_400),
        "regret_percent": _number(1, 100),
        "stall_percent": _number(0.1, 100),
        "latency_gap_ns": _number(1, 100_000),
        "move_cost_ns": _number(0, 1_000_000),
    },
    "migrate": {
        "engine": _choice(*Engine),
        "budget_mbps": _MBPS,
        "batch_pages": _whole(1, 65_536),
        "round_percent": _number(1, 100),
        "move_locked": _FLAG,
        "demote_cache": _FLAG,
    },
}
"""The rules of the keys of each table."""

NEEDS_RESTART = frozenset(
    {"conflicts.numa_balancing", "migrate.engine", "arena.enabled"}
    | {f"daemon.{key}" for key in TABLES["daemon"] if key != "interval_s"}
    | {f"damon.{key}" for key in TABLES["damon"] if key != "cpu_percent"}
    | {f"{table}.{key}" for table in ("api", "hardware") for key in TABLES[table]}
)
"""The keys of tables that a running daemon cannot change."""

ARRAYS: Mapping[str, Mapping[str, Rule]] = {
    "tier": {
        "name": Rule(_tier_name, _pattern(_TIER_NAME)),
        "kind": _choice(TierKind.DRAM, TierKind.CXL),
        "nodes": Rule(
            _nodes, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
        ),
        "latency_ns": _whole(1, 1_000_000),
        "bandwidth_mbps": _whole(1, 100_000_000),
    },
    "target": {
        "pid": _whole(1, 1 << 22),
        "command": Rule(_command, {"type": "string", "minLength": 1, "maxLength": _COMM_BYTES}),
        "cgroup": Rule(_cgroup, {"type": "string", "pattern": "^/"}),
        "unit": Rule(_unit, _pattern(_UNIT)),
        "container": Rule(_container, _pattern(_CONTAINER)),
        "user": Rule(_user, _pattern(_USER)),
        "pin": _PINS,
    },
    "tenant": {
        "cgroup": Rule(_cgroup, {"type": "string", "pattern": "^/"}),
        "class": _choice(*TenantClass),
        "weight": _number(1, 10_000),
        "guaranteed_mib": _SIZES,
        "maximum_mib": _SIZES,
        "far_mbps": _RATES,
    },
}
"""The rules of the keys of each table that there may be several of."""

NEEDED_OF_TENANT = ("cgroup",)
NEEDED_OF_TIER = ("name", "kind", "nodes")
MARKS_OF_TARGET = ("command", "cgroup", "unit", "container", "user")
"""A target has a pid, or at least one of these."""
