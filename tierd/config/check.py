# SPDX-License-Identifier: Apache-2.0
"""Turns documents of TOML into a configuration, or into all that is wrong with them.

Of several documents the later ones come on top: their tables key by key, their [[tier]],
[[target]] and [[tenant]] behind those before. A wrong value is told also where a later document
has another.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tierd.config.lines import Key, find_lines
from tierd.config.rules import (
    ARRAYS,
    MARKS_OF_TARGET,
    NEEDED_OF_TENANT,
    NEEDED_OF_TIER,
    TABLES,
    Rule,
)
from tierd.config.show import settings
from tierd.config.values import (
    NAMED,
    ApiConfig,
    ArenaConfig,
    Config,
    ConflictsConfig,
    CxlConfig,
    DaemonConfig,
    DamonConfig,
    DiscoverConfig,
    Engine,
    HardwareConfig,
    MigrateConfig,
    Place,
    PolicyConfig,
    PolicyName,
    Rival,
    TargetConfig,
    TenantConfig,
    TierConfig,
    attribute,
)
from tierd.errors import ConfigError, Problem
from tierd.model import MAX_TIERS, NodeId, Policy

MOST_DAMOS_TIERS = 2
"""DAMOS promotes towards one node, and demotes towards another."""

_PLACEMENT = frozenset(Policy.__dataclass_fields__)


@dataclass(frozen=True)
class Document:
    """One file's text, and what tomllib makes of it."""

    file: str
    content: str
    values: Mapping[str, Any]

    @cached_property
    def lines(self) -> Mapping[Key, int]:
        return find_lines(self.content)

    def place(self, key: Key) -> Place:
        """Returns where the key stands, or else what it is in."""
        known = next((key[:n] for n in range(len(key), 0, -1) if key[:n] in self.lines), ())
        return Place(file=self.file, line=self.lines.get(known), key=_spell(key))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where each key stands that is not at its default."""

    config: Config
    places: Mapping[tuple[str, str], Place]


def parse_document(content: str, file: str) -> Document:
    """Parses one file's text; `file` is what problems name.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        return Document(file, content, tomllib.loads(content))
    except (ValueError, RecursionError) as error:
        raise ConfigError([_syntax_problem(error, content, file)]) from None


def was_set(values: Mapping[str, Any]) -> Document:
    """Returns what a running daemon was told on top of its files."""
    return Document("tierctl set", "", values)


def named(name: PolicyName) -> Document:
    """Returns a policy with all that one of them sets, to come on top of another."""
    defaults, keys = settings(Config()), {key for values in NAMED.values() for key in values}
    policy = {key: defaults["policy", key] for key in keys} | {**NAMED[name], "name": name}
    return Document(f"policy {name}", "", {"policy": policy})


def check(documents: Sequence[Document]) -> Loaded:
    """Checks documents, and puts them together.

    Raises:
        ConfigError: every problem in all of them, in their order.
    """
    found = _Found()
    for document in documents:
        _Reader(document, found).read()
    config = found.config()
    _check_order(config, documents, found)
    _check_tiers(found)
    _check_rates(config, found)
    if config.migrate.engine is Engine.DAMOS:
        _check_damos(config, found)
    elif config.conflicts.numa_balancing is Rival.COOPERATE:
        _check_promises(found, f'numa_balancing "{Rival.COOPERATE}"', "take another")
    if found.problems:
        order = {document.file: index for index, document in enumerate(documents)}
        raise ConfigError(sorted(found.problems, key=lambda p: (order[p.file], p.line or 0)))
    return Loaded(config, found.places)


