# SPDX-License-Identifier: Apache-2.0
"""The configuration: /etc/tierd/tierd.toml, checked whole before anything is used.

systemd/tierd.toml is the same as no file at all: it names every key with its default and range.
Every problem is told at once, with its line. tomllib knows no lines and the TOML libraries that
keep a document's layout (tomlkit) give none for a key either, so _lines() finds them: it feeds
tomllib one statement at a time, and leaves every rule of the syntax to it.
"""

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from tierd.errors import ConfigError, Problem
from tierd.model import MAX_TIERS, NodeId, Pid, Policy, TierKind

DEFAULT_PATH = Path("/etc/tierd/tierd.toml")
LARGEST_BYTES = 64 << 10

_LONGEST_STATEMENT = 256
_COMM_BYTES = 15  # TASK_COMM_LEN less the final NUL
_TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")

Key: TypeAlias = tuple[str | int, ...]


class Mode(StrEnum):
    """What the daemon does with a plan."""

    PLACE = "place"
    OBSERVE = "observe"

    @property
    def moves(self) -> bool:
        return self is Mode.PLACE


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    interval_s: float = 1.0
    state_dir: Path = Path("/var/lib/tierd")
    runtime_dir: Path = Path("/run/tierd")


@dataclass(frozen=True, slots=True, kw_only=True)
class DamonConfig:
    """`cpu_percent` is what kdamonds may use of one core."""

    sample_us: int = 20_000
    aggregation_us: int = 400_000
    min_regions: int = 10
    max_regions: int = 1000
    cpu_percent: float = 2.0
    take_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """`headroom_percent` of a tier's capacity is left free, above the kernel's watermarks.

    `placement` holds what decide takes; in the file its fields stand in [policy] with the others.
    """

    mode: Mode = Mode.PLACE
    headroom_percent: float = 2.0
    placement: Policy = field(default_factory=Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateConfig:
    """`round_percent` is the share of daemon.interval_s that may be spent in moving."""

    budget_mbps: float = 256.0
    batch_pages: int = 16_384
    round_percent: float = 50.0
    move_locked: bool = False


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
class TargetConfig:
    """One [[target]]: exactly one of the first three is set. `cgroup` takes in what is below it."""

    pid: Pid | None = None
    command: str | None = None
    cgroup: str | None = None
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
    damon: DamonConfig = field(default_factory=DamonConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    migrate: MigrateConfig = field(default_factory=MigrateConfig)
    tiers: tuple[TierConfig, ...] = ()
    targets: tuple[TargetConfig, ...] = ()


def load(path: Path = DEFAULT_PATH) -> Config:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: everything that is wrong in it, or why it cannot be read.
    """
    return parse(_read(path), str(path))


def load_or_default(path: Path | None) -> Config:
    """As load(); without a path the default one, or no file at all where that isn't there."""
    if path is None and not DEFAULT_PATH.exists():
        return Config()
    return load(path or DEFAULT_PATH)


def parse(content: str, file: str) -> Config:
    """As load(), of a text; `file` is what the problems name."""
    try:
        document = tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError([_syntax_problem(error, content, file)]) from None
    return _Check(file, _lines(content)).config(document)


# The rules: each takes a value as tomllib gives it, and returns it as the dataclass wants it or
# raises a ValueError that tells what is allowed.

Rule: TypeAlias = Callable[[Any], Any]


def _number(low: float, high: float) -> Rule:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"a number from {low:g} to {high:g}")
        if not low <= value <= high:
            raise ValueError(f"from {low:g} to {high:g}")
        return float(value)

    return check


def _whole(low: int, high: int) -> Rule:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"a whole number from {low} to {high}")
        if not low <= value <= high:
            raise ValueError(f"from {low} to {high}")
        return value

    return check


def _choice(*members: StrEnum) -> Rule:
    def check(value: Any) -> StrEnum:
        for member in members:
            if value == member.value:
                return member
        raise ValueError("one of " + ", ".join(f'"{member}"' for member in members))

    return check


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


