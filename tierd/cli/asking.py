# SPDX-License-Identifier: Apache-2.0
"""tierctl's commands that ask the running daemon."""

import json
import shutil
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tierd.cli import heat as heat_view
from tierd.cli import targets as targets_view
from tierd.cli import top as top_view
from tierd.cli.connect import control, monitor
from tierd.cli.options import PID, config_option, interval_option, json_option
from tierd.kernel.pressure import read_pressure


@click.command()
@json_option()
@config_option("The running daemon's configuration")
def targets(*, as_json: bool, config_path: Path | None) -> None:
    """List the processes that are watched. With what each has on each tier."""
    found = monitor(config_path).get("/v1/status")
    if as_json:
        click.echo(json.dumps(found["targets"], indent=2))
    else:
        click.echo(targets_view.as_text(found["targets"], _names(found)))


@click.command()
@click.argument("pid", type=PID)
@json_option()
@config_option("The running daemon's configuration")
def explain(*, pid: int, as_json: bool, config_path: Path | None) -> None:
    """Tell what of a process is hot. With where it lies, and why it isn't elsewhere."""
    found = control(config_path).get(f"/v1/targets/{pid}")
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(targets_view.explained(found, [*found["resident"]]))


@click.command()
@click.argument("pid", type=PID)
@click.option(
    "--for",
    "for_s",
    type=click.FloatRange(0, 3600),
    default=10.0,
    show_default=True,
    help="Look for so many seconds.",
)
@interval_option()
@click.option("--rows", type=click.IntRange(1, 1000), help="Cut the addresses into so many rows.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Draw a picture, as FILE.png or FILE.svg; needs matplotlib.",
)
@json_option()
@config_option("The running daemon's configuration")
def heat(
    *,
    pid: int,
    for_s: float,
    interval_s: float,
    rows: int | None,
    output: Path | None,
    as_json: bool,
    config_path: Path | None,
) -> None:
    """Draw a process's addresses against time. Shades are heat, colours tiers."""
    client = control(config_path)
    seen = client.get(f"/v1/targets/{pid}")
    tiers = [*seen["resident"]]
    height = shutil.get_terminal_size().lines - 2
    bins = heat_view.make_bins(seen, rows or (200 if output else max(height, 1)))
    columns = [heat_view.make_column(seen, bins, tiers, time.monotonic())]
    for _ in range(int(for_s / interval_s)):
        time.sleep(interval_s)
        seen = client.get(f"/v1/targets/{pid}")
        columns.append(heat_view.make_column(seen, bins, tiers, time.monotonic()))
    if output is not None:
        heat_view.save(output, columns, bins, f"process {pid} ({seen['command']})")
    if as_json:
        click.echo(json.dumps(heat_view.as_document(columns, bins, tiers)))
    elif output is None:
        click.echo(heat_view.as_text(columns, bins, tiers))


@click.command()
@click.option(
    "--once", is_flag=True, help="Print one screen and end, as where there is no terminal."
)
@interval_option()
@json_option()
@config_option("The running daemon's configuration")
def top(*, once: bool, interval_s: float, as_json: bool, config_path: Path | None) -> None:
    """Show live what goes on. Tiers with use and flow, targets with hits; q ends it."""
    client = monitor(config_path)

    def look() -> top_view.Moment:
        status = client.get("/v1/status")
        return top_view.Moment(at_s=time.monotonic(), status=status, pressure=read_pressure())

    if not (once or as_json) and sys.stdout.isatty():
        top_view.live(look, interval_s)
        return
    before = look()
    time.sleep(interval_s)
    now = look()
    if as_json:
        click.echo(json.dumps(top_view.as_document(before, now), indent=2))
    else:
        click.echo("\n".join(top_view.frame(before, now)))


@click.command()
@click.option(
    "-n",
    "--lines",
    "most",
    type=click.IntRange(1, 2000),
    default=20,
    show_default=True,
    help="Show so many, the latest.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens, until interrupted.")
@json_option()
@config_option("The running daemon's configuration")
def events(*, most: int, follow: bool, as_json: bool, config_path: Path | None) -> None:
    """Show what happened. With --json, an object a line."""
    client = monitor(config_path)
    after = 0
    while True:
        found = client.get(f"/v1/events?after={after}&most={most}")["events"]
        for happened in found:
            click.echo(json.dumps(happened) if as_json else _event(happened))
            after = happened["id"]
        if not follow:
            return
        most = 2000
        time.sleep(1)


def _event(happened: Mapping[str, Any]) -> str:
    at = datetime.fromisoformat(happened["time"]).astimezone()
    colour = {"warning": "yellow", "error": "red"}.get(happened["level"])
    message = click.style(happened["message"], fg=colour)
    return f"{at:%Y-%m-%d %H:%M:%S}  {happened['kind']:<12}  {message}"


def _names(status: Mapping[str, Any]) -> list[str]:
    return [tier["name"] for tier in status["tiers"]]