@dataclass(slots=True)
class _Found:
    """What was found so far in all documents."""

    tables: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in TABLES})
    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    tiers: list[tuple[Document, Key, TierConfig]] = field(default_factory=list)
    targets: list[TargetConfig] = field(default_factory=list)
    tenants: list[TenantConfig] = field(default_factory=list)
    promises: list[Place] = field(default_factory=list)
    """Where tenants are given guarantees, maxima and classes."""
    rates: list[tuple[Place, TenantConfig]] = field(default_factory=list)
    """Tenants that may copy so much at most, and where that is said."""
    pins: list[Place] = field(default_factory=list)
    tier_count: int = 0
    problems: list[Problem] = field(default_factory=list)

    def config(self) -> Config:
        tables = self.tables
        name = tables["policy"].get("name", PolicyName.BALANCED)
        policy = {**NAMED[name], **tables["policy"]}
        placement = {k: v for k, v in policy.items() if k in _PLACEMENT}
        others = {k: v for k, v in policy.items() if k not in _PLACEMENT}
        return Config(
            daemon=DaemonConfig(**tables["daemon"]),
            conflicts=ConflictsConfig(**tables["conflicts"]),
            api=ApiConfig(**tables["api"]),
            arena=ArenaConfig(**tables["arena"]),
            discover=DiscoverConfig(**tables["discover"]),
            damon=DamonConfig(**tables["damon"]),
            hardware=HardwareConfig(**tables["hardware"]),
            cxl=CxlConfig(**tables["cxl"]),
            policy=PolicyConfig(placement=Policy(**placement), **others),
            migrate=MigrateConfig(**tables["migrate"]),
            tiers=tuple(tier for _, _, tier in self.tiers),
            targets=tuple(self.targets),
            tenants=tuple(self.tenants),
        )


class _Reader:
    """Reads one document: each value by itself."""

    def __init__(self, document: Document, found: _Found) -> None:
        self._document, self._found = document, found

    def read(self) -> None:
        self._refuse_unknown((), self._document.values, [*TABLES, *ARRAYS])
        for name in TABLES:
            for key, value in self._table(name).items():
                self._found.tables[name][key] = value
                self._found.places[name, key] = self._document.place((name, key))
        self._read_tiers()
        self._read_targets()
        self._read_tenants()

    def _refuse(self, key: Key, message: str) -> None:
        self._found.problems.append(self._document.place(key).problem(message))

    def _refuse_unknown(self, above: Key, table: Mapping[str, Any], known: Sequence[str]) -> None:
        for name in table:
            if name not in known:
                self._refuse((*above, name), unknown_key(name, known))

    def _table(self, name: str) -> dict[str, Any]:
        table = self._document.values.get(name, {})
        if not isinstance(table, dict):
            self._refuse((name,), f"must be a table, [{name}]")
            return {}
        return self._values((name,), table, TABLES[name])

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

    def _array(self, name: str) -> Iterable[tuple[Key, Mapping[str, Any], dict[str, Any]]]:
        """Yields each table's key, what it says, and what of that is right."""
        array = self._document.values.get(name, [])
        if not isinstance(array, list) or not all(isinstance(table, dict) for table in array):
            self._refuse((name,), f"must be tables, each headed [[{name}]]")
            return
        for index, table in enumerate(array):
            yield (name, index), table, self._values((name, index), table, ARRAYS[name])

    def _read_tiers(self) -> None:
        found = self._found
        for key, given, values in self._array("tier"):
            for name in (name for name in NEEDED_OF_TIER if name not in given):
                self._refuse(key, f"{name} is missing")
            if values.keys() >= {*NEEDED_OF_TIER}:
                tier = TierConfig(**values, place=self._document.place((*key, "nodes")))
                found.tiers.append((self._document, key, tier))
            found.tier_count += 1
            if found.tier_count == MAX_TIERS + 1:
                self._refuse(key, f"at most {MAX_TIERS} tiers")

    def _read_targets(self) -> None:
        for key, given, values in self._array("target"):
            marks = [name for name in MARKS_OF_TARGET if name in given]
            if ("pid" in given) == bool(marks):
                self._refuse(
                    key, f"must have a pid, or one or more of {', '.join(MARKS_OF_TARGET)}"
                )
            elif values.keys() == given.keys():
                place = self._document.place((*key, *(marks or ["pid"])[-1:]))
                self._found.targets.append(TargetConfig(**values, place=place))
                if values.get("pin"):
                    self._found.pins.append(self._document.place((*key, "pin")))

    def _read_tenants(self) -> None:
        for key, given, values in self._array("tenant"):
            for name in (name for name in NEEDED_OF_TENANT if name not in given):
                self._refuse(key, f"{name} is missing")
            if len(values) < len(given) or not values.keys() >= {*NEEDED_OF_TENANT}:
                continue
            attributes = {attribute(name): value for name, value in values.items()}
            place = self._document.place((*key, "cgroup"))
            tenant = TenantConfig(**attributes, place=place)
            if any(other.cgroup == tenant.cgroup for other in self._found.tenants):
                self._refuse((*key, "cgroup"), f"another tenant has {tenant.cgroup} too")
            for tier, most in tenant.maximum_mib.items():
                least = tenant.guaranteed_mib.get(tier, 0)
                if most < least:
                    message = f"{tier} must not be below what is guaranteed, {least:g}"
                    self._refuse((*key, "maximum_mib"), message)
            for name in ("guaranteed_mib", "maximum_mib", "class"):
                if values.get(name):
                    self._found.promises.append(self._document.place((*key, name)))
            if tenant.far_mbps:
                place = self._document.place((*key, "far_mbps"))
                self._found.rates.append((place, tenant))
            self._found.tenants.append(tenant)


