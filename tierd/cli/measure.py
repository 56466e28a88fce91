# SPDX-License-Identifier: Apache-2.0
"""tierctl measure: latency and bandwidth of each node's memory, beside what the firmware tells."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from tierd import config
from tierd.cli.options import SIZE, config_option, json_option
from tierd.cli.pictures import new_figure, save_figure
from tierd.cli.settings import DropIn, require_writable
from tierd.cli.text import amount, ids, table
from tierd.config import DEFAULT_PATH, TierConfig
from tierd.config.check import parse_document
from tierd.config.show import toml
from tierd.discover import speed as speeds
from tierd.discover.speed import Method, Speed
from tierd.discover.topology import discover, read_use
from tierd.errors import TierdError
from tierd.kernel.cpus import is_virtual
from tierd.kernel.nodes import read_sizes
from tierd.model import NodeId, Performance, Tier, Topology

DROP_IN = "50-measured.toml"
HEAD = "# Written by tierctl measure --save: tiers by what was measured.\n"


def _complete_node(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Completes the number of a node with memory."""
    try:
        nodes = [str(node) for node, size in read_sizes().items() if size]
    except (OSError, TierdError):
        return []
    return [node for node in nodes if node.startswith(incomplete)]


@click.command()
@click.argument(
    "nodes",
    nargs=-1,
    type=click.IntRange(0, 1023),
    metavar="[NODE]...",
    shell_complete=_complete_node,
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 60),
    default=1.0,
    show_default=True,
    help="Measure each node for so long.",
)
@click.option(
    "--size",
    "size_bytes",
    type=SIZE,
    help="Use so much of each node; by default 8 times the last cache, and at most a quarter of"
    " what is free.",
)
@click.option("--loaded", is_flag=True, help="Measure latency also while other CPUs read.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw latency and bandwidth."
)
@click.option("--save", is_flag=True, help=f"Keep it as tiers, in tierd.toml.d/{DROP_IN}.")
@click.option("--dry-run", is_flag=True, help="With --save, print the file, and write none.")
@json_option("docs/measure.md")
@config_option("Take the tiers from this file, and keep them beside it")
def measure(
    *,
    nodes: tuple[int, ...],
    seconds: float,
    size_bytes: int | None,
    loaded: bool,
    plot: Path | None,
    save: bool,
    dry_run: bool,
    as_json: bool,
    config_path: Path | None,
) -> None:
    """Measure latency and bandwidth of memory. Of these nodes, or of all.

    From the CPUs nearest to each, for about a second. It is refused where a node lacks room.
    """
    if dry_run and not save:
        raise click.UsageError("--dry-run is of --save")
    found = discover(config.load(config_path).tiers)
    only = tuple(map(NodeId, dict.fromkeys(nodes)))
    ways = [*speeds.methods(found.nodes, read_use(), only, size_bytes)]
    refused = [way for way in ways if isinstance(way, TierdError)]
    if refused and (only or len(refused) == len(ways)):
        raise refused[0]
    measured = [
        speeds.measure(way, seconds, loaded=loaded) for way in ways if isinstance(way, Method)
    ]
    virtual = is_virtual()
    if as_json:
        document = speeds.as_document(measured, found.nodes, refused, virtual=virtual)
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(_as_text(found, measured, refused, virtual=virtual))
    if plot is not None:
        _draw(plot, measured, _told(found))
    if save:
        drop_in = _prepare(config_path, found, measured)
        if dry_run:
            click.echo(f"\n# {drop_in.path}\n{drop_in.content}", nl=False, err=as_json)
            return
        require_writable(drop_in.path, "look at it with --dry-run")
        drop_in.write()
        click.echo(f"\nkept in {drop_in.path}", err=as_json)


_HEADS = (
    *("NODE", "TIER", "FROM CPU", "LATENCY", "LOADED", "READ", "WRITE"),
    *("TOLD LATENCY", "TOLD READ", "TOLD WRITE"),
)


def _as_text(
    found: Topology, measured: Sequence[Speed], refused: Sequence[TierdError], *, virtual: bool
) -> str:
    """Gives a table, and what is to be known of its figures."""
    names = {node: tier.name for tier in found.tiers for node in tier.nodes}
    told = _told(found)
    rows = [_row(speed, names, told.get(speed.method.node)) for speed in measured]
    return "\n\n".join([table(_HEADS, rows), "\n".join(_notes(measured, refused, virtual=virtual))])


