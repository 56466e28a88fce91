# SPDX-License-Identifier: Apache-2.0
"""Which writes make a region of volatile CXL memory: a pure function of what was found.

Follows drivers/cxl/core/region.c and hdm.c. The kernel takes the writes in this order alone, and
what it demands of them is checked here first, where there are words for it:

- ways are 1, 2, 3, 4, 6, 8, 12 or 16, and a power of two times those of the root decoder;
- position N is behind the root decoder's target N modulo its ways, and ports below alternate too;
- a root decoder of several ways demands its own granularity;
- a size is a multiple of 256 MiB times the ways; a device's capacity is handed out from its
  beginning to its end, and by its decoders in their order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierd.errors import TierdError, UnsupportedKernel
from tierd.kernel.blocks import AUTO_ONLINE
from tierd.kernel.cxl import DEVICES, REGION_DRIVER
from tierd.model import CxlRegion, Decoder, Memdev, Online

ALIGN_BYTES = 256 << 20
WAYS = (1, 2, 3, 4, 6, 8, 12, 16)
GRANULARITIES = tuple(256 << power for power in range(7))

NEEDED = {
    "cxl_region": "cxl_core, built with CONFIG_CXL_REGION",
    "cxl_dax_region": "dax_cxl",
    "kmem": "kmem",
}
"""The drivers that make memory of a region, and the modules that have them."""

_MODULES = "modprobe -a cxl_acpi cxl_pci cxl_mem cxl_port"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for; None and empty is what tierd is to choose."""

    memdevs: tuple[str, ...] = ()
    ways: int | None = None
    granularity_bytes: int | None = None
    size_bytes: int | None = None
    online: Online = Online.MOVABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The machine's CXL memory.

    `next_regions` are the names that root decoders give next, `drivers` those of NEEDED that are
    loaded, `auto_online` what becomes of new memory blocks.
    """

    memdevs: tuple[Memdev, ...]
    decoders: tuple[Decoder, ...]
    regions: tuple[CxlRegion, ...]
    next_regions: Mapping[str, str]
    drivers: frozenset[str]
    auto_online: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A write to a file of sysfs: `path` is below the root of the file system."""

    path: Path
    value: str
    why: str

    def __str__(self) -> str:
        return f"/{self.path} = {self.value!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """A region, and the writes that make it. `memdevs` and `decoders` are by their position."""

    region: str
    root: str
    memdevs: tuple[str, ...]
    decoders: tuple[str, ...]
    size_bytes: int
    granularity_bytes: int
    online: Online
    steps: tuple[Step, ...] = ()

    @property
    def ways(self) -> int:
        return len(self.decoders)


def make(request: Request, found: Found) -> RegionPlan:
    """Chooses devices, a root decoder and sizes, and lists every write.

    Raises:
        UnsupportedKernel: a driver is missing.
        TierdError: it cannot be done, with the reason and the next step.
    """
    _require_drivers(found)
    memdevs = _choose_memdevs(request, found)
    ways = len(memdevs)
    share_bytes = _share_bytes(request, memdevs, found)
    root = _choose_root(memdevs, share_bytes * ways, found)
    members = _in_order(root, memdevs)
    for memdev in members:
        _require_way(memdev, found)
    plan = RegionPlan(
        region=found.next_regions[root.name],
        root=root.name,
        memdevs=tuple(memdev.name for memdev in members),
        decoders=tuple(_free_decoder(memdev, found).name for memdev in members),
        size_bytes=share_bytes * ways,
        granularity_bytes=_granularity_bytes(request, root),
        online=request.online,
    )
    steps = (*_steps_of_region(plan), *_steps_of_memory(plan, found.auto_online))
    return replace(plan, steps=steps)


def free_bytes(memdev: Memdev, decoders: Iterable[Decoder]) -> int:
    """Returns the volatile capacity behind all that is handed out, which alone can be."""
    ours = (d for d in decoders if d.memdev == memdev.name and d.dpa_bytes and d.mode != "pmem")
    ends = [d.dpa_bytes if d.dpa_start is None else d.dpa_start + d.dpa_bytes for d in ours]
    return max(memdev.ram_bytes - max(ends, default=0), 0)


def _require_drivers(found: Found) -> None:
    if not found.memdevs:
        raise UnsupportedKernel(
            "the kernel knows of no CXL memory device",
            hint=f"if there is one (lspci -d ::0502), load its drivers: {_MODULES}",
        )
    if not any(decoder.kind == "root" for decoder in found.decoders):
        raise UnsupportedKernel(
            "the kernel knows of no window for CXL memory (root decoder)",
            hint="modprobe cxl_acpi; if that brings none, the firmware has set up no window "
            "(ACPI's CEDT): see its settings",
        )
    for driver, module in NEEDED.items():
        if driver not in found.drivers:
            raise UnsupportedKernel(
                f"the driver {driver} is not there, without which a region becomes no memory",
                hint=f"load the module that has it: {module}",
            )


def _choose_memdevs(request: Request, found: Found) -> Sequence[Memdev]:
    known = {memdev.name: memdev for memdev in found.memdevs}
    for name in request.memdevs:
        if name not in known:
            raise TierdError(
                f"there is no CXL device {name}; there are {', '.join(known)}",
                hint="tierctl cxl list shows them",
            )
    if len(set(request.memdevs)) < len(request.memdevs):
        raise TierdError("a device is named twice", hint="name each once")
    memdevs = [known[name] for name in request.memdevs] or _free_memdevs(request, found)
    if request.ways not in (None, len(memdevs)):
        raise TierdError(
            f"{request.ways} ways take as many devices, not {len(memdevs)}",
            hint="name as many with --memdev, or leave --interleave away",
        )
    if len(memdevs) not in WAYS:
        raise TierdError(
            f"CXL memory cannot be interleaved over {len(memdevs)} devices",
            hint=f"name {', '.join(map(str, WAYS))} of them",
        )
    return memdevs


def _free_memdevs(request: Request, found: Found) -> Sequence[Memdev]:
    """Returns the devices to take where none is named: those that have volatile memory alone."""
    free = [
        memdev
        for memdev in found.memdevs
        if not memdev.pmem_bytes and free_bytes(memdev, found.decoders) >= ALIGN_BYTES
    ]
    names = ", ".join(memdev.name for memdev in free)
    if not free:
        raise TierdError(
            "no CXL device of volatile memory alone has 256 MiB free",
            hint="tierctl cxl list shows what has them; one with persistent memory too is taken "
            "only where it is named with --memdev",
        )
    if len(free) != (request.ways or 1):
        raise TierdError(
            f"{len(free)} CXL devices are free: {names}",
            hint="say which with --memdev, or have all of them interleaved with "
            f"--interleave {len(free)}",
        )
    return free


def _share_bytes(request: Request, memdevs: Sequence[Memdev], found: Found) -> int:
    """Returns how much of each device the region gets."""
    most = min(_usable_bytes(memdev, found) for memdev in memdevs)
    if request.size_bytes is None:
        return most
    ways = len(memdevs)
    unit = ALIGN_BYTES * ways
    if request.size_bytes <= 0 or request.size_bytes % unit:
        below = min(request.size_bytes // unit, most // ALIGN_BYTES) * unit
        raise TierdError(
            f"the size {request.size_bytes >> 20} MiB is no multiple of {unit >> 20} MiB, "
            f"256 MiB times {ways} devices",
            hint=f"--size {max(below, unit) >> 20}M",
        )
    if request.size_bytes // ways > most:
        raise TierdError(
            f"{request.size_bytes >> 20} MiB are more than the {most * ways >> 20} MiB that are "
            f"free on {', '.join(memdev.name for memdev in memdevs)}",
            hint=f"--size {most * ways >> 20}M, or without --size for all of it",
        )
    return request.size_bytes // ways


def _usable_bytes(memdev: Memdev, found: Found) -> int:
    """Returns a device's free capacity in whole units.

    Raises:
        TierdError: it has none, or cannot be used.
    """
    if not memdev.ram_bytes:
        raise TierdError(
            f"{memdev.name} has persistent memory alone, and regions are made of volatile memory",
            hint="for persistent memory: cxl create-region -t pmem",
        )
    if not memdev.route or memdev.bridge is None:
        raise UnsupportedKernel(
            f"{memdev.name} has no endpoint, so the kernel cannot reach its decoders",
            hint=f"{_MODULES}; dmesg tells why the driver refused it",
        )
    usable = free_bytes(memdev, found.decoders) // ALIGN_BYTES * ALIGN_BYTES
    if not usable:
        regions = [r.name for r in found.regions if memdev.name in r.memdevs]
        used = f"{memdev.name} is in use by {', '.join(regions) or 'a decoder without a region'}"
        raise TierdError(
            f"{used}: it has no 256 MiB free",
            hint="tierctl cxl list shows by what; take another device",
        )
    return usable


def _free_decoder(memdev: Memdev, found: Found) -> Decoder:
    """Returns the decoder that the kernel hands out next: that behind the last one in use."""
    decoders = [decoder for decoder in found.decoders if decoder.memdev == memdev.name]
    used = [i for i, d in enumerate(decoders) if d.dpa_bytes or d.size_bytes or d.region]
    behind = max(used, default=-1) + 1
    if behind >= len(decoders):
        raise TierdError(
            f"all {len(decoders)} decoders of {memdev.name} are in use",
            hint="tierctl cxl list shows by which regions",
        )
    if decoders[behind].locked:
        raise TierdError(
            f"{decoders[behind].name} of {memdev.name} is locked by the firmware",
            hint="have the firmware leave CXL memory to the operating system, and boot again",
        )
    return decoders[behind]


def _require_way(memdev: Memdev, found: Found) -> None:
    """Refuses a device with a port above it whose decoders are all taken: many have but one."""
    for port in memdev.route[:-1]:
        number = port.removeprefix("port")
        decoders = [d for d in found.decoders if d.name.startswith(f"decoder{number}.")]
        if decoders and all(decoder.region is not None for decoder in decoders):
            users = ", ".join(f"{d.name} by {d.region}" for d in decoders)
            raise TierdError(
                f"no decoder of {port}, which {memdev.name} is behind, is free: {users}",
                hint="such a port maps no more regions: one region of all that is behind it is "
                "needed, or a device behind another port",
            )


def _choose_root(memdevs: Sequence[Memdev], size_bytes: int, found: Found) -> Decoder:
    """Returns the root decoder that fits these devices with the least room to spare."""
    refused = {
        decoder.name: _unfit(decoder, memdevs, size_bytes, found)
        for decoder in found.decoders
        if decoder.kind == "root"
    }
    fit = [d for d in found.decoders if d.kind == "root" and refused[d.name] is None]
    if not fit:
        names = ", ".join(memdev.name for memdev in memdevs)
        reasons = "; ".join(f"{name} {reason}" for name, reason in refused.items())
        raise TierdError(
            f"no window of the host takes {size_bytes >> 20} MiB of {names}: {reasons}",
            hint="tierctl cxl list shows the windows and their host bridges; name other devices, "
            "or less with --size",
        )
    return max(fit, key=lambda d: (d.interleave_ways or 1, -_room_bytes(d, found)))


def _unfit(root: Decoder, memdevs: Sequence[Memdev], size_bytes: int, found: Found) -> str | None:
    """Returns why a region cannot be in a root decoder, None where it can."""
    ways = root.interleave_ways or 1
    if "ram" not in root.modes or root.name not in found.next_regions:
        return "is not for volatile memory"
    if root.locked:
        return "is locked by the firmware"
    if len(memdevs) % ways or not _is_power_of_two(len(memdevs) // ways):
        return f"takes {ways} devices, or that times a power of two, not {len(memdevs)}"
    of_bridges = [memdev.bridge for memdev in memdevs]
    if any(bridge not in root.targets for bridge in of_bridges):
        return f"is not for the host bridges {', '.join(sorted({b or '?' for b in of_bridges}))}"
    if any(of_bridges.count(target) != len(memdevs) // ways for target in root.targets[:ways]):
        return "wants as many devices behind each of its host bridges"
    if _room_bytes(root, found) < size_bytes:
        return f"has only {_room_bytes(root, found) >> 20} MiB free"
    return None


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _room_bytes(root: Decoder, found: Found) -> int:
    """Returns the largest free range of a root decoder; all together where starts aren't told."""
    inside = [region for region in found.regions if region.root == root.name and region.size_bytes]
    if root.start is None or any(region.start is None for region in inside):
        return root.size_bytes - sum(region.size_bytes for region in inside)
    edge, largest = root.start, 0
    for start, size in sorted((region.start or 0, region.size_bytes) for region in inside):
        edge, largest = start + size, max(largest, start - edge)
    return max(largest, root.start + root.size_bytes - edge)


