# SPDX-License-Identifier: Apache-2.0
"""What is done about errors of CXL devices: they are counted, and, as configured, fled from."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd import cxl_kept
from tierd.bulk import Report
from tierd.config import OnError
from tierd.cxl_kept import Kept
from tierd.daemon import Daemon
from tierd.errors import TierdError
from tierd.kernel import frames, process
from tierd.kernel.blocks import read_block_bytes, read_blocks, read_state
from tierd.kernel.cxl_events import CxlEvent, Severity
from tierd.kernel.frames import Frames
from tierd.kernel.free import FreeMemory
from tierd.kernel.tunable import boot_id
from tierd.migrate.drain import Drain, apart, find_mapped
from tierd.migrate.mover import Mover
from tierd.model import PAGE_BYTES, NodeId, Pid, Topology
from tierd.observe.cxl_errors import CxlErrorCounts
from tierd.observe.events import event as log_event
from tierd.observe.flows import OTHERS
from tierd.provision.retire import addresses, bad_frames, frames_of

log = logging.getLogger("tierd")

FENCE_S = 86_400.0
"""Uncorrected errors count against a device for a day."""

MOST_BLOCKS = 64
"""Evacuated at a time: 8 GiB of blocks of 128 MiB. What is worse than that is fenced."""


LOOK_S, RARELY_S = 10.0, 3600.0
"""An evacuated block is looked at again after the first. What could not be moved is tried again
after that, then after twice as long each time, up to the second."""

LOOK_COST = 10
"""Looking, and evacuating again, is repeated after so many times what it took."""

FOLIOS_S = 1.0
"""What moves together with lost data is looked at anew after so long."""


class Events(Protocol):
    """What tells of errors: tierd.kernel.cxl_events.CxlEvents, or what plays it."""

    amiss: int
    deaf: str | None

    @property
    def lost(self) -> int: ...

    def read(self) -> list[CxlEvent]: ...


@dataclass(slots=True)
class _Looks:
    """How an evacuated block is looked after while it is online, for others get memory of it.

    Attributes:
        begun_s: since when it is evacuated, this time.
        moved_pages: what had been moved before.
        mapped: pages that processes had there at the last look; None where that is not known.
        stays: and when nothing more could be moved.
    """

    begun_s: float
    moved_pages: int = 0
    mapped: int | None = None
    stays: int = 0
    at_s: float = 0.0
    retry_at_s: float = 0.0
    wait_s: float = LOOK_S / 2

    def rest(self, now_s: float, moved_pages: int) -> None:
        """Begins to wait, where nothing more could be moved."""
        is_moved = moved_pages > self.moved_pages
        self.wait_s = LOOK_S if is_moved else min(2 * self.wait_s, RARELY_S)
        self.retry_at_s = now_s + self.wait_s
        self.at_s = now_s + max(LOOK_S, LOOK_COST * (now_s - self.begun_s))
        self.stays = self.mapped or 0

    def asks(self, now_s: float) -> bool:
        """Tells whether there is something to be moved, or to be tried again."""
        if self.mapped is not None and self.mapped > self.stays:
            return True
        return self.mapped != 0 and now_s >= self.retry_at_s


@dataclass(slots=True, kw_only=True)
class CxlErrors:
    """The work on them, between the daemon's rounds.

    Args:
        daemon: places nothing while pages are taken out of a block.
        free: tells what a node can take.
        make_mover: makes what moves pages between the tiers of a topology.
        fence: has nothing placed on a node any more, and takes what is there off it.
        folder: where it is kept what a restart is not to forget.
        listen: begins to listen; raises OSError or TierdError where that cannot be.
        root: where /sys and /proc are.
        clock: CLOCK_MONOTONIC in seconds.
    """

    daemon: Daemon
    free: FreeMemory
    make_mover: Callable[[Topology], Mover]
    fence: Callable[[NodeId], None]
    folder: Path
    listen: Callable[[], Events]
    root: Path = Path("/")
    clock: Callable[[], float] = time.monotonic

    known: CxlErrorCounts = field(default_factory=CxlErrorCounts)
    evacuations: dict[int, Drain] = field(default_factory=dict)
    _looks: dict[int, _Looks] = field(default_factory=dict)
    """At the blocks of `evacuations`."""
    fenced: dict[NodeId, str] = field(default_factory=dict)
    """With the device for whose errors."""
    _is_kept: bool = True
    _events: Events | None = None
    _trouble: str | None = None
    _bad: dict[range, Frames] = field(default_factory=dict)
    """What _bad_in() found, until something comes."""
    _folios: dict[range, tuple[float, Frames]] = field(default_factory=dict)
    """What _left_out() found, and until when it is taken for true."""
    _recent: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def begin(self) -> None:
        """Listens, where there is a CXL device; without one there is nothing to hear."""
        if self._events is not None or not self.daemon.topology.memdevs:
            return
        try:
            self._events = self.listen()
            self._trouble = None
        except (OSError, TierdError) as error:
            hint = getattr(error, "hint", None)
            next_step = f" ({hint})" if hint else ""
            self._trouble = f"errors of CXL devices are not seen: {error}{next_step}"

    def restore(self) -> None:
        """Goes on with what an earlier daemon knew in this boot."""
        kept = cxl_kept.load(self.folder, boot_id(self.root))
        self.known.places.update({(e.device, e.dpa or 0): e for e in kept.places})
        for device, times in kept.recent.items():
            self._recent[device].extend(times)
        if self.daemon.config.cxl.on_error is OnError.EVACUATE:
            self._flee(self._blocks_of(kept.places))
        nodes = {node for tier in self.daemon.topology.tiers for node in tier.nodes}
        for node in kept.fenced.keys() & nodes:
            self._fence(node, kept.fenced[node])

    def follow(self) -> None:
        """Goes on with other tiers: what was begun of a node that is there begins anew."""
        self.begin()
        nodes = {node for tier in self.daemon.topology.tiers for node in tier.nodes}
        self.fenced = {node: device for node, device in self.fenced.items() if node in nodes}
        begun, self.evacuations = self.evacuations, {}
        self._looks.clear()
        for block, evacuation in begun.items():
            if read_state(block, self.root) == "online":
                self._begin(block, evacuation.node)

    def go_on(self) -> None:
        """Takes in what has come, and goes on within a round's budget."""
        if self._events is not None:
            for event in self._events.read():
                self._take_in(event)
        self.known.go_on(self.clock())
        for node in self.fenced.keys() - self.free.closed:  # an operator has it used again
            self._recent.pop(self.fenced.pop(node), None)
            self._is_kept = False
        self._look_after()
        self._work()
        self._keep()

    def account(self) -> dict[str, Any]:
        """Returns what the status tells."""
        return {
            "listens": self._events is not None,
            "lost": 0 if self._events is None else self._events.lost + self._events.amiss,
            "errors": list(self.known.account()),
            "evacuations": [
                {
                    "block": block,
                    "node": evacuation.node,
                    "done": evacuation.is_done,
                    "moved_pages": evacuation.moved_pages,
                    "left": {o.label: count for o, count in evacuation.left.items()},
                    "mapped_pages": self._looks[block].mapped,
                    "bad_pages": frames.count(self._bad_in(self._frames(block))),
                }
                for block, evacuation in sorted(self.evacuations.items())
            ],
            "fenced": [{"node": n, "device": d} for n, d in sorted(self.fenced.items())],
        }

    def notes(self) -> Iterator[str]:
        """Yields what is amiss, each with the next step."""
        if self._trouble:
            yield self._trouble
        if self._events is not None and self._events.deaf:
            yield f"errors that some CPU tells of CXL devices are not seen: {self._events.deaf}"
        for block, evacuation in sorted(self.evacuations.items()):
            what = f"memory block {block} of node {evacuation.node} has lost data"
            if self.daemon.mover is None:
                yield f"{what}, and tierd only observes: empty it by: tierctl cxl retire {block}"
            elif evacuation.is_done:
                yield (
                    f"{what} and is evacuated{self._but(block)}; take it out of use, as others may "
                    f"get memory of it until then: tierctl cxl retire {block}"
                )
        for node, device in sorted(self.fenced.items()):
            yield (
                f"node {node} is fenced for errors of {device}: replace it, or have the node used "
                f"again: tierctl drain {node} --undo"
            )

    # Events

    def _take_in(self, event: CxlEvent) -> None:
        now_s = self.clock()
        is_news = self.known.take_in(event, now_s)
        self._bad.clear()
        self._folios.clear()
        rule = self.daemon.config.cxl
        self._is_kept &= not is_news
        if not is_news or event.severity is not Severity.UNCORRECTED:
            return
        if rule.on_error is OnError.EVACUATE:
            self._flee([addresses(event, self.daemon.topology.regions)])
            self._count_against(event, now_s, rule.fence_after)

    def _flee(self, lost: Sequence[range]) -> None:
        """Begins to take all pages out of the blocks that have some of these addresses."""
        asked = [part for part in lost if part]
        for block in read_blocks(asked, self.root)[:MOST_BLOCKS] if asked else ():
            if block.number in self.evacuations:
                self._again(block.number)
            elif block.state == "online" and len(self.evacuations) < MOST_BLOCKS:
                self._begin(block.number, block.node)

    def _begin(self, number: int, node: NodeId | None) -> None:
        topology = self.daemon.topology
        if node is None or not any(node in tier.nodes for tier in topology.tiers):
            return
        rest = apart(topology, node)
        if len(rest.tiers) < 2:
            return
        tier_of = {node: tier for tier in topology.tiers for node in tier.nodes}
        tiers = [tier_of[tier.nodes[0]] for tier in rest.tiers]

        def learn(report: Report) -> None:
            self.daemon.cost.add(report)
            tenants = [process.read_cgroup(pid) or OTHERS for pid in report.plan.pids]
            self.daemon.flows.add(report, tiers, tenants)

        self._looks[number] = _Looks(self.clock())
        self.evacuations[number] = Drain(
            node=node,
            mover=self.make_mover(rest),
            room=self.free.room_bytes,
            find=process.read_pids,
            find_in=partial(self._find_in, self._frames(number)),
            learn=learn,
            clock=self.clock,
        )
        told = "memory block %d has lost data: its other pages are moved away"
        log.warning(told, number, extra=log_event("cxl.evacuate", block=number, node=node))

    def _count_against(self, event: CxlEvent, now_s: float, fence_after: int) -> None:
        """Fences the nodes of a device that has had too many errors in a day."""
        recent = self._recent[event.device]
        recent.append(now_s)
        while recent[0] < now_s - FENCE_S or len(recent) > fence_after:
            recent.popleft()
        if len(recent) < fence_after:
            return
        for node in self._nodes_of(event):
            if node not in self.fenced:
                self._fence(node, event.device)
                told = "node %d is fenced: CXL device %s has had %d uncorrected errors in a day"
                fields = {"node": node, "device": event.device}
                extra = log_event("cxl.fence", **fields)
                log.error(told, node, event.device, len(recent), extra=extra)

    def _fence(self, node: NodeId, device: str) -> None:
        self.fence(node)
        self.fenced[node] = device
        self._is_kept = False

    def _blocks_of(self, places: Sequence[CxlEvent]) -> list[range]:
        """Returns the addresses of the first blocks that have lost data."""
        size = read_block_bytes(self.root) or 0
        lost = (addresses(event, self.daemon.topology.regions) for event in places)
        numbers: set[int] = set()
        for part in lost if size else ():
            numbers |= {*range(part.start // size, -(-part.stop // size))[:MOST_BLOCKS]}
        return [range(n * size, (n + 1) * size) for n in sorted(numbers)[:MOST_BLOCKS]]

    def _keep(self) -> None:
        """Writes down what a restart is not to forget, where that has changed."""
        if self._is_kept:
            return
        recent = {device: tuple(times) for device, times in self._recent.items()}
        places = tuple(self.known.places.values())
        kept = Kept(fenced=self.fenced, recent=recent, places=places)
        try:
            cxl_kept.save(self.folder, boot_id(self.root), kept)
        except OSError as error:
            told = "errors of CXL devices are forgotten by a restart: %s: %s"
            log.warning(told, self.folder, error.strerror, extra=log_event("cxl.unkept"))
        self._is_kept = True

    def _nodes_of(self, event: CxlEvent) -> set[NodeId]:
        """Returns the nodes in tiers that have a device's memory."""
        topology = self.daemon.topology
        regions = {region.name for region in topology.regions if event.device in region.memdevs}
        in_tiers = {node for tier in topology.tiers for node in tier.nodes}
        nodes = {dax.target_node for dax in topology.dax_devices if dax.region in regions}
        return {node for node in nodes if node is not None} & in_tiers

    # Work

    def _work(self) -> None:
        """Goes on with the blocks; placing rests meanwhile, and a drain goes first."""
        daemon = self.daemon
        waiting = {n: drain for n, drain in self.evacuations.items() if not drain.is_done}
        if not waiting or daemon.yields or daemon.paused or daemon.mover is None:
            return
        daemon.yields = True
        share_s = daemon.config.daemon.interval_s * daemon.config.migrate.round_percent / 100
        budget_s = daemon.budget_bytes / PAGE_BYTES * daemon.cost.page_ns / 1e9
        for block, drain in waiting.items():
            drain.run(self.clock() + min(share_s, budget_s) / len(waiting))
            if drain.is_done:
                self._rest(block, drain)

    def _rest(self, block: int, drain: Drain) -> None:
        """Has a block rest that nothing more can be moved out of, and tells what was."""
        looks = self._looks[block]
        moved, is_first = drain.moved_pages - looks.moved_pages, not looks.at_s
        looks.mapped = self._count_mapped(block)
        looks.rest(self.clock(), drain.moved_pages)
        if not moved and not is_first:
            return
        what = "is evacuated" if is_first else f"was in use again: {moved} pages are moved away"
        fields = {"block": block, "moved_pages": moved, "left": looks.mapped}
        extra = log_event("cxl.evacuated", **fields)
        log.warning("memory block %d %s%s", block, what, self._but(block), extra=extra)

    def _look_after(self) -> None:
        """Looks at one of the blocks that are evacuated, and begins anew where it is in use."""
        begin_s = self.clock()
        done = {block for block, drain in self.evacuations.items() if drain.is_done}
        due = [block for block in done if self._looks[block].at_s <= begin_s]
        if not due:
            return
        block = min(due, key=lambda block: self._looks[block].at_s)
        looks = self._looks[block]
        looks.mapped = self._count_mapped(block)
        now_s = self.clock()
        looks.at_s = now_s + max(LOOK_S, LOOK_COST * len(done) * (now_s - begin_s))
        if looks.asks(now_s):
            self._again(block)

    def _again(self, block: int) -> None:
        drain, looks = self.evacuations[block], self._looks[block]
        if drain.is_done:
            looks.begun_s, looks.moved_pages = self.clock(), drain.moved_pages
        drain.again()

    def _count_mapped(self, block: int) -> int | None:
        """Counts what processes have on a block beside lost data; None where that is not told."""
        whole = self._frames(block)
        try:
            return frames.count_mapped(whole, self._left_out(whole), self.root)
        except OSError:
            return None

    def _but(self, block: int) -> str:
        """Returns what is to be told of pages that stay."""
        mapped = self._looks[block].mapped
        if mapped is None:
            return ", as far as is known"
        return f", but for {mapped} pages of programs that cannot be moved now" if mapped else ""

    # Physical memory

    def find_on(self, node: NodeId, pid: Pid, cursor: int) -> tuple[NDArray[np.void], int | None]:
        """Lists what of a process a drain of a node may move: all, but what has lost its data."""
        whole = self._frames_on(node)
        return self._find_in(whole, pid, cursor) if self.is_bad(node) else find_mapped(pid, cursor)

    def is_bad(self, node: NodeId) -> bool:
        """Tells whether a node has lost some data."""
        return bool(len(self._bad_in(self._frames_on(node))))

    def _frames_on(self, node: NodeId) -> range:
        """Returns the frames from a node's first to its last one."""
        blocks = [b for n in self.daemon.topology.nodes if n.id == node for b in n.blocks]
        first = min((block.start for block in blocks), default=0) // PAGE_BYTES
        return range(first, max((block.stop for block in blocks), default=0) // PAGE_BYTES)

    def _find_in(self, whole: range, pid: Pid, cursor: int) -> tuple[NDArray[np.void], int | None]:
        """Lists what a process has of these frames, less what moves together with a bad one."""
        left_out = self._left_out(whole)
        return frames.find_in(pid, whole, left_out, cursor=cursor, root=self.root)

    def _left_out(self, whole: range) -> Frames:
        """Returns the frames that move together with a bad one; folios come and go."""
        until_s, found = self._folios.get(whole, (float("-inf"), frames.NONE))
        if self.clock() >= until_s:
            found = frames.whole_folios(self._bad_in(whole), self.root)
            self._folios[whole] = self.clock() + FOLIOS_S, found
        return found

    def _bad_in(self, whole: range) -> Frames:
        """Returns which of these frames hold lost data."""
        if whole not in self._bad:
            regions = self.daemon.topology.regions
            self._bad[whole] = bad_frames(whole, self.known.places.values(), regions)
        return self._bad[whole]

    def _frames(self, block: int) -> range:
        return frames_of(block, read_block_bytes(self.root) or 0)
