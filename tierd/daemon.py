# SPDX-License-Identifier: Apache-2.0
"""The loop that joins the stages: discover, sample, decide, migrate, observe, once a round."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.arenas import Arenas, Steered, may_have
from tierd.bulk import Accesses, Plan, Report, Target, map_nodes, rank_nodes
from tierd.config import Config
from tierd.decide.alike import most_promising
from tierd.decide.aside import Awaited
from tierd.decide.below import cold_bytes, is_spare
from tierd.decide.guard import judge, promotable
from tierd.decide.heat import ceiling, of_single_pages
from tierd.decide.latency import Latencies, Way, closed, take_in
from tierd.decide.placement import plan
from tierd.decide.settle import settle, unsettle
from tierd.decide.shares import Elsewhere
from tierd.decide.unsorted import Sorting
from tierd.decide.zoom import Doubt, awaits_look, most_doubtful
from tierd.discover.tenants import Tenants
from tierd.kernel.task import CpuTimes, held_up_s
from tierd.machine import Machine
from tierd.migrate.cache import Cache
from tierd.model import PAGE_BYTES, KernelMoves, Pid, Pin, Policy, Rank, Tier, TierRoom, Topology
from tierd.observe.events import event
from tierd.observe.flows import OTHERS, Flows, MoveCost, summary
from tierd.sample.residence import PAGES_PER_PIECE
from tierd.sample.sampler import Sampler
from tierd.targets import Targets
from tierd.tiers import numa
from tierd.watched import Watched

log = logging.getLogger("tierd")

LEAST_PLAN_PAGES = 512
"""So many pages may be planned in any round, whatever a move seems to cost."""

FEW_PAGES, FEW_WAIT_S = 64, 10.0
"""Fewer pages are moved at most so often: to begin takes as long as moving some hundreds does."""

CALM_S, CALM_TIMES = 15.0, 2.0
"""Where next to nothing has moved for so long rounds are so many times as far apart."""

STEP_MOST_S = 2.0
"""What the kernel has done within longer tells of no look of its own."""

PROBE_PAGES_BUSY, PROBE_PAGES_AT_REST = 4096, 256

_PID, _PID_AND_KIND = attrgetter("pid"), attrgetter("pid", "zoomed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round has seen of the machine, before it decided."""

    at_s: float
    config: Config
    tiers: Sequence[Tier]
    rooms: Sequence[TierRoom]
    seen: Sequence[Accesses]
    watched: Mapping[Pid, Watched]
    page_cost_ns: float
    took_ns: float
    """What a page of the moves before took, 0 where next to nothing moved."""


class Moves(Protocol):
    """What makes a plan's moves: migrate.mover.Mover, or what plays it."""

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        """Makes them in order until the deadline."""
        ...


