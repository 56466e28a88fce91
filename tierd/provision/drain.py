# SPDX-License-Identifier: Apache-2.0
"""Takes a region of CXL memory out of use and apart, while programs run.

Until its driver is unbound all of it can come back, and does, where a step fails; from then on
there is only the way to the end. Each step is recorded before it is made.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tierd.errors import Conflict, TierdError
from tierd.journal import EntryId, Journal, RegionDrain
from tierd.kernel import blocks as memory_blocks
from tierd.kernel import cxl, nodes, process, zoneinfo
from tierd.kernel.cxl_regions import Regions
from tierd.kernel.dax import read_dax_devices
from tierd.kernel.held import Held, read_held
from tierd.kernel.signals import time_limit
from tierd.kernel.tunable import Files
from tierd.model import Backing, MemoryBlock, NodeId, Pid
from tierd.provision.drain_plan import DrainPlan, InUse, Restricted, needed_bytes, no_room
from tierd.provision.undoing import undone_where_it_fails

WITHIN_S = 60.0
"""How long a block may take; the kernel itself would go on for ever on a page that is pinned."""

TOLD_HOLDERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a drain is: bytes of blocks that are offline, of all that were online."""

    doing: str
    offline_bytes: int
    total_bytes: int


def look(root: Path = Path("/")) -> InUse:
    """Reads what a plan is made of.

    Raises:
        UnexpectedContent: the kernel tells something in a format that is new to tierd.
    """
    regions = cxl.read_regions(root)
    ranges = [range(r.start, r.start + r.size_bytes) for r in regions if r.start is not None]
    found = memory_blocks.read_blocks(ranges, root)
    of_regions = {block.node for block in found if block.node is not None}
    everywhere = memory_blocks.read_blocks([range(1 << 63)], root) if of_regions else ()
    in_use = {node: nodes.read_in_use(node, root) for node in of_regions}
    return InUse(
        memdevs=cxl.read_memdevs(root),
        decoders=cxl.read_decoders(root),
        regions=regions,
        dax_devices=tuple(d for d in read_dax_devices(root) if d.backing is Backing.CXL),
        blocks=found,
        node_blocks=Counter(
            b.node for b in everywhere if b.node is not None and b.state != "offline"
        ),
        in_use=in_use,
        rooms=zoneinfo.free_above_watermarks_bytes(root),
        restricted=tuple(_restricted(of_regions, root)),
    )


def _restricted(among: set[NodeId], root: Path) -> Iterator[Restricted]:
    """Yields the processes that may have memory of these nodes alone."""
    others = {
        node.id for node in nodes.read_nodes(root) if node.total_bytes and node.id not in among
    }
    for pid in process.read_pids(root) if among else ():
        found = process.read_process(pid, root)
        if found is None or found.is_kernel_thread:
            continue
        for by, allowed in _allowed(pid, found, root):
            if allowed & among and not allowed & others:
                yield Restricted(pid=pid, command=found.command, by=by, nodes=allowed & among)
                break


def _allowed(
    pid: Pid, found: process.Process, root: Path
) -> Iterator[tuple[str, frozenset[NodeId]]]:
    if found.allowed_nodes is not None:
        yield "cpuset", frozenset(found.allowed_nodes)
    with contextlib.suppress(PermissionError):
        for bound in process.read_policies(pid, root) or ():
            yield "mempolicy", frozenset(bound.nodes)


def left_of(journal: Journal, name: str) -> tuple[EntryId, RegionDrain] | None:
    """Returns the drain of a region that was cut short, if there is one."""
    entries = (
        (entry, change)
        for entry, change in journal.changes.items()
        if isinstance(change, RegionDrain) and change.name == name
    )
    return next(entries, None)


