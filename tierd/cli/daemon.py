# SPDX-License-Identifier: Apache-2.0
"""`tierd run`: what is set up around the loop, and taken down after it."""

import logging
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from tierd import __version__, config
from tierd.cli.errors import Commands
from tierd.config import Config, Mode, Place, TargetConfig
from tierd.daemon import Daemon
from tierd.discover.targets import check_targets, find_targets
from tierd.discover.topology import discover
from tierd.errors import TierdError
from tierd.journal import Journal
from tierd.kernel.free import FreeMemory
from tierd.kernel.process import Process, is_alive
from tierd.kernel.stop import stop_signals
from tierd.migrate.limits import LimitsReader
from tierd.migrate.mover import Mover
from tierd.model import NodeId, Pid, Topology
from tierd.observe import status
from tierd.sample.session import Session
from tierd.tiers import numa

log = logging.getLogger("tierd")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tierd")
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
@click.option("-v", "--verbose", is_flag=True, help="Log debugging messages too.")
def run(
    config_path: Path | None,
    pids: tuple[int, ...],
    for_s: float | None,
    dry_run: bool,
    verbose: bool,
) -> None:
    """Runs the daemon in the foreground, until SIGTERM or SIGINT."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(levelname)s %(message)s"
        if "JOURNAL_STREAM" in os.environ
        else "tierd: %(message)s",
    )
    settings = _configured(config_path, pids, dry_run=dry_run)
    if os.geteuid() != 0:
        raise TierdError(
            "tierd run needs root: DAMON and the memory of other users' processes are root's",
            hint="run it with sudo, or as a service",
        )
    check_targets(settings.targets)
    with stop_signals() as stop, ExitStack() as stack:
        daemon = _set_up(stack, settings)
        _notify("READY=1")
        stack.callback(_notify, "STOPPING=1")
        daemon.run(stop.asked, for_s=for_s)


def _configured(path: Path | None, pids: Iterable[int], *, dry_run: bool) -> Config:
    settings = config.load_or_default(path)
    given = tuple(
        TargetConfig(pid=Pid(pid), place=Place(file="command line", line=None, key=f"--pid {pid}"))
        for pid in pids
    )
    mode = Mode.OBSERVE if dry_run else settings.policy.mode
    return replace(
        settings,
        targets=(*settings.targets, *given),
        policy=replace(settings.policy, mode=mode),
    )


def _set_up(stack: ExitStack, settings: Config) -> Daemon:
    """Sets up the daemon; the stack takes down what was set up, also where a later step fails."""
    journal = stack.enter_context(Journal(settings.daemon.state_dir))
    _undo(journal)
    topology = discover(settings.tiers)
    _require_tiers(topology)
    runtime_dir = settings.daemon.runtime_dir
    runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    stack.callback(status.withdraw, runtime_dir)
    stack.callback(_undo, journal)
    sampler = stack.enter_context(Session(settings.damon, journal))
    free = stack.enter_context(FreeMemory())
    for tier in topology.tiers:
        log.info("tier %d: %s, nodes %s", tier.rank, tier.name, ", ".join(map(str, tier.nodes)))
    return Daemon(
        settings,
        topology=topology,
        sampler=sampler,
        mover=make_mover(settings, topology, free) if settings.policy.mode.moves else None,
        find=Finder(settings.targets),
        free_bytes=free.rooms_bytes,
        tell=partial(_publish, runtime_dir),
    )


def _require_tiers(topology: Topology) -> None:
    if len(topology.tiers) < 2:
        raise TierdError(
            "all memory is in one tier: there is nothing to place",
            hint="\n".join(topology.warnings) or None,
        )


def make_mover(settings: Config, topology: Topology, free: FreeMemory) -> Mover:
    """Makes the mover of move_pages(2), as the configuration wants it."""
    tier_of = {node: tier for tier in topology.tiers for node in tier.nodes}

    def room(node: NodeId) -> int:
        room = {node: free.room_bytes(node)}
        return numa.node_room_bytes(tier_of[node], node, room, settings.policy.headroom_percent)

    return Mover(
        topology=topology,
        room=room,
        limits=LimitsReader(move_locked=settings.migrate.move_locked),
        batch_pages=settings.migrate.batch_pages,
    )


def _undo(journal: Journal) -> None:
    for line in journal.undo():
        log.info("undone: %s", line)


class Finder:
    """Finds the targets now. Those given by pid are the processes that had it at the start."""

    def __init__(self, rules: Sequence[TargetConfig]) -> None:
        self._rules = [rule for rule in rules if rule.pid is None]
        self._given = find_targets([rule for rule in rules if rule.pid is not None])

    def __call__(self) -> Iterator[Process]:
        yield from filter(is_alive, self._given)
        yield from find_targets(self._rules)


def _publish(runtime_dir: Path, account: dict[str, Any]) -> None:
    try:
        status.publish(runtime_dir, {"pid": os.getpid(), **account})
    except OSError as error:
        log.warning("status not published: %s: %s", error.filename, error.strerror)


def _notify(state: str) -> None:
    """Tells systemd, where it started us with Type=notify (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        channel.send(state.encode())
