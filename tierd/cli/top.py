# SPDX-License-Identifier: Apache-2.0
"""`tierctl top`: a screen of what goes on, painted anew each second."""

import curses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierd.cli import targets
from tierd.cli.status import tenants
from tierd.cli.text import amount, share
from tierd.kernel.pressure import Pressure
from tierd.model import PAGE_BYTES

BAR = 24
_BOLD, _PLAIN = curses.A_BOLD, curses.A_NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What was seen at one time, in seconds of CLOCK_MONOTONIC."""

    at_s: float
    status: Mapping[str, Any]
    pressure: Pressure | None


def as_document(before: Moment, now: Moment) -> dict[str, Any]:
    """Returns a frame's figures, for programs."""
    return {
        "tiers": now.status["tiers"],
        "targets": now.status["targets"],
        "tenants": now.status["tenants"],
        "moved_per_s": [
            {"from": source, "to": destination, "pages": round(rate, 1)}
            for (source, destination), rate in flows(before, now).items()
        ],
        "hit_percent": _hit_percent(now.status),
        "pressure_percent": now.pressure and now.pressure.some_percent,
        "paused": now.status["paused"],
    }


def frame(before: Moment, now: Moment) -> list[str]:
    """Returns a screen's lines."""
    return [*_frame(before, now)]


def _frame(before: Moment, now: Moment) -> Iterator[str]:
    status = now.status
    tiers = [tier["name"] for tier in status["tiers"]]
    hit = _hit_percent(status)
    yield "   ".join(
        [
            f"tierd {status['pid']}: {'PAUSED' if status['paused'] else status['mode']}",
            f"hits {'-' if hit is None else f'{hit:.1f} %'}",
            f"waiting for memory {_pressure(now.pressure)}",
            f"round {status['round_ms']:.0f} ms",
            f"lost {status['sampler']['lost']}",
        ]
    )
    yield ""
    moved = flows(before, now)
    for tier in status["tiers"]:
        yield _tier(tier, moved)
    yield ""
    yield from targets.as_text(status["targets"], tiers).splitlines()
    yield ""
    if status["tenants"]:
        yield from [*tenants(status).splitlines(), ""]
    for why, size in status["kept"].items():
        yield f"hot, but {why}: {amount(size)}"
    yield from (f"note: {note}" for note in status["notes"])


def _tier(tier: Mapping[str, Any], moved: Mapping[tuple[str, str], float]) -> str:
    name, capacity = tier["name"], tier["capacity"]
    used = max(capacity - tier["free"], 0)
    filled = round(BAR * used / max(capacity, 1))
    arriving = sum(rate for (_, destination), rate in moved.items() if destination == name)
    leaving = sum(rate for (source, _), rate in moved.items() if source == name)
    return (
        f"{name:<10} [{'#' * filled}{'.' * (BAR - filled)}] {share(used, capacity):>5} of "
        f"{amount(capacity):<9} in {_rate(arriving):<11} out {_rate(leaving)}"
    )


def _rate(pages: float) -> str:
    return f"{amount(round(pages) * PAGE_BYTES)}/s"


def _pressure(pressure: Pressure | None) -> str:
    return "unknown" if pressure is None else f"{pressure.some_percent:.1f} %"


def _hit_percent(status: Mapping[str, Any]) -> float | None:
    """Returns which share of all accesses seen go to the fastest tier."""
    total: dict[str, float] = {}
    for target in status["targets"]:
        for tier, rate in target["rate"].items():
            total[tier] = total.get(tier, 0.0) + rate
    whole = sum(total.values())
    return 100 * total[status["tiers"][0]["name"]] / whole if whole > 0 else None


def flows(before: Moment, now: Moment) -> dict[tuple[str, str], float]:
    """Returns the pages moved each second between two moments, by the tiers' names."""
    passed_s = now.at_s - before.at_s
    earlier = _moved(before.status)
    if passed_s <= 0 or before.status["pid"] != now.status["pid"]:
        return {}
    return {
        between: (pages - earlier.get(between, 0)) / passed_s
        for between, pages in _moved(now.status).items()
    }


def _moved(status: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    return {(flow["from"], flow["to"]): flow["pages"] for flow in status["moved"]}


def live(look: Callable[[], Moment], interval_s: float) -> None:
    """Paints frames until q is pressed."""
    curses.wrapper(_paint, look, interval_s)


def _paint(screen: "curses.window", look: Callable[[], Moment], interval_s: float) -> None:
    curses.curs_set(0)
    screen.timeout(round(interval_s * 1000))
    before = look()
    while True:
        now = look()
        _show(screen, frame(before, now))
        before = now
        if screen.getch() in (ord("q"), ord("Q"), 27):
            return


def _show(screen: "curses.window", lines: Sequence[str]) -> None:
    height, width = screen.getmaxyx()
    screen.erase()
    for row, line in enumerate(lines[: height - 1]):
        bold = row == 0 or line.startswith(("PID", "TENANT"))
        screen.addnstr(row, 0, line, width - 1, _BOLD if bold else _PLAIN)
    screen.addnstr(height - 1, 0, "q to quit", width - 1, curses.A_DIM)
    screen.refresh()
