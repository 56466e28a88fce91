# SPDX-License-Identifier: Apache-2.0
"""tierctl's commands that ask the running daemon."""

import json
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

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
