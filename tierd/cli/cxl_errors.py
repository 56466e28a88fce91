# SPDX-License-Identifier: Apache-2.0
"""tierctl cxl poison and retire: memory of CXL devices that has lost its data."""

import json
import os
from collections.abc import Mapping
from typing import Any

import click

from tierd.cli.cxl import complete_memdev
from tierd.cli.options import json_option
from tierd.errors import NotFound, TierdError
from tierd.kernel import cxl_events
from tierd.kernel.blocks import read_block_bytes
from tierd.kernel.cxl import read_memdevs, read_regions
from tierd.kernel.cxl_events import CxlEvent
from tierd.kernel.frames import Frames
from tierd.kernel.tunable import KernelFiles
from tierd.provision import retire as retiring
from tierd.provision.retire import Retirement, bad_frames, frames_of


@click.command
@click.argument("memdevs", nargs=-1, metavar="[MEMDEV]...", shell_complete=complete_memdev)
@json_option("docs/cxl.md")
def poison(*, memdevs: tuple[str, ...], as_json: bool) -> None:
    """List what data CXL devices have lost. By their own poison lists.

    A tierd that runs hears it too, and does what [cxl] on_error says.
    """
    _require_root("poison", "it asks the devices")
    found = _read(memdevs or tuple(memdev.name for memdev in read_memdevs()))
    if as_json:
        document = {name: [_document(event) for event in told] for name, told in found.items()}
        click.echo(json.dumps({"poison": document}, indent=2))
        return
    for name, told in found.items():
        click.echo(f"{name}: no poison" if not told else "\n".join(map(_line, told)))


@click.command
@click.argument("block", type=click.IntRange(min=0))
@click.option(
    "--give-up", is_flag=True, help="Also where lost data are in use: who touches them is killed."
)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and change nothing.")
@json_option("docs/cxl.md")
def retire(*, block: int, give_up: bool, dry_run: bool, as_json: bool) -> None:
    """Take a block of memory that has lost data out of use. N of memoryN, as in cxl list.

    Its pages with lost data are given up, and the others moved to other nodes.
    """
    _require_root("retire", "it writes to /sys")
    files = KernelFiles()
    wanted = retiring.plan(block, _bad_of(block), files)
    if not as_json:
        for path, value in wanted.writes:
            click.echo(f"echo {value} > /{path}")
    if not dry_run:
        retiring.retire(wanted, files, force=give_up)
    if as_json:
        click.echo(json.dumps(_retired(wanted, dry_run=dry_run), indent=2))
    elif wanted.offline:
        click.echo(f"memory block {block} is offline")


def _bad_of(block: int) -> Frames:
    """Returns the frames of a block that its devices say have lost data."""
    block_bytes = read_block_bytes()
    if block_bytes is None:
        raise NotFound("this kernel has no memory blocks")
    start = block * block_bytes
    regions = [
        region
        for region in read_regions()
        if region.start is not None
        and region.start < start + block_bytes
        and start < region.start + region.size_bytes
    ]
    if not regions:
        raise NotFound(
            f"memory block {block} is of no CXL region",
            hint="see `blocks` of: tierctl cxl list",
        )
    told = _read(tuple(memdev for region in regions for memdev in region.memdevs))
    events = [event for of_one in told.values() for event in of_one]
    return bad_frames(frames_of(block, block_bytes), events, regions)


def _read(memdevs: tuple[str, ...]) -> Mapping[str, list[CxlEvent]]:
    known = {memdev.name for memdev in read_memdevs()}
    for name in memdevs:
        if name not in known:
            raise NotFound(f"there is no CXL device {name}", hint="see: tierctl cxl list")
    return cxl_events.read_poison(memdevs)


def _document(event: CxlEvent) -> dict[str, Any]:
    return {
        "dpa": event.dpa,
        "size_bytes": event.size_bytes,
        "region": event.region,
        "start": event.start,
        "block": _block(event),
    }


def _line(event: CxlEvent) -> str:
    line = f"{event.device}: {event.size_bytes} bytes at {event.dpa or 0:#x}"
    if event.start is not None:
        line += f", in {event.region} at {event.start:#x}, memory block {_block(event)}"
    return line


def _block(event: CxlEvent) -> int | None:
    block_bytes = read_block_bytes()
    return None if event.start is None or not block_bytes else event.start // block_bytes


def _retired(wanted: Retirement, *, dry_run: bool) -> dict[str, Any]:
    steps = [{"path": f"/{path}", "value": value} for path, value in wanted.writes]
    return {
        "block": wanted.block,
        "offline": wanted.offline or not dry_run,
        "given_up": len(wanted.give_up),
        "in_use": len(wanted.in_use),
        "steps": steps,
        "dry_run": dry_run,
    }


def _require_root(command: str, why: str) -> None:
    if os.geteuid() != 0:
        raise TierdError(f"tierctl cxl {command} needs root: {why}", hint="run it with sudo")
