# SPDX-License-Identifier: Apache-2.0
"""Keeps one kdamond within its share of a core, and knows at what intervals it samples.

Commands to a running kdamond wait for it, on 6.12 for a whole aggregation, so they are given in
another thread; what they changed counts once they are through.
"""

from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from tierd.config import DamonConfig
from tierd.errors import TierdError
from tierd.journal import EntryId
from tierd.kernel import process, task
from tierd.kernel.damon import Admin, Setup, SlotIndex
from tierd.model import Pid
from tierd.sample import tuning
from tierd.sample.tuning import Tuning

JUDGE_S = 10.0
"""CPU time is measured over so long: /proc counts it in 10 ms."""
FIRST_S = 2.0
"""From then on it is known roughly, by which others know what is left of the budget."""
READ_BACK_S = 2.0
DRIFT = 0.25
"""A snapshot this share early or late means that the kernel has tuned the intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A kdamond of ours that runs, as it was set up."""

    slot: SlotIndex
    pid: Pid
    entry: EntryId
    setup: Setup


class Governor:
    """Watches what a kdamond costs.

    Args:
        config: how finely to look where that is within the budget.
        admin: DAMON.
        target: what it watches.
        started: the kdamond.
        worker: where to wait for it.
        now_s: CLOCK_MONOTONIC.

    Raises:
        ProcessLookupError: it has stopped already.
    """

    def __init__(
        self,
        config: DamonConfig,
        admin: Admin,
        target: Pid,
        started: Started,
        *,
        worker: Executor,
        now_s: float,
    ) -> None:
        self._config = config
        self._admin = admin
        self._target = target
        self._slot = started.slot
        self._kdamond = started.pid
        self._setup = started.setup
        self._worker = worker
        self._asked = self._thrift = 1.0
        """What the budget asks for, and what is done, which is more while nothing happens."""
        self._is_calm = False
        self._pending: Future[Setup | None] | None = None
        self._pending_thrift = 1.0
        self._cpu_percent: float | None = None
        self._cpu_s = task.cpu_s(started.pid)
        self._judged_s = self._read_back_s = now_s
        self._snapshot_s = now_s
        self._has_drifted = False

    @property
    def setup(self) -> Setup:
        return self._setup

    @property
    def tuning(self) -> Tuning:
        return Tuning(
            sample_us=self._setup.sample_us,
            aggregation_us=self._setup.aggregation_us,
            max_regions=self._setup.max_regions,
            thrift=self._thrift,
            cpu_percent=self._cpu_percent,
        )

    def note_snapshot(self, at_s: float) -> None:
        """Takes in when an aggregation ended."""
        late_s = at_s - self._snapshot_s - self._setup.aggregation_us / 1e6
        self._has_drifted = abs(late_s) > DRIFT * self._setup.aggregation_us / 1e6
        self._snapshot_s = at_s

    def govern(self, now_s: float, budget_percent: float, *, is_calm: bool) -> None:
        """Measures and tunes, when it is time, and when it becomes calm or ceases to be."""
        if self._cpu_percent is None and now_s - self._judged_s >= FIRST_S:
            self._measure(now_s)
        if self._pending is not None:
            if not self._pending.done():
                return
            self._settle(self._pending)
        if is_calm != self._is_calm:
            self._is_calm = is_calm
            self._change()
        elif now_s - self._judged_s >= JUDGE_S:
            self._judge(now_s, budget_percent)
        elif self._has_drifted and now_s - self._read_back_s >= READ_BACK_S:
            self._read_back(now_s)

    def close(self) -> None:
        """Waits for what is under way; the slot is about to be emptied."""
        if self._pending is not None:
            self._pending.exception()

    def _measure(self, now_s: float) -> tuple[float, float] | None:
        """Returns its CPU time, and its percent of a core since it was judged.

        None where it has stopped, which its reader tells.
        """
        try:
            cpu_s = task.cpu_s(self._kdamond)
        except ProcessLookupError:
            return None
        self._cpu_percent = used = 100 * (cpu_s - self._cpu_s) / (now_s - self._judged_s)
        return cpu_s, used

    def _judge(self, now_s: float, budget_percent: float) -> None:
        measured = self._measure(now_s)
        if measured is None:
            return
        (self._cpu_s, used), self._judged_s = measured, now_s
        as_asked = used * self._thrift / self._asked
        self._asked = tuning.next_thrift(self._asked, used=as_asked, budget=budget_percent)
        self._change()

    def _change(self) -> None:
        """Has the kdamond go on with what is due now, where that is anything else."""
        self._pending_thrift = max(self._asked, tuning.CALM if self._is_calm else 1.0)
        wanted = self._wanted(self._pending_thrift)
        if self._pending_thrift != self._thrift or tuning.is_regrown(self._setup, wanted):
            self._pending = self._worker.submit(self._commit, wanted)

    def _read_back(self, now_s: float) -> None:
        self._read_back_s = now_s
        self._has_drifted = False
        if self._setup.goal is not None:
            self._pending = self._worker.submit(self._tuned, self._setup)

    def _settle(self, done: Future[Setup | None]) -> None:
        """Takes over what a command has changed; one that failed is tried at the next judging."""
        self._pending = None
        failed = isinstance(done.exception(), OSError | TierdError)
        setup = None if failed else done.result()
        if setup is None:
            self._pending_thrift = self._thrift
        else:
            self._setup, self._thrift = setup, self._pending_thrift

    def _wanted(self, thrift: float) -> Setup:
        """Returns the setup for a thrift, and for what the target has now."""
        return tuning.setup(
            self._config,
            thrift=thrift,
            resident_bytes=process.read_resident_bytes(self._target) or 0,
            has_goal=self._setup.goal is not None,
            mark_us=self._setup.update_us,
        )

    def _commit(self, setup: Setup) -> Setup | None:
        """Has the kdamond go on with another setup; runs in the worker."""
        self._admin.set_up(self._slot, setup)
        return setup if self._admin.command(self._slot, "commit") else None

    def _tuned(self, setup: Setup) -> Setup | None:
        """Returns the setup with the intervals that the kernel has come to; runs in the worker."""
        if not self._admin.command(self._slot, "update_tuned_intervals"):
            return None
        sample_us, aggregation_us = self._admin.intervals_us(self._slot)
        return replace(setup, sample_us=sample_us, aggregation_us=aggregation_us)
