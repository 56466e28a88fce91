# SPDX-License-Identifier: Apache-2.0
"""`tierctl donor`: what this host's donor lends, and to whom."""

import json
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tierd.api.client import Client
from tierd.api.sockets import CONTROL, DONOR, MONITOR
from tierd.cli.errors import Commands
from tierd.cli.options import json_option, runtime_dir_option
from tierd.cli.text import amount, ids, table
from tierd.errors import TierdError

_LOOK_S = 0.5
_MEMORY = ("LENDS", "BORROWED", "FREE", "NODES", "RESERVE", "SPARE")
_BORROWERS = ("BORROWER", "ADDRESS", "HAS", "SINCE")


@click.group(cls=Commands)
def donor() -> None:
    """See and steer the donor of this host's memory, tierd-donor."""


@donor.command()
@json_option("docs/remote.md")
@runtime_dir_option("The donor's sockets are")
def status(*, as_json: bool, runtime_dir: Path) -> None:
    """Show what is lent. How much, of which nodes, and to whom since when."""
    found = Client(runtime_dir / MONITOR, DONOR).get("/v1/status")
    click.echo(json.dumps(found, indent=2) if as_json else _as_text(found))


@donor.command()
@click.option(
    "--timeout",
    "within_s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    help="Wait no longer than so many seconds.",
)
@click.option("--undo", is_flag=True, help="Lend again.")
@click.option("--dry-run", is_flag=True, help="Show who would be asked, and ask nobody.")
@json_option("docs/remote.md")
@runtime_dir_option("The donor's sockets are")
def drain(*, within_s: float, undo: bool, dry_run: bool, as_json: bool, runtime_dir: Path) -> None:
    """Have borrowers move away. Nothing more is lent until --undo or a restart.

    Waits until nobody borrows. Interrupted, or after --timeout, borrowers are asked all the same.
    """
    if undo and dry_run:
        raise click.UsageError("--undo and --dry-run do not go together")
    if dry_run:
        told = Client(runtime_dir / MONITOR, DONOR).get("/v1/status")
        text = f"would be asked to move away:\n{borrowers(told)}"
    else:
        client = Client(runtime_dir / CONTROL, DONOR)
        told = client.request("DELETE" if undo else "PUT", "/v1/drain")
        if not undo:
            told = _waited(client, told, within_s, quiet=as_json)
        text = "lends again" if undo else "nobody borrows, and nothing is lent until --undo"
    click.echo(json.dumps(told, indent=2) if as_json else text)


def _waited(client: Client, told: Any, within_s: float, *, quiet: bool) -> Any:
    """Waits until nobody borrows; returns the status then."""
    until_s, said = time.monotonic() + within_s, None
    try:
        while told["borrowed"]:
            left = f"{len(told['borrowers'])} borrowers have {amount(told['borrowed'])} still"
            if not told["leaves"]:
                raise TierdError(f"somebody has it lend again, and {left}")
            if time.monotonic() >= until_s:
                raise TierdError(
                    f"after {within_s:g} s {left}; they are asked to move away all the same",
                    hint="wait on: tierctl donor drain; lend again: tierctl donor drain --undo",
                )
            if left != said and not quiet:
                click.echo(left)
            said = left
            time.sleep(_LOOK_S)
            told = client.get("/v1/status")
    except KeyboardInterrupt:
        click.echo("borrowers are asked all the same; tierctl donor drain --undo ends it", err=True)
        raise
    return told


def _as_text(status: Mapping[str, Any]) -> str:
    return "\n\n".join([_headline(status), _memory(status), borrowers(status)])


def _headline(status: Mapping[str, Any]) -> str:
    what = "asks to be left, and lends nothing more" if status["leaves"] else "lends"
    return (
        f"tierd-donor {status['pid']}: {what}, at {status['address']}; {status['leases']} leases, "
        f"{sum(status['refused'].values())} refused"
    )


def _memory(status: Mapping[str, Any]) -> str:
    spare = status["spare"]
    row = (
        *(amount(status[what]) for what in ("capacity", "borrowed", "free")),
        ids(status["nodes"]),
        amount(status["reserve"]),
        amount(spare) if spare >= 0 else f"lacks {amount(-spare)}",
    )
    return table(_MEMORY, [row])


def borrowers(status: Mapping[str, Any]) -> str:
    """Gives a row for each borrower."""
    rows = [
        (
            borrower["name"],
            borrower["address"],
            amount(borrower["bytes"]),
            f"{datetime.fromisoformat(borrower['since']).astimezone():%Y-%m-%d %H:%M:%S}",
        )
        for borrower in status["borrowers"]
    ]
    return table(_BORROWERS, rows) if rows else "nobody borrows"
