# SPDX-License-Identifier: Apache-2.0
"""`tierctl version`."""

import json
from pathlib import Path

import click

from tierd.cli.connect import monitor
from tierd.cli.options import config_option, json_option
from tierd.errors import TierdError
from tierd.version import VERSION


@click.command()
@json_option()
@config_option("The running daemon's configuration")
def version(*, as_json: bool, config_path: Path | None) -> None:
    """Show the versions of tierctl and of the running daemon."""
    try:
        running = monitor(config_path).get("/v1/version")["version"]
    except TierdError:
        running = None
    if as_json:
        click.echo(json.dumps({"tierctl": VERSION, "tierd": running}))
    else:
        click.echo(f"tierctl {VERSION}, {'no tierd' if running is None else f'tierd {running}'}")
