# SPDX-License-Identifier: Apache-2.0
"""tierctl: what an operator asks."""

import json
from pathlib import Path

import click

from tierd import config
from tierd.cli import topology as view
from tierd.cli.errors import Commands
from tierd.discover.topology import discover, read_use


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
    found = discover(_read_config(config_path).tiers, root)
    use = read_use(root)
    if as_json:
        click.echo(json.dumps(view.as_json(found, use), indent=2))
        return
    click.echo(view.as_text(found, use))
    for warning in found.warnings:
        click.echo(f"\nwarning: {warning}")


def _read_config(path: Path | None) -> config.Config:
    if path is None and not config.DEFAULT_PATH.exists():
        return config.Config()
    return config.load(path or config.DEFAULT_PATH)
