# SPDX-License-Identifier: Apache-2.0
"""Keeps tierd and the kernel's own page placement (numa_balancing) out of each other's way."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierd.config import Rival
from tierd.errors import Conflict, UnsupportedKernel
from tierd.journal import EntryId, Journal
from tierd.kernel import numa_balancing, text

log = logging.getLogger("tierd")

LEAVE_OUT = 'leave numa_balancing = "cooperate" out of [conflicts]'


@dataclass(slots=True, kw_only=True)
class Arbiter:
    """Does what is configured, at the start and once a round: anybody may change it meanwhile.

    Args:
        journal: has what was turned on or off, to be put back.
        root: where /proc is.
    """

    journal: Journal
    root: Path = Path("/")
    note: str | None = None
    """What the status tells: that the kernel places pages, and what follows for tierd."""
    cooperates: bool = False
    """Whether the kernel promotes single pages now as it is asked to, beside tierd."""

    _entries: list[EntryId] = field(default_factory=list)
    _held: Mapping[str, str | None] = field(default_factory=dict)
    """What is held for the cooperation, by path, and within which limit."""
    _limit_mbps: int = 0

    def may_move(
        self, wanted: Rival, *, moves: bool, rests: bool = False, budget_mbps: float = math.inf
    ) -> bool:
        """Returns whether tierd may move pages now.

        Args:
            wanted: what is to be done about the kernel's placement.
            moves: whether tierd is to move any. While it isn't, the machine is left as it is.
            rests: whether it moves none for a while, in which the kernel isn't asked to either.
            budget_mbps: the most that the kernel promotes in a second where it is asked to, in MiB.

        Raises:
            Conflict: it is on, and that is to be refused.
            UnsupportedKernel: it is to be on, and the kernel has none.
            OSError, TierdError: it cannot be turned on or off, or not put back.
        """
        takes_over = moves and wanted is Rival.TAKE_OVER
        shares = moves and wanted is Rival.COOPERATE
        self.cooperates = shares and not rests
        if not takes_over and not self.cooperates:
            self._put_back()
        if self.cooperates:
            self._turn_on(math.ceil(min(budget_mbps, numa_balancing.MOST_MBPS)))
        mode = numa_balancing.read_mode(self.root)
        if shares or not mode:
            self.note = None
            return moves
        says = f"numa_balancing is {mode}: the kernel {numa_balancing.describe(mode)}"
        if takes_over:
            self._put_back()  # of an earlier time there is nothing left to put back
            self._set({numa_balancing.PATH: numa_balancing.OFF})
            log.info("%s; it is off until tierd ends", says)
            return True
        if moves and wanted is Rival.REFUSE:
            raise Conflict(says, hint=numa_balancing.TURN_OFF)
        if moves and wanted is Rival.OBSERVE:
            says += f"; tierd only observes meanwhile ({numa_balancing.TURN_OFF})"
        elif moves:
            says += f", against what tierd decides ({numa_balancing.TURN_OFF})"
        if says != self.note:
            log.warning("%s", says)
        self.note = says
        return moves and wanted is Rival.IGNORE

    def _turn_on(self, limit_mbps: int) -> None:
        """Has the kernel promote single pages, and demote for them."""
        if self._held == self._tiering() and self._limit_mbps == limit_mbps:
            return
        self._put_back()
        mode, limit = (
            text.read_int(self.root / path) for path in (numa_balancing.PATH, numa_balancing.LIMIT)
        )
        if mode is None or limit is None or None in self._tiering().values():
            raise UnsupportedKernel("this kernel places no pages by itself", hint=LEAVE_OUT)
        self._set(
            {
                numa_balancing.PATH: str(mode | numa_balancing.PROMOTES),
                numa_balancing.LIMIT: str(min(limit, limit_mbps)),
                numa_balancing.DEMOTES: numa_balancing.YES,
            }
        )
        self._held, self._limit_mbps = self._tiering(), limit_mbps
        log.info("the kernel promotes single pages, and demotes, until tierd ends")

    def _tiering(self) -> Mapping[str, str | None]:
        """What of the kernel's is held while it cooperates, as it is now."""
        paths = (numa_balancing.PATH, numa_balancing.LIMIT, numa_balancing.DEMOTES)
        return {path: text.read(self.root / path) for path in paths}

    def _set(self, values: Mapping[str, str]) -> None:
        for path, value in values.items():
            entry = self.journal.write(self.root / path, value)
            if entry is not None:
                self._entries.append(entry)

    def _put_back(self) -> None:
        self._held = {}
        while self._entries:
            told = self.journal.revert(self._entries[-1])
            self._entries.pop()
            if told is not None:
                log.info("undone: %s", told)