class Daemon:
    """One tierd over its collaborators.

    Args:
        config: checked, of which the policy, the budgets and the interval are used here.
        topology: the tiers.
        sampler: watches processes.
        mover: makes moves, None to decide only.
        machine: tells of processes and of memory.
        tell: is told of each round's end, and of the room before its moves; None for nobody.
        record: is given what a round has seen, before it decides; None likewise.
        arenas: of programs that have connected them.
        cache: has page cache make way; None for not.
    """

    def __init__(
        self,
        config: Config,
        *,
        topology: Topology,
        sampler: Sampler,
        mover: Moves | None,
        machine: Machine,
        tell: Callable[["Daemon", Sequence[TierRoom]], None] | None,
        record: Callable[[Round], None] | None = None,
        arenas: Arenas | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.config, self.topology, self.sampler, self.mover = config, topology, sampler, mover
        self.machine, self.tell, self.record = machine, tell, record
        self.arenas = Arenas() if arenas is None else arenas
        self.cache = cache
        self.targets = Targets(config.targets, machine=machine, sampler=sampler)
        self.watched = self.targets.watched
        self.names = topology.names()
        self.tenants = Tenants(config.tenants, topology.tiers)
        self.shares = self.owed = np.zeros((0, 0))
        """Of each tenant and tier but the slowest, as of the last round; empty of one alone."""
        self.rank_of_node, self.node_map = rank_nodes(topology), map_nodes(topology)
        self.latencies = Latencies()
        self.closed: frozenset[Way] = frozenset()
        """Ways up that nothing is moved, since the faster tier answers no sooner under load."""
        self.gaps_ns: tuple[float, ...] = ()
        """Between the tiers, as the last plan has taken them; empty before it."""
        self.awaited = Awaited()
        """Room that single CPUs keep aside, and that moves wait for."""
        self.flows = Flows()
        self.cost = MoveCost(config.policy.placement.move_cost_ns)
        self.rounds = 0
        self.round_s = self.rounds_s = 0.0
        self.moved_lately, self.moved_s = True, -math.inf
        self.busy_s = self.machine.monotonic()
        """When there was more to do last than to look."""
        self.came: frozenset[Pid] = frozenset()
        """Those watched in the last round."""
        self.stalls: str | None = None
        """What the status tells while tasks wait for memory too much for moves up."""
        self.paused = False
        self.sorted_by_kernel = False
        """Whether the kernel promotes single pages where it matters (see tierd/arbiter.py)."""
        self.sorting = Sorting()
        """Whether it does now."""
        self.kernel_moves, self.followed_s = KernelMoves(), -math.inf
        """What the kernel had done by itself when that was last looked at, and when."""
        self.ran: Mapping[Pid, CpuTimes] = {}
        """How long each target had run then, in a first look."""
        self.promoted: Mapping[Pid, int] = {}
        """How many pages the kernel had promoted then for each target that lacks next to none."""
        self.plans = True
        """Whether moves are decided here, and not by DAMOS (see tierd/handover.py)."""
        self.schemes: list[dict[str, Any]] = []
        """What DAMOS has done, for the status."""
        self.yields = False
        """Whether somebody else spends the budget of moves meanwhile, as a drain does."""

    def reconfigure(self, config: Config, mover: Moves | None) -> None:
        """Goes on by another configuration, between two rounds; what is known of targets stays."""
        self.config, self.mover = config, mover
        self.tenants = Tenants(config.tenants, self.topology.tiers)
        self.cost.prior_ns = config.policy.placement.move_cost_ns
        self.targets.reconfigure(config.targets)

    def retier(self, topology: Topology, mover: Moves | None) -> None:
        """Goes on with other tiers, between two rounds; fewer than two are nothing to move between.

        What is known of targets stays, but where any node is of another rank now, all pieces are
        looked for anew.
        """
        ranks = rank_nodes(topology)
        if not np.array_equal(ranks, self.rank_of_node):
            for watched in self.watched.values():
                watched.pieces = unsettle(watched.pieces)
        self.topology, self.mover, self.awaited = topology, mover, Awaited()
        self.names, self.rank_of_node = topology.names(), ranks
        self.node_map, self.closed, self.gaps_ns = map_nodes(topology), frozenset(), ()
        self.tenants = Tenants(self.config.tenants, topology.tiers)

    def run(self, stop_asked: Callable[[float], bool], *, for_s: float | None = None) -> None:
        """Goes round until it is asked to stop, or for so many seconds.

        Args:
            stop_asked: waits between the rounds for so many seconds at most; tells to stop.
            for_s: None for ever.
        """
        now_s = self.machine.monotonic
        end_s = float("inf") if for_s is None else now_s() + for_s
        next_s = now_s()
        while next_s < end_s:
            self.round()
            next_s = max(next_s + self._interval_s, now_s())
            if stop_asked(min(next_s, end_s) - now_s()):
                return

    @property
    def _interval_s(self) -> float:
        """From the last round to the next one."""
        return self.config.daemon.interval_s * (CALM_TIMES if self.sampler.is_calm else 1.0)

    def round(self) -> None:
        begin_s = self.machine.monotonic()
        self.targets.follow(begin_s, is_first=not self.rounds)
        seen = self.sampler.poll()
        self._take_in(seen)
        loads = self.sampler.loads
        self.latencies = take_in(self.latencies, loads, self.node_map, now_s=begin_s)
        fresh = self._fresh_targets(begin_s)
        rooms = self._rooms()
        if self.record is not None:
            self.record(self._as_seen(begin_s, seen, rooms))
        self.arenas.look(self.topology.tiers, begin_s, self.config.policy.placement)
        self.owed = np.zeros((0, 0))
        planned_bytes = self._place(fresh, rooms, begin_s) if self.plans else 0
        self._steer(rooms, begin_s, planned_bytes)
        self._limit_arenas()
        self._calm_down(begin_s)
        self.rounds += 1
        self.round_s = self.machine.monotonic() - begin_s
        self.rounds_s += self.round_s
        if self.tell is not None:
            self.tell(self, rooms)

    def _calm_down(self, now_s: float) -> None:
        """Has targets looked at more rarely, and more roughly, once there is nothing else to do."""
        came, self.came = self.came, frozenset(self.watched)
        sorts = self.sorted_by_kernel and self.sorting.is_due
        works = sorts or self.yields or not self.plans or bool(self.arenas.all())
        if works or came != self.came or not came:
            self.busy_s = now_s
        self.sampler.is_calm = now_s - self.busy_s >= CALM_S

    def _place(self, fresh: list[Watched], rooms: list[TierRoom], begin_s: float) -> int:
        """Places the targets' pages; returns how many bytes were to be moved for that."""
        targets = self._targets(fresh, begin_s)
        if self.sorted_by_kernel:
            self.follow_kernel()
            targets = self._shared_with_kernel(targets, rooms[0], begin_s)
        counted = self.awaited.counted(rooms, now_s=begin_s)
        made = self._decide(targets, counted, begin_s)
        self._move(made, begin_s)
        if self.sorted_by_kernel and self.sorting.is_due:
            placed = [
                of_single_pages(self.watched[target.pid].pieces, target.ceiling)
                for target in targets
            ]
            room = self._rooms()[0] if self.moved_lately else None
            self.sorting = self.sorting.once_moved(
                placed, now_s=begin_s, room=room, move_cost_ns=self.cost.page_ns
            )
        self._try_pages(targets, begin_s)
        self._zoom(targets, begin_s)
        planned_bytes = int(made.moves["bytes"].sum())
        self._make_room(made.lacks, planned_bytes, begin_s)
        return planned_bytes

    def _shared_with_kernel(
        self, targets: list[Target], room: TierRoom, begin_s: float
    ) -> list[Target]:
        """Has the kernel sort what matters; returns the targets with what is left to it of each."""
        by_pages = [
            replace(target, pieces=of_single_pages(target.pieces, target.ceiling))
            for target in targets
        ]
        sorting = self.sorting.with_room(room, self._cold_bytes(by_pages))
        self.sorting = sorting.after(by_pages, self.watched, now_s=begin_s)
        unsorted = (self.sorting.leaves(target, now_s=begin_s) for target in by_pages)
        return [
            replace(target, unsorted=flags, fills=self.sorting.fills(target, now_s=begin_s))
            for target, flags in zip(targets, unsorted, strict=True)
        ]

    def _cold_bytes(self, targets: Sequence[Target]) -> float:
        """Returns what may make way in the fastest tier for what the kernel takes up."""
        if not self.sorting.is_due:
            return 0.0
        policy = self.policy()
        return sum(cold_bytes(each.pieces, each.ceiling, policy) for each in targets)

    def follow_kernel(self) -> None:
        """Takes in what the kernel has promoted since it was last asked, where that is not long."""
        before, self.kernel_moves = self.kernel_moves, self.machine.kernel_moves()
        before_s, self.followed_s = self.followed_s, self.machine.monotonic()
        passed_s = self.followed_s - before_s
        if self.sorting.is_due and passed_s <= STEP_MOST_S:
            step = KernelMoves(*np.subtract(self.kernel_moves, before).tolist())
            self.sorting = self.sorting.once_taken_up(
                step,
                now_s=self.followed_s,
                passed_s=passed_s,
                held_up_s=self._held_up_s(passed_s),
                idle_pages=self._idle_pages(),
            )

    def _held_up_s(self, passed_s: float) -> float:
        """Returns for how long of a step of a first look the kernel had the target it had most."""
        before, looked = self.ran, self.sorting.looked
        self.ran = ran = {} if looked else self.machine.cpu_times(self.watched)
        both = before.keys() & ran.keys()
        return max((held_up_s(before[pid], ran[pid], passed_s) for pid in both), default=0.0)

    def _idle_pages(self) -> int:
        """Returns how many pages a step has promoted for targets that lack next to none."""
        before, self.promoted = self.promoted, self.machine.promoted_pages(self.sorting.served)
        return sum(self.promoted[pid] - before[pid] for pid in before.keys() & self.promoted.keys())

    def _steer(self, rooms: Sequence[TierRoom], now_s: float, taken_bytes: int) -> None:
        """Places the arenas' blocks with what the targets' pages have left of room and budget."""
        if not self.arenas.all():
            return
        has, leaves = self.resident_of_tenants(), self._in_arenas().leaves
        free = [room.free_bytes - room.headroom_bytes - taken_bytes for room in rooms]

        def most(arena: Steered) -> Mapping[Rank, float]:
            tenant = self.tenants.index(arena.cgroup)
            is_counted = len(self.owed) and self._tenant_of(arena) is not None
            return may_have(
                arena,
                has=has[tenant],
                share=self.shares[tenant] if len(self.shares) else np.zeros(0),
                maximum=self.tenants.all[tenant].maximum_bytes,
                owed=self.owed[tenant] if is_counted else np.zeros(0),
                leaves=leaves[tenant],
                rooms=np.maximum(free, 0.0),
            )

        self.arenas.place(
            self.topology.tiers,
            self.policy(),
            now_s=now_s,
            budget_bytes=max(self.budget_bytes - taken_bytes, 0),
            promotable=self._promotable(),
            most=most,
            moves=self.config.policy.mode.moves and not self.paused and not self.yields,
        )

    def _limit_arenas(self) -> None:
        """Divides the bandwidth of far tiers; a pause does not end that, since nothing is moved."""
        if not self.arenas.all():
            return
        if not self.config.policy.mode.moves:
            self.arenas.unlimit()
            return
        tenants = self.tenants
        self.arenas.limit(
            self.config.arena.far_mbps, tenants.all, lambda arena: tenants.index(arena.cgroup)
        )

    def resident_of_tenants(self) -> NDArray[np.float64]:
        """Returns what each tenant has on each tier, of targets and in arenas."""
        has: NDArray[np.float64] = self._in_arenas().has
        for watched in self.watched.values():
            has[self.tenants.index(watched.process.cgroup)] += watched.resident_bytes()
        return has

    def _in_arenas(self) -> Elsewhere:
        """Returns what each tenant has in arenas, but for those in pages of a target."""
        long_s = self.config.policy.placement.long_s
        return self.arenas.elsewhere(len(self.tenants.all), self._tenant_of, long_s)

    def _tenant_of(self, arena: Steered) -> int | None:
        is_target = arena.lease.pid in self.watched
        return None if is_target else self.tenants.index(arena.cgroup)

    def _as_seen(self, now_s: float, seen: Sequence[Accesses], rooms: Sequence[TierRoom]) -> Round:
        return Round(
            at_s=now_s,
            config=self.config,
            tiers=self.topology.tiers,
            rooms=rooms,
            seen=seen,
            watched=self.watched,
            page_cost_ns=self.cost.page_ns,
            took_ns=self.cost.last_ns,
        )

    # Sample

    def _take_in(self, seen: Sequence[Accesses]) -> None:
        policy = self.config.policy.placement
        for (pid, zoomed), alike in groupby(sorted(seen, key=_PID), key=_PID_AND_KIND):
            watched, snapshots = self.watched.get(pid), list(alike)
            if watched is None:
                continue
            if zoomed:
                watched.take_zoomed(snapshots, policy)
            else:
                self.targets.look_at_mappings(watched, snapshots[-1].at_s)
                watched.take(snapshots, policy)

    def _fresh_targets(self, now_s: float) -> list[Watched]:
        """Returns the targets with recent samples, their pieces' places looked at."""
        moves = self.moved_lately or (self.sorted_by_kernel and self.sorting.is_due)
        least = PROBE_PAGES_BUSY if moves else PROBE_PAGES_AT_REST
        fresh = [w for w in self.watched.values() if w.is_fresh(now_s) and len(w.pieces)]
        for watched in fresh:
            unknown = int((~np.isfinite(watched.pieces["probed_s"])).sum())
            budget = min(max(least, unknown * PAGES_PER_PIECE), PROBE_PAGES_BUSY)
            try:
                self.machine.locate(
                    watched.process.pid,
                    watched.pieces,
                    self.rank_of_node,
                    budget_pages=budget // len(fresh),
                    now_s=now_s,
                )
            except ProcessLookupError:
                watched.accesses = None
        return [watched for watched in fresh if watched.accesses is not None]

    # Decide

    def _rests(self, watched: Watched, pieces: NDArray[np.void], most: float, now_s: float) -> bool:
        """Returns whether nothing of a target is to be moved up now, and tells where it begins.

        Judged are the pieces that are placed by their heat.
        """
        before = watched.guard
        watched.guard = judge(
            before, pieces, most, self.policy(), now_s=now_s, gaps_ns=self.gaps_ns
        )
        if watched.guard.rests_until_s > before.rests_until_s:
            who, rest_s = watched.process, watched.guard.rests_until_s - now_s
            log.warning(
                "process %d (%s): most of what was moved lately was not worth it; nothing of it is "
                "moved up for %.0f s",
                who.pid,
                who.command,
                rest_s,
                extra=event("target.rests", pid=who.pid, command=who.command, rest_s=rest_s),
            )
        return watched.guard.rests(now_s)

    def _promotable(self) -> float:
        """Returns which share of the budget may be used to move up, and tells of less than all."""
        pressure = self.machine.pressure()
        percent = None if pressure is None else pressure.some_percent
        share = promotable(percent, self.config.policy.placement)
        was, self.stalls = self.stalls, None
        if share < 1:
            what = "less" if share else "nothing"
            self.stalls = f"tasks wait for memory {percent:.0f} % of the time: {what} is moved up"
            if was is None:
                log.warning("%s", self.stalls, extra=event("memory.stalls"))
        return share

    def _rooms(self) -> list[TierRoom]:
        percent, tiers = self.config.policy.headroom_percent, self.topology.tiers
        rooms = numa.rooms(tiers, self.machine.rooms(), percent)
        cycles = map(self.latencies.cycles_of, tiers)
        return [
            room if each is None else replace(room, loaded_cycles=each)
            for room, each in zip(rooms, cycles, strict=True)
        ]

    def _close(self, rooms: Sequence[TierRoom]) -> None:
        """Finds the ways up that don't pay under the present load, and tells of changes."""
        before = self.closed
        self.closed = closed(before, [room.loaded_cycles for room in rooms])
        for way in sorted(self.closed - before):
            log.warning("%s", self.why_closed(way, rooms), extra=event("tier.loaded"))
        for upper, lower in sorted(before - self.closed):
            names = self.names[lower], self.names[upper]
            log.info("moves up from %s to %s go on", *names, extra=event("tier.relieved"))

    def why_closed(self, way: Way, rooms: Sequence[TierRoom]) -> str:
        """Says why nothing is moved up that way now."""
        (upper, lower), names = way, self.names
        return (
            f"{names[upper]} answers in {rooms[upper].loaded_cycles:.0f} cycles, {names[lower]} in "
            f"{rooms[lower].loaded_cycles:.0f}: nothing is moved up from there to it"
        )

    def policy(self) -> Policy:
        """Returns the configured policy with what moving a page was found to cost."""
        return replace(self.config.policy.placement, move_cost_ns=self.cost.page_ns)

    @property
    def budget_bytes(self) -> int:
        """What may be moved in a round."""
        config = self.config
        return int(config.migrate.budget_mbps * (1 << 20) * config.daemon.interval_s)

    @property
    def _moving_s(self) -> float:
        """How long a round may spend in moving."""
        return self.config.daemon.interval_s * self.config.migrate.round_percent / 100

    def _plannable_bytes(self) -> int:
        """Returns what a plan may move.

        Of several tenants that is no more than a round has time for: the budget is divided between
        them, but the deadline would cut off whoever comes last, and the same one each time.
        """
        if len(self.tenants.all) == 1:
            return self.budget_bytes
        in_time = max(int(self._moving_s * 1e9 / self.cost.page_ns), LEAST_PLAN_PAGES)
        return min(self.budget_bytes, in_time * PAGE_BYTES)

    def _targets(self, fresh: list[Watched], now_s: float) -> list[Target]:
        """Returns what may be moved of them."""
        return [
            self._target(watched, watched.accesses, now_s)
            for watched in fresh
            if watched.accesses is not None
            and (watched.pin is not Pin.HERE or len(watched.pins) or len(watched.named))
        ]

    def _target(self, watched: Watched, seen: Accesses, now_s: float) -> Target:
        most = ceiling(seen)
        pinned, fixed = watched.cut_at_pins()
        pieces = watched.pieces
        if not isinstance(pinned, bool):
            pieces = pieces.take(np.flatnonzero(~(pinned | fixed)))
        target = Target(
            pid=watched.process.pid,
            pieces=watched.pieces,
            ceiling=most,
            pinned=pinned,
            fixed=fixed,
            rests=watched.pin is None and self._rests(watched, pieces, most, now_s),
            spare=is_spare(watched.pieces),
            tenant=self.tenants.index(watched.process.cgroup),
        )
        if not watched.is_looked_at(now_s):
            return target
        return replace(target, awaits_look=awaits_look(target, now_s=now_s))

    def _decide(self, targets: list[Target], rooms: list[TierRoom], now_s: float) -> Plan:
        self._close(rooms)
        made = plan(
            targets,
            rooms,
            self.policy(),
            now_s=now_s,
            budget_bytes=min(
                self._plannable_bytes(), self.budget_bytes - self.arenas.claim(self.budget_bytes)
            ),
            promotable=self._promotable(),
            closed=self.closed,
            tenants=self.tenants.all,
            sorted_by_kernel=self.sorted_by_kernel,
            elsewhere=self._in_arenas() if self.arenas.all() else None,
        )
        self.shares, self.owed = made.shares, made.owed
        self.gaps_ns = made.gaps_ns
        self.flows.note(made)
        first = 0
        for target in targets:
            last = first + len(target.pieces)
            target.pieces["kept"] = made.kept_codes[first:last]
            first = last
        return made

    def _try_pages(self, targets: list[Target], now_s: float) -> None:
        """Has a few pages looked at that tell whether what is left to the kernel is alike."""
        if not (self.sorted_by_kernel and self.sorting.tells_alike and self.sampler.can_look):
            return
        due = [target for target in targets if self.watched[target.pid].try_at_s <= now_s]
        if (watched := self._look_at(most_promising(due))) is not None:
            watched.note_trial(now_s)

    def _zoom(self, targets: list[Target], now_s: float) -> None:
        """Has the most doubtful memory looked at page by page, a range at a time."""
        if not self.sampler.can_zoom:
            return
        due = [target for target in targets if self.watched[target.pid].zoom_at_s <= now_s]
        doubt = most_doubtful(due, self.policy(), now_s=now_s, gaps_ns=self.gaps_ns)
        if (watched := self._look_at(doubt)) is not None:
            watched.note_look(now_s)

    def _look_at(self, doubt: Doubt | None) -> Watched | None:
        """Begins a look at single pages; returns whose they are, None where none has begun."""
        if doubt is None or not self.sampler.zoom(
            doubt.pid, doubt.start, doubt.end, per_page_s=doubt.per_page_s
        ):
            return None
        return self.watched[doubt.pid]

    # Migrate

    def _move(self, made: Plan, begin_s: float) -> None:
        pages = int(made.moves["bytes"].sum()) // PAGE_BYTES
        waits = pages < FEW_PAGES and begin_s - self.moved_s < FEW_WAIT_S
        self.moved_lately = pages > 0 and not waits
        if pages >= FEW_PAGES:
            self.busy_s = begin_s
        if self.mover is None or self.paused or self.yields or not self.moved_lately:
            self.cost.idle()
            return
        self.moved_s = begin_s
        report = self.mover.run(made, deadline_s=self.machine.monotonic() + self._moving_s)
        tenants = [self.watched[pid].process.cgroup or OTHERS for pid in made.pids]
        self.flows.add(report, self.topology.tiers, tenants)
        self.cost.add(report)
        self._learn(report, begin_s)
        self.awaited = self.awaited.after(report, now_s=begin_s)
        if line := summary(report, self.topology.tiers):
            log.info("%s", line, extra=event("moved", pages=report.moved_pages))

    def _make_room(self, lacks: Sequence[int], taken_bytes: int, now_s: float) -> None:
        """Has page cache that nobody uses make way for what lacks room, within the budget."""
        if self.cache is not None:
            self.cache.make_room(
                self.topology,
                lacks,
                self.config.policy.placement,
                interval_s=self.config.daemon.interval_s,
                most_bytes=self.budget_bytes - taken_bytes,
                now_s=now_s,
            )

    def _learn(self, report: Report, now_s: float) -> None:
        for index, pid in enumerate(report.plan.pids):
            watched = self.watched[pid]
            watched.pieces = settle(watched.pieces, report, index, self.policy(), now_s=now_s)
