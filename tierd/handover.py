# SPDX-License-Identifier: Apache-2.0
"""The policy in the kernel's hands, for `engine = "damos"`: kept as it is now, round by round."""

import logging
from dataclasses import dataclass
from typing import Any

from tierd.daemon import Daemon
from tierd.decide import schemes
from tierd.decide.schemes import Terms, unfit
from tierd.errors import TierdError
from tierd.kernel.damon import Setup
from tierd.kernel.free import FreeMemory
from tierd.migrate.schemes import KernelSchemes, make_none
from tierd.model import PAGE_BYTES, Scheme, Topology
from tierd.observe.events import event
from tierd.tiers import numa

log = logging.getLogger("tierd")

UNRESPECTED = (
    "DAMON moves by itself (engine = damos): it respects no cpusets, memory policies, shares of "
    "tenants and pins, and the guard does not hold it"
)
USE_MOVE_PAGES = 'set engine = "move_pages" in [migrate]'


@dataclass(slots=True, kw_only=True)
class Handover:
    """Hands DAMOS what the daemon would decide by, and nothing while nothing may be moved.

    Args:
        daemon: samples, and plans no moves.
        kernel: the schemes in the targets' kdamonds.
        free: tells what the kernel keeps free of a node.
    """

    daemon: Daemon
    kernel: KernelSchemes
    free: FreeMemory
    trouble: str | None = None
    """Why DAMOS cannot place between the tiers as they are now."""
    _moved_bytes: int = 0

    def begin(self) -> None:
        """Has the daemon leave moves to DAMOS, and says what that means.

        Raises:
            TierdError: DAMOS cannot place memory between these tiers.
        """
        require_fit(self.daemon.topology)
        self.daemon.plans = False
        log.warning("%s", UNRESPECTED, extra=event("engine.damos"))
        self.go_on()

    def go_on(self) -> None:
        """Takes over what has changed since the last round."""
        daemon = self.daemon
        daemon.schemes = self._account()
        moved_bytes = sum(applied.bytes for applied in self.kernel.applied.values())
        daemon.moved_lately = moved_bytes != self._moved_bytes
        self._moved_bytes = moved_bytes
        self._look_at_tiers()
        if self._may_move():
            self._hand(self._terms())
        else:
            self.kernel.hand(make_none)

    def notes(self) -> list[str]:
        """Returns what the status notes."""
        if self.trouble is None:
            return [UNRESPECTED]
        return [UNRESPECTED, f"DAMON moves nothing: {self.trouble} ({USE_MOVE_PAGES})"]

    def _look_at_tiers(self) -> None:
        trouble = unfit(self.daemon.topology.tiers)
        if trouble is not None and trouble != self.trouble:
            log.warning("DAMON moves nothing: %s", trouble, extra=event("engine.unfit"))
        self.trouble = trouble

    def _may_move(self) -> bool:
        """Says whether DAMOS may move now; it would fill a node again that was drained."""
        daemon = self.daemon
        if daemon.mover is None or daemon.paused or daemon.yields or self.free.closed:
            return False
        return self.trouble is None and len(daemon.topology.tiers) > 1

    def _hand(self, terms: Terms) -> None:
        def make(setup: Setup, targets: int) -> tuple[Scheme, ...]:
            return schemes.schemes(
                terms,
                sample_s=setup.sample_us / 1e6,
                aggregation_s=setup.aggregation_us / 1e6,
                targets=targets,
            )

        self.kernel.hand(make)

    def _terms(self) -> Terms:
        daemon = self.daemon
        fast, slow = daemon.topology.tiers
        (node,) = fast.nodes
        return Terms(
            policy=schemes.with_gap(daemon.policy(), fast, slow),
            fast=node,
            slow=slow.nodes[0],
            fast_bytes=fast.capacity_bytes,
            headroom_bytes=numa.headroom_bytes(fast, daemon.config.policy.headroom_percent),
            withheld_bytes=self.free.withheld_bytes(node),
            budget_bytes=daemon.budget_bytes,
            interval_s=daemon.config.daemon.interval_s,
        )

    def _account(self) -> list[dict[str, Any]]:
        return [
            {
                "action": str(action),
                "pages": applied.bytes // PAGE_BYTES,
                "regions": applied.regions,
                "tried_bytes": applied.tried_bytes,
                "over_quota": applied.over_quota,
            }
            for action, applied in self.kernel.applied.items()
        ]


def require_fit(topology: Topology) -> None:
    """Raises TierdError where DAMOS cannot place memory between the tiers."""
    trouble = unfit(topology.tiers)
    if trouble is not None:
        raise TierdError(trouble, hint=USE_MOVE_PAGES)
