# SPDX-License-Identifier: Apache-2.0
"""tierctl: what an operator asks."""

import json
from dataclasses import asdict
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from tierd import config
from tierd.cli import status as status_view
from tierd.cli import topology as topology_view
from tierd.cli.config import config as config_commands
from tierd.cli.doctor import Finding, Verdict, examine
from tierd.cli.errors import Commands, Failure
from tierd.cli.options import config_option, json_option
from tierd.discover.topology import discover, read_use
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
        click.echo(json.dumps(topology_view.as_json(found, use), indent=2))
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
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion for a shell. It is to be sourced there."""
    complete = get_completion_class(shell)
    assert complete is not None, "click has these three"
    click.echo(complete(main, {}, "tierctl", "_TIERCTL_COMPLETE").source())


main.add_command(config_commands)
