# SPDX-License-Identifier: Apache-2.0
"""`tierctl donor`: what this host's donor lends, and to whom."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tierd.api.client import Client
from tierd.api.sockets import DONOR, MONITOR
from tierd.cli.errors import Commands
from tierd.cli.options import json_option, runtime_dir_option
from tierd.cli.text import amount, ids, table

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
