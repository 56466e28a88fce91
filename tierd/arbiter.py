# SPDX-License-Identifier: Apache-2.0
"""Keeps tierd and the kernel's own page placement (numa_balancing) out of each other's way."""

import logging
import math
from dataclasses import dataclass

from tierd.config import Rival
from tierd.decide.look import Look
from tierd.errors import Conflict, UnsupportedKernel
from tierd.held import Held
from tierd.kernel import numa_balancing, text

log = logging.getLogger("tierd")

OWNER = "numa_balancing"
ANY_LOOK = Look()
LEAVE_OUT = 'leave numa_balancing = "cooperate" out of [conflicts]'


@dataclass(slots=True, kw_only=True)
class Arbiter:
    """Does what is configured, at the start and once a round: anybody may change it meanwhile.

    Args:
        held: has what was turned on or off, to be put back.
    """

    held: Held
    note: str | None = None
    """What the status tells: that the kernel places pages, and what follows for tierd."""
    cooperates: bool = False
    """Whether single pages are as the kernel has sorted them, and demoted by it."""

    def may_move(
        self,
        wanted: Rival,
        *,
        moves: bool,
        rests: bool = False,
        look: Look | None = ANY_LOOK,
        budget_mbps: float = math.inf,
    ) -> bool:
        """Returns whether tierd may move pages now.

        Args:
            wanted: what is to be done about the kernel's placement.
            moves: whether tierd is to move any. While it isn't, the machine is left as it is.
            rests: whether it moves none for a while, in which the kernel isn't asked to either.
            look: how the kernel looks for what it is to promote, beside tierd; None for nothing.
            budget_mbps: the most that the kernel promotes in a second where it is asked to, in MiB.

        Raises:
            Conflict: it is on, and that is to be refused.
            UnsupportedKernel: it is to be on, and the kernel has none.
            OSError, TierdError: it cannot be turned on or off, or not put back.
        """
        shares = moves and wanted is Rival.COOPERATE
        self.cooperates = shares and not rests
        if moves and wanted is Rival.TAKE_OVER:
            self._turn_off()
        elif self.cooperates:
            limit_mbps = math.ceil(min(budget_mbps, numa_balancing.MOST_MBPS))
            self._turn_on(limit_mbps, look)
        else:
            self.held.let_go(OWNER)
        mode = numa_balancing.read_mode(self.held.root)
        if shares or not mode:
            self.note = None
            return moves
        says = _says(mode)
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

    def _turn_off(self) -> None:
        mode = numa_balancing.read_mode(self.held.root)
        if mode is not None and self.held.hold(OWNER, {numa_balancing.PATH: numa_balancing.OFF}):
            log.info("%s; it is off until tierd ends", _says(mode))

    def _turn_on(self, limit_mbps: int, look: Look | None) -> None:
        """Has the kernel promote single pages, and look so, and demote for them, or only demote."""
        mode, limit = self._otherwise(numa_balancing.PATH), self._otherwise(numa_balancing.LIMIT)
        demotes = text.read(self.held.at(numa_balancing.DEMOTES))
        if mode is None or limit is None or demotes is None:
            raise UnsupportedKernel("this kernel places no pages by itself", hint=LEAVE_OUT)
        wanted = {numa_balancing.DEMOTES: numa_balancing.YES}
        if look is not None:
            if not look.adapts and self._adapts():
                self.held.hold(OWNER, wanted)  # and forgets that as it is turned on again
            wanted |= self._looks(look)
            wanted[numa_balancing.LIMIT] = str(min(limit, limit_mbps))
            wanted[numa_balancing.PATH] = str(mode | numa_balancing.PROMOTES)
        begins = look is not None and not self._promotes()
        self.held.hold(OWNER, wanted)
        if begins:
            log.info("the kernel promotes single pages where it matters, and demotes")

    def _looks(self, look: Look) -> dict[str, str]:
        """Returns how the kernel is to look, where debugfs tells of that.

        After a look by which it took up little it waits twice as long, up to a minute of the
        program's CPU time. That few of its pages were due then says nothing of the others, so it is
        to look as often as it does by itself at the most. Where it is to begin anew at once, it is
        through with what no thread accesses forty times as soon, and looks at nothing twice in that
        (docs/decisions/0069 and 0082).
        """
        try:
            otherwise = {path: self._otherwise(path) for path in numa_balancing.LOOKS}
        except PermissionError:  # a kernel that is locked down
            return {}
        shortest, longest, within, size_mib = otherwise.values()
        wanted, at_a_time_mib = dict[str, int](), numa_balancing.DEFAULT_MIB
        if size_mib:
            wanted[numa_balancing.AT_A_TIME] = at_a_time_mib = look.mib_at_a_time(size_mib)
        if shortest is not None and longest is not None:
            at_once_ms = numa_balancing.least_ms(at_a_time_mib)
            least_ms, most_ms = look.periods_ms((shortest, longest), at_once_ms)
            wanted[numa_balancing.SHORTEST_LOOK] = least_ms
            wanted[numa_balancing.LONGEST_LOOK] = most_ms
        if within is not None:
            wanted[numa_balancing.HOT_WITHIN] = look.hot_ms(within)
        return {path: str(value) for path, value in wanted.items() if value != otherwise[path]}

    def _promotes(self) -> bool:
        """Returns whether the kernel promotes now."""
        return bool((numa_balancing.read_mode(self.held.root) or 0) & numa_balancing.PROMOTES)

    def _adapts(self) -> bool:
        """Returns whether the kernel looks often, and so adapts what counts as hot."""
        return self.held.change(numa_balancing.LONGEST_LOOK) is not None

    def _otherwise(self, path: str) -> int | None:
        """What a setting would be if it were not held."""
        change = self.held.change(path)
        return text.read_int(self.held.at(path)) if change is None else int(change.before)


def _says(mode: int) -> str:
    return f"numa_balancing is {mode}: the kernel {numa_balancing.describe(mode)}"
