# SPDX-License-Identifier: Apache-2.0
"""`tierctl status`, and a daemon's status as a person reads it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tierd import config
from tierd.cli.options import config_option, json_option
from tierd.cli.text import amount, ids, table
from tierd.model import PAGE_BYTES
from tierd.observe import status as published

_TIERS = ("TIER", "KIND", "NODES", "CAPACITY", "ROOM", "HEADROOM", "BACKED BY")
_ARENAS = ("ARENA", "PID", "COMMAND", "HAS", "FAR MIB/S", "ASKED", "MOVED", "UNMOVED", "DROPPED")
_TENANTS = ("TENANT", "CLASS", "WEIGHT", "TIER", "HAS", "SHARE", "GUARANTEED", "MAXIMUM")
_BANDWIDTH = ("TENANT", "FAR TIERS", "MIB/S", "LIMIT", "MAXIMUM")
_FLOWS = ("MOVED", "PAGES", "BYTES")
_SCHEMES = ("DAMON'S SCHEME", "PAGES MOVED", "BYTES MOVED", "LOOKED THROUGH")
_CXL_ERRORS = ("CXL DEVICE", "REGION", "ERRORS", "SEVERITY", "COUNT")
_REASONS = ("NOT MOVED", "HOW MUCH")


@click.command()
@json_option("docs/status.md")
@config_option("The running daemon's configuration")
def status(*, as_json: bool, config_path: Path | None) -> None:
    """Show what the daemon does. What it watches, what it has moved, what it has not and why."""
    found = published.read(config.load(config_path).daemon.runtime_dir)
    click.echo(json.dumps(found, indent=2) if as_json else as_text(found))


def as_text(status: Mapping[str, Any]) -> str:
    """Gives tables of the tiers, the targets, what was moved, and what was not and why."""
    tables = [_headline(status), _tiers(status), _targets(status)]
    if status["arenas"]:
        tables.append(arenas(status["arenas"]))
    if status["tenants"]:
        tables.append(tenants(status))
    if bandwidth := list(_bandwidth(status)):
        tables.append(table(_BANDWIDTH, bandwidth))
    if status["schemes"]:
        tables.append(_schemes(status))
    if status["moved"] or not status["schemes"]:
        tables.append(_flows(status))
    if reasons := list(_reasons(status)):
        tables.append(table(_REASONS, reasons))
    if status["cxl"]["errors"]:
        tables.append(_cxl_errors(status))
    tables += [f"note: {note}" for note in status["notes"]]
    return "\n\n".join(tables)


def _headline(status: Mapping[str, Any]) -> str:
    sampler = status["sampler"]
    return (
        f"tierd {status['pid']}: {status['mode']}, {status['rounds']} rounds, the last took "
        f"{status['round_ms']} ms; DAMON by {sampler['way']}, {sampler['lost']} records lost; "
        f"a page costs {status['page_cost_ns'] / 1000:.1f} µs to move"
    )


def _tiers(status: Mapping[str, Any]) -> str:
    return table(
        _TIERS,
        [
            (
                tier["name"],
                tier["kind"],
                ids(tier["nodes"]),
                amount(tier["capacity"]),
                amount(tier["free"]),
                amount(tier["headroom"]),
                ", ".join(tier["backing"]),
            )
            for tier in status["tiers"]
        ],
    )


def _targets(status: Mapping[str, Any]) -> str:
    names = [tier["name"] for tier in status["tiers"]]
    heads = ["TARGET", "COMMAND", *(n.upper() for n in names), *(f"HOT {n.upper()}" for n in names)]
    rows = [
        (
            str(target["pid"]),
            target["command"],
            *(amount(target["resident"][name]) for name in names),
            *(amount(target["hot"][name]) for name in names),
        )
        for target in status["targets"]
    ]
    return table(heads, rows) if rows else "no targets: none of the configured processes is there"


def arenas(found: Sequence[Mapping[str, Any]]) -> str:
    """Gives a row for each arena: what it has on its tiers, copies, and did of what it was told."""
    rows = [
        (
            arena["name"],
            str(arena["pid"]),
            arena["command"],
            ", ".join(f"{tier} {amount(size)}" for tier, size in arena["resident"].items()),
            _copies(arena),
            *(str(arena[what]) for what in ("asked", "moved", "unmoved", "dropped")),
        )
        for arena in found
    ]
    return table(_ARENAS, rows)


def _copies(arena: Mapping[str, Any]) -> str:
    """Tells how fast far tiers are used, and how fast they may be where that is limited."""
    limits = arena["far_limit_mbps"]
    told = (
        f"{tier} {used:g}" + (f" of {limits[tier]}" if tier in limits else "")
        for tier, used in arena["far_used_mbps"].items()
    )
    return ", ".join(told) or "-"


def _bandwidth(status: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Gives a row for each tenant and kind of far tier that it uses, or may use so much of."""
    for tenant in status["tenants"]:
        columns = [tenant[f"far_{what}_mbps"] for what in ("used", "limit", "maximum")]
        for kind in sorted({**columns[0], **columns[2]}):
            rates = (f"{column[kind]:g}" if kind in column else "-" for column in columns)
            yield tenant["name"], kind, *rates


def tenants(status: Mapping[str, Any]) -> str:
    """Gives a row for each tenant and tier: what it has, may have now, and was promised."""
    rows = [
        (
            tenant["name"],
            tenant["class"],
            f"{tenant['weight']:g}",
            tier["name"],
            *(
                amount(tenant[what][tier["name"]]) if tier["name"] in tenant[what] else "-"
                for what in ("resident", "share", "guaranteed", "maximum")
            ),
        )
        for tenant in status["tenants"]
        for tier in status["tiers"]
    ]
    return table(_TENANTS, rows)


def _flows(status: Mapping[str, Any]) -> str:
    rows = [
        (f"{flow['from']} to {flow['to']}", str(flow["pages"]), amount(flow["pages"] * PAGE_BYTES))
        for flow in status["moved"]
    ]
    if cache := status["cache_pages"]:
        rows.append(("page cache, down", str(cache), amount(cache * PAGE_BYTES)))
    return table(_FLOWS, rows) if rows else "nothing moved yet"


def _schemes(status: Mapping[str, Any]) -> str:
    rows = [
        (
            scheme["action"],
            str(scheme["pages"]),
            amount(scheme["pages"] * PAGE_BYTES),
            amount(scheme["tried_bytes"]),
        )
        for scheme in status["schemes"]
    ]
    return table(_SCHEMES, rows)


def _cxl_errors(status: Mapping[str, Any]) -> str:
    rows = [
        (
            e["device"],
            e["region"] or "-",
            e["kind"].replace("_", " "),
            e["severity"],
            str(e["count"]),
        )
        for e in status["cxl"]["errors"]
    ]
    return table(_CXL_ERRORS, rows)


def _reasons(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Gives why hot memory is still in a slower tier, and why moves were refused."""
    for why, size in status["kept"].items():
        yield f"hot, but {why}", amount(size)
    for why, count in status["refused"].items():
        yield why.replace("_", " "), f"{count} pages"
