# SPDX-License-Identifier: Apache-2.0
"""A target, and what the daemon knows of it from round to round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import PIECE, Accesses, Flags
from tierd.decide.guard import Guard
from tierd.decide.heat import fold
from tierd.decide.magnify import is_unequal, magnify
from tierd.decide.pins import NO_PINS, cut_at, merge
from tierd.kernel.process import Process
from tierd.model import PIN_CODE, Pin, Policy

MOST_TOGETHER = 4
"""So many snapshots are taken in at once, which costs their regions' number times theirs."""

STALE_AGGREGATIONS = 4
"""Without a snapshot for so many aggregations a target's memory is left where it is."""

ZOOM_WAIT_MOST_S = 60.0
"""Between two looks at single pages of a target whose pages were alike again and again."""
TRY_AGAIN_S = 30.0
"""Between two looks at a few pages of a target, to tell whether its memory is hot throughout."""
LOOK_SOON_S, LOOKS_S = 5.0, 30.0
"""Memory waits for a look while the last one began this long ago, and the first of them that."""


@dataclass(slots=True)
class Watched:
    """A target and what is known of it."""

    process: Process
    pieces: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, PIECE))
    accesses: Accesses | None = None
    mapped: NDArray[np.void] | None = None
    look_at_s: float = 0.0
    zooms_in_vain: int = 0
    """How often in a row all pages of a range were found alike."""
    zoom_at_s: float = 0.0
    """From when on its single pages may be looked at again."""
    try_at_s: float = 0.0
    """From when on a few of them may be, to tell whether memory is hot throughout."""
    looked_s: float = -np.inf
    """When the last look at them began, likewise the first of those that followed each other."""
    looked_since_s: float = -np.inf
    pin: Pin | None = None
    """Of what neither of these ranges has."""
    pins: NDArray[np.void] = field(default_factory=lambda: NO_PINS)
    """Ranges that an operator has pinned (dtype PINNED)."""
    named: NDArray[np.void] = field(default_factory=lambda: NO_PINS)
    """Ranges that the configuration pins, by the names of their mappings; `pins` hold first."""
    guard: Guard = field(default_factory=Guard)

    def resident_bytes(self) -> NDArray[np.float64]:
        """Returns what it has on each tier."""
        length = self.pieces["end"] - self.pieces["start"]
        return np.asarray((length[:, None] * self.pieces["resident"]).sum(axis=0), np.float64)

    def pinned_bytes(self) -> Mapping[str, int]:
        """Returns how much of it is in pinned ranges."""
        pins = merge(self.pins, self.named)
        size = (pins["end"] - pins["start"]).astype(np.int64)
        return {str(pin): int(size[pins["pin"] == code].sum()) for pin, code in PIN_CODE.items()}

    def cut_at_pins(self) -> tuple[Flags, Flags]:
        """Tells which pieces are pinned to the fastest tier, and which where they are.

        Where ranges are pinned, it cuts the pieces at their edges first. What is pinned owes
        nothing for its moves, then and later: who pinned it wanted it there.
        """
        pins = merge(self.pins, self.named)
        if not len(pins):
            if self.pin is not None:
                self.pieces["owed"] = 0
            return self.pin is Pin.FASTEST, self.pin is Pin.HERE
        self.pieces, code = cut_at(self.pieces, pins)
        if self.pin is not None:
            code[code == 0] = PIN_CODE[self.pin]
        self.pieces["owed"][code > 0] = 0
        return code == PIN_CODE[Pin.FASTEST], code == PIN_CODE[Pin.HERE]

    def take(self, snapshots: Sequence[Accesses], policy: Policy) -> None:
        """Takes in snapshots of all of it, in the order of time, if it is known what is mapped."""
        if self.mapped is None:
            return
        self.accesses = snapshots[-1]
        for first in range(0, len(snapshots), MOST_TOGETHER):
            together = snapshots[first : first + MOST_TOGETHER]
            self.pieces = fold(self.pieces, together, self.mapped, policy)

    def take_zoomed(self, looks: Sequence[Accesses], policy: Policy) -> None:
        """Takes in looks at single pages; the next waits ever longer while these are alike."""
        for look in looks:
            self.pieces = magnify(self.pieces, look, policy)
            is_mixed = is_unequal(look)
            self.zooms_in_vain = 0 if is_mixed else self.zooms_in_vain + 1
            if not is_mixed:
                self.try_at_s = look.at_s
            wait_s = min(ZOOM_WAIT_MOST_S, 2.0 ** min(self.zooms_in_vain, 10) - 1)
            self.zoom_at_s = look.at_s + wait_s

    def note_trial(self, now_s: float) -> None:
        """Takes in that a look at a few pages begins; the next one waits unless they are alike."""
        self.try_at_s = now_s + TRY_AGAIN_S

    def note_look(self, now_s: float) -> None:
        """Takes in that a look at single pages begins."""
        if now_s - self.looked_s > LOOKS_S:
            self.looked_since_s = now_s
        self.looked_s = now_s

    def is_looked_at(self, now_s: float) -> bool:
        """Whether looks at single pages go on, and have not for so long that it may be for ever."""
        return now_s - self.looked_s < LOOK_SOON_S and now_s - self.looked_since_s < LOOKS_S

    def is_fresh(self, now_s: float) -> bool:
        seen = self.accesses
        return seen is not None and now_s - seen.at_s < STALE_AGGREGATIONS * seen.aggregation_s + 1
