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

from benches.figure import Figure, NotHere

NOT_HERE = 3
"""The exit status where a bench could not run in this machine, and no bound was missed."""

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
@click.option("--only", multiple=True, help="A part of the bench, such as a load; can be repeated.")
@click.option("--seconds", type=click.IntRange(10), help="How long each part takes.")
@click.option("--rounds", type=click.IntRange(1), help="How often each part is tried, in turn.")
@click.option("--jobs", type=click.IntRange(1), help="How many parts at once: one for each CPU.")
def main(
    names: tuple[str, ...],
    file: Path | None,
    only: tuple[str, ...],
    seconds: int | None,
    rounds: int | None,
    jobs: int | None,
) -> None:
    """Measure, print each figure beside its bound, and exit 1 when one is missed.

    Exits 3 when this machine has not what a bench needs.

    A value is the median of several rounds, between the lowest and the highest of them. Of the
    benches the shootout alone has parts, its loads and its contenders.
    """
    chosen = choices(names, only=only, seconds=seconds, rounds=rounds, jobs=jobs)
    machine = describe_machine()
    print("  ".join(machine.values()))
    results, lacking = {}, 0
    for name in names:
        try:
            results[name] = measure(name, **chosen)
        except NotHere as error:
            print(f"{name}  not measured: {error}")
            lacking += 1
    if file is not None:
        file.write_text(json.dumps({**machine, "figures": as_json(results)}, indent=2) + "\n")
    missed = sum(not figure.holds for figures in results.values() for figure in figures)
    if missed:
        print(f"{missed} of the bounds missed")
    sys.exit(1 if missed else NOT_HERE if lacking else 0)


def choices(
    names: tuple[str, ...], *, only: tuple[str, ...], **options: int | None
) -> dict[str, object]:
    """What is passed on to a bench of parts."""
    all_options: dict[str, object] = {"only": only, **options}
    given = {name: value for name, value in all_options.items() if value}
    for name in names if given else ():
        parts = getattr(importlib.import_module(f"benches.{name}"), "PARTS", ())
        if not parts or not set(only) <= set(parts):
            raise click.UsageError(f"{name} has these parts: {', '.join(parts) or 'none'}")
    return given


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


def measure(name: str, **chosen: object) -> list[Figure]:
    """Runs one benchmark and prints its figures."""
    figures: list[Figure] = importlib.import_module(f"benches.{name}").run(**chosen)
    width = max((len(figure.name) for figure in figures), default=0)
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
