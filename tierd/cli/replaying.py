# SPDX-License-Identifier: Apache-2.0
"""`tierctl replay` and `size`: what other policies, or less fast memory, would have done."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np

from tierd.cli.options import SIZE, Option, json_option
from tierd.cli.pictures import new_figure, save_figure
from tierd.cli.text import amount, table
from tierd.config import Config
from tierd.config.check import Document, named
from tierd.config.files import read_document
from tierd.config.values import PolicyName
from tierd.errors import TierdError
from tierd.observe.moments import Recording, load
from tierd.replay import Outcomes, configured
from tierd.replay import replay as replayed

AS_RECORDED = "recorded"
NAMES = ", ".join([AS_RECORDED, *PolicyName])
STEPS = 10

Passed: TypeAlias = Callable[[float], None]
"""Is told the seconds that were replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A replay, and how many times faster than the recording it went."""

    name: str
    outcomes: Outcomes
    speed: float


def recording_argument() -> Option:
    """Adds FILE and --until-damage."""

    def decorate(command: Any) -> Any:
        command = click.option(
            "--until-damage", is_flag=True, help="Of a damaged file, take what is before."
        )(command)
        return click.argument("file", type=click.Path(path_type=Path))(command)

    return decorate


@click.command("replay")
@recording_argument()
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=(AS_RECORDED,),
    show_default=True,
    metavar="NAME|FILE",
    help=f"Try this: {NAMES}, or a file of TOML on top of what was recorded.",
)
@click.option("--fast", "fast_bytes", type=SIZE, help="Suppose so much fast memory.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Draw hits against time.")
@json_option("docs/recordings.md")
def replay(
    *,
    file: Path,
    until_damage: bool,
    policies: Sequence[str],
    fast_bytes: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Try policies on a recording. With the daemon's own decisions, faster than it was recorded."""
    recording = load(file, until_damage=until_damage)
    if fast_bytes is None and not recording.knows_places:
        raise TierdError(f"{file} doesn't tell of tiers", hint="suppose some with --fast SIZE")
    configs = [(name, configured(recording, _policy(name))) for name in policies]
    with _progress(recording.seconds * len(configs)) as passed:
        tried = [_try(name, recording, config, fast_bytes, passed) for name, config in configs]
    if output is not None:
        _draw_hits(output, tried)
    if as_json:
        click.echo(json.dumps(_document(recording, tried), indent=2))
    else:
        click.echo(_as_text(recording, tried))


@click.command("size")
@recording_argument()
@click.option(
    "--policy",
    default=AS_RECORDED,
    show_default=True,
    metavar="NAME|FILE",
    help="Place by this, as replay does.",
)
@click.option(
    "--steps", type=click.IntRange(2, 100), default=STEPS, show_default=True, help="So many sizes."
)
@click.option(
    "--price",
    "prices",
    type=float,
    nargs=2,
    metavar="FAST SLOW",
    help="What a gigabyte of each costs, to name the cheapest size for what is done with it.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Draw slowdown against size.")
