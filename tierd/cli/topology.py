# SPDX-License-Identifier: Apache-2.0
"""`tierctl topology`, and a topology as a person reads it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from tierd import config
from tierd.cli.options import config_option, json_option
from tierd.cli.text import amount, ids, table
from tierd.discover.topology import NodeUse, as_document, discover, read_use
from tierd.model import Backing, CxlRegion, Memdev, Node, NodeId, Performance, Tier, Topology

Use = Mapping[NodeId, NodeUse]


@click.command()
@json_option("docs/topology.md")
@config_option("Take the tiers from this file")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def topology(*, as_json: bool, config_path: Path | None, root: Path) -> None:
    """Show the tiers of memory. With what they are made of, and how full they are."""
    found = discover(config.load(config_path).tiers, root)
    use = read_use(root)
    if as_json:
        click.echo(json.dumps(as_document(found, use), indent=2))
        return
    click.echo(as_text(found, use))
    for warning in found.warnings:
        click.echo(f"\nwarning: {warning}")


def as_text(topology: Topology, use: Use) -> str:
    """Gives tables of the tiers, the nodes, and the CXL devices and regions where there are any."""
    tables = [
        table(_TIER_HEADS, [_tier_row(tier, use) for tier in topology.tiers]),
        table(_NODE_HEADS, [_node_row(node, topology, use) for node in topology.nodes]),
    ]
    if topology.memdevs:
        tables.append(table(_MEMDEV_HEADS, map(_memdev_row, topology.memdevs)))
    if topology.regions:
        tables.append(
            table(_REGION_HEADS, [_region_row(region, topology) for region in topology.regions])
        )
    return "\n\n".join(tables)


_TIER_HEADS = ("TIER", "KIND", "NODES", "CAPACITY", "USED", "ROOM", "LATENCY", "BANDWIDTH")
_NODE_HEADS = ("NODE", "TIER", "CAPACITY", "FREE", "CPUS", "BACKED BY", "HMAT READ", "KERNEL TIER")
_MEMDEV_HEADS = ("CXL DEVICE", "RAM", "PMEM", "SERIAL", "NODE", "FIRMWARE")
_REGION_HEADS = ("CXL REGION", "SIZE", "MODE", "INTERLEAVED OVER", "DAX", "STATE")


def _tier_row(tier: Tier, use: Use) -> Sequence[str]:
    known = [use[node] for node in tier.nodes if node in use]
    free = sum(node.free_bytes for node in known)
    used = tier.capacity_bytes - free
    return (
        tier.name,
        tier.kind,
        ids(tier.nodes),
        amount(tier.capacity_bytes),
        f"{amount(used)} ({used * 100 // max(1, tier.capacity_bytes)} %)",
        amount(sum(node.room_bytes for node in known)),
        _unit(tier.latency_ns, "ns"),
        _unit(tier.bandwidth_mbps, "MB/s"),
    )


def _node_row(node: Node, topology: Topology, use: Use) -> Sequence[str]:
    names = [tier.name for tier in topology.tiers if node.id in tier.nodes]
    through = [*node.memdevs, *node.dax_devices]
    return (
        str(node.id),
        *(names or ["none"]),
        amount(node.total_bytes),
        amount(use[node.id].free_bytes) if node.id in use else "unknown",
        ids(node.cpus) or "none",
        f"{node.backing} ({', '.join(through)})" if through else node.backing,
        _performance(node.cpu_initiator or node.any_initiator),
        "none" if node.kernel_tier is None else str(node.kernel_tier),
    )


def _memdev_row(memdev: Memdev) -> Sequence[str]:
    return (
        memdev.name,
        amount(memdev.ram_bytes),
        amount(memdev.pmem_bytes),
        "unknown" if memdev.serial is None else f"{memdev.serial:#x}",
        "none" if memdev.node is None else str(memdev.node),
        memdev.firmware or "unknown",
    )


def _region_row(region: CxlRegion, topology: Topology) -> Sequence[str]:
    devices = [
        f"{dax.name} ({dax.driver or 'no driver'})"
        for dax in topology.dax_devices
        if dax.backing is Backing.CXL and dax.region == region.name
    ]
    return (
        region.name,
        amount(region.size_bytes),
        region.mode or "unknown",
        ", ".join(region.memdevs) or "none",
        ", ".join(devices) or "none",
        "committed" if region.committed else "not committed",
    )


def _unit(figure: int | None, unit: str) -> str:
    return "unknown" if figure is None else f"{figure} {unit}"


def _performance(performance: Performance | None) -> str:
    if performance is None:
        return "unknown"
    latency = _unit(performance.read_latency_ns, "ns")
    return f"{latency}, {_unit(performance.read_bandwidth_mbps, 'MB/s')}"