def _check_order(config: Config, documents: Sequence[Document], found: _Found) -> None:
    """Checks what two keys say together."""
    policy, damon = config.policy.placement, config.damon
    for table, key, holds, message in (
        (
            "policy",
            "long_s",
            policy.long_s > policy.short_s,
            f"must be above short_s, which is {policy.short_s:g}",
        ),
        (
            "policy",
            "retry_most_s",
            policy.retry_most_s >= policy.retry_s,
            f"must not be below retry_s, which is {policy.retry_s:g}",
        ),
        (
            "damon",
            "aggregation_us",
            damon.aggregation_us >= 5 * damon.sample_us,
            f"must be 5 times sample_us ({damon.sample_us}) or more, or heat is not told",
        ),
        (
            "damon",
            "max_regions",
            damon.max_regions >= 2 * damon.min_regions,
            f"must be twice min_regions ({damon.min_regions}) or more, or no region is split",
        ),
    ):
        if holds:
            continue
        last = next(document for document in reversed(documents) if table in document.values)
        place = found.places.get((table, key), last.place((table, key)))
        found.problems.append(place.problem(message))


def _check_tiers(found: _Found) -> None:
    names: set[str] = set()
    held: dict[NodeId, str] = {}
    for document, key, tier in found.tiers:
        if tier.name in names:
            place = document.place((*key, "name"))
            found.problems.append(place.problem(f"another tier is named {tier.name} too"))
        names.add(tier.name)
        for node in tier.nodes:
            if node in held:
                message = f"node {node} is already in tier {held[node]}"
                found.problems.append(document.place((*key, "nodes")).problem(message))
            held[node] = tier.name


def _check_rates(config: Config, found: _Found) -> None:
    """Checks that no tenant may copy more than all of them together."""
    for place, tenant in found.rates:
        for kind, most in tenant.far_mbps.items():
            total = config.arena.far_mbps.get(kind, most)
            if most > total:
                message = f"{kind} must not be above arena.far_mbps, which is {total:g}"
                found.problems.append(place.problem(message))


def _check_promises(found: _Found, who: str, otherwise: str) -> None:
    """Checks what nobody can promise where the kernel moves by itself."""
    for places, what in ((found.promises, "keeps no shares"), (found.pins, "knows no pins")):
        for place in places:
            found.problems.append(place.problem(f"{who} {what}: {otherwise}, or leave this out"))


def _check_damos(config: Config, found: _Found) -> None:
    """Checks what the kernel cannot do as it moves by itself."""
    engine = f'engine "{Engine.DAMOS}"'
    otherwise = f'take engine = "{Engine.MOVE_PAGES}" in [migrate]'
    _check_promises(found, engine, otherwise)
    if config.conflicts.numa_balancing is Rival.COOPERATE:
        place = found.places["conflicts", "numa_balancing"]
        found.problems.append(place.problem(f"{engine} moves by itself: {otherwise}"))
    if config.migrate.demote_cache:
        place = found.places["migrate", "demote_cache"]
        message = f"{engine} doesn't tell what lacks room: {otherwise}, or leave this out"
        found.problems.append(place.problem(message))
    for index, (document, key, tier) in enumerate(found.tiers):
        if index == MOST_DAMOS_TIERS:
            message = f"{engine} has two tiers at most: {otherwise}, or leave this out"
            found.problems.append(document.place(key).problem(message))
        if len(tier.nodes) > 1:
            place = document.place((*key, "nodes"))
            message = f"{engine} has one node a tier: {otherwise}, or leave this out"
            found.problems.append(place.problem(message))


def unknown_key(name: str, known: Sequence[str]) -> str:
    """Says that there is no such key, and which there are."""
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"unknown key; {advice}"


def _syntax_problem(error: Exception, content: str, file: str) -> Problem:
    message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    message, _, place = message.partition(" (at ")
    line = None
    if place:
        before_end = place.removeprefix("line ").partition(",")[0]
        line = int(before_end) if before_end.isdecimal() else content.count("\n") + 1
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
