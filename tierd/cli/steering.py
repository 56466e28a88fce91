# SPDX-License-Identifier: Apache-2.0
"""tierctl's commands that change the running daemon."""

import json
import sys
import time
from base64 import b64decode
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import click

from tierd.api.client import Client
from tierd.cli import settings as settings_view
from tierd.cli.connect import control
from tierd.cli.options import ADDRESSES, PID, SIZE, Option, config_option, json_option
from tierd.cli.text import amount
from tierd.config.show import Difference
from tierd.errors import TierdError
from tierd.observe.files import new_file


@click.command()
@config_option("The running daemon's configuration")
def pause(*, config_path: Path | None) -> None:
    """Move nothing until resumed. Sampling goes on; a restart resumes too."""
    control(config_path).request("POST", "/v1/pause")
    click.echo("paused: nothing is moved until tierctl resume")


@click.command()
@config_option("The running daemon's configuration")
def resume(*, config_path: Path | None) -> None:
    """Go on after a pause."""
    control(config_path).request("POST", "/v1/resume")
    click.echo("resumed")


def _range_option(what_for: str) -> Option:
    """Adds --range as `part`."""
    return click.option("--range", "part", type=ADDRESSES, metavar="START-END", help=what_for)


@click.command()
@click.argument("pid", type=PID)
@click.option("--here", is_flag=True, help="Leave its memory where it is.")
@_range_option("Only these addresses, as explain or /proc/PID/maps tells them.")
@config_option("The running daemon's configuration")
def pin(*, pid: int, here: bool, part: range | None, config_path: Path | None) -> None:
    """Keep a process's memory in the fastest tier. Before all others', as far as there is room."""
    wanted: dict[str, Any] = {"pin": "here" if here else "fastest"}
    if part is not None:
        wanted["range"] = {"start": part.start, "end": part.stop}
    told = control(config_path).request("PUT", f"/v1/targets/{pid}/pin", wanted)
    if part is None:
        click.echo(f"process {pid} is pinned: {wanted['pin']}")
        return
    operators = (pin for pin in told["pins"] if pin["by"] == "operator")
    (made,) = (pin for pin in operators if pin["start"] <= part.start < pin["end"])
    click.echo(f"process {pid}: {made['start']:x}-{made['end']:x} is pinned: {made['pin']}")


@click.command()
@click.argument("pid", type=PID)
@_range_option("Only these addresses, whole pages.")
@config_option("The running daemon's configuration")
def unpin(*, pid: int, part: range | None, config_path: Path | None) -> None:
    """Place a process's memory as others' is. Without --range, none of its ranges is pinned too."""
    query = "" if part is None else f"?start={part.start}&end={part.stop}"
    told = control(config_path).request("DELETE", f"/v1/targets/{pid}/pin{query}")
    what = f"process {pid}" + ("" if part is None else f": {part.start:x}-{part.stop:x}")
    click.echo(f"{what} is pinned no more")
    if left := len(told["pins"]):
        click.echo(f"ranges that are pinned still: {left}; tierctl explain {pid} lists them")


@click.command()
@click.argument("node", type=click.IntRange(0, 1023))
@click.option("--undo", is_flag=True, help="Use the node again.")
@json_option()
@config_option("The running daemon's configuration")
def drain(*, node: int, undo: bool, as_json: bool, config_path: Path | None) -> None:
    """Take the pages of all processes off a node. None is placed there until --undo.

    Interrupted, it ends the drain, and what was moved stays where it is.
    """
    client = control(config_path)
    path = f"/v1/drains/{node}"
    if undo:
        client.request("DELETE", path)
        click.echo(f"node {node} is used again")
        return
    done = client.request("PUT", path)
    try:
        while not done["done"]:
            if not as_json:
                _progress(done)
            time.sleep(1)
            done = client.request("PUT", path)
    except KeyboardInterrupt:
        ended = client.request("DELETE", path)
        click.echo(f"\nended: node {node} is used again; {ended['moved_pages']} pages were moved")
        raise
    click.echo(json.dumps(done, indent=2) if as_json else f"\r{_drained(done)}")


