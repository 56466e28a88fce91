# SPDX-License-Identifier: Apache-2.0
"""Which writes take a region of CXL memory apart, and whether it may be: a pure function.

The order is the kernel's, as tierd/kernel/cxl_regions.py tells. What would fail half-way, or would
leave programs without memory, is refused here, before anything is touched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tierd.errors import Conflict, NotFound, TierdError
from tierd.kernel.blocks import MEMORY
from tierd.kernel.cxl import DEVICES, REGION_DRIVER
from tierd.kernel.dax import KMEM
from tierd.model import CxlRegion, DaxDevice, Decoder, Memdev, MemoryBlock, NodeId, Pid
from tierd.provision.plan import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Restricted:
    """A process whose cpuset, or a mempolicy of whose memory, allows these nodes alone."""

    pid: Pid
    command: str
    by: str
    nodes: frozenset[NodeId]


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """The machine's CXL memory and what is on it.

    `blocks` are those of all regions, `node_blocks` how many each node has altogether. `in_use` is
    what programs have of each node, and `rooms` what it can take above its watermarks, in bytes.
    """

    memdevs: tuple[Memdev, ...]
    decoders: tuple[Decoder, ...]
    regions: tuple[CxlRegion, ...]
    dax_devices: tuple[DaxDevice, ...]
    blocks: tuple[MemoryBlock, ...]
    node_blocks: Mapping[NodeId, int]
    in_use: Mapping[NodeId, int]
    rooms: Mapping[NodeId, int]
    restricted: tuple[Restricted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """A region, and the writes that take it apart.

    `blocks` are its blocks that are online, `node` the one whose memory they are, None where they
    are of none or not all that it has. `kmem` are its dax devices that kmem has.
    """

    region: str
    root: str
    memdevs: tuple[str, ...]
    decoders: tuple[str, ...]
    size_bytes: int
    node: NodeId | None
    kmem: tuple[str, ...]
    blocks: tuple[MemoryBlock, ...]
    steps: tuple[Step, ...] = ()

    @property
    def share_bytes(self) -> int:
        """What it has of each device."""
        return self.size_bytes // max(len(self.decoders), 1)


def make(name: str | None, found: InUse) -> DrainPlan:
    """Chooses a region, and lists every write.

    Args:
        name: of a region, or of a memory device of one; None for the only one of volatile memory.
        found: the machine's CXL memory.

    Raises:
        TierdError: it cannot be done, with the reason and the next step.
    """
    region = _choose(name, found)
    devices = [dax for dax in found.dax_devices if dax.region == region.name]
    _require_volatile(region)
    _require_memory(region, devices)
    _require_unlocked(region, found)
    _require_last(region, found)
    blocks = tuple(b for b in _blocks(region, found) if b.state != "offline")
    _require_unrestricted(region, blocks, found)
    _require_room(region, blocks, found)
    plan = DrainPlan(
        region=region.name,
        root=region.root or "",
        memdevs=region.memdevs,
        decoders=region.decoders,
        size_bytes=region.size_bytes,
        node=_node(region, found),
        kmem=tuple(dax.name for dax in devices if dax.driver == "kmem"),
        blocks=blocks,
    )
    return replace(plan, steps=tuple(_steps(plan, region)))


def _choose(name: str | None, found: InUse) -> CxlRegion:
    regions = {region.name: region for region in found.regions}
    if name in regions:
        return regions[name]
    if name is None:
        fit = [region for region in found.regions if region.mode == "ram"]
        whose, hint = "of volatile memory", "tierctl cxl list shows the regions"
    else:
        fit = [region for region in found.regions if name in region.memdevs]
        whose, hint = f"of {name}", "name another, as tierctl cxl list has it"
        if not fit and name not in [memdev.name for memdev in found.memdevs]:
            raise NotFound(f"{name} is neither a CXL region nor a memory device", hint=hint)
    if not fit:
        raise NotFound(f"there is no CXL region {whose}", hint=hint)
    if len(fit) > 1:
        names = ", ".join(region.name for region in fit)
        raise TierdError(f"there are several CXL regions {whose}: {names}", hint="name one")
    return fit[0]


def _require_volatile(region: CxlRegion) -> None:
    if region.mode != "ram" or region.root is None:
        raise TierdError(
            f"{region.name} is of persistent memory, which is never taken apart",
            hint="where its data may go: cxl disable-region and cxl destroy-region",
        )


def _require_memory(region: CxlRegion, devices: list[DaxDevice]) -> None:
    for dax in devices:
        if dax.driver not in (None, "kmem"):
            raise Conflict(
                f"{dax.name} of {region.name} has the driver {dax.driver}: programs have it as a "
                "file, and what is in it would be lost",
                hint=f"end them, and then: daxctl disable-device {dax.name}",
            )


def _require_unlocked(region: CxlRegion, found: InUse) -> None:
    ours = {region.root, *region.decoders}
    locked = [
        decoder.name
        for decoder in found.decoders
        if decoder.locked and (decoder.name in ours or decoder.region == region.name)
    ]
    if locked:
        raise TierdError(
            f"{', '.join(locked)} of {region.name} is locked by the firmware",
            hint="have the firmware leave CXL memory to the operating system, and boot again",
        )


def _require_last(region: CxlRegion, found: InUse) -> None:
    """Refuses a region behind whose part of a device there is another's: that must go first."""
    decoders = {decoder.name: decoder for decoder in found.decoders}
    for ours in (decoders[name] for name in region.decoders if name in decoders):
        for other in found.decoders:
            is_behind = other.memdev == ours.memdev and other.dpa_bytes
            if is_behind and (other.dpa_start or 0) > (ours.dpa_start or 0):
                raise TierdError(
                    f"{other.region or other.name} has the part of {ours.memdev} behind that of "
                    f"{region.name}, and devices give back their last part first",
                    hint=f"drain {other.region or 'what it is of'} first",
                )