@json_option("docs/recordings.md")
def size(
    *,
    file: Path,
    until_damage: bool,
    policy: str,
    steps: int,
    prices: tuple[float, float] | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Tell how much fast memory a recorded load needs. From how it would slow down with less."""
    if prices is not None and min(prices) <= 0:
        raise TierdError(f"--price {prices[0]:g} {prices[1]:g}: both have to be above 0")
    recording = load(file, until_damage=until_damage)
    config = configured(recording, _policy(policy))
    whole_bytes = recording.most_bytes
    if not whole_bytes:
        raise TierdError(f"{file}: nothing is known of where the memory lay", hint="record longer")
    sizes = [whole_bytes * step // steps for step in range(1, steps + 1)]
    with _progress(recording.seconds * len(sizes)) as passed:
        found = [_try("", recording, config, each, passed).outcomes for each in sizes]
    sizing = _Sizing(
        sizes=sizes,
        slowdowns=[outcomes.slowdown for outcomes in found],
        hit_ratios=[outcomes.hit_ratio for outcomes in found],
        prices=prices,
    )
    if output is not None:
        _draw_slowdown(output, sizing)
    click.echo(json.dumps(sizing.document(), indent=2) if as_json else sizing.as_text())


@contextmanager
def _progress(seconds: float) -> Iterator[Passed]:
    """Shows how far it is, on standard error where that is a terminal."""
    length, hidden = max(int(seconds * 1000), 1), not sys.stderr.isatty()
    bar: Any = click.progressbar(length=length, label="replaying", file=sys.stderr, hidden=hidden)
    with bar:
        yield lambda seconds: bar.update(int(seconds * 1000))


def _policy(name: str) -> Sequence[Document]:
    """Returns what a policy has in place of the recorded configuration's values."""
    if name == AS_RECORDED:
        return ()
    is_named = name in [*PolicyName]
    return (named(PolicyName(name)) if is_named else read_document(Path(name)),)


def _try(
    name: str, recording: Recording, config: Config, fast_bytes: int | None, passed: Passed
) -> Tried:
    begin_s = time.perf_counter()
    outcomes = replayed(recording, config, fast_bytes=fast_bytes, progress=passed)
    took_s = time.perf_counter() - begin_s
    if not len(outcomes.at_s):
        raise TierdError("nothing was accessed in this recording", hint="record for longer")
    return Tried(name=name, outcomes=outcomes, speed=recording.seconds / took_s)


def _as_text(recording: Recording, tried: Sequence[Tried]) -> str:
    heads = ("policy", "hits", "best possible", "up", "down", "slowdown", "speed")
    rows = [
        (
            one.name,
            f"{100 * one.outcomes.hit_ratio:.1f} %",
            f"{100 * one.outcomes.best_ratio:.1f} %",
            amount(one.outcomes.up_bytes),
            amount(one.outcomes.down_bytes),
            f"{one.outcomes.slowdown:.2f}",
            f"{one.speed:,.0f} times",
        )
        for one in tried
    ]
    return f"{_about(recording)}\n\n{table(heads, rows)}"


def _about(recording: Recording) -> str:
    begin = recording.begin
    tiers = ", ".join(tier["name"] for tier in begin["tiers"])
    return (
        f"{recording.seconds:.0f} s of {begin['time']}, Linux {begin['kernel']}, "
        f"tierd {begin['tierd']}; tiers: {tiers}"
    )


def _document(recording: Recording, tried: Sequence[Tried]) -> dict[str, Any]:
    return {
        "seconds": round(recording.seconds, 3),
        "recording": {key: recording.begin[key] for key in ("time", "kernel", "tierd", "tiers")},
        "policies": [
            {
                "policy": one.name,
                "hit_ratio": one.outcomes.hit_ratio,
                "best_ratio": one.outcomes.best_ratio,
                "up_bytes": one.outcomes.up_bytes,
                "down_bytes": one.outcomes.down_bytes,
                "slowdown": one.outcomes.slowdown,
                "speed": round(one.speed, 1),
                "at_s": one.outcomes.at_s.round(3).tolist(),
                "hits": one.outcomes.hits.round(5).tolist(),
                "optimum": one.outcomes.optimum.round(5).tolist(),
            }
            for one in tried
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizing:
    """Slowdowns by how much fast memory there is; the last size holds everything."""

    sizes: Sequence[int]
    slowdowns: Sequence[float]
    hit_ratios: Sequence[float]
    prices: tuple[float, float] | None

    @property
    def knee(self) -> int:
        """Where more memory begins to gain less: farthest below the line from first to last.

        That is Kneedle's rule (Satopaa et al., 2011) without its smoothing.
        """
        sizes, slowdowns = np.array(self.sizes, float), np.array(self.slowdowns)
        line = np.interp(sizes, sizes[[0, -1]], slowdowns[[0, -1]])
        return int((line - slowdowns).argmax())

    @property
    def costs(self) -> list[float] | None:
        """What memory costs for the work that is done with it, in gigabytes' prices."""
        if self.prices is None:
            return None
        fast, slow = self.prices
        return [
            (fast * size + slow * (self.sizes[-1] - size)) / 1e9 * slowdown
            for size, slowdown in zip(self.sizes, self.slowdowns, strict=True)
        ]

    def document(self) -> Mapping[str, Any]:
        costs = self.costs
        return {
            "sizes": [
                {
                    "fast_bytes": size,
                    "hit_ratio": self.hit_ratios[i],
                    "slowdown": self.slowdowns[i],
                    "cost": None if costs is None else costs[i],
                }
                for i, size in enumerate(self.sizes)
            ],
            "knee_bytes": self.sizes[self.knee],
            "cheapest_bytes": None if costs is None else self.sizes[int(np.argmin(costs))],
        }

    def as_text(self) -> str:
        costs = self.costs
        marks = {self.knee: "knee"}
        if costs is not None:
            cheapest = int(np.argmin(costs))
            marks[cheapest] = ", ".join([*filter(None, [marks.get(cheapest)]), "cheapest"])
        rows = [
            (
                amount(size),
                f"{100 * self.hit_ratios[i]:.1f} %",
                f"{self.slowdowns[i]:.2f}",
                "-" if costs is None else f"{costs[i]:.2f}",
                marks.get(i, ""),
            )
            for i, size in enumerate(self.sizes)
        ]
        return table(("fast memory", "hits", "slowdown", "cost", ""), rows)


def _draw_hits(path: Path, tried: Sequence[Tried]) -> None:
    figure, axes = new_figure()
    for one in tried:
        axes.plot(one.outcomes.at_s, 100 * one.outcomes.hits[:, 0], label=one.name)
    first = tried[0].outcomes
    axes.plot(first.at_s, 100 * first.optimum, "k:", label="best possible")
    axes.set(xlabel="seconds", ylabel="accesses in the fastest tier, %", ylim=(0, 101))
    axes.legend()
    save_figure(figure, path)


def _draw_slowdown(path: Path, sizing: _Sizing) -> None:
    figure, axes = new_figure()
    gib = np.array(sizing.sizes) / 2**30
    axes.plot(gib, sizing.slowdowns, marker="o")
    axes.axvline(gib[sizing.knee], linestyle=":", color="k", label="knee")
    axes.set(
        xlabel="fast memory, GiB", ylabel="an access, times the fastest tier's", ylim=(0.95, None)
    )
    axes.legend()
    save_figure(figure, path)