class RegionDrainer:
    """The work on one region.

    Args:
        plan: of what is to be done still.
        journal: open.
        files: how sysfs is written to; it sees each write.
        root: where /proc and /sys are.
        within_s: how long a block may take to go offline.
        tell: is told how far it is.
        let_go: ends a daemon's drain of a node; nothing where there is none.
    """

    def __init__(
        self,
        plan: DrainPlan,
        journal: Journal,
        files: Files,
        root: Path = Path("/"),
        *,
        within_s: float = WITHIN_S,
        tell: Callable[[Progress], None] = lambda _: None,
        let_go: Callable[[NodeId], None] = lambda _: None,
    ) -> None:
        self._plan, self._journal, self._files, self._root = plan, journal, files, root
        self._within_s, self._tell, self._let_go = within_s, tell, let_go
        self._regions = Regions(root, files)
        self._entry: EntryId | None = None
        self._change: RegionDrain | None = None

    def run(self, empty: Callable[[Callable[[NodeId], None]], None]) -> None:
        """Takes the region apart; what fails brings it back, as long as it can come back.

        Args:
            empty: moves what can be moved off the node first. It calls its argument before it has
                a daemon drain a node.

        Raises:
            TierdError: it could not be done, with the reason, the next step, and what was undone.
        """
        with undone_where_it_fails(self._undo):
            self._begin()
            empty(self._note_daemon)
            for number, block in enumerate(reversed(self._plan.blocks)):
                self._take_offline(block, number)
            self._step("the memory's end")
            self._regions.unbind_kmem(self._plan.region)
            self._step("the region's end", ends=True)
            assert self._entry is not None, "it was recorded first"
            self._journal.revert(self._entry)
            self._end_daemons()

    def _begin(self) -> None:
        """Records the region as it is; where it was begun before, as it was then."""
        plan = self._plan
        folder = self._regions.folder(plan.region)
        left = left_of(self._journal, plan.region)
        if left is not None and left[1].folder == folder:
            self._entry, self._change = left
            return
        if folder is None:
            raise Conflict(f"{plan.region} is gone by now")
        self._change = RegionDrain(
            name=plan.region,
            root=plan.root,
            folder=folder,
            decoders=plan.decoders,
            share_bytes=plan.share_bytes,
            kmem=plan.kmem,
            online=tuple(f"{block.number}={_policy(block)}" for block in plan.blocks),
            doing="its beginning",
        )
        self._entry = self._journal.record(self._change)

    def _note_daemon(self, node: NodeId) -> None:
        assert self._change is not None, "it was recorded first"
        self._amend(replace(self._change, node=node, doing=f"the drain of node {node}"))

    def _step(self, doing: str, *, ends: bool = False) -> None:
        assert self._change is not None, "it was recorded first"
        self._amend(replace(self._change, doing=doing, ends=ends))

    def _amend(self, change: RegionDrain) -> None:
        assert self._entry is not None, "it was recorded first"
        self._change = change
        self._journal.amend(self._entry, change)

    def _take_offline(self, block: MemoryBlock, number: int) -> None:
        total = sum(block.size_bytes for block in self._plan.blocks)
        name, at = f"memory{block.number}", number * block.size_bytes
        self._tell(Progress(doing=name, offline_bytes=at, total_bytes=total))
        self._require_room(self._plan.blocks[: len(self._plan.blocks) - number])
        self._step(f"{name}, offline")
        path = self._root / memory_blocks.MEMORY / name / "state"
        try:
            with time_limit(self._within_s):
                self._files.write(path, "offline")
        except OSError as error:
            if self._files.read(path) != "offline":
                raise self._stays(block, error) from error
        self._tell(Progress(doing=name, offline_bytes=at + block.size_bytes, total_bytes=total))

    def _require_room(self, left: tuple[MemoryBlock, ...]) -> None:
        """Looks again before each block: programs go on allocating meanwhile."""
        ours = {block.node for block in left if block.node is not None}
        needed = needed_bytes(ours, left, {n: nodes.read_in_use(n, self._root) for n in ours})
        rooms = zoneinfo.free_above_watermarks_bytes(self._root)
        room = sum(free for node, free in rooms.items() if node not in ours)
        if needed > room:
            raise no_room(self._plan.region, needed, room)

    def _stays(self, block: MemoryBlock, error: OSError) -> TierdError:
        held = read_held(range(block.start, block.start + block.size_bytes), self._root)
        why = (
            f"{self._within_s:g} s were not enough"
            if isinstance(error, TimeoutError)
            else str(error.strerror)
        )
        return Conflict(
            f"memory{block.number} of {self._plan.region} cannot be taken offline: {why}\n"
            f"{told_of(held, self._root)}",
            hint="end what holds it (pinned: RDMA, io_uring, vmsplice, VFIO), or wait longer with "
            "--timeout; memory that the kernel has for itself stays until the next boot",
        )

    def _end_daemons(self) -> None:
        if self._change is not None and self._change.node is not None:
            self._let_go(NodeId(self._change.node))

    def _undo(self) -> list[str]:
        if self._entry is None:
            return []
        try:
            self._end_daemons()
            line = self._journal.revert(self._entry)
        except (OSError, TierdError) as error:
            line = f"could not be undone: {error}; tierctl cxl list tries again"
        return [] if line is None else [line]


def told_of(held: Held | None, root: Path) -> str:
    """Returns what is on a block and whose it is, in words."""
    if held is None:
        return "what is on it is not known: the kernel has no /proc/kpageflags, or keeps it"
    kinds = ", ".join(f"{count} {kind}" for kind, count in held.kinds.items())
    processes = [
        f"{count} of process {pid} ({process.read_command(pid, root) or 'gone'})"
        for pid, count in [*held.processes.items()][:TOLD_HOLDERS]
    ]
    cgroups = [f"{count} of {name}" for name, count in [*held.cgroups.items()][:TOLD_HOLDERS]]
    return "\n".join(
        f"{what}: {told}"
        for what, told in (
            ("pages on it", kinds or "none"),
            ("mapped", ", ".join(processes)),
            ("charged", ", ".join(cgroups)),
        )
        if told
    )


def _policy(block: MemoryBlock) -> str:
    return "online_movable" if block.zones == ("Movable",) else "online_kernel"