def _progress(drain: Mapping[str, Any]) -> None:
    walked = drain["processes"] - drain["processes_left"]
    told = (
        f"\rnode {drain['node']}: {amount(drain['in_use'])} in use, {drain['moved_pages']} pages "
        f"moved; pass {drain['passes'] + 1}, {walked} of {drain['processes']} processes  "
    )
    click.echo(told, nl=False)


def _drained(drain: Mapping[str, Any]) -> str:
    told = f"node {drain['node']} is drained: {drain['moved_pages']} pages moved"
    left = ", ".join(f"{count} {reason}" for reason, count in drain["left"].items())
    return f"{told}; pages that could not be moved: {left}" if left else told


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--for", "for_s", type=click.FloatRange(0, min_open=True), help="Record so long.")
@click.option(
    "--size", "most_bytes", type=SIZE, default="256M", show_default=True, help="End at this size."
)
@config_option("The running daemon's configuration")
def record(*, file: Path, for_s: float | None, most_bytes: int, config_path: Path | None) -> None:
    """Record what the daemon sees, for replay and size. Until interrupted, or for so long."""
    client = control(config_path)
    with new_file(file) as opened:
        path = _begun(client, file)
        begin_s, why = time.monotonic(), None
        try:
            while why is None and (for_s is None or time.monotonic() < begin_s + for_s):
                left_s = 1.0 if for_s is None else begin_s + for_s - time.monotonic()
                time.sleep(min(1.0, max(left_s, 0.0)))
                told = client.request("PUT", path)
                why = told["ended"] or _kept(opened, told, most_bytes)
                _recorded(begin_s, opened.tell())
        except KeyboardInterrupt:
            pass
        finally:
            rest = client.request("DELETE", path)
        if why is None:
            _kept(opened, rest, most_bytes)
        _recorded(begin_s, opened.tell(), "\n" if why is None else f"; {why}\n")


def _begun(client: Client, file: Path) -> str:
    """Begins a recording; returns its path. Where that is refused, there is no file either."""
    try:
        return f"/v1/recordings/{client.request('POST', '/v1/recordings')['id']}"
    except TierdError:
        file.unlink()
        raise


def _kept(file: FileIO, told: Mapping[str, Any], most_bytes: int) -> str | None:
    """Writes what was told; returns why that was the last, if it was."""
    data = b64decode(told["data"])
    if file.tell() + len(data) > most_bytes:
        return f"it has reached {amount(most_bytes)}"
    file.write(data)
    return None


def _recorded(begin_s: float, size_bytes: int, end: str = "") -> None:
    passed_s = time.monotonic() - begin_s
    again = "\r" if sys.stdout.isatty() else ""
    if end or again:
        click.echo(f"{again}{passed_s:.0f} s recorded, {amount(size_bytes)}{end}", nl=False)


@click.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="TABLE.KEY=VALUE...")
@click.option("--persist", is_flag=True, help="Keep it over a restart, in a drop-in file.")
@json_option()
@config_option("The running daemon's configuration")
def set_(
    *, settings: tuple[str, ...], persist: bool, as_json: bool, config_path: Path | None
) -> None:
    """Set keys of the running daemon. All or none; an empty value takes a key back."""
    changes = settings_view.parse(settings)
    drop_in = settings_view.prepare(config_path, changes) if persist else None
    made = control(config_path).request("PATCH", "/v1/config", changes)
    if drop_in is not None:
        drop_in.write()
    if as_json:
        click.echo(json.dumps(made, indent=2))
        return
    for change in made["changes"]:
        click.echo(str(Difference(**change)))
    if not made["changes"]:
        click.echo("nothing has changed")
    if drop_in is not None:
        click.echo(f"kept in {drop_in.path}")
