# SPDX-License-Identifier: Apache-2.0
"""./scripts/demo --remote: layers of which half are in donors' memory, and one donor is killed.

The donors are processes of this machine, reached by TCP on loopback: that nothing is lost is shown
here, and not how fast a network is.
"""

import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import trustme

from sweeps.donors import BY_TCP, DonorProcess, make_keys
from sweeps.figures import json_option, write_figures
from sweeps.layers import Steps, Work, ahead, seconds_of, some_layers
from tierd.arena import Arena, Lookahead
from tierd.errors import TierdError
from tierd.remote.space import Copies, RemoteSpace
from tierd.tiers.memory import dram
from tierd.tiers.rdma import RemoteTier, rdma

LAYER_BYTES, FAST, LAYERS, DONORS = 1 << 20, 32, 64, 3
WORK_BYTES = 4 << 20
PATIENCE_S = 30
"""How much longer it goes on at most, until all is on two donors again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of it; speeds are layers a second, by the median of the rounds."""

    used: int
    """Each was checked: a wrong byte ends the demo with an error."""
    lost: int
    copied_again_mib: int
    whole_after_s: float | None
    """From the kill until every layer that is remote was on two donors again."""
    before: float
    after: float

    @property
    def succeeded(self) -> bool:
        return not self.lost and self.whole_after_s is not None


@click.command()
@json_option()
@click.option("--seconds", type=click.IntRange(2, 600), default=30, show_default=True)
def main(json_path: Path | None, seconds: int) -> None:
    """Sweeps over layers that are half in donors' memory, and kills a donor half-way.

    Each layer is 1 MiB, and the work on it is a digest that tells a wrong byte.
    """
    os.environ.update(BY_TCP)
    try:
        result = _show(seconds)
    except TierdError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_table(result))
    write_figures(result, json_path)
    sys.exit(0 if result.succeeded else 1)


def _show(seconds: int) -> Result:
    layers = some_layers(LAYERS, LAYER_BYTES)
    with ExitStack() as stack:
        donors, tier = stack.enter_context(_donors())
        arena = stack.enter_context(
            Arena(LAYER_BYTES, [dram(FAST * LAYER_BYTES), tier], blocks=LAYERS)
        )
        for number in range(LAYERS):
            arena.write([number], layers[number])
        [space] = tier.spaces
        click.echo(
            f"{LAYERS} MiB of layers; fast tier {FAST} MiB of DRAM; {DONORS} donors, each layer on "
            f"two of them\n"
        )
        steps = stack.enter_context(closing(ahead(Lookahead(arena, range(LAYERS), repeats=True))))
        return _sweep(steps, Work(layers, WORK_BYTES), space, donors, seconds)


@contextmanager
def _donors() -> Iterator[tuple[list[DonorProcess], RemoteTier]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        keys = make_keys(Path(folder), trustme.CA(), "demo")
        donors = []
        for _ in range(DONORS):
            donors.append(DonorProcess(keys, 2 * LAYERS))
            stack.callback(donors[-1].end)
        addresses = [donor.address for donor in donors]
        size = LAYERS * LAYER_BYTES
        yield donors, rdma(addresses, size, ca=keys.ca, cert=keys.cert, key=keys.key)


def _sweep(
    steps: Steps, work: Work, space: RemoteSpace, donors: list[DonorProcess], seconds: int
) -> Result:
    rounds: list[float] = []
    killed, killed_at, whole_after_s, before = "", 0.0, None, 0
    since_s, begin_s = 0.0, time.monotonic()
    while since_s < seconds + (PATIENCE_S if whole_after_s is None else 0):
        rounds.append(1 / seconds_of(steps, work, LAYERS))
        copies, note = space.copies, ""
        if killed in space.failures and whole_after_s is None and not copies.thin:
            whole_after_s = time.monotonic() - killed_at
            note = f"every layer is on two donors again, {whole_after_s:.1f} s later"
        since_s = time.monotonic() - begin_s
        if not killed and since_s > seconds / 2:
            killed = space.holders[0]
            next(donor for donor in donors if donor.address == killed).send(signal.SIGKILL)
            killed_at, before = time.monotonic(), len(rounds)
            note = f"now the donor at {killed} is killed"
        click.echo(_line(len(rounds), rounds[-1], copies, note))
    return Result(
        used=len(rounds) * LAYERS,
        lost=space.copies.lost,
        copied_again_mib=space.copies.copied_again * LAYER_BYTES >> 20,
        whole_after_s=whole_after_s,
        before=float(np.median(rounds[:before])),
        after=float(np.median(rounds[before:])),
    )


def _line(number: int, speed: float, copies: Copies, note: str) -> str:
    told = f"{number:3}  {speed:4.0f} layers/s  remote: {copies.whole:3} on two donors"
    told += f", {copies.thin:3} on one, {copies.lost} lost"
    return f"{told}  {note}".rstrip()


def _table(result: Result) -> str:
    whole = "not yet" if result.whole_after_s is None else f"{result.whole_after_s:.1f} s"
    rows = [
        ("layers used, each checked", f"{result.used:,}"),
        ("lost", str(result.lost)),
        ("copied again", f"{result.copied_again_mib} MiB"),
        ("on two donors again after", whole),
        ("layers a second, before and after", f"{result.before:.0f}, {result.after:.0f}"),
    ]
    note = (
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}. "
        "The donors are processes of this machine, by TCP on loopback."
    )
    return "\n".join(["", *(f"{name:<36}{value:>10}" for name, value in rows), "", note])


if __name__ == "__main__":
    main(prog_name="demo --remote")
