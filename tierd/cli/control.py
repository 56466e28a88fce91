# SPDX-License-Identifier: Apache-2.0
"""tierctl: the commands that need no daemon, and those that ask and steer one."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from tierd import __version__, config
from tierd.cli import status as status_view
from tierd.cli import topology as topology_view
from tierd.cli.asking import events, explain, heat, targets, top
from tierd.cli.completion import SHELLS, script
from tierd.cli.config import config as config_commands
from tierd.cli.connect import monitor
from tierd.cli.cxl import cxl
from tierd.cli.cxl_errors import poison, retire
from tierd.cli.cxl_provision import provision
from tierd.cli.doctor import Finding, Verdict, examine
from tierd.cli.errors import Commands, Failure
from tierd.cli.lending import donor
from tierd.cli.measure import measure
from tierd.cli.options import config_option, json_option
from tierd.cli.replaying import replay, size
from tierd.cli.steering import drain, pause, pin, record, resume, set_, unpin
from tierd.discover.topology import as_document, discover, read_use
from tierd.errors import TierdError
from tierd.observe import status as published


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tierd")
def main() -> None:
    """See what tierd does with the memory of this machine."""


@main.command()
@json_option("docs/topology.md")
@config_option("Take the tiers from this file")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def topology(*, as_json: bool, config_path: Path | None, root: Path) -> None:
    """Show the tiers of memory. With what they are made of, and how full they are."""
    found = discover(config.load(config_path).tiers, root)
    use = read_use(root)
    if as_json:
        click.echo(json.dumps(as_document(found, use), indent=2))
        return
    click.echo(topology_view.as_text(found, use))
    for warning in found.warnings:
        click.echo(f"\nwarning: {warning}")


@main.command()
@json_option("docs/status.md")
@config_option("The running daemon's configuration")
def status(*, as_json: bool, config_path: Path | None) -> None:
    """Show what the daemon does. What it watches, what it has moved, what it has not and why."""
    found = published.read(config.load(config_path).daemon.runtime_dir)
    click.echo(json.dumps(found, indent=2) if as_json else status_view.as_text(found))


@main.command()
@json_option()
@config_option("The daemon's configuration")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def doctor(*, as_json: bool, config_path: Path | None, root: Path) -> None:
    """Tell whether tierd can work here. What stands in its way, and what to do about it."""
    found = examine(config_path, root)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        for finding in found:
            click.echo(_finding(finding))
    if any(finding.verdict is Verdict.FAIL for finding in found):
        raise click.exceptions.Exit(Failure.exit_code)


def _finding(finding: Finding) -> str:
    colour = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}[finding.verdict]
    mark = click.style(f"{finding.verdict:<4}", fg=colour, bold=True)
    line = f"{mark}  {finding.subject}: {finding.message}"
    return line if finding.next_step is None else f"{line}\n      {finding.next_step}"


@main.command()
@json_option()
@config_option("The running daemon's configuration")
def version(*, as_json: bool, config_path: Path | None) -> None:
    """Show the versions of tierctl and of the running daemon."""
    try:
        running = monitor(config_path).get("/v1/version")["version"]
    except TierdError:
        running = None
    if as_json:
        click.echo(json.dumps({"tierctl": __version__, "tierd": running}))
    else:
        click.echo(
            f"tierctl {__version__}, {'no tierd' if running is None else f'tierd {running}'}"
        )


@main.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion for a shell. It is to be sourced there."""
    click.echo(script(shell))


for command in (provision, poison, retire):
    cxl.add_command(command)
for command in (
    *(config_commands, cxl, donor, events, explain, heat, measure, targets, top),
    *(drain, pause, pin, resume, set_, unpin),
    *(record, replay, size),
):
    main.add_command(command)