_TABLES: Mapping[str, Mapping[str, Rule]] = {
    "daemon": {
        "interval_s": _number(0.1, 60),
        "state_dir": _absolute_path,
        "runtime_dir": _absolute_path,
    },
    "damon": {
        "sample_us": _whole(1000, 1_000_000),
        "aggregation_us": _whole(5000, 60_000_000),
        "min_regions": _whole(3, 10_000),
        "max_regions": _whole(10, 100_000),
        "cpu_percent": _number(0.1, 100),
        "take_over": _flag,
    },
    "policy": {
        "mode": _choice(*Mode),
        "headroom_percent": _number(0, 50),
        "short_s": _number(0.1, 600),
        "long_s": _number(1, 3600),
        "hysteresis": _number(1, 100),
        "horizon_s": _number(1, 3600),
        "payback": _number(0, 1000),
        "dwell_s": _number(0, 3600),
        "retry_s": _number(0.1, 3600),
        "retry_most_s": _number(1, 86_400),
        "latency_gap_ns": _number(1, 100_000),
        "move_cost_ns": _number(0, 1_000_000),
    },
    "migrate": {
        "budget_mbps": _number(1, 1_000_000),
        "batch_pages": _whole(1, 65_536),
        "round_percent": _number(1, 100),
        "move_locked": _flag,
    },
}
_ARRAYS: Mapping[str, Mapping[str, Rule]] = {
    "tier": {
        "name": _tier_name,
        "kind": _choice(TierKind.DRAM, TierKind.CXL),
        "nodes": _nodes,
        "latency_ns": _whole(1, 1_000_000),
        "bandwidth_mbps": _whole(1, 100_000_000),
    },
    "target": {"pid": _whole(1, 1 << 22), "command": _command, "cgroup": _cgroup},
}
_PLACEMENT = frozenset(Policy.__dataclass_fields__)


class _Check:
    """Gathers the problems of one document while its parts are turned into values."""

    def __init__(self, file: str, lines: Mapping[Key, int]) -> None:
        self._file = file
        self._lines = lines
        self._problems: list[Problem] = []

    def config(self, document: Mapping[str, Any]) -> Config:
        self._refuse_unknown((), document, [*_TABLES, *_ARRAYS])
        tiers = dict(self._tiers(document))
        config = Config(
            daemon=DaemonConfig(**self._table("daemon", document)),
            damon=DamonConfig(**self._table("damon", document)),
            policy=_policy(self._table("policy", document)),
            migrate=MigrateConfig(**self._table("migrate", document)),
            tiers=tuple(tiers.values()),
            targets=tuple(self._targets(document)),
        )
        self._check_order(config)
        self._check_tiers(tiers)
        if self._problems:
            raise ConfigError(sorted(self._problems, key=lambda problem: problem.line or 0))
        return config

    def _refuse(self, key: Key, message: str) -> None:
        self._problems.append(self._place(key).problem(message))

    def _place(self, key: Key) -> Place:
        known = next((key[:n] for n in range(len(key), 0, -1) if key[:n] in self._lines), ())
        return Place(file=self._file, line=self._lines.get(known), key=_spell(key))

    def _refuse_unknown(self, above: Key, table: Mapping[str, Any], known: Sequence[str]) -> None:
        for name in table:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                self._refuse((*above, name), f"unknown key; {advice}")

    def _table(self, name: str, document: Mapping[str, Any]) -> dict[str, Any]:
        table = document.get(name, {})
        if not isinstance(table, dict):
            self._refuse((name,), f"must be a table, [{name}]")
            return {}
        return self._values((name,), table, _TABLES[name])

    def _values(
        self, above: Key, table: Mapping[str, Any], rules: Mapping[str, Rule]
    ) -> dict[str, Any]:
        self._refuse_unknown(above, table, list(rules))
        values = {}
        for name in (name for name in rules if name in table):
            try:
                values[name] = rules[name](table[name])
            except ValueError as error:
                self._refuse((*above, name), f"must be {error}; it is {_show(table[name])}")
        return values

    def _array(
        self, name: str, document: Mapping[str, Any]
    ) -> Iterable[tuple[Key, dict[str, Any]]]:
        array = document.get(name, [])
        if not isinstance(array, list) or not all(isinstance(table, dict) for table in array):
            self._refuse((name,), f"must be tables, each headed [[{name}]]")
            return
        for index, table in enumerate(array):
            yield (name, index), self._values((name, index), table, _ARRAYS[name])

    def _tiers(self, document: Mapping[str, Any]) -> Iterable[tuple[Key, TierConfig]]:
        needed = ("name", "kind", "nodes")
        for key, values in self._array("tier", document):
            given = document["tier"][key[1]]
            for name in (name for name in needed if name not in given):
                self._refuse(key, f"{name} is missing")
            if values.keys() >= {*needed}:
                yield key, TierConfig(**values, place=self._place((*key, "nodes")))
            if key[1] == MAX_TIERS:
                self._refuse(key, f"at most {MAX_TIERS} tiers")

    def _targets(self, document: Mapping[str, Any]) -> Iterable[TargetConfig]:
        for key, values in self._array("target", document):
            given = document["target"][key[1]].keys() & _ARRAYS["target"].keys()
            if len(given) != 1:
                self._refuse(key, "must have exactly one of pid, command, cgroup")
            elif values:
                yield TargetConfig(**values, place=self._place((*key, *given)))

    def _check_order(self, config: Config) -> None:
        policy, damon = config.policy.placement, config.damon
        for key, holds, message in (
            (
                ("policy", "long_s"),
                policy.long_s > policy.short_s,
                f"must be above short_s, which is {policy.short_s:g}",
            ),
            (
                ("policy", "retry_most_s"),
                policy.retry_most_s >= policy.retry_s,
                f"must not be below retry_s, which is {policy.retry_s:g}",
            ),
            (
                ("damon", "aggregation_us"),
                damon.aggregation_us >= 5 * damon.sample_us,
                f"must be 5 times sample_us ({damon.sample_us}) or more, or heat is not told",
            ),
            (
                ("damon", "max_regions"),
                damon.max_regions >= 2 * damon.min_regions,
                f"must be twice min_regions ({damon.min_regions}) or more, or no region is split",
            ),
        ):
            if not holds:
                self._refuse(key, message)

    def _check_tiers(self, tiers: Mapping[Key, TierConfig]) -> None:
        names: set[str] = set()
        held: dict[NodeId, str] = {}
        for key, tier in tiers.items():
            if tier.name in names:
                self._refuse((*key, "name"), f"another tier is named {tier.name} too")
            names.add(tier.name)
            for node in tier.nodes:
                if node in held:
                    self._refuse((*key, "nodes"), f"node {node} is already in tier {held[node]}")
                held[node] = tier.name


