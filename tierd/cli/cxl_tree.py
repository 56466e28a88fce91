# SPDX-License-Identifier: Apache-2.0
"""CXL memory as a person reads it: the devices, and the windows with what was made in them."""

from collections.abc import Iterator
from dataclasses import dataclass

from tierd.cli.text import amount
from tierd.discover.fabric import Blocks, Fabric
from tierd.model import CxlRegion, DaxDevice, Decoder, Memdev

NOTHING = (
    "the kernel knows of no CXL memory device; if there is one (lspci -d ::0502), load its "
    "drivers: modprobe -a cxl_acpi cxl_pci cxl_mem cxl_port"
)


@dataclass(frozen=True, slots=True)
class Branch:
    """A line, and what hangs below it."""

    line: str
    below: tuple["Branch", ...] = ()


def as_text(fabric: Fabric) -> str:
    """Gives a tree of the devices with their decoders, and one of the root decoders' regions."""
    found = fabric.topology
    if not (found.memdevs or found.decoders):
        return NOTHING
    roots = [decoder for decoder in found.decoders if decoder.kind == "root"]
    switches = [_decoder(decoder) for decoder in found.decoders if decoder.kind == "switch"]
    branches = [
        *(_memdev(memdev, fabric) for memdev in found.memdevs),
        *(_root(decoder, fabric) for decoder in roots),
        *([Branch("decoders between them", tuple(switches))] if switches else []),
    ]
    return "\n".join(line for branch in branches for line in _drawn(branch))


def region(fabric: Fabric, name: str) -> str:
    """Gives a region with what was made of it."""
    found = (region for region in fabric.topology.regions if region.name == name)
    return "\n".join(line for region in found for line in _drawn(_region(region, fabric)))


def _drawn(branch: Branch, first: str = "", rest: str = "") -> Iterator[str]:
    """Yields the lines of a branch, with what leads to them."""
    yield first + branch.line
    for position, below in enumerate(branch.below, 1):
        is_last = position == len(branch.below)
        yield from _drawn(
            below,
            rest + ("└─ " if is_last else "├─ "),
            rest + "   " * is_last + "│  " * (not is_last),
        )


def _memdev(memdev: Memdev, fabric: Fabric) -> Branch:
    decoders = [d for d in fabric.topology.decoders if d.memdev == memdev.name]
    used = [_decoder(decoder) for decoder in decoders if decoder.dpa_bytes or decoder.size_bytes]
    free = len(decoders) - len(used)
    below = [
        Branch(f"health: {_health(memdev, fabric)}"),
        *used,
        *([Branch(f"free decoders: {free}")] if decoders else []),
    ]
    serial = "unknown" if memdev.serial is None else f"{memdev.serial:#x}"
    node = "no node" if memdev.node is None else f"node {memdev.node}"
    capacity = [f"{amount(memdev.ram_bytes)} ram", f"{amount(memdev.pmem_bytes)} pmem"]
    sizes = [size for size, n in zip(capacity, (1, memdev.pmem_bytes), strict=True) if n]
    line = (
        f"{', '.join(sizes)}, serial {serial}, firmware {memdev.firmware or 'unknown'}, at {node}"
    )
    return Branch(f"{memdev.name}: {line}", tuple(below))


def _health(memdev: Memdev, fabric: Fabric) -> str:
    health = fabric.health.get(memdev.name)
    if health is None:
        return "unknown"
    driver = "no driver" if health.driver is None else f"driver {health.driver}"
    counts = {
        "correctable": health.correctable_errors,
        "nonfatal": health.nonfatal_errors,
        "fatal": health.fatal_errors,
    }
    known = [f"{count} {kind}" for kind, count in counts.items() if count is not None]
    errors = f"errors {', '.join(known)}" if known else "errors unknown"
    return f"{driver}, security {health.security or 'unknown'}, {errors}"


def _decoder(decoder: Decoder) -> Branch:
    if decoder.memdev is not None:
        what = f"{amount(decoder.dpa_bytes)} {decoder.mode or 'of unknown mode'}"
    else:
        what = f"{decoder.kind} over ports {', '.join(decoder.targets) or 'unknown'}"
    return Branch(f"{decoder.name}: {what}, {_interleave(decoder)}, {_use(decoder)}")


def _use(decoder: Decoder) -> str:
    region = "in no region" if decoder.region is None else f"of {decoder.region}"
    return f"{region}, locked" if decoder.locked else region


def _interleave(of: Decoder | CxlRegion) -> str:
    if not of.interleave_ways:
        return "ways not set"
    ways = "1 way" if of.interleave_ways == 1 else f"{of.interleave_ways} ways"
    if of.interleave_granularity_bytes is None:
        return ways
    return f"{ways} of {amount(of.interleave_granularity_bytes)}"


def _root(decoder: Decoder, fabric: Fabric) -> Branch:
    start = "" if decoder.start is None else f" at {decoder.start:#x}"
    locked = ", locked" if decoder.locked else ""
    regions = [_region(r, fabric) for r in fabric.topology.regions if r.root == decoder.name]
    return Branch(
        f"{decoder.name}: root, {amount(decoder.size_bytes)}{start}, {_interleave(decoder)}, "
        f"for {' and '.join(decoder.modes) or 'unknown'}, over bridges "
        f"{', '.join(decoder.targets) or 'unknown'}{locked}",
        tuple(regions) or (Branch("no region"),),
    )


def _region(region: CxlRegion, fabric: Fabric) -> Branch:
    state = "committed" if region.committed else "not committed"
    driver = "no driver" if region.driver is None else f"driver {region.driver}"
    kind = {"ram": "ram", "pmem": "persistent memory"}.get(region.mode or "", "unknown mode")
    members = zip(region.memdevs, region.decoders, strict=False)
    over = Branch(f"over {', '.join(f'{m} ({d})' for m, d in members) or 'no device'}")
    devices = [_dax(dax, region, fabric) for dax in fabric.dax_devices(region)]
    blocks = [Branch(_blocks(blocks)) for blocks in _of(region, fabric)] if not devices else []
    told = (kind, amount(region.size_bytes), _interleave(region), state, driver)
    return Branch(f"{region.name}: {', '.join(told)}", (over, *devices, *blocks))


def _of(region: CxlRegion, fabric: Fabric) -> list[Blocks]:
    return [blocks for blocks in fabric.blocks if blocks.region == region.name]


def _dax(dax: DaxDevice, region: CxlRegion, fabric: Fabric) -> Branch:
    driver = "no driver" if dax.driver is None else f"driver {dax.driver}"
    line = f"{dax.name}: {amount(dax.size_bytes)}, {driver}"
    if dax.target_node is None:
        return Branch(line)
    sizes = {node.id: node.total_bytes for node in fabric.topology.nodes}
    size = amount(sizes.get(dax.target_node, 0))
    tier = fabric.tier(dax.target_node) or "none"
    blocks = tuple(Branch(_blocks(blocks)) for blocks in _of(region, fabric))
    return Branch(line, (Branch(f"node {dax.target_node}: {size}, tier {tier}", blocks),))


def _blocks(blocks: Blocks) -> str:
    zones = "" if not blocks.zones else f", {' or '.join(blocks.zones)}"
    return f"blocks {blocks.first}-{blocks.last}: {amount(blocks.size_bytes)} {blocks.state}{zones}"
