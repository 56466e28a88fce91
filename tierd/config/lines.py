# SPDX-License-Identifier: Apache-2.0
"""On which lines of a TOML file its keys and tables stand.

tomllib knows no lines, and the TOML libraries that keep a document's layout (tomlkit) give none for
a key either. So tomllib is fed one statement at a time, and every rule of the syntax is left to it.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

_LONGEST_STATEMENT = 256

Key: TypeAlias = tuple[str | int, ...]


def find_lines(content: str) -> dict[Key, int]:
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
