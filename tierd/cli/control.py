# SPDX-License-Identifier: Apache-2.0
"""tierctl: what an operator asks."""

import json
from pathlib import Path

import click

from tierd import config
from tierd.cli import status as status_view
from tierd.cli import topology as topology_view
from tierd.cli.config import config as config_commands
from tierd.cli.errors import Commands
from tierd.discover.topology import discover, read_use
from tierd.observe import status as published


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tierd")
def main() -> None:
    """See what tierd does with the memory of this machine."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/topology.md tells it.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"Take the tiers from this file; {config.DEFAULT_PATH} where it exists.",
)
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def topology(*, as_json: bool, config_path: Path | None, root: Path) -> None:
    """Show the tiers of memory, what they are made of, and how full they are."""
    found = discover(config.load_or_default(config_path).tiers, root)
    use = read_use(root)
    if as_json:
        click.echo(json.dumps(topology_view.as_json(found, use), indent=2))
        return
    click.echo(topology_view.as_text(found, use))
    for warning in found.warnings:
        click.echo(f"\nwarning: {warning}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/status.md tells it.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"The running daemon's configuration; {config.DEFAULT_PATH} where it exists.",
)
def status(*, as_json: bool, config_path: Path | None) -> None:
    """Show what the daemon watches, what it has moved, and what it has not and why."""
    found = published.read(config.load_or_default(config_path).daemon.runtime_dir)
    click.echo(json.dumps(found, indent=2) if as_json else status_view.as_text(found))


main.add_command(config_commands)
