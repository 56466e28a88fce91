# SPDX-License-Identifier: Apache-2.0
"""tierctl cxl: CXL memory, from the device to the node."""

import json
from pathlib import Path

import click

from tierd import config
from tierd.cli import cxl_tree
from tierd.cli.options import config_option, json_option
from tierd.discover.fabric import as_document, read_fabric


@click.group()
def cxl() -> None:
    """CXL memory, from the device to the node."""


@cxl.command("list")
@json_option("docs/cxl.md")
@config_option("Take the tiers from this file")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def list_(*, as_json: bool, config_path: Path | None, root: Path) -> None:
    """Show CXL devices and what was made of them. Down to the blocks of memory and the nodes."""
    found = read_fabric(config.load(config_path).tiers, root)
    click.echo(json.dumps(as_document(found), indent=2) if as_json else cxl_tree.as_text(found))
