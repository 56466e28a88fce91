# SPDX-License-Identifier: Apache-2.0
"""A command's options from a file of TOML; what the command line says holds before it.

Each key is an option's long name, and each value what could stand behind it on the command line, or
a list of such where the option may be given several times:

    lend = "64G"
    node = [1]
    runtime_dir = "/run/tierd-donor"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tierd.cli.options import Option
from tierd.config.check import Document, unknown_key
from tierd.config.files import read_document
from tierd.errors import ConfigError


def file_option(default: Path) -> Option:
    """Adds --config, a file of the command's other options."""

    def read(context: click.Context, _: click.Parameter, path: Path | None) -> None:
        chosen = path or (default if default.exists() else None)
        if chosen is not None:
            context.default_map = read_options(context.command, chosen)

    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=read,
        help=f"Take what is not given here from this file; {default} where it exists.",
    )


def read_options(command: click.Command, path: Path) -> dict[str, Any]:
    """Returns what a file says, by the names of the command's parameters.

    Raises:
        ConfigError: everything that is wrong in it.
    """
    document = read_document(path)
    options = options_of(command)
    problems, values = [], {}
    for key, value in document.values.items():
        if key not in options:
            problems.append(document.place((key,)).problem(unknown_key(key, [*options])))
            continue
        option = options[key]
        try:
            values[option.name or key] = _converted(option, value)
        except click.BadParameter as error:
            problems.append(document.place((key,)).problem(error.message))
    if problems:
        raise ConfigError(problems)
    return values


def require_all(command: click.Command, path: Path) -> dict[str, Any]:
    """As read_options(), of a file that has to have all that the command needs."""
    values = read_options(command, path)
    missing = [
        key
        for key, option in options_of(command).items()
        if option.required and option.name not in values
    ]
    if missing:
        whole = Document(str(path), "", {}).place(())
        raise ConfigError([whole.problem(f"{key} is missing") for key in missing])
    return values


def options_of(command: click.Command) -> Mapping[str, click.Option]:
    """Returns the options that a file may have, by their keys."""
    options = (p for p in command.params if isinstance(p, click.Option) and not p.is_eager)
    return {option.opts[0].lstrip("-").replace("-", "_"): option for option in options}


def _converted(option: click.Option, value: Any) -> Any:
    if option.multiple is not isinstance(value, list):
        raise click.BadParameter(
            "must be a list, in [ ]" if option.multiple else "must be one value, and no list"
        )
    if option.multiple:
        return [option.type.convert(_spelled(part), option, None) for part in value]
    return option.type.convert(_spelled(value), option, None)


def _spelled(value: Any) -> str:
    """Spells a value as on the command line."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.BadParameter("must be text or a number")
    return str(value)
