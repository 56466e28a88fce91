# SPDX-License-Identifier: Apache-2.0
"""`tierctl set`: what it takes, and the drop-in that keeps it over a restart."""

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tierd import config
from tierd.config import DEFAULT_PATH
from tierd.config.check import parse_document
from tierd.config.show import toml
from tierd.errors import TierdError

DROP_IN = "90-tierctl.toml"
HEAD = "# Written by tierctl set --persist.\n"

Tables = dict[str, dict[str, Any]]


def parse(settings: Sequence[str]) -> Tables:
    """Parses TABLE.KEY=VALUE, of which the value is TOML or a bare word, or empty for None.

    Raises:
        click.UsageError: one isn't of this form.
    """
    tables: Tables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        table, dot, key = name.strip().partition(".")
        if not (equals and dot and table and key):
            raise click.UsageError(f"{setting}: must be TABLE.KEY=VALUE, as in policy.mode=observe")
        tables.setdefault(table, {})[key] = _value(value.strip())
    return tables


def _value(text: str) -> Any:
    if not text:
        return None
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = {text}")["value"]
    return text


@dataclass(frozen=True, slots=True)
class DropIn:
    """A drop-in that was checked, and can be written."""

    path: Path
    content: str

    def write(self) -> None:
        """Replaces the file in one step."""
        self.path.parent.mkdir(exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.write_text(self.content)
        fresh.replace(self.path)


def prepare(config_path: Path | None, changes: Mapping[str, Mapping[str, Any]]) -> DropIn:
    """Returns the drop-in with changes, beside a configuration file.

    Raises:
        ConfigError: with it the configuration would be wrong.
        TierdError: it cannot be written.
    """
    main = config_path or DEFAULT_PATH
    path = main.with_name(f"{main.name}.d") / DROP_IN
    tables: Tables = {}
    with suppress(FileNotFoundError):
        tables = tomllib.loads(path.read_text())
    for table, keys in changes.items():
        merged = {**tables.get(table, {}), **keys}
        tables[table] = {key: value for key, value in merged.items() if value is not None}
    content = HEAD + "".join(
        f"\n[{table}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in keys.items())
        for table, keys in tables.items()
        if keys
    )
    others = [file for file in config.files(config_path) if file != path]
    config.load_with_places(others, [parse_document(content, str(path))])
    require_writable(path, "leave out --persist")
    return DropIn(path, content)


def require_writable(path: Path, otherwise: str) -> None:
    """Refuses before anything is done that could not be kept.

    Raises:
        TierdError: the file cannot be written.
    """
    folder = path.parent if path.parent.exists() else path.parent.parent
    probe = folder / f".{path.name}.new"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TierdError(
            f"{folder}: {error.strerror}", hint=f"run it with sudo, or {otherwise}"
        ) from None
