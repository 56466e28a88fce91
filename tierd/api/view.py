# SPDX-License-Identifier: Apache-2.0
"""What a running daemon can be asked, answered at once from any thread.

Each answer is made of what the last round has left: nobody waits for a round or a migration. The
loop replaces its values and doesn't change them, but for where pieces lie, which an answer may
show half a round old.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd import account
from tierd.bulk import PIECE
from tierd.daemon import Daemon
from tierd.decide.explain import REASONS, explain
from tierd.decide.heat import ceiling, concatenate, score
from tierd.discover.topology import as_document, read_use
from tierd.errors import Busy
from tierd.model import PAGE_BYTES, Pid
from tierd.observe import metrics
from tierd.observe.events import History
from tierd.observe.metrics import Heat
from tierd.version import VERSION
from tierd.watched import Watched

Document = dict[str, Any]


@dataclass(slots=True)
class View:
    """A daemon as others see it; `account` is what it told of its last round."""

    daemon: Daemon
    history: History
    account: Document | None = None

    def version(self) -> Document:
        return {"version": VERSION, "api": "v1"}

    def status(self) -> Document:
        if self.account is None:
            raise Busy("the daemon is in its first round", hint="ask again in a second")
        return self.account

    def topology(self) -> Document:
        return as_document(self.daemon.topology, read_use())

    def targets(self) -> Document:
        return {"targets": self.status()["targets"]}

    def target(self, pid: int) -> Document:
        """Tells what of a target is how hot, where it lies, and why it is not elsewhere."""
        watched = self.daemon.targets.get(Pid(pid))
        pins = {"pins": self.daemon.targets.pins(Pid(pid))}
        return account.target(self.daemon, watched) | pins | self._ranges(watched)

    def events(self, *, after: int, most: int) -> Document:
        return {"events": self.history.recent(after=after, most=most)}

    def config(self) -> Document:
        return {key: self.status()[key] for key in ("config", "set")}

    def metrics(self) -> str:
        return metrics.as_text(self.status(), self._heat())

    def _ranges(self, watched: Watched) -> Document:
        pieces, names = watched.pieces, self.daemon.names
        most = float("inf") if watched.accesses is None else ceiling(watched.accesses)
        size = (pieces["end"] - pieces["start"]).astype(np.int64)
        reason = explain(pieces, most, self.daemon.policy(), self.daemon.gaps_ns)
        heat = score(pieces).astype(np.float64) * PAGE_BYTES
        resident = (size[:, None] * pieces["resident"][:, : len(names)]).astype(np.int64)
        columns = (pieces["start"], pieces["end"], heat.round(3), resident, reason)
        return {
            "ranges": [
                {
                    "start": start,
                    "end": end,
                    "heat": warmth,
                    "resident": dict(zip(names.values(), places, strict=True)),
                    "why": REASONS[why],
                }
                for start, end, warmth, places, why in zip(
                    *(column.tolist() for column in columns), strict=True
                )
            ],
            "why": _by_reason(reason, size),
        }

    def _heat(self) -> dict[str, Heat]:
        """Returns how much of all targets on each tier has which heat."""
        pieces = concatenate(
            [np.zeros(0, PIECE), *(w.pieces for w in [*self.daemon.watched.values()])]
        )
        heat = score(pieces).astype(np.float64) * PAGE_BYTES
        size = (pieces["end"] - pieces["start"]).astype(np.float64)
        bucket = np.searchsorted(metrics.BOUNDS, heat, "left")
        found = {}
        for rank, name in self.daemon.names.items():
            there = size * pieces["resident"][:, rank]
            in_buckets: NDArray[Any] = np.bincount(bucket, there, len(metrics.BOUNDS) + 1)
            found[name] = Heat(bytes=in_buckets, total=float((there * heat).sum()))
        return found


def _by_reason(reason: NDArray[np.intp], size: NDArray[np.int64]) -> dict[str, int]:
    total = np.bincount(reason, size, len(REASONS))
    return {why: int(total[index]) for index, why in enumerate(REASONS) if total[index]}