def _row(speed: Speed, names: Mapping[NodeId, str], told: Performance | None) -> Sequence[str]:
    node = speed.method.node
    told = told or Performance()
    return (
        str(node),
        names.get(node, "none"),
        str(speed.method.cpus[0]),
        _unit(speed.read_latency_ns, "ns"),
        _unit(speed.loaded_latency_ns, "ns"),
        _unit(speed.read_bandwidth_mbps, "MB/s"),
        _unit(speed.write_bandwidth_mbps, "MB/s"),
        _unit(told.read_latency_ns, "ns"),
        _unit(told.read_bandwidth_mbps, "MB/s"),
        _unit(told.write_bandwidth_mbps, "MB/s"),
    )


def _notes(
    measured: Sequence[Speed], refused: Sequence[TierdError], *, virtual: bool
) -> Iterator[str]:
    for speed in measured:
        method = speed.method
        yield (
            f"node {method.node}: {amount(method.size_bytes)}, bandwidth by CPUs"
            f" {ids(method.cpus)} of node {method.from_node}"
        )
        if speed.huge_bytes < method.size_bytes:
            small = amount(method.size_bytes - speed.huge_bytes)
            yield f"  {small} of it in small pages: its latency has a few misses of the TLB in it"
    for error in refused:
        yield f"not measured: {error}" + (f"; {error.hint}" if error.hint else "")
    if virtual:
        yield "this is a virtual machine: its hypervisor and its neighbours are in these figures"


def _told(found: Topology) -> Mapping[NodeId, Performance | None]:
    return {node.id: node.cpu_initiator or node.any_initiator for node in found.nodes}


def _unit(figure: float | None, unit: str) -> str:
    return "-" if figure is None else f"{figure:.0f} {unit}"


def _draw(path: Path, measured: Sequence[Speed], told: Mapping[NodeId, Performance | None]) -> None:
    """Draws latency against bandwidth: filled what was measured, hollow what is told."""
    figure, axes = new_figure()
    for position, speed in enumerate(measured):
        node, colour = speed.method.node, f"C{position}"
        latencies = [speed.read_latency_ns]
        if speed.loaded_latency_ns is not None:
            latencies.append(speed.loaded_latency_ns)
        bandwidths = [speed.read_bandwidth_mbps] * len(latencies)
        axes.plot(bandwidths, latencies, "o-", color=colour, label=f"node {node}, measured")
        by_firmware = told[node] or Performance()
        bandwidth, latency = by_firmware.read_bandwidth_mbps, by_firmware.read_latency_ns
        if bandwidth is not None and latency is not None:
            label = f"node {node}, told"
            axes.plot([bandwidth], [latency], "o", color=colour, fillstyle="none", label=label)
    axes.set(xlabel="read bandwidth, MB/s", ylabel="read latency, ns", xscale="log", ylim=(0, None))
    axes.legend()
    save_figure(figure, path)


def _prepare(config_path: Path | None, found: Topology, measured: Sequence[Speed]) -> DropIn:
    """Returns the drop-in with tiers by what was measured.

    Raises:
        TierdError: the operator has tiers already.
        ConfigError: with it the configuration would be wrong.
    """
    main = config_path or DEFAULT_PATH
    path = main.with_name(f"{main.name}.d") / DROP_IN
    others = [file for file in config.files(config_path) if file != path]
    declared = config.load_with_places(others).config.tiers
    if declared:
        raise TierdError(
            f"{declared[0].place.file} has [[tier]] tables: they stay as they are",
            hint=f"add there, as far as you agree: {_additions(found, measured, declared)}",
        )
    tiers = speeds.rank(found.nodes, measured)
    content = HEAD + "".join(f"\n[[tier]]\n{_lines(tier)}" for tier in tiers)
    config.load_with_places(others, [parse_document(content, str(path))])
    return DropIn(path, content)


def _additions(found: Topology, measured: Sequence[Speed], declared: Sequence[TierConfig]) -> str:
    """Says what to add to which table."""
    tiers = speeds.declare(declared, found.nodes, measured)
    return "; ".join(
        ", ".join([f'to "{tier.name}"', *(f"{k} = {v}" for k, v in _figures(tier).items())])
        for tier in tiers
    )


def _lines(tier: Tier) -> str:
    keys = {"name": tier.name, "kind": tier.kind, "nodes": list(tier.nodes)} | _figures(tier)
    return "".join(f"{key} = {toml(value)}\n" for key, value in keys.items())


def _figures(tier: Tier) -> dict[str, int]:
    figures = {"latency_ns": tier.latency_ns, "bandwidth_mbps": tier.bandwidth_mbps}
    return {key: figure for key, figure in figures.items() if figure is not None}