def _in_order(root: Decoder, memdevs: Sequence[Memdev]) -> Sequence[Memdev]:
    """Puts devices at the positions that the kernel takes them at."""
    ways = root.interleave_ways or 1
    behind = [
        _alternating([memdev for memdev in memdevs if memdev.bridge == target], 0)
        for target in root.targets[:ways]
    ]
    return [memdev for turn in zip(*behind, strict=True) for memdev in turn]


def _alternating(memdevs: Sequence[Memdev], depth: int) -> Sequence[Memdev]:
    """Takes turns at the ports that lie so deep on the devices' routes, and at those below them."""
    if len(memdevs) < 2:
        return memdevs
    ports = dict.fromkeys(memdev.route[depth] for memdev in memdevs)
    groups = [
        _alternating([memdev for memdev in memdevs if memdev.route[depth] == port], depth + 1)
        for port in ports
    ]
    if len({len(group) for group in groups}) > 1:
        raise TierdError(
            f"there are not as many devices behind each of the ports {', '.join(ports)}",
            hint="name as many behind each; tierctl cxl list --json has their routes",
        )
    return [memdev for turn in zip(*groups, strict=True) for memdev in turn]


def _granularity_bytes(request: Request, root: Decoder) -> int:
    own = root.interleave_granularity_bytes or GRANULARITIES[0]
    wanted = request.granularity_bytes
    if wanted is None:
        return own
    if wanted not in GRANULARITIES:
        raise TierdError(
            f"{wanted} bytes are no granularity",
            hint=f"one of {', '.join(map(str, GRANULARITIES))}",
        )
    if (root.interleave_ways or 1) > 1 and wanted != own:
        raise TierdError(
            f"{root.name} is interleaved by {own} bytes, and a region in it has to be too",
            hint=f"--granularity {own}, or leave it away",
        )
    return wanted