def _policy(values: Mapping[str, Any]) -> PolicyConfig:
    placement = {name: value for name, value in values.items() if name in _PLACEMENT}
    others = {name: value for name, value in values.items() if name not in _PLACEMENT}
    return PolicyConfig(placement=Policy(**placement), **others)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise ConfigError([_file_problem(path, f"cannot be read: {error.strerror}")]) from None
    if len(content) > LARGEST_BYTES:
        raise ConfigError([_file_problem(path, f"is larger than {LARGEST_BYTES >> 10} KiB")])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([_file_problem(path, "is not UTF-8 text", line)]) from None


def _file_problem(path: Path, message: str, line: int | None = None) -> Problem:
    return Problem(file=str(path), line=line, key="", message=message)


def _syntax_problem(error: Exception, content: str, file: str) -> Problem:
    message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    message, _, place = message.partition(" (at ")
    found = re.match(r"line (\d+)", place)
    last = content.count("\n") + 1 if place else None
    line = int(found[1]) if found else last
    return Problem(file=file, line=line, key="", message=f"is not TOML: {message}")


def _spell(key: Key) -> str:
    """Spells a key as people do: tier[2].nodes, counted from 1."""
    parts = (f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in key)
    return "".join(parts).removeprefix(".")


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 64:
        return "larger than any number here"
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def _lines(content: str) -> dict[Key, int]:
    """Finds the line of each key and table of a valid document.

    A statement is as many lines as tomllib needs to make sense of them alone: what is cut inside
    of a string or an array never parses. One of more than _LONGEST_STATEMENT lines ends the
    search, so that the work stays linear; the keys after it are told without a line.
    """
    lines: dict[Key, int] = {}
    lengths: Counter[Key] = Counter()
    table: Key = ()
    pending: list[str] = []
    for number, line in enumerate(content.replace("\r\n", "\n").split("\n"), 1):
        pending.append(line)
        if len(pending) > _LONGEST_STATEMENT:
            break
        try:
            statement = tomllib.loads("\n".join(pending))
        except (ValueError, RecursionError):
            continue
        first = number - len(pending) + 1
        if pending[0].lstrip().startswith("["):
            table = _enter(statement, lengths)
            lines[table] = first
        else:
            lines.update(dict.fromkeys(_keys(statement, table), first))
        pending = []
    return lines


def _enter(header: Mapping[str, Any], lengths: Counter[Key]) -> Key:
    """Returns the table that a header opens, and counts it if it is a new one of an array."""
    key: Key = ()
    value: Any = header
    while value:
        name, value = next(iter(value.items()))
        key = (*key, name)
        if isinstance(value, list):
            value = value[0]
            lengths[key] += 1
        if key in lengths:
            key = (*key, lengths[key] - 1)
    return key


def _keys(value: Any, above: Key) -> Iterable[Key]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inside in items:
        yield (*above, name)
        if isinstance(inside, dict | list):
            yield from _keys(inside, (*above, name))
