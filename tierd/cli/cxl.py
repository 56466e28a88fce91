# SPDX-License-Identifier: Apache-2.0
"""tierctl cxl: CXL memory, from the device to the node."""

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from tierd import config
from tierd.cli import cxl_tree
from tierd.cli.cxl_drain import drain, end_daemons_drains
from tierd.cli.errors import Commands
from tierd.cli.options import SIZE, config_option, json_option
from tierd.cli.writes import shown
from tierd.discover.fabric import as_document, read_fabric
from tierd.errors import Conflict, TierdError
from tierd.kernel.cxl import read_memdevs
from tierd.kernel.tunable import KernelFiles
from tierd.model import Online
from tierd.provision import plan as planning
from tierd.provision.create import create as make_region
from tierd.provision.create import look, open_journal, undo_left
from tierd.provision.plan import GRANULARITIES, RegionPlan, Request, Step


def complete_memdev(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Completes the name of a device, where the kernel tells them."""
    try:
        names = [memdev.name for memdev in read_memdevs()]
    except (OSError, TierdError):
        return []
    return [name for name in names if name.startswith(incomplete)]


@click.group(
    cls=Commands,
    modules={
        "poison": "tierd.cli.cxl_errors",
        "provision": "tierd.cli.cxl_provision",
        "retire": "tierd.cli.cxl_errors",
    },
)
def cxl() -> None:
    """CXL memory, from the device to the node."""


@cxl.command("list")
@json_option("docs/cxl.md")
@config_option("Take the tiers and the state directory from this file")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def list_(*, as_json: bool, config_path: Path | None, root: Path) -> None:
    """Show CXL devices and what was made of them. Down to the blocks of memory and the nodes.

    As root it first takes back what a create or a drain that was killed has left.
    """
    settings = config.load(config_path)
    undone = _undone(settings, root)
    found = read_fabric(settings.tiers, root)
    if as_json:
        click.echo(json.dumps(as_document(found) | {"undone": undone}, indent=2))
        return
    for line in undone:
        click.echo(f"undone: {line}\n")
    click.echo(cxl_tree.as_text(found))


@cxl.command("create")
@click.option(
    "--memdev",
    "memdevs",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_memdev,
    help="Take this device.",
)
@click.option(
    "--interleave", "ways", type=click.IntRange(1, 16), help="Interleave over so many devices."
)
@click.option(
    "--granularity",
    "granularity_bytes",
    type=click.IntRange(GRANULARITIES[0], GRANULARITIES[-1]),
    help="Take so many bytes from one device before the next; the window's by default.",
)
@click.option("--size", "size_bytes", type=SIZE, help="Make it so large; by default, all there is.")
@click.option(
    "--online",
    type=click.Choice([online.value for online in Online]),
    default=Online.MOVABLE.value,
    show_default=True,
    help="Bring its memory online in this zone, or not.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and change nothing.")
@json_option("docs/cxl.md")
@config_option("Take the state directory from this file")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def create(
    *,
    memdevs: tuple[str, ...],
    ways: int | None,
    granularity_bytes: int | None,
    size_bytes: int | None,
    online: str,
    dry_run: bool,
    as_json: bool,
    config_path: Path | None,
    root: Path,
) -> None:
    """Make memory of CXL devices. A region of their volatile capacity, and a node of it.

    Every write is shown. What fails is taken back to the first write.
    """
    request = Request(
        memdevs=memdevs,
        ways=ways,
        granularity_bytes=granularity_bytes,
        size_bytes=size_bytes,
        online=Online(online),
    )
    settings = config.load(config_path)
    document = carry_out(request, settings, root, dry_run=dry_run, as_json=as_json)
    if as_json:
        click.echo(json.dumps(document, indent=2))


def carry_out(
    request: Request, settings: config.Config, root: Path, *, dry_run: bool, as_json: bool
) -> dict[str, Any]:
    """Makes a region, or shows the writes that would; returns the document of docs/cxl.md."""
    undone: list[str] = []
    if dry_run:
        plan = planning.make(request, look(root))
        if not as_json:
            _show_all(plan, root)
    else:
        plan, undone = _create(request, settings, root, as_json=as_json)
    return _document(plan, root, dry_run=dry_run, undone=undone)


def _create(
    request: Request, settings: config.Config, root: Path, *, as_json: bool
) -> tuple[RegionPlan, list[str]]:
    if os.geteuid() != 0:
        raise TierdError(
            f"{click.get_current_context().command_path} needs root: it writes to /sys",
            hint="run it with sudo; --dry-run shows to anybody what it would write",
        )
    files = KernelFiles()
    with open_journal(settings.daemon.state_dir, root, files) as journal:
        end_daemons_drains(settings, journal)
        undone = journal.undo()
        if not as_json:
            for line in undone:
                click.echo(f"undone: {line}\n")
        if journal.changes:
            raise TierdError(
                "\n".join(["what was left before could not all be undone", *undone]),
                hint="see above; after a reboot nothing of it is there any more",
            )
        plan = planning.make(request, look(root))

        def tell(step: Step) -> None:
            if not as_json:
                click.echo(shown(step, root))

        make_region(plan, journal, files, root, tell=tell)
    if not as_json:
        click.echo(f"\n{cxl_tree.region(read_fabric((), root), plan.region)}")
    return plan, undone


def _undone(settings: config.Config, root: Path) -> list[str]:
    """Takes back what was left, where that may be done; returns what to say of it."""
    if os.geteuid() != 0:
        return []
    try:
        first = partial(end_daemons_drains, settings)
        return undo_left(settings.daemon.state_dir, root, KernelFiles(), first)
    except Conflict as error:
        return [f"nothing: {error}"]


def _show_all(plan: RegionPlan, root: Path) -> None:
    for step in plan.steps:
        click.echo(shown(step, root))


def _document(plan: RegionPlan, root: Path, *, dry_run: bool, undone: list[str]) -> dict[str, Any]:
    """Returns the document that docs/cxl.md describes."""
    document = asdict(plan)
    for step in document["steps"]:
        step["path"] = str(root / step["path"])
    return document | {"dry_run": dry_run, "undone": undone}


cxl.add_command(drain)
