# SPDX-License-Identifier: Apache-2.0
"""A running daemon: what of it is asked for, set and followed between its rounds."""

import logging
import os
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from tierd import config
from tierd.api.inbox import Inbox
from tierd.api.view import View
from tierd.arbiter import LEAVE_OUT, Arbiter
from tierd.config import Config, Mode, Place, Rival, TargetConfig
from tierd.config.check import was_set as as_set
from tierd.config.rules import NEEDS_RESTART
from tierd.config.show import Difference, as_dict, differences
from tierd.cxl_errors import CxlErrors
from tierd.daemon import Daemon
from tierd.decide.steps import HEADROOM_LOW
from tierd.discover import hotplug
from tierd.discover.hotplug import Hotplug
from tierd.discover.targets import Finder, check_targets
from tierd.discover.tenants import check_tenants
from tierd.drains import Drains
from tierd.errors import Conflict, TierdError
from tierd.handover import USE_MOVE_PAGES, Handover
from tierd.kernel.free import FreeMemory
from tierd.kernel.notify import notify
from tierd.migrate.limits import LimitsReader
from tierd.migrate.mover import Mover
from tierd.model import PAGE_BYTES, NodeId, Pid, Pin, Topology
from tierd.observe import status
from tierd.observe.events import event
from tierd.recorder import Recordings
from tierd.sample.fused import Fused
from tierd.sample.session import Session
from tierd.tiers import numa

log = logging.getLogger("tierd")

_SLOWLY = (
    "accesses are read from sysfs, fewer and slower: tracefs or perf is out of reach "
    "(tierctl doctor, as the user that runs tierd)"
)
PAGES_PER_MIB = (1 << 20) // PAGE_BYTES
STEP_S = 0.1
"""So often it is looked at what the kernel takes up, while it does."""
_TOLD = attrgetter("lacking_pages", "look")
"""What of Sorting changes between two rounds, and is told to the kernel."""
COMMAND_S = 10.0
"""A command waits for so long for the loop: a batch of pages, or a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Where the configuration is, and what the command line says on top of it.

    `record` is a file to record to, of `record_bytes` at most.
    """

    path: Path | None
    pids: Sequence[int]
    dry_run: bool
    record: Path | None = None
    record_bytes: int = 0

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


