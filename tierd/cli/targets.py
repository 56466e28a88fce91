# SPDX-License-Identifier: Apache-2.0
"""Targets as a person reads them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tierd.cli.text import amount, share, table

_RANGES = 20
"""So many ranges of a process are listed, those with the most accesses."""


def as_text(targets: Sequence[Mapping[str, Any]], tiers: Sequence[str]) -> str:
    """Gives a table of targets, the largest first."""
    if not targets:
        return "no targets: none of the configured processes is there"
    heads = ("PID", "COMMAND", *(tier.upper() for tier in tiers), "HITS", "PIN", "CGROUP")
    largest = sorted(targets, key=lambda target: -sum(target["resident"].values()))
    return table(heads, [_row(target, tiers) for target in largest])


def _row(target: Mapping[str, Any], tiers: Sequence[str]) -> tuple[str, ...]:
    return (
        str(target["pid"]),
        target["command"],
        *(amount(target["resident"][tier]) for tier in tiers),
        hits(target["rate"], tiers),
        _pins(target) or "-",
        target["cgroup"] or "-",
    )


def _pins(target: Mapping[str, Any]) -> str:
    """Spells how a process is pinned, and how much of it in ranges."""
    ranges = (f"{pin} {amount(size)}" for pin, size in target["pinned"].items() if size)
    return ", ".join([*filter(None, [target["pin"]]), *ranges])


def hits(rate: Mapping[str, float], tiers: Sequence[str]) -> str:
    """Spells the share of accesses that find their page in the fastest tier."""
    return share(rate[tiers[0]], sum(rate.values()))


def explained(target: Mapping[str, Any], tiers: Sequence[str]) -> str:
    """Tells of a process what is hot, where it lies, and why it isn't elsewhere."""
    return "\n\n".join(_explained(target, tiers))


def _explained(target: Mapping[str, Any], tiers: Sequence[str]) -> Iterator[str]:
    total = sum(target["resident"].values())
    pin = f", pinned: {pins}" if (pins := _pins(target)) else ""
    yield (
        f"process {target['pid']} ({target['command']}): {amount(total)}{pin}; "
        f"{hits(target['rate'], tiers)} of its accesses go to {tiers[0]}"
        + ("; nothing is moved up for now, since that did not pay" if target["rests"] else "")
    )
    yield table(
        ("TIER", "RESIDENT", "OF IT HOT", "ACCESSES/S"),
        [
            (
                tier,
                amount(target["resident"][tier]),
                amount(target["hot"][tier]),
                f"{target['rate'][tier]:.0f}",
            )
            for tier in tiers
        ],
    )
    if target["pins"]:
        yield table(
            ("PINNED RANGES", "SIZE", "PIN", "BY"),
            [
                (_addresses(pin), amount(pin["end"] - pin["start"]), pin["pin"], pin["by"])
                for pin in target["pins"]
            ],
        )
    reasons = sorted(target["why"].items(), key=lambda pair: -pair[1])
    yield table(("WHY WHAT LIES WHERE IT DOES", "SIZE"), [(why, amount(n)) for why, n in reasons])
    busiest = sorted(target["ranges"], key=_accesses, reverse=True)[:_RANGES]
    yield table(
        ("BUSIEST RANGES", "SIZE", "ACCESSES/PAGE/S", "MOSTLY ON", "WHY"),
        [
            (
                _addresses(part),
                amount(part["end"] - part["start"]),
                f"{part['heat']:.2f}",
                mostly_on(part["resident"]) or "-",
                part["why"],
            )
            for part in busiest
        ],
    )


def _addresses(part: Mapping[str, Any]) -> str:
    return f"{part['start']:x}-{part['end']:x}"


def _accesses(part: Mapping[str, Any]) -> float:
    return float(part["heat"] * (part["end"] - part["start"]))


def mostly_on(resident: Mapping[str, int]) -> str | None:
    """Returns the tier that has most of a range, None where none has any."""
    tier = max(resident, key=lambda name: resident[name], default=None)
    return tier if tier is not None and resident[tier] else None
