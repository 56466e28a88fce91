# SPDX-License-Identifier: Apache-2.0
"""Pinned ranges: what an operator, or the configuration, has said about parts of a target's memory.

Pins are ranges of whole pages (dtype PINNED), sorted and disjoint, and joined where they adjoin and
are alike. Plans are made of pieces that are cut at their edges; pieces that become alike again are
joined by the next snapshot, and cut anew.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import PINNED
from tierd.decide.heat import Ranges, cut, overlay
from tierd.errors import Conflict, NotFound, TierdError
from tierd.model import PAGE_BYTES, PIN_CODE, Pin

Pins = NDArray[np.void]
"""Of dtype PINNED, sorted and disjoint."""

NO_PINS = np.zeros(0, PINNED)

MOST = 64
"""An operator pins no more ranges of a process: each is listed, and cuts its pieces."""

MOST_NAMED = 1024
"""Of a process' mappings that the configuration pins by their names, so many are."""


def add(pins: Pins, part: range, pin: Pin, mapped: Ranges) -> Pins:
    """Returns the pins with one more, of the whole pages that it touches.

    Args:
        pins: what is pinned already.
        part: addresses.
        pin: what is said of them.
        mapped: what the target has mapped.

    Raises:
        Conflict: some of it is pinned otherwise.
        TierdError: it is empty, some of it is not mapped, or these would be too many ranges.
    """
    if part.start >= part.stop:
        raise TierdError(f"{spell(part)} is no range: its end must be above its start")
    added = _one(_whole_pages(part), pin)
    start, _, (inside, mapped_at) = overlay(added, mapped)
    outside = start[(inside >= 0) & (mapped_at < 0)]
    if len(outside):
        raise TierdError(
            f"{spell(part)} is not all mapped: nothing is at {int(outside[0]):x}",
            hint="/proc/PID/maps lists what is; a pin is of memory that is there",
        )
    start, end, (inside, other) = overlay(added, pins)
    contrary = (inside >= 0) & (_codes(pins, other) > 0) & (_codes(pins, other) != PIN_CODE[pin])
    if contrary.any():
        first = range(int(start[contrary][0]), int(end[contrary][0]))
        raise Conflict(f"{spell(first)} is pinned otherwise", hint="unpin that range first")
    made = merge(added, pins)
    if len(made) > MOST:
        raise TierdError(
            f"{MOST} ranges of the process are pinned already",
            hint="unpin some, or pin larger ranges: those that adjoin count as one",
        )
    return made


def remove(pins: Pins, part: range) -> Pins:
    """Returns the pins without the whole pages that a range touches.

    Raises:
        NotFound: none of it is pinned.
    """
    if part.start >= part.stop or not len(pins):
        raise NotFound(f"nothing is pinned in {spell(part)}")
    start, end, (pin_at, inside) = overlay(pins, _one(_whole_pages(part), Pin.HERE))
    if not ((pin_at >= 0) & (inside >= 0)).any():
        raise NotFound(f"nothing is pinned in {spell(part)}")
    return _joined(start, end, np.where(inside < 0, _codes(pins, pin_at), 0))


def merge(top: Pins, below: Pins) -> Pins:
    """Returns two layers of pins as one; where both are, `top` holds."""
    if not len(below):
        return top
    start, end, (top_at, below_at) = overlay(top, below)
    code = _codes(top, top_at)
    return _joined(start, end, np.where(code > 0, code, _codes(below, below_at)))


def within(pins: Pins, mapped: Ranges) -> Pins:
    """Returns what is left of pins where less is mapped than when they were made."""
    if not len(pins):
        return pins
    start, end, (pin_at, mapped_at) = overlay(pins, mapped)
    return _joined(start, end, np.where(mapped_at >= 0, _codes(pins, pin_at), 0))


def by_name(found: Sequence[tuple[int, int, str]], wanted: Mapping[str, Pin]) -> Pins:
    """Returns pins of mappings, each with start, end and a name that is wanted; sorted."""
    table = np.array([(start, end, PIN_CODE[wanted[name]]) for start, end, name in found], PINNED)
    table = table[:MOST_NAMED]
    return _joined(table["start"], table["end"], table["pin"])


def cut_at(pieces: NDArray[np.void], pins: Pins) -> tuple[NDArray[np.void], NDArray[np.uint8]]:
    """Returns pieces (dtype PIECE) cut at the pins' edges, and each one's PIN_CODE, 0 for none."""
    start, end, (piece_at, pin_at) = overlay(pieces, pins)
    known = piece_at >= 0
    parts = cut(pieces, start[known], end[known], piece_at[known])
    return parts, _codes(pins, pin_at[known])


def spell(part: range) -> str:
    """Spells addresses as /proc/PID/maps does."""
    return f"{part.start:x}-{part.stop:x}"


def _whole_pages(part: range) -> range:
    first, last = part.start // PAGE_BYTES, -(-part.stop // PAGE_BYTES)
    return range(first * PAGE_BYTES, last * PAGE_BYTES)


def _one(part: range, pin: Pin) -> Pins:
    return np.array([(part.start, part.stop, PIN_CODE[pin])], PINNED)


def _codes(pins: Pins, index: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Returns the codes of the pins with these indexes, 0 for -1."""
    return np.append(pins["pin"], np.uint8(0))[index]


def _joined(start: NDArray[np.uint64], end: NDArray[np.uint64], code: NDArray[np.uint8]) -> Pins:
    """Returns the ranges with a code, as pins."""
    kept = np.flatnonzero(code)
    start, end, code = start[kept], end[kept], code[kept]
    begins = np.ones(len(kept), np.bool_)
    begins[1:] = (start[1:] != end[:-1]) | (code[1:] != code[:-1])
    first = np.flatnonzero(begins)
    joined = np.zeros(len(first), PINNED)
    joined["start"], joined["pin"] = start[first], code[first]
    joined["end"] = end[np.append(first[1:], len(kept)) - 1] if len(first) else end
    return joined
