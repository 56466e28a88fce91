# SPDX-License-Identifier: Apache-2.0
"""A configuration as plain values, to be shown, compared and written."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from tierd.config.rules import ARRAYS, TABLES
from tierd.config.values import NAMED, Config, Place, attribute

_BARE = re.compile(r"[A-Za-z0-9_-]+")
"""A key that TOML has without quotes."""

Setting: TypeAlias = tuple[str, str]
"""A table and a key of it."""


def settings(config: Config) -> dict[Setting, Any]:
    """Returns each key of the tables with its value, as TOML would hold it."""
    return {
        (table, key): _plain(next(getattr(part, key) for part in parts if key in _keys(part)))
        for table, rules in TABLES.items()
        for parts in [_parts(config, table)]
        for key in rules
    }


def entries(config: Config) -> dict[str, list[dict[str, Any]]]:
    """Returns the [[tier]], [[target]] and [[tenant]] tables, each with the keys that it has."""
    return {
        name: [
            {
                key: _plain(value)
                for key in ARRAYS[name]
                if (value := getattr(entry, attribute(key))) is not None
            }
            for entry in found
        ]
        for name, found in (
            ("tier", config.tiers),
            ("target", config.targets),
            ("tenant", config.tenants),
        )
    }


def as_dict(config: Config) -> dict[str, Any]:
    """Returns all of it as a document of TOML or JSON would hold it."""
    tables: dict[str, Any] = {name: {} for name in TABLES}
    for (table, key), value in settings(config).items():
        tables[table][key] = value
    return tables | entries(config)


@dataclass(frozen=True, slots=True)
class Difference:
    """A key, or all [[tier]] or [[target]] tables, that two configurations hold differently."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {toml(self.before)} -> {toml(self.after)}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Compares two configurations that are as as_dict() gives them."""
    found = [
        Difference(f"{table}.{key}", before[table].get(key), after[table].get(key))
        for table in TABLES
        for key in {**before[table], **after[table]}
    ]
    found += [Difference(name, before.get(name, []), after.get(name, [])) for name in ARRAYS]
    return [difference for difference in found if difference.before != difference.after]


def as_toml(config: Config, places: Mapping[Setting, Place]) -> str:
    """Returns all of it as TOML, with a comment to each key that tells where it was set."""
    return "\n".join(_lines(config, places))


def _lines(config: Config, places: Mapping[Setting, Place]) -> Iterator[str]:
    current = settings(config)
    for table, rules in TABLES.items():
        yield f"[{table}]"
        for key in rules:
            place, named = places.get((table, key)), config.policy.name
            is_named = place is None and table == "policy" and key in NAMED[named]
            origin = f'policy "{named}"' if is_named else _origin(place)
            yield f"{key} = {toml(current[table, key])}  # {origin}"
        yield ""
    for name, found in entries(config).items():
        places_of = [entry.place for entry in getattr(config, f"{name}s")]
        for entry, place in zip(found, places_of, strict=True):
            yield f"[[{name}]]  # {_origin(place)}"
            yield from (f"{key} = {toml(value)}" for key, value in entry.items())
            yield ""


def toml(value: Any) -> str:
    """Spells a value as TOML; JSON spells all but tables alike."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {toml(v)}" for key, v in value.items()) + " }"
    return json.dumps(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _origin(place: Place | None) -> str:
    if place is None:
        return "default"
    return place.file if place.line is None else f"{place.file}:{place.line}"


def _parts(config: Config, table: str) -> list[Any]:
    """Returns what holds a table's keys."""
    part = getattr(config, table)
    return [part, part.placement] if table == "policy" else [part]


def _keys(part: Any) -> set[str]:
    return {field.name for field in fields(part)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
