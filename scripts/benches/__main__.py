# SPDX-License-Identifier: Apache-2.0
"""The command line of ./scripts/bench."""

import importlib
import json
import platform
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
import psutil

from benches.figure import Figure

FRAME = {"__init__", "__main__", "figure"}
NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in FRAME and not path.stem.startswith("_")
)


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(NAMES), metavar="NAME...")
@click.option(
    "--json", "file", type=click.Path(path_type=Path), help="Write the figures there too."
)
def main(names: tuple[str, ...], file: Path | None) -> None:
    """Measure, print each figure beside its bound, and exit 1 when one is missed.

    A value is the median of several rounds, between the lowest and the highest of them.
    """
    machine = describe_machine()
    print("  ".join(machine.values()))
    results = {name: measure(name) for name in names}
    if file is not None:
        file.write_text(json.dumps({**machine, "figures": as_json(results)}, indent=2) + "\n")
    missed = sum(not figure.holds for figures in results.values() for figure in figures)
    if missed:
        print(f"{missed} of the bounds missed")
    sys.exit(missed > 0)


def describe_machine() -> dict[str, str]:
    """What ran, and what else did: a busy machine measures itself."""
    load = psutil.getloadavg()[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpus": f"{psutil.cpu_count()} CPUs",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"Python {platform.python_version()}",
        "load": f"load {load:.1f} before",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def measure(name: str) -> list[Figure]:
    """Runs one benchmark and prints its figures."""
    figures: list[Figure] = importlib.import_module(f"benches.{name}").run()
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        print(f"{name}  {figure.name:{width}}  {verdict(figure)}", flush=True)
    return figures


def verdict(figure: Figure) -> str:
    """A figure in words."""
    told = f"{figure.value:10.4g} {figure.unit:8} ({figure.lowest:.4g} to {figure.highest:.4g})"
    if figure.bound is None:
        return told
    return f"{told}  {figure.bound}  {'holds' if figure.holds else 'MISSED'}"


def as_json(results: dict[str, list[Figure]]) -> list[dict[str, object]]:
    return [
        {"bench": name, **asdict(figure), "bound": figure.bound, "holds": figure.holds}
        for name, figures in results.items()
        for figure in figures
    ]


if __name__ == "__main__":
    main()
