# SPDX-License-Identifier: Apache-2.0
"""What CXL devices have told of errors, counted, and told to the log without flooding it."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierd.kernel.cxl_events import CxlEvent, Kind, Severity
from tierd.observe.events import event as log_event

log = logging.getLogger("tierd")

MOST_COUNTS, MOST_PLACES = 1024, 1024
"""More devices and places than these are counted as of OTHERS, or not kept."""

OTHERS = "others"

TOLD, WINDOW_S = 10, 60.0
"""So many of a device and kind are told one by one in a minute, the others by their number."""

_LEVELS = {
    Severity.UNCORRECTED: logging.ERROR,
    Severity.CORRECTED: logging.WARNING,
    Severity.NONE: logging.WARNING,
}


@dataclass(frozen=True, slots=True)
class Count:
    """What is counted apart."""

    device: str
    region: str | None
    kind: Kind
    severity: Severity

    @property
    def order(self) -> tuple[str, ...]:
        return self.device, self.region or "", self.kind, self.severity


@dataclass(slots=True)
class _Window:
    """What was told in a minute."""

    end_s: float
    told: int = 0
    held: int = 0


@dataclass(slots=True)
class CxlErrorCounts:
    """Counts them, and keeps the places that hold lost data.

    A poison list is told anew whenever it is read: a place counts once, until it is cleared.
    """

    counts: Counter[Count] = field(default_factory=Counter)
    places: dict[tuple[str, int], CxlEvent] = field(default_factory=dict)
    """By the device and its own address."""
    _windows: dict[tuple[str, Kind], _Window] = field(default_factory=dict)

    def take_in(self, event: CxlEvent, now_s: float) -> bool:
        """Counts an event and tells it; returns whether it is news."""
        place = (event.device, -1 if event.dpa is None else event.dpa)
        if event.kind is Kind.CLEARED:
            self.places.pop(place, None)
        elif event.severity is Severity.UNCORRECTED and event.dpa is not None:
            if event.kind is Kind.POISON and place in self.places:
                return False
            if len(self.places) < MOST_PLACES:
                self.places[place] = event
        self._count(event)
        self._tell(event, now_s)
        return True

    def _count(self, event: CxlEvent) -> None:
        count = Count(event.device, event.region, event.kind, event.severity)
        if count not in self.counts and len(self.counts) >= MOST_COUNTS:
            count = Count(OTHERS, None, event.kind, event.severity)
        self.counts[count] += 1

    def _tell(self, event: CxlEvent, now_s: float) -> None:
        key = (event.device if len(self._windows) < MOST_COUNTS else OTHERS, event.kind)
        window = self._windows.setdefault(key, _Window(now_s + WINDOW_S))
        if window.told >= TOLD:
            window.held += 1
            return
        window.told += 1
        fields = {
            "device": event.device,
            "region": event.region,
            "about": str(event.kind),
            "severity": str(event.severity),
        }
        log.log(_LEVELS[event.severity], "%s", describe(event), extra=log_event("cxl", **fields))

    def go_on(self, now_s: float) -> None:
        """Tells how many more there were, once their minute is over."""
        for key in [key for key, window in self._windows.items() if window.end_s <= now_s]:
            (device, kind), held = key, self._windows.pop(key).held
            if held:
                fields = {"device": device, "about": str(kind), "count": held}
                told = "CXL device %s: %d more of %s in the last minute"
                log.warning(told, device, held, kind, extra=log_event("cxl.more", **fields))

    def account(self) -> Iterator[Mapping[str, Any]]:
        for count, number in sorted(self.counts.items(), key=lambda item: item[0].order):
            yield {
                "device": count.device,
                "region": count.region,
                "kind": str(count.kind),
                "severity": str(count.severity),
                "count": number,
            }


_WORDS = {
    Kind.POISON: "data of its memory are lost (poison)",
    Kind.CLEARED: "poison was cleared",
    Kind.GENERAL_MEDIA: "an error of its media",
    Kind.DRAM: "an error of its DRAM",
    Kind.MEMORY_MODULE: "its health has changed",
    Kind.LINK: "an error of its link",
    Kind.OVERFLOW: "its log was full, and it has lost events",
}


def describe(event: CxlEvent) -> str:
    """Returns a line for the log, without addresses: these are root's alone."""
    severity = "" if event.severity is Severity.NONE else f", {event.severity}"
    if event.kind is Kind.POISON:
        severity = ""
    where = f", in {event.region}" if event.region else ""
    return f"CXL device {event.device}: {_WORDS[event.kind]}{severity}{where}"
