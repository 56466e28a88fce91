# SPDX-License-Identifier: Apache-2.0
"""Keeps tierd and the kernel's own page placement (numa_balancing) from placing the same pages."""

import logging
from dataclasses import dataclass
from pathlib import Path

from tierd.config import Rival
from tierd.errors import Conflict
from tierd.journal import EntryId, Journal
from tierd.kernel import numa_balancing

log = logging.getLogger("tierd")


@dataclass(slots=True, kw_only=True)
class Arbiter:
    """Does what is configured, at the start and once a round: anybody may turn it on meanwhile.

    Args:
        journal: has what was turned off, to be put back.
        root: where /proc is.
    """

    journal: Journal
    root: Path = Path("/")
    note: str | None = None
    """What the status tells: that the kernel places pages, and what follows for tierd."""

    _turned_off: EntryId | None = None

    def may_move(self, wanted: Rival, *, moves: bool) -> bool:
        """Returns whether tierd may move pages now.

        Args:
            wanted: what is to be done about the kernel's placement.
            moves: whether tierd is to move any. While it isn't, the machine is left as it is.

        Raises:
            Conflict: it is on, and that is to be refused.
            OSError, TierdError: it cannot be turned off, or not put back.
        """
        takes_over = moves and wanted is Rival.TAKE_OVER
        if not takes_over:
            self._put_back()
        mode = numa_balancing.read_mode(self.root)
        if not mode:
            self.note = None
            return moves
        says = f"numa_balancing is {mode}: the kernel {numa_balancing.describe(mode)}"
        if takes_over:
            self._put_back()  # of an earlier time there is nothing left to put back
            self._turned_off = self.journal.write(
                self.root / numa_balancing.PATH, numa_balancing.OFF
            )
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

    def _put_back(self) -> None:
        if self._turned_off is not None:
            told = self.journal.revert(self._turned_off)
            self._turned_off = None
            if told is not None:
                log.info("undone: %s", told)
