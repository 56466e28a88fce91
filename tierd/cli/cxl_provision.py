# SPDX-License-Identifier: Apache-2.0
"""tierctl cxl provision: what udev has done with each new CXL device."""

import json
import time
from pathlib import Path
from typing import Any

import click

from tierd import config
from tierd.cli.cxl import carry_out, complete_memdev
from tierd.cli.options import config_option, json_option
from tierd.config import Config
from tierd.errors import Conflict
from tierd.provision import rule
from tierd.provision.create import look
from tierd.provision.plan import Request

WITHIN_S = 60.0
"""Devices come together, as at boot, and one region is made at a time."""

LOOK_S = 0.5


@click.command
@click.argument("memdev", shell_complete=complete_memdev)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and change nothing.")
@json_option("docs/cxl.md")
@config_option("Take [cxl] and the state directory from this file")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def provision(
    *, memdev: str, dry_run: bool, as_json: bool, config_path: Path | None, root: Path
) -> None:
    """Do with a new device what [cxl] in the configuration says. By default, nothing.

    udev has it done for each device that the kernel finds.
    """
    settings = config.load(config_path)
    document = _in_turn(memdev, settings, root, dry_run=dry_run, as_json=as_json)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    elif document["left"] is not None:
        click.echo(f"{memdev} is left as it is: {document['left']}")


def _in_turn(
    memdev: str, settings: Config, root: Path, *, dry_run: bool, as_json: bool
) -> dict[str, Any]:
    """Waits while others make regions; returns the document of docs/cxl.md."""
    end_s = time.monotonic() + WITHIN_S
    while True:
        wanted = rule.request(memdev, settings.cxl, look(root))
        if not isinstance(wanted, Request):
            return {"left": wanted, "made": None}
        try:
            made = carry_out(wanted, settings, root, dry_run=dry_run, as_json=as_json)
        except Conflict:
            if time.monotonic() >= end_s:
                raise
            time.sleep(LOOK_S)
        else:
            return {"left": None, "made": made}
