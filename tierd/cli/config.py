# SPDX-License-Identifier: Apache-2.0
"""`tierctl config`: the configuration's files, checked, shown and held against the daemon's."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from tierd import config as configuration
from tierd.cli.errors import Commands, Failure
from tierd.cli.options import config_option, json_option
from tierd.config.check import was_set
from tierd.config.schema import schema as json_schema
from tierd.config.show import as_dict, as_toml, differences
from tierd.errors import ConfigError, TierdError
from tierd.observe import status as published

DIFFERS = 3
"""The exit status of `diff` where there is something to reload."""


@click.group(cls=Commands)
def config() -> None:
    """Check, show and compare the configuration."""


@config.command()
@config_option("This file and its drop-ins")
@json_option()
def check(*, config_path: Path | None, as_json: bool) -> None:
    """Check the files. Tells everything that is wrong in them."""
    files = configuration.files(config_path)
    try:
        configuration.load_with_places(files)
    except ConfigError as error:
        if not as_json:
            raise
        problems = [asdict(problem) for problem in error.problems]
        click.echo(json.dumps({"files": [*map(str, files)], "problems": problems}, indent=2))
        raise click.exceptions.Exit(Failure.exit_code) from None
    if as_json:
        click.echo(json.dumps({"files": [*map(str, files)], "problems": []}, indent=2))
        return
    click.echo("\n".join(f"{file}: ok" for file in files) or "no files: all is at its default")


@config.command()
@config_option("This file and its drop-ins")
@json_option()
def show(*, config_path: Path | None, as_json: bool) -> None:
    """Show what holds. Every key, as TOML, with its value and where it was set."""
    loaded = configuration.load_with_places(configuration.files(config_path))
    if as_json:
        click.echo(json.dumps(as_dict(loaded.config), indent=2))
    else:
        click.echo(as_toml(loaded.config, loaded.places))


@config.command()
@config_option("This file and its drop-ins")
@json_option()
def diff(*, config_path: Path | None, as_json: bool) -> None:
    """Show what a reload would change. Exits with 3 if anything."""
    running = published.read(configuration.load(config_path).daemon.runtime_dir)
    if not {"config", "set"} <= running.keys():
        raise TierdError("the running daemon is older than this tierctl", hint="restart it")
    files = configuration.load(config_path, [was_set(running["set"])])
    found = differences(running["config"], as_dict(files))
    if as_json:
        click.echo(json.dumps([asdict(difference) for difference in found], indent=2))
    else:
        click.echo("\n".join(map(str, found)) or "the daemon has what the files say")
    if found:
        raise click.exceptions.Exit(DIFFERS)


@config.command()
def schema() -> None:
    """Print the JSON Schema of the files."""
    click.echo(json.dumps(json_schema(), indent=2))
