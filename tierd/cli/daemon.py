# SPDX-License-Identifier: Apache-2.0
"""`tierd run`, and `tierd undo` for where it was killed."""

import logging
import os
from pathlib import Path

import click
from logging_journald import Facility, JournaldLogHandler, check_journal_stream

from tierd import config
from tierd.cli.errors import Commands
from tierd.cli.options import SIZE, config_option
from tierd.discover.targets import check_targets
from tierd.errors import TierdError
from tierd.service import CommandLine
from tierd.startup import run_service, undo_left


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tierd", prog_name="tierd")
def main() -> None:
    """Keeps hot data in fast memory and cold data in slow memory."""


@main.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"Configuration file.  [default: {config.DEFAULT_PATH}, if it is there]",
)
@click.option("--pid", "pids", type=int, multiple=True, help="Place this process too.")
@click.option("--for", "for_s", type=click.FloatRange(min=0), help="Stop after so many seconds.")
@click.option("--dry-run", is_flag=True, help="Sample and decide, but move nothing.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Record what is seen, for tierctl replay and size.",
)
@click.option(
    "--record-size",
    "record_bytes",
    type=SIZE,
    default="256M",
    show_default=True,
    help="End the recording where it would be larger.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log debugging messages too.")
def run(
    config_path: Path | None,
    pids: tuple[int, ...],
    for_s: float | None,
    dry_run: bool,
    record: Path | None,
    record_bytes: int,
    verbose: bool,
) -> None:
    """Runs the daemon in the foreground, until SIGTERM or SIGINT."""
    log_from(logging.DEBUG if verbose else logging.INFO)
    command_line = CommandLine(
        path=config_path, pids=pids, dry_run=dry_run, record=record, record_bytes=record_bytes
    )
    files = config.load(config_path)
    if os.geteuid() != 0:
        raise TierdError(
            "tierd run needs root: DAMON and the memory of other users' processes are root's",
            hint="run it with sudo, or as a service",
        )
    check_targets(command_line.on_top_of(files).targets)
    run_service(command_line, files, for_s=for_s)


@main.command()
@config_option("The configuration of the daemon that was killed")
def undo(*, config_path: Path | None) -> None:
    """Takes back what a killed tierd has left, where none is to be started again."""
    log_from(logging.INFO)
    undo_left(config.load(config_path).daemon.state_dir)


def log_from(level: int) -> None:
    """Has all that is logged from a level on go to where operators look."""
    logging.basicConfig(
        level=level,
        format="%(message)s" if check_journal_stream() else "tierd: %(message)s",
        handlers=[log_handler()],
    )


def log_handler() -> logging.Handler:
    """Returns what tells systemd's journal where it listens, and standard error elsewhere."""
    if not check_journal_stream():
        return logging.StreamHandler()
    journal: logging.Handler = JournaldLogHandler("tierd", Facility.DAEMON, use_message_id=False)
    return journal
