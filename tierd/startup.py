# SPDX-License-Identifier: Apache-2.0
"""A daemon's start and end: what is set up around the loop, and taken down."""

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from tierd.account import account
from tierd.api.app import App
from tierd.api.endpoints import serving_api
from tierd.api.inbox import Inbox
from tierd.api.operations import OPERATIONS
from tierd.api.server import tcp_listener, unix_listener
from tierd.api.sockets import ARENAS, GROUP
from tierd.api.view import View
from tierd.arbiter import Arbiter
from tierd.arenas import Arenas
from tierd.config import Config, Engine
from tierd.cxl_errors import CxlErrors
from tierd.daemon import Daemon
from tierd.decide.unsorted import Sorting
from tierd.discover import hotplug
from tierd.discover.hotplug import Hotplug
from tierd.discover.targets import Finder
from tierd.discover.tenants import check_tenants
from tierd.discover.topology import discover
from tierd.drains import Drains
from tierd.errors import TierdError
from tierd.handover import Handover, require_fit
from tierd.held import Held
from tierd.journal import Journal
from tierd.kernel.cxl_events import CxlEvents
from tierd.kernel.damon import Admin
from tierd.kernel.free import FreeMemory
from tierd.kernel.notify import notify
from tierd.kernel.proc_events import ProcEvents
from tierd.kernel.signals import CALL, RELOAD, Signals, caught_signals
from tierd.kernel.task import give_way
from tierd.kernel.tunable import Files, KernelFiles
from tierd.kernel.uevents import Uevents
from tierd.leases import Limits, leasing
from tierd.machine import ThisMachine
from tierd.migrate.cache import Cache
from tierd.migrate.mover import Mover
from tierd.migrate.schemes import KernelSchemes
from tierd.model import Topology
from tierd.observe import status
from tierd.observe.events import History, event
from tierd.provision.create import has_journal, open_journal
from tierd.recorder import Recorder, Recordings, recording_to
from tierd.sample.fused import with_hardware
from tierd.sample.session import Session
from tierd.service import CommandLine, Service, make_mover
from tierd.version import VERSION

log = logging.getLogger("tierd")


def run_service(command_line: CommandLine, files: Config, *, for_s: float | None) -> None:
    """Runs the daemon until SIGTERM or SIGINT, or for so many seconds.

    Args:
        command_line: what it says on top of the files.
        files: the configuration.
        for_s: None for ever.
    """
    with caught_signals() as signals, ExitStack() as stack:
        service = _set_up(stack, command_line, files, signals)
        notify("READY=1")
        stack.callback(notify, "STOPPING=1")
        answers = {RELOAD: service.reload, CALL: service.inbox.run}

        def stop_asked(wait_s: float) -> bool:
            notify("WATCHDOG=1")
            if service.arbiter.cooperates:
                service.follow_rival()  # what the round tells of sorting holds from now on
            service.drains.go_on()
            service.cxl_errors.go_on()
            stop = service.waited(wait_s, lambda for_s: signals.stop_asked(for_s, answers))
            service.follow_memory()
            service.follow_rival()
            service.follow_cache()
            if service.handover is not None:
                service.handover.go_on()
            return stop

        service.daemon.run(stop_asked, for_s=for_s)


def undo_left(state_dir: Path, root: Path = Path("/"), files: Files | None = None) -> None:
    """Takes back what a daemon or a tierctl that was killed has left, as the next one would.

    Raises:
        TierdError: not all of it could be taken back; or a daemon is running, or such a tierctl.
    """
    with ExitStack() as stack:
        journals = [stack.enter_context(Journal(state_dir, root=root))]
        if has_journal(state_dir):
            regions = open_journal(state_dir, root, files or KernelFiles())
            journals.append(stack.enter_context(regions))
        for journal in reversed(journals):
            _undo(journal)
        left = sum(len(journal.changes) for journal in journals)
    if left:
        raise TierdError(
            f"{left} of the changes could not be taken back",
            hint="see above; after a reboot none of them is there any more",
        )


