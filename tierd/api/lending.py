# SPDX-License-Identifier: Apache-2.0
"""What a running donor can be asked and told, from any thread."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tierd.api import schemas
from tierd.api.operation import TEXT, Operation
from tierd.model import NodeId
from tierd.observe import lending_metrics
from tierd.remote.donor import Donor, Ended, Refused, read_free
from tierd.version import VERSION

log = logging.getLogger("tierd")

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """A donor as others see it.

    Args:
        donor: it.
        address: where borrowers come to.
        nodes: whose memory it lends.
        reserve_bytes: what was to be free on these besides.
    """

    donor: Donor
    address: str
    nodes: Sequence[NodeId]
    reserve_bytes: int

    def version(self) -> Document:
        return {"version": VERSION, "api": "v1"}

    def status(self) -> Document:
        account = self.donor.account()
        return {
            "pid": os.getpid(),
            "address": self.address,
            "nodes": [*self.nodes],
            "capacity": account.capacity_bytes,
            "borrowed": account.borrowed_bytes,
            "free": account.free_bytes,
            "reserve": self.reserve_bytes,
            "spare": sum(read_free(self.nodes).values()) - self.reserve_bytes,
            "leaves": account.leaves,
            "leases": account.leases,
            "refused": {str(why): account.refused[why] for why in Refused},
            "ended": {str(how): account.ended[how] for how in Ended},
            "borrowers": [
                {
                    "name": borrower.name,
                    "address": borrower.address,
                    "bytes": len(borrower.part),
                    "since": datetime.fromtimestamp(borrower.since_s, UTC).isoformat(),
                }
                for borrower in account.borrowers
            ],
        }

    def metrics(self) -> str:
        return lending_metrics.as_text(self.status())

    def drain(self, *, wanted: bool) -> Document:
        if wanted is not self.donor.leaves:
            self.donor.leaves = wanted
            log.info("an operator has it %s", "ask to be left" if wanted else "lend again")
        return self.status()


OPERATIONS: tuple[Operation[Lending, Lending], ...] = (
    Operation(
        method="GET",
        path="/v1/version",
        summary="The donor's version, and the API's",
        answer=schemas.VERSION,
        run=lambda view, commands, asked: view.version(),
    ),
    Operation(
        method="GET",
        path="/v1/status",
        summary="What is lent, and to whom",
        answer=schemas.LENDING,
        run=lambda view, commands, asked: view.status(),
    ),
    Operation(
        method="GET",
        path="/metrics",
        summary="Metrics in Prometheus' text format",
        answer={"type": "string"},
        media=TEXT,
        run=lambda view, commands, asked: view.metrics(),
    ),
    Operation(
        method="PUT",
        path="/v1/drain",
        summary="Ask borrowers to move away, and lend nothing any more",
        answer=schemas.LENDING,
        changes=True,
        run=lambda view, commands, asked: commands.drain(wanted=True),
    ),
    Operation(
        method="DELETE",
        path="/v1/drain",
        summary="Lend again",
        answer=schemas.LENDING,
        changes=True,
        run=lambda view, commands, asked: commands.drain(wanted=False),
    ),
)
