# SPDX-License-Identifier: Apache-2.0
"""./scripts/demo: a program with its data on emulated CXL memory, before and after tierd.

Where the pages lie is asked by the program itself, with move_pages(2); tierd's own word is shown
beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from guests.boot import boot
from guests.errors import GuestError
from guests.guest import Guest
from guests.kernels import Kernel
from guests.tiering import tierd
from guests.topology import Emulator, Topology, cxl
from guests.workloads import Hotset, Sample, hotset

BUFFER_MIB, HOT_MIB, SHARE = 64, 8, 99
BEFORE_S, AFTER_S, PATIENCE_S = 8, 8, 120
ARRIVED = 0.95
BAR = 24

SETTINGS = """
[[target]]
command = "hotset"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the demo showed. Shares are of the hot window's pages on the DRAM node."""

    kernel: str
    guest: str
    ops_before: float
    ops_after: float
    hot_share_before: float
    hot_share_after: float
    cold_on_cxl_after: float
    seconds_to_arrive: float | None
    pages_promoted: int
    pages_demoted: int

    @property
    def faster(self) -> float:
        return self.ops_after / self.ops_before

    @property
    def succeeded(self) -> bool:
        return self.hot_share_after >= ARRIVED and self.faster > 1


@click.command()
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the figures to this file too.",
)
@click.option("--kernel", type=click.Choice([*map(str, Kernel)]), default="7.2", show_default=True)
def main(json_path: Path | None, kernel: str) -> None:
    """Boots a machine with emulated CXL memory, and lets tierd speed up a program there.

    The program keeps 64 MiB on CXL memory, of which 8 MiB are hot. It does not know of tierd.
    Another demo, of an arena with prefetch: ./scripts/demo --arena, which has a --help of its own.
    """
    machine = cxl(512, emulator=Emulator.SLOW)
    try:
        result = _show(machine, Kernel(kernel))
    except GuestError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_table(result))
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(result), indent=2) + "\n")
    sys.exit(0 if result.succeeded else 1)


def _show(machine: Topology, kernel: Kernel) -> Result:
    with ExitStack() as stack:
        with _doing("booting a machine with 2 GiB of DRAM and 512 MiB of CXL memory"):
            guest = stack.enter_context(boot(machine, kernel))
        return _run(guest)


def _run(guest: Guest) -> Result:
    click.echo(guest.run(["tierctl", "topology"]).stdout)
    options = ("--mib", f"{BUFFER_MIB}", "--hot-mib", f"{HOT_MIB}", "--share", f"{SHARE}")
    slow = str(guest.facts.slow[0])
    with hotset(guest, *options, "--node", slow) as load:
        with _doing(f"filling {BUFFER_MIB} MiB on CXL memory, each access of it emulated"):
            first = load.sample(PATIENCE_S)
        return _watch(guest, load, first)


def _watch(guest: Guest, load: Hotset, first: Sample) -> Result:
    before = [_line(sample) for sample in load.samples(BEFORE_S)]
    click.echo("tierd starts")
    with tierd(guest, settings=SETTINGS) as placing:
        started = load.sample().t
        arrived = next(
            (s for s in map(_line, load.samples(PATIENCE_S)) if s.hot_share >= ARRIVED), None
        )
        after = [_line(sample) for sample in load.samples(AFTER_S)]
        moved = placing.moved
    return Result(
        kernel=guest.facts.release,
        guest=f"{guest.topology.name}, QEMU {guest.topology.emulator}, "
        f"{'KVM' if guest.facts.kvm else 'TCG'}",
        ops_before=statistics.median(s.ops_per_s for s in before),
        ops_after=statistics.median(s.ops_per_s for s in after),
        hot_share_before=first.hot_share,
        hot_share_after=after[-1].hot_share,
        cold_on_cxl_after=after[-1].cold_on_slow / after[-1].cold_pages,
        seconds_to_arrive=None if arrived is None else arrived.t - started,
        pages_promoted=moved.get(("cxl", "dram"), 0),
        pages_demoted=moved.get(("dram", "cxl"), 0),
    )


@contextmanager
def _doing(what: str) -> Iterator[None]:
    click.echo(f"{what} ... ", nl=False)
    begin = time.monotonic()
    yield
    click.echo(f"{time.monotonic() - begin:.0f} s")


def _line(sample: Sample) -> Sample:
    """Shows a second."""
    full = round(BAR * sample.hot_share)
    click.echo(
        f"{sample.t:6.0f} s  hot in DRAM [{'#' * full}{'.' * (BAR - full)}] "
        f"{sample.hot_share:4.0%}  {sample.ops_per_s / 1e3:8.0f} thousand accesses/s"
    )
    return sample


def _table(result: Result) -> str:
    rows = [
        ("", "before", "with tierd"),
        ("hot pages in DRAM", f"{result.hot_share_before:.0%}", f"{result.hot_share_after:.1%}"),
        ("cold pages on CXL", "100%", f"{result.cold_on_cxl_after:.1%}"),
        ("accesses a second", f"{result.ops_before:,.0f}", f"{result.ops_after:,.0f}"),
        ("speed", "1.0", f"{result.faster:.1f} times"),
        ("pages moved up, down", "", f"{result.pages_promoted}, {result.pages_demoted}"),
    ]
    lines = [f"{name:<22}{before:>14}{after:>16}" for name, before, after in rows]
    note = (
        f"Linux {result.kernel} in {result.guest}. Emulated CXL memory is some ten times or more "
        "slower\nthan DRAM, real CXL memory two or three times: the effect is real, its size isn't."
    )
    return "\n".join(["", *lines, "", note])


if __name__ == "__main__":
    main(prog_name="demo")