def _blocks(region: CxlRegion, found: InUse) -> tuple[MemoryBlock, ...]:
    start = region.start
    if start is None:
        return ()
    inside = range(start, start + region.size_bytes)
    return tuple(block for block in found.blocks if block.start in inside)


def _require_unrestricted(region: CxlRegion, blocks: tuple[MemoryBlock, ...], found: InUse) -> None:
    """Refuses to leave a program with no node to allocate from: the kernel would kill it."""
    nodes = {block.node for block in blocks if block.node is not None}
    ours = {node for node in nodes if _share(node, blocks, found) == 1}
    bound = [other for other in found.restricted if other.nodes and other.nodes <= ours]
    if bound:
        told = ", ".join(f"{p.pid} ({p.command}, by its {p.by})" for p in bound[:8])
        more = f" and {len(bound) - 8} more" if len(bound) > 8 else ""
        raise TierdError(
            f"processes may have memory of {region.name} alone: {told}{more}",
            hint="end them, or let them have another node: cpuset.mems of their cgroup, or another "
            "numactl --membind",
        )


def _require_room(region: CxlRegion, blocks: tuple[MemoryBlock, ...], found: InUse) -> None:
    nodes = {block.node for block in blocks if block.node is not None}
    needed = needed_bytes(nodes, blocks, found.in_use)
    room = sum(bytes_ for node, bytes_ in found.rooms.items() if node not in nodes)
    if needed > room:
        raise no_room(region.name, needed, room)


def needed_bytes(
    nodes: set[NodeId], blocks: tuple[MemoryBlock, ...], in_use: Mapping[NodeId, int]
) -> int:
    """Returns how much of programs' memory may have to leave some blocks of these nodes."""
    return sum(
        min(in_use.get(node, 0), sum(b.size_bytes for b in blocks if b.node == node))
        for node in nodes
    )


def no_room(region: str, needed: int, room: int) -> TierdError:
    return TierdError(
        f"{region} holds {needed >> 20} MiB of programs' memory, and the other nodes have room for "
        f"{room >> 20} MiB",
        hint="end programs, or bring more memory online, and try again",
    )


def _node(region: CxlRegion, found: InUse) -> NodeId | None:
    """Returns the node that a region's memory alone is of."""
    blocks = _blocks(region, found)
    nodes = {block.node for block in blocks}
    only = nodes.pop() if len(nodes) == 1 else None
    return only if only is not None and _share(only, blocks, found) == 1 else None


def _share(node: NodeId, blocks: tuple[MemoryBlock, ...], found: InUse) -> float:
    """Returns which part of a node's online blocks these are."""
    ours = sum(block.node == node and block.state != "offline" for block in blocks)
    return ours / max(found.node_blocks.get(node, 0), 1)


def _steps(plan: DrainPlan, region: CxlRegion) -> Iterator[Step]:
    def step(path: Path, value: str, why: str) -> Step:
        return Step(path=path, value=value, why=why)

    for block in reversed(plan.blocks):
        yield step(MEMORY / f"memory{block.number}/state", "offline", "what is on it moves off")
    for dax in plan.kmem:
        yield step(KMEM / "unbind", dax, "the blocks go; until here all can come back")
    if region.driver is not None:
        yield step(REGION_DRIVER / "unbind", plan.region, "its dax device goes")
    if region.committed:
        yield step(DEVICES / plan.region / "commit", "0", "the hardware decodes it no more")
    for position, decoder in enumerate(region.decoders):
        yield step(DEVICES / plan.region / f"target{position}", "", f"{decoder} leaves it")
    for decoder in reversed(region.decoders):
        yield step(DEVICES / decoder / "dpa_size", "0", "the device has its capacity back")
    yield step(DEVICES / plan.root / "delete_region", plan.region, "the window has its addresses")