def _steps_of_region(plan: RegionPlan) -> Iterator[Step]:
    region, share = DEVICES / plan.region, plan.size_bytes // plan.ways

    def step(path: Path, value: object, why: str) -> Step:
        return Step(path=path, value=str(value), why=why)

    yield step(DEVICES / plan.root / "create_ram_region", plan.region, "a region in this window")
    yield step(
        region / "interleave_granularity", plan.granularity_bytes, "bytes from one device in turn"
    )
    yield step(region / "interleave_ways", plan.ways, "so many devices")
    yield step(region / "size", plan.size_bytes, "addresses of the host")
    for position, (memdev, name) in enumerate(zip(plan.memdevs, plan.decoders, strict=True)):
        decoder = DEVICES / name
        yield step(decoder / "mode", "ram", f"{memdev}: volatile memory")
        yield step(decoder / "dpa_size", share, f"{memdev}: so much of its capacity")
        yield step(region / f"target{position}", name, f"{memdev} at position {position}")
    yield step(region / "commit", 1, "the hardware decodes the addresses")


def _steps_of_memory(plan: RegionPlan, auto_online: str | None) -> Iterator[Step]:
    policy = plan.online.policy
    changes = auto_online is not None and auto_online != policy
    if changes:
        why = "for the blocks that come next"
        yield Step(path=AUTO_ONLINE, value=policy, why=why)
    why = "a dax device, of which kmem makes memory"
    yield Step(path=REGION_DRIVER / "bind", value=plan.region, why=why)
    if changes:
        yield Step(path=AUTO_ONLINE, value=auto_online or "", why="as it was")
