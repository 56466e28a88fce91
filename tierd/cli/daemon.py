# SPDX-License-Identifier: Apache-2.0
"""`tierd run`: what is set up around the loop, changed on a reload, and taken down after it."""

import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from tierd import __version__, config
from tierd.cli.errors import Commands
from tierd.config import Config, Mode, Place, Rival, TargetConfig
from tierd.config.rules import TABLES
from tierd.config.show import as_dict, differences
from tierd.daemon import Daemon
from tierd.discover.targets import Finder, check_targets
from tierd.discover.topology import discover
from tierd.errors import Conflict, TierdError
from tierd.journal import Journal
from tierd.kernel import numa_balancing
from tierd.kernel.free import FreeMemory
from tierd.kernel.proc_events import ProcEvents
from tierd.kernel.signals import caught_signals
from tierd.migrate.limits import LimitsReader
from tierd.migrate.mover import Mover
from tierd.model import NodeId, Pid, Topology
from tierd.observe import status
from tierd.sample.session import Session
from tierd.tiers import numa

log = logging.getLogger("tierd")

RESTART = frozenset(
    {"conflicts.numa_balancing", "daemon.state_dir", "daemon.runtime_dir", "tier"}
    | {f"damon.{key}" for key in TABLES["damon"] if key != "cpu_percent"}
)
"""The keys that a reload cannot change."""


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
    command_line = CommandLine(path=config_path, pids=pids, dry_run=dry_run)
    files = config.load(config_path)
    if os.geteuid() != 0:
        raise TierdError(
            "tierd run needs root: DAMON and the memory of other users' processes are root's",
            hint="run it with sudo, or as a service",
        )
    check_targets(command_line.on_top_of(files).targets)
    with caught_signals() as signals, ExitStack() as stack:
        service = _set_up(stack, command_line, files)
        _notify("READY=1")
        stack.callback(_notify, "STOPPING=1")
        service.daemon.run(lambda s: signals.stop_asked(s, service.reload), for_s=for_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Where the configuration is, and what the command line says on top of it."""

    path: Path | None
    pids: Sequence[int]
    dry_run: bool

    def on_top_of(self, files: Config) -> Config:
        given = tuple(
            TargetConfig(
                pid=Pid(pid), place=Place(file="command line", line=None, key=f"--pid {pid}")
            )
            for pid in self.pids
        )
        mode = Mode.OBSERVE if self.dry_run else files.policy.mode
        return replace(
            files,
            targets=(*files.targets, *given),
            policy=replace(files.policy, mode=mode),
        )


@dataclass(slots=True)
class Service:
    """A daemon, and what of it a reload changes: `files`, and with the command line `settings`."""

    command_line: CommandLine
    files: Config
    settings: Config
    daemon: Daemon
    sampler: Session
    finder: Finder
    free: FreeMemory

    def reload(self) -> None:
        """Takes over the files as they are now, whole or not at all, and says what has changed."""
        _notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            files = config.load(self.command_line.path)
            self._take(self.command_line.on_top_of(files))
        except (TierdError, OSError) as error:
            log.error("not reloaded, all stays as it was: %s", error)
        else:
            changes = differences(as_dict(self.files), as_dict(files))
            log.info("reloaded: %s", "; ".join(map(str, changes)) or "nothing has changed")
            self.files = files
        _notify("READY=1")

    def _take(self, settings: Config) -> None:
        _require_same(self.settings, settings)
        known = {rule.pid for rule in self.settings.targets}
        check_targets(r for r in settings.targets if r.pid is None or r.pid not in known)
        topology, free = self.daemon.topology, self.free
        mover = make_mover(settings, topology, free) if settings.policy.mode.moves else None
        self.finder.follow(settings.targets, settings.discover)
        self.sampler.cpu_percent = settings.damon.cpu_percent
        self.daemon.reconfigure(settings, mover)
        self.settings = settings

    def publish(self, account: dict[str, Any]) -> None:
        """Publishes the daemon's status."""
        document = {"pid": os.getpid(), **account, "config": as_dict(self.files)}
        try:
            status.publish(self.settings.daemon.runtime_dir, document)
        except OSError as error:
            log.warning("status not published: %s: %s", error.filename, error.strerror)


def _require_same(running: Config, wanted: Config) -> None:
    """Refuses what only a restart can change."""
    changes = differences(as_dict(running), as_dict(wanted))
    fixed = [change.key for change in changes if change.key in RESTART]
    if fixed:
        raise TierdError(
            f"{', '.join(fixed)}: only a restart can change this",
            hint="systemctl restart tierd, or put it back and reload",
        )


def _set_up(stack: ExitStack, command_line: CommandLine, files: Config) -> Service:
    """Sets up the daemon; the stack takes down what was set up, also where a later step fails."""
    journal = stack.enter_context(Journal(files.daemon.state_dir))
    _undo(journal)
    topology = discover(files.tiers)
    _require_tiers(topology)
    runtime_dir = files.daemon.runtime_dir
    runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    stack.callback(status.withdraw, runtime_dir)
    stack.callback(_undo, journal)
    if must_only_observe(files.conflicts.numa_balancing, journal):
        command_line = replace(command_line, dry_run=True)
    settings = command_line.on_top_of(files)
    sampler = stack.enter_context(Session(settings.damon, journal))
    free = stack.enter_context(FreeMemory())
    for tier in topology.tiers:
        log.info("tier %d: %s, nodes %s", tier.rank, tier.name, ", ".join(map(str, tier.nodes)))
    finder = Finder(settings.targets, settings.discover, partial(_listen, stack))
    daemon = Daemon(
        settings,
        topology=topology,
        sampler=sampler,
        mover=make_mover(settings, topology, free) if settings.policy.mode.moves else None,
        find=finder,
        free_bytes=free.rooms_bytes,
        tell=lambda account: service.publish(account),
    )
    service = Service(command_line, files, settings, daemon, sampler, finder, free)
    return service


def must_only_observe(wanted: Rival, journal: Journal, root: Path = Path("/")) -> bool:
    """Does about the kernel's own page placement what is configured, and says so.

    Returns:
        Whether the placing is left to the kernel.

    Raises:
        Conflict: it is on, and that is to be refused.
    """
    mode = numa_balancing.read_mode(root)
    if not mode:
        return False
    says = f"numa_balancing is {mode}: the kernel {numa_balancing.describe(mode)}"
    match wanted:
        case Rival.REFUSE:
            raise Conflict(says, hint=numa_balancing.TURN_OFF)
        case Rival.TAKE_OVER:
            journal.write(root / numa_balancing.PATH, numa_balancing.OFF)
            log.info("%s; it is off until tierd ends", says)
        case Rival.OBSERVE:
            log.warning("%s; tierd only observes", says)
        case Rival.IGNORE:
            log.warning("%s, against what tierd decides; %s", says, numa_balancing.TURN_OFF)
    return wanted is Rival.OBSERVE


def _listen(stack: ExitStack) -> ProcEvents | None:
    """Listens to process events for as long as the stack lasts."""
    try:
        return stack.enter_context(ProcEvents())
    except OSError as error:
        log.warning("no process events (%s); all processes are looked at now and then", error)
        return None


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


def _notify(state: str) -> None:
    """Tells systemd, where it started us with Type=notify (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        channel.send(state.encode())