@dataclass(slots=True, kw_only=True)
class Service:
    """A daemon, and what of it is changed while it runs.

    `files` is the configuration as last taken over, with what was `set` since; `settings` has the
    command line on top. The commands are for other threads, and done by the loop.
    """

    command_line: CommandLine
    files: Config
    settings: Config
    daemon: Daemon
    sampler: Session
    finder: Finder
    free: FreeMemory
    drains: Drains
    cxl_errors: CxlErrors
    arbiter: Arbiter
    recordings: Recordings
    hotplug: Hotplug
    interrupted: Callable[[], bool]
    view: View
    inbox: Inbox
    handover: Handover | None = None
    """Where DAMOS moves."""
    was_set: dict[str, dict[str, Any]] = field(default_factory=dict)
    trouble: str | None = None
    shown: dict[str, Any] = field(init=False)
    """The files as the status has them; to make that takes as long as a plan."""

    def __post_init__(self) -> None:
        self.shown = as_dict(self.files)

    def reload(self) -> None:
        """Takes over the files as they are now, whole or not at all, and says what has changed."""
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            changes = self._load(self.was_set)
        except (TierdError, OSError) as error:
            log.error("not reloaded, all stays as it was: %s", error, extra=event("reload.refused"))
        else:
            told = "; ".join(map(str, changes)) or "nothing has changed"
            log.info("reloaded: %s", told, extra=event("reload"))
        notify("READY=1")

    def pause(self) -> Mapping[str, Any]:
        return self.inbox.call(partial(self._pause, True), COMMAND_S)

    def resume(self) -> Mapping[str, Any]:
        return self.inbox.call(partial(self._pause, False), COMMAND_S)

    def pin(self, pid: int, pin: Pin | None, part: range | None = None) -> Mapping[str, Any]:
        return self.inbox.call(partial(self._pin, Pid(pid), pin, part), COMMAND_S)

    def drain(self, node: int, *, wanted: bool) -> Mapping[str, Any]:
        work = self.drains.begin if wanted else self.drains.end
        return self.inbox.call(partial(work, NodeId(node)), COMMAND_S)

    def set(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.inbox.call(partial(self._set, changes), COMMAND_S)

    def record(self) -> Mapping[str, Any]:
        return {"id": self.inbox.call(self.recordings.begin, COMMAND_S)}

    def recorded(self, number: int, *, wanted: bool) -> Mapping[str, Any]:
        if wanted:
            data, ended = self.inbox.call(partial(self.recordings.fetch, number), COMMAND_S)
        else:
            data, ended = self.inbox.call(partial(self.recordings.end, number), COMMAND_S), None
        return {"data": b64encode(data).decode(), "ended": ended}

    def _pause(self, paused: bool) -> Mapping[str, Any]:
        if paused is not self.daemon.paused:
            self.daemon.paused = paused
            word = "paused" if paused else "resumed"
            log.info("%s by an operator", word, extra=event(word))
        return {"paused": paused}

    def _pin(self, pid: Pid, pin: Pin | None, part: range | None) -> Mapping[str, Any]:
        if self.handover is not None and pin is not None:
            raise Conflict("DAMON moves by itself, and knows no pins", hint=USE_MOVE_PAGES)
        if self.settings.conflicts.numa_balancing is Rival.COOPERATE and pin is not None:
            raise Conflict("the kernel promotes too, and knows no pins", hint=LEAVE_OUT)
        self.daemon.targets.pin(pid, pin, part)
        told = {"pid": pid, "pin": pin and str(pin)}
        # Events are for anybody to read, addresses are not.
        what = "" if part is None else f" of {len(part)} bytes"
        log.info(
            "process %d: pin%s is now %s", pid, what, pin or "none", extra=event("pin", **told)
        )
        whole = self.daemon.targets.get(pid).pin
        return {"pid": pid, "pin": whole and str(whole), "pins": self.daemon.targets.pins(pid)}

    def _set(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        was_set = _merged(self.was_set, changes)
        made = self._load(was_set)
        self.was_set = was_set
        told = "; ".join(map(str, made)) or "nothing has changed"
        log.info("set by an operator: %s", told, extra=event("set"))
        return {"changes": [asdict(change) for change in made], "set": was_set}

    def _load(self, was_set: Mapping[str, Any]) -> Sequence[Difference]:
        """Takes over the files and what was set on top, and returns what that changes."""
        files = config.load(self.command_line.path, [as_set(was_set)])
        self._take(self.command_line.on_top_of(files))
        shown = as_dict(files)
        changes = differences(self.shown, shown)
        self.files, self.shown = files, shown
        return changes

    def _take(self, settings: Config) -> None:
        _require_same(self.settings, settings)
        known = {rule.pid for rule in self.settings.targets}
        check_targets(r for r in settings.targets if r.pid is None or r.pid not in known)
        check_tenants(settings.tenants, self.daemon.topology.tiers)
        if settings.migrate.demote_cache and self.daemon.cache is not None:
            self.daemon.cache.require(self.daemon.topology)
        mover = self._mover(settings, self.daemon.topology)
        self.finder.follow(settings.targets, settings.discover)
        self.sampler.cpu_percent = settings.damon.cpu_percent
        if isinstance(self.daemon.sampler, Fused):
            self.daemon.sampler.weigh_writes(settings.policy.write_weight)
        self.daemon.reconfigure(settings, mover)
        self.settings = settings

    def follow_memory(self) -> None:
        """Goes on with the tiers as they are now, where memory has come or gone."""
        before = self.daemon.topology
        try:
            topology = self.hotplug.poll()
        except (TierdError, OSError) as error:
            if self.trouble != str(error):
                said = "memory has changed, and the tiers stay as they were: %s"
                log.warning(said, error, extra=event("memory.unknown"))
            self.trouble = str(error)
            return
        self.trouble = None
        if topology is not None:
            self.daemon.retier(topology, self._mover(self.settings, topology))
            self.drains.follow()
            self.cxl_errors.follow()
            for change in hotplug.differences(before, topology):
                log.info("%s", change, extra=event("memory"))

    def follow_rival(self) -> None:
        """Goes on placing, or leaves it, as the kernel's own placement is off or on now.

        Raises:
            Conflict: it is on now, and that is to be refused.
        """
        daemon = self.daemon
        if self._may_move(self.settings) is (daemon.mover is None):
            daemon.mover = self._mover(self.settings, daemon.topology)

    def waited(self, wait_s: float, stop_asked: Callable[[float], bool]) -> bool:
        """Waits for so long between two rounds; returns whether to stop, which `stop_asked` tells.

        While the kernel sorts, what it takes up is followed meanwhile: a look takes it a second.
        """
        promotes = self.daemon.sorted_by_kernel and self.daemon.sorting.promotes
        while promotes and wait_s > STEP_S:
            if stop_asked(STEP_S):
                return True
            wait_s -= STEP_S
            before = self.daemon.sorting
            self.daemon.follow_kernel()
            now = self.daemon.sorting
            promotes = now.promotes
            if not promotes or _TOLD(now) != _TOLD(before):
                self.follow_rival()
        return stop_asked(wait_s)

    def follow_cache(self) -> None:
        """Lets page cache make way, or leaves it, as tierd moves now or does not."""
        if self.daemon.cache is not None:
            moves = self.daemon.mover is not None and not self._rests()
            self.daemon.cache.hold(self.settings.migrate.demote_cache and moves)

    def _may_move(self, settings: Config) -> bool:
        sorting = self.daemon.sorting
        may_move = self.arbiter.may_move(
            settings.conflicts.numa_balancing,
            moves=settings.policy.mode.moves,
            rests=self._rests(),
            look=sorting.look,
            budget_mbps=min(settings.migrate.budget_mbps, sorting.lacking_pages / PAGES_PER_MIB),
        )
        self.daemon.sorted_by_kernel = self.arbiter.cooperates
        return may_move

    def _rests(self) -> bool:
        """Whether an operator pauses moves, or drains a node, which the kernel would fill again."""
        return self.daemon.paused or self.daemon.yields or bool(self.free.closed)

    def _mover(self, settings: Config, topology: Topology) -> Mover | None:
        if not self._may_move(settings):
            return None
        return make_mover(settings, topology, self.free, self.interrupted)

    def publish(self, account: dict[str, Any]) -> None:
        """Publishes the daemon's status."""
        document = {
            "pid": os.getpid(),
            **account,
            "config": self.shown,
            "set": self.was_set,
            "drains": self.drains.accounts(),
            "cxl": self.cxl_errors.account(),
        }
        slowly = _SLOWLY if self.sampler.way == "tried_regions" else None
        handed = [] if self.handover is None else self.handover.notes()
        amiss = (self.view.history.trouble, self.arbiter.note, slowly, *handed)
        told = [note for note in amiss if note is not None]
        document["notes"] = [*account["notes"], *told, *self.cxl_errors.notes()]
        self.view.account = document
        try:
            status.publish(self.settings.daemon.runtime_dir, document)
        except OSError as error:
            log.warning("status not published: %s: %s", error.filename, error.strerror)


def _merged(was_set: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns what is set with changes on top; null takes a key back."""
    tables = {**was_set, **changes}
    merged = {name: {**was_set.get(name, {}), **changes.get(name, {})} for name in tables}
    present = {
        name: {key: value for key, value in keys.items() if value is not None}
        for name, keys in merged.items()
    }
    return {name: keys for name, keys in present.items() if keys}


def _require_same(running: Config, wanted: Config) -> None:
    """Refuses what only a restart can change."""
    changes = differences(as_dict(running), as_dict(wanted))
    fixed = [change.key for change in changes if change.key in {*NEEDS_RESTART, "tier"}]
    if fixed:
        raise TierdError(
            f"{', '.join(fixed)}: only a restart can change this",
            hint="systemctl restart tierd, or put it back and reload",
        )


def make_mover(
    settings: Config,
    topology: Topology,
    free: FreeMemory,
    interrupted: Callable[[], bool] = lambda: False,
) -> Mover:
    """Makes the mover of move_pages(2), as the configuration wants it."""
    tier_of = {node: tier for tier in topology.tiers for node in tier.nodes}
    kept_percent = _kept_percent(settings)

    def room(node: NodeId) -> int:
        room = {node: free.room_bytes(node)}
        return numa.node_room_bytes(tier_of[node], node, room, kept_percent)

    return Mover(
        topology=topology,
        room=room,
        limits=LimitsReader(move_locked=settings.migrate.move_locked),
        batch_pages=settings.migrate.batch_pages,
        may_replace=free.may_replace,
        interrupted=interrupted,
    )


def _kept_percent(settings: Config) -> float:
    """Returns the share of a tier that stays free while pages change places.

    A plan leaves all of the headroom free, but has a page make way for a page while half of it is;
    or more of it is gone, beside the kernel, which takes it for its own promotions.
    """
    cooperates = settings.conflicts.numa_balancing is Rival.COOPERATE
    return 0.0 if cooperates else HEADROOM_LOW * settings.policy.headroom_percent
