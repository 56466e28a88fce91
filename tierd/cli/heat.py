# SPDX-License-Identifier: Apache-2.0
"""`tierctl heat`: a process's addresses against time, in the terminal or as a picture.

Addresses that hold nothing are left out; what is left is cut into as many bins as there are rows.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Floats
from tierd.cli.connect import control
from tierd.cli.options import PID, config_option, interval_option, json_option
from tierd.cli.pictures import new_figure, save_figure
from tierd.cli.text import amount
from tierd.errors import TierdError

SHADES = " ░▒▓█"
COLDEST, HOTTEST = 2.0**-6, 2.0**8
"""Accesses per page and second; the shades are equal steps of their logarithm."""

COLOURS = ("green", "blue", "magenta", "cyan")
"""Of the tiers, the fastest first."""


@click.command()
@click.argument("pid", type=PID)
@click.option(
    "--for",
    "for_s",
    type=click.FloatRange(0, 3600),
    default=10.0,
    show_default=True,
    help="Look for so many seconds.",
)
@interval_option()
@click.option("--rows", type=click.IntRange(1, 1000), help="Cut the addresses into so many rows.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Draw a picture, as FILE.png or FILE.svg; needs matplotlib.",
)
@json_option()
@config_option("The running daemon's configuration")
def heat(
    *,
    pid: int,
    for_s: float,
    interval_s: float,
    rows: int | None,
    output: Path | None,
    as_json: bool,
    config_path: Path | None,
) -> None:
    """Draw a process's addresses against time. Shades are heat, colours tiers."""
    client = control(config_path)
    seen = client.get(f"/v1/targets/{pid}")
    tiers = [*seen["resident"]]
    height = shutil.get_terminal_size().lines - 2
    bins = make_bins(seen, rows or (200 if output else max(height, 1)))
    columns = [make_column(seen, bins, tiers, time.monotonic())]
    for _ in range(int(for_s / interval_s)):
        time.sleep(interval_s)
        seen = client.get(f"/v1/targets/{pid}")
        columns.append(make_column(seen, bins, tiers, time.monotonic()))
    if output is not None:
        save(output, columns, bins, f"process {pid} ({seen['command']})")
    if as_json:
        click.echo(json.dumps(as_document(columns, bins, tiers)))
    elif output is None:
        click.echo(as_text(columns, bins, tiers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Ranges of addresses, one for each row: bin i has bytes edge[i] to edge[i + 1] of the mapped.

    `start` and `length` are of the ranges that were mapped when it was looked first.
    """

    start: NDArray[np.uint64]
    length: Floats
    edge: Floats

    def address(self, row: int) -> int:
        """Returns the first address of a row."""
        before = np.cumsum(self.length) - self.length
        at = int(np.searchsorted(before, self.edge[row], "right")) - 1
        return int(self.start[at]) + int(self.edge[row] - before[at])


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One look: each bin's heat, in accesses per page and second, and the share on each tier."""

    at_s: float
    heat: Floats
    shares: Floats


def make_bins(target: Mapping[str, Any], rows: int) -> Bins:
    """Cuts what a target has mapped into bins of the same size."""
    ranges = target["ranges"]
    if not ranges:
        raise TierdError(f"nothing is known yet of process {target['pid']}", hint="wait a second")
    start = np.array([part["start"] for part in ranges], np.uint64)
    length = np.array([part["end"] - part["start"] for part in ranges], np.float64)
    return Bins(start=start, length=length, edge=np.linspace(0, length.sum(), rows + 1))


def make_column(target: Mapping[str, Any], bins: Bins, tiers: Sequence[str], at_s: float) -> Column:
    """Takes a look at a target into its bins. What was mapped since is left out."""
    ranges = target["ranges"]
    start, end = (np.array([part[key] for part in ranges], np.uint64) for key in ("start", "end"))
    heat = np.array([part["heat"] for part in ranges], np.float64)
    resident = np.array([[part["resident"][tier] for tier in tiers] for part in ranges], np.float64)
    below, behind = _offsets(bins, start), _offsets(bins, end)
    known = behind - below
    share = known / (end - start).astype(np.float64)
    weights = np.column_stack([heat * known, resident.reshape(-1, len(tiers)) * share[:, None]])
    total = np.cumsum(weights, axis=0)
    at = np.column_stack([below, behind]).ravel()
    sums = [
        np.column_stack([part - part_each, part]).ravel()
        for part, part_each in zip(total.T, weights.T, strict=True)
    ]
    within = np.column_stack([np.diff(np.interp(bins.edge, at, part)) for part in sums])
    bytes_each = np.diff(bins.edge)
    return Column(
        at_s=at_s,
        heat=within[:, 0] / bytes_each,
        shares=within[:, 1:] / bytes_each[:, None],
    )


def _offsets(bins: Bins, address: NDArray[np.uint64]) -> Floats:
    """Returns how many mapped bytes lie below each address."""
    before = np.cumsum(bins.length) - bins.length
    at = np.maximum(np.searchsorted(bins.start, address, "right") - 1, 0)
    inside = np.minimum((address - bins.start[at]).astype(np.float64), bins.length[at])
    return np.asarray(before[at] + inside, np.float64)


def level(heat: Floats) -> Floats:
    """Returns 0 for cold to 1 for as hot as can be told."""
    scale = np.log2(np.maximum(heat, COLDEST) / COLDEST) / np.log2(HOTTEST / COLDEST)
    return np.asarray(np.clip(scale, 0, 1), np.float64)


def as_text(columns: Sequence[Column], bins: Bins, tiers: Sequence[str]) -> str:
    """Draws columns side by side: shades are heat, colours the tier that has most."""
    rows = [
        f"{bins.address(row):>12x} " + "".join(_cell(column, row) for column in columns)
        for row in range(len(bins.edge) - 1)
    ]
    passed_s = columns[-1].at_s - columns[0].at_s
    legend = "  ".join(
        click.style(f"{SHADES[-1]} {tier}", fg=COLOURS[i % len(COLOURS)])
        for i, tier in enumerate(tiers)
    )
    each = amount(int(bins.edge[1]))
    return "\n".join(
        [
            *rows,
            f"{'':12} {passed_s:.0f} s; a row is {each}; {legend}; from {SHADES[1]} warm to "
            f"{SHADES[-1]} hot",
        ]
    )


def _cell(column: Column, row: int) -> str:
    shade = SHADES[round(float(level(column.heat[row : row + 1])[0]) * (len(SHADES) - 1))]
    tier = int(column.shares[row].argmax())
    return click.style(shade, fg=COLOURS[tier % len(COLOURS)])


def as_document(columns: Sequence[Column], bins: Bins, tiers: Sequence[str]) -> dict[str, Any]:
    """Returns the same for programs: `heat` and `shares` have a row for each look."""
    return {
        "addresses": [bins.address(row) for row in range(len(bins.edge) - 1)],
        "row_bytes": int(bins.edge[1]),
        "tiers": [*tiers],
        "at_s": [round(column.at_s - columns[0].at_s, 3) for column in columns],
        "heat": [column.heat.round(4).tolist() for column in columns],
        "shares": [column.shares.round(4).tolist() for column in columns],
    }


def save(path: Path, columns: Sequence[Column], bins: Bins, title: str) -> None:
    """Draws a picture.

    Raises:
        TierdError: matplotlib isn't there, or doesn't know this kind.
    """
    figure, axes = new_figure()
    image = axes.imshow(
        np.column_stack([np.log2(np.maximum(column.heat, COLDEST)) for column in columns]),
        aspect="auto",
        origin="lower",
        cmap="inferno",
        extent=(0, max(columns[-1].at_s - columns[0].at_s, 1), 0, bins.edge[-1] / 2**20),
        vmin=np.log2(COLDEST),
        vmax=np.log2(HOTTEST),
    )
    axes.set(title=title, xlabel="seconds", ylabel="MiB of mapped memory, by address")
    figure.colorbar(image, label="log2 of accesses per page and second")
    save_figure(figure, path)