def _set_up(
    stack: ExitStack, command_line: CommandLine, files: Config, signals: Signals
) -> Service:
    """Sets up the daemon; the stack takes down what was set up, also where a later step fails."""
    journal = stack.enter_context(Journal(files.daemon.state_dir))
    history = stack.enter_context(_kept_history(files.daemon.state_dir))
    log.info("version %s begins", VERSION, extra=event("start", version=VERSION))
    stack.callback(log.info, "ended", extra=event("end"))
    _undo(journal)
    runtime_dir = files.daemon.runtime_dir
    runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    stack.callback(status.withdraw, runtime_dir)  # a killed one's too, where this one refuses
    stack.callback(_undo, journal)
    topology = discover(files.tiers)
    _require_tiers(topology)
    settings = command_line.on_top_of(files)
    check_tenants(settings.tenants, topology.tiers)
    give_way(settings.daemon.nice)
    held = Held(journal)
    arbiter = Arbiter(held=held)
    cache = stack.enter_context(Cache(held))  # waits for the kernel before all is put back
    if settings.migrate.demote_cache:
        cache.require(topology)
    may_move = arbiter.may_move(
        settings.conflicts.numa_balancing,
        moves=settings.policy.mode.moves,
        look=Sorting().look,
        budget_mbps=settings.migrate.budget_mbps,
    )
    schemes = KernelSchemes(Admin()) if settings.migrate.engine is Engine.DAMOS else None
    if schemes is not None:
        require_fit(topology)
    session = Session(settings.damon, journal, schemes=schemes)
    write_weight = settings.policy.write_weight
    fused = with_hardware(session, settings.hardware, write_weight=write_weight)
    sampler = stack.enter_context(closing(fused))
    session.require_schemes()
    free = stack.enter_context(FreeMemory())
    for tier in topology.tiers:
        log.info("%s", hotplug.describe(tier))
    recordings = Recordings(stack.enter_context(_recorder(command_line)))
    finder = Finder(settings.targets, settings.discover, partial(_listen, stack))
    daemon = Daemon(
        settings,
        topology=topology,
        sampler=sampler,
        mover=make_mover(settings, topology, free, signals.are_waiting) if may_move else None,
        machine=ThisMachine(finder=finder, free=free.rooms),
        tell=lambda daemon, rooms: service.publish(account(daemon, rooms)),
        record=recordings,
        cache=cache,
    )

    def make_drain_mover(topology: Topology) -> Mover:
        return make_mover(daemon.config, topology, free, signals.are_waiting)

    drains = Drains(daemon=daemon, free=free, make_mover=make_drain_mover)
    cxl_errors = CxlErrors(
        daemon=daemon,
        free=free,
        make_mover=make_drain_mover,
        fence=drains.fence,
        folder=files.daemon.state_dir,
        listen=lambda: stack.enter_context(CxlEvents()),
    )
    drains.find_on, drains.is_bad = cxl_errors.find_on, cxl_errors.is_bad
    service = Service(
        command_line=command_line,
        files=files,
        settings=settings,
        daemon=daemon,
        sampler=session,
        finder=finder,
        free=free,
        drains=drains,
        cxl_errors=cxl_errors,
        arbiter=arbiter,
        recordings=recordings,
        hotplug=Hotplug(topology, files.tiers, _listen_to_memory(stack)),
        interrupted=signals.are_waiting,
        view=View(daemon, history),
        inbox=Inbox(signals.call),
    )
    cxl_errors.restore()
    cxl_errors.begin()
    if schemes is not None:
        service.handover = Handover(daemon=daemon, kernel=schemes, free=free)
        service.handover.begin()
    service.follow_rival()
    service.follow_cache()
    app = partial(App, service.view, service)
    metrics = _metrics_listener(stack, settings)
    stack.enter_context(serving_api(settings.daemon.runtime_dir, app, OPERATIONS, metrics))
    if settings.arena.enabled:
        daemon.arenas = _arenas(stack, service)
    return service


@contextmanager
def _recorder(command_line: CommandLine) -> Iterator[Recorder | None]:
    path = command_line.record
    if path is None:
        yield None
        return
    with recording_to(path, most_bytes=command_line.record_bytes) as recorder:
        yield recorder


def _arenas(stack: ExitStack, service: Service) -> Arenas:
    """Lets arenas connect for as long as the stack lasts."""
    path = service.settings.daemon.runtime_dir / ARENAS
    listener = stack.enter_context(unix_listener(path, 0o660, GROUP, kind=socket.SOCK_SEQPACKET))

    def limits() -> Limits:
        arena = service.settings.arena
        return Limits(arenas=arena.max_arenas, blocks=arena.max_blocks)

    return Arenas(stack.enter_context(leasing(listener, limits)).all)


def _metrics_listener(stack: ExitStack, settings: Config) -> socket.socket | None:
    """Listens for who collects metrics for as long as the stack lasts, where that is configured."""
    if not settings.api.metrics_listen:
        return None
    address, _, port = settings.api.metrics_listen.rpartition(":")
    return stack.enter_context(tcp_listener(address.strip("[]"), int(port)))


@contextmanager
def _kept_history(folder: Path) -> Iterator[History]:
    """Keeps what is logged inside the block."""
    history = History(folder)
    log.addHandler(history)
    try:
        yield history
    finally:
        log.removeHandler(history)


def _listen(stack: ExitStack) -> ProcEvents | None:
    """Listens to process events for as long as the stack lasts."""
    try:
        return stack.enter_context(ProcEvents())
    except OSError as error:
        log.warning("no process events (%s); all processes are looked at now and then", error)
        return None


def _listen_to_memory(stack: ExitStack) -> Uevents | None:
    """Listens to events of memory and its devices for as long as the stack lasts."""
    try:
        return stack.enter_context(Uevents())
    except (OSError, ImportError) as error:
        log.warning("no events of memory (%s); the nodes' sizes are looked at instead", error)
        return None


def _require_tiers(topology: Topology) -> None:
    if len(topology.tiers) < 2:
        raise TierdError(
            "all memory is in one tier: there is nothing to place",
            hint="\n".join(topology.warnings) or None,
        )


def _undo(journal: Journal) -> None:
    for line in journal.undo():
        log.info("undone: %s", line, extra=event("undone"))
