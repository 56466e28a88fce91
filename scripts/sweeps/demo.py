# SPDX-License-Identifier: Apache-2.0
"""./scripts/demo --arena: layers of which half have room in fast memory, with and without prefetch.

All of it is in this process: no guest, no root, no GPU. The far tier is memory whose speed is
simulated, so that the demo shows the same on any machine.
"""

import platform
import statistics
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from sweeps.far import Far
from sweeps.figures import json_option, write_figures
from sweeps.layers import Steps, Sweep, ahead, on_demand, seconds_of, some_layers
from tierd.arena import Lookahead
from tierd.errors import TierdError

LAYER_BYTES, FAST_MIB, FAR_MIB_PER_S = 1 << 20, 64, 512
BAR = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the demo showed: layers a second, each way in turn, by the median of the rounds."""

    all_fast: float
    with_prefetch: float
    without_prefetch: float
    late: float
    """The part of the layers that prefetch had not brought yet when they were needed."""
    window: int
    moves_with: float
    moves_without: float
    """Layers copied in or out for each one used."""

    @property
    def succeeded(self) -> bool:
        return self.with_prefetch > self.without_prefetch


@click.command()
@json_option()
@click.option("--seconds", type=click.IntRange(1, 600), default=12, show_default=True)
@click.option(
    "--fast-mib",
    type=click.IntRange(8, 4096),
    default=FAST_MIB,
    show_default=True,
    help="Size of the fast tier; the layers are twice as much.",
)
def main(json_path: Path | None, seconds: int, fast_mib: int) -> None:
    """Sweeps over twice as much as an arena's fast tier holds, with and without prefetch.

    Each layer is 1 MiB, and the work on it takes as long as the copies that it needs when it is
    fetched on demand.
    """
    try:
        result = _show(fast_mib, seconds)
    except TierdError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_table(result, fast_mib))
    write_figures(result, json_path)
    sys.exit(0 if result.succeeded else 1)


def _show(fast: int, seconds: int) -> Result:
    count = 2 * fast
    click.echo(
        f"{count} MiB of layers; fast tier {fast} MiB of DRAM; "
        f"far tier at {FAR_MIB_PER_S} MiB/s each way (simulated)"
    )
    far = partial(Far, bytes_per_s=FAR_MIB_PER_S * (1 << 20))
    sweep = Sweep(some_layers(count, LAYER_BYTES), fast, far)
    copies_s = sweep.copies_s(laps=1)
    work = sweep.work_for(copies_s)
    click.echo(f"copies of a layer, one out and one in: {copies_s * 1e3:.1f} ms; so is its work\n")
    with ExitStack() as stack:
        arenas = [
            stack.enter_context(sweep.arena(is_all_fast=is_all_fast))
            for is_all_fast in (True, False, False)
        ]
        lookahead = Lookahead(arenas[1], range(count), repeats=True)
        ways: list[Steps] = [
            stack.enter_context(closing(way))
            for way in (on_demand(arenas[0]), ahead(lookahead), on_demand(arenas[2]))
        ]
        for way in ways[1:]:
            seconds_of(way, work, count)  # from now on each has its stride
        before, moved = lookahead.foresight, [arena.moves().moved for arena in arenas]
        rounds: list[list[float]] = []
        until = time.monotonic() + seconds
        while not rounds or time.monotonic() < until:
            rounds.append([1 / seconds_of(way, work, count) for way in ways])
            click.echo(_line(len(rounds), rounds[-1]))
        after, used = lookahead.foresight, count * len(rounds)
        moves = [
            (arena.moves().moved - then) / used for arena, then in zip(arenas, moved, strict=True)
        ]
    all_fast, with_prefetch, without = map(statistics.median, zip(*rounds, strict=True))
    return Result(
        all_fast=all_fast,
        with_prefetch=with_prefetch,
        without_prefetch=without,
        late=(after.late - before.late) / used,
        window=lookahead.window,
        moves_with=moves[1],
        moves_without=moves[2],
    )


def _line(number: int, speeds: list[float]) -> str:
    """A round: each way's speed as a part of the fastest one's."""
    names = ("all fast", "prefetch", "on demand")
    most = max(speeds)
    bars = (
        f"{name} [{_bar(speed / most)}] {speed:4.0f}/s"
        for name, speed in zip(names, speeds, strict=True)
    )
    return f"{number:3}  {'  '.join(bars)}"


def _bar(share: float) -> str:
    full = round(BAR * share)
    return "#" * full + "." * (BAR - full)


def _table(result: Result, fast_mib: int) -> str:
    rows = [
        ("", "all fast", "with prefetch", "on demand"),
        (
            "layers a second",
            f"{result.all_fast:,.0f}",
            f"{result.with_prefetch:,.0f}",
            f"{result.without_prefetch:,.0f}",
        ),
        (
            "of all fast",
            "1.00",
            f"{result.with_prefetch / result.all_fast:.2f}",
            f"{result.without_prefetch / result.all_fast:.2f}",
        ),
        ("not there in time", "0%", f"{result.late:.1%}", "100%"),
        ("copies a layer", "0", f"{result.moves_with:.2f}", f"{result.moves_without:.2f}"),
    ]
    lines = [f"{name:<20}{a:>12}{b:>16}{c:>12}" for name, a, b, c in rows]
    note = (
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}. Each layer "
        f"was checked, {result.window} steps ahead at the end.\nThe far tier's speed is simulated: "
        "the overlap is real, the speed is that of no device."
    )
    return "\n".join(["", *lines, "", note])


if __name__ == "__main__":
    main(prog_name="demo --arena")
