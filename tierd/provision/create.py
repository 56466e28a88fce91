# SPDX-License-Identifier: Apache-2.0
"""Makes a region of CXL memory: each write is recorded before it is made, and all or none stay."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tierd.errors import Conflict, TierdError
from tierd.journal import EntryId, Journal, Region
from tierd.kernel import cxl, text
from tierd.kernel.blocks import AUTO_ONLINE
from tierd.kernel.cxl import DAX_DRIVER, REGION_DRIVER
from tierd.kernel.cxl_regions import Regions
from tierd.kernel.dax import KMEM
from tierd.kernel.tunable import Files
from tierd.provision.plan import Found, RegionPlan, Step
from tierd.provision.refusals import explained
from tierd.provision.undoing import undone_where_it_fails

FOLDER = "cxl"
"""Of the state directory: a journal of its own, since a running daemon holds the other's lock."""

WITHIN_S = 60.0
"""Linux 7.2 probes what makes the dax device asynchronously (drivers/dax/cxl.c), 6.12 does not."""

LOOK_S = 0.1


def look(root: Path = Path("/")) -> Found:
    """Reads what a plan is made of.

    Raises:
        UnexpectedContent: the kernel tells something in a format that is new to tierd.
    """
    drivers = {"cxl_region": REGION_DRIVER, "cxl_dax_region": DAX_DRIVER, "kmem": KMEM}
    return Found(
        memdevs=cxl.read_memdevs(root),
        decoders=cxl.read_decoders(root),
        regions=cxl.read_regions(root),
        next_regions=cxl.read_next_regions(root),
        drivers=frozenset(name for name, path in drivers.items() if (root / path).exists()),
        auto_online=text.read(root / AUTO_ONLINE) or None,
    )


def open_journal(state_dir: Path, root: Path, files: Files) -> Journal:
    """Opens the journal of what is made of CXL memory, and keeps a second one out.

    Raises:
        Conflict: another tierctl is making or undoing a region.
        TierdError: it cannot be written.
    """
    try:
        return Journal(state_dir / FOLDER, root=root, files=files)
    except Conflict as error:
        raise Conflict(
            "another tierctl is making or draining a CXL region, or undoing that",
            hint="wait for it to end",
        ) from error


def has_journal(state_dir: Path) -> bool:
    """Tells whether anything was ever made of CXL memory here."""
    return (state_dir / FOLDER).exists()


def undo_left(
    state_dir: Path, root: Path, files: Files, first: Callable[[Journal], None] = lambda _: None
) -> list[str]:
    """Takes back what a tierctl that was killed has left; returns what was done, for people.

    `first` is what is to be done before.

    Raises:
        Conflict: it runs still.
        TierdError: the journal cannot be read.
    """
    if not has_journal(state_dir):
        return []
    with open_journal(state_dir, root, files) as journal:
        first(journal)
        return journal.undo()


def create(
    plan: RegionPlan,
    journal: Journal,
    files: Files,
    root: Path = Path("/"),
    *,
    within_s: float = WITHIN_S,
    tell: Callable[[Step], None] = lambda _: None,
) -> None:
    """Makes a plan's writes, and waits for the memory. What fails is taken back to the first.

    Raises:
        TierdError: it could not be made, with the reason, the next step, and what was undone.
    """
    making = _Making(plan, journal, files, root, tell)
    with undone_where_it_fails(making.undo):
        making.run(within_s)


class _Making:
    def __init__(
        self,
        plan: RegionPlan,
        journal: Journal,
        files: Files,
        root: Path,
        tell: Callable[[Step], None],
    ) -> None:
        self._plan, self._journal, self._files, self._root = plan, journal, files, root
        self._tell = tell
        self._regions = Regions(root, files)
        self._change = Region(
            name=plan.region,
            root=plan.root,
            decoders=plan.decoders,
            share_bytes=plan.size_bytes // plan.ways,
            policy=plan.online.policy,
            doing="its beginning",
        )
        self._entry: EntryId | None = None
        self._policy: EntryId | None = None

    def run(self, within_s: float) -> None:
        self._entry = self._journal.record(self._change)
        for step in self._plan.steps:
            self._tell(step)
            try:
                self._make(step)
            except OSError as error:
                raise explained(step, error, self._root) from error
            if step.path.name == "bind":
                self._wait(within_s)
        self._journal.keep(self._entry)

    def undo(self) -> list[str]:
        """Takes back what was made, the latest first; returns what it did."""
        entries = [entry for entry in (self._policy, self._entry) if entry is not None]
        told: list[str] = []
        for entry in entries:
            try:
                line = self._journal.revert(entry)
            except (OSError, TierdError) as error:
                line = f"could not be undone: {error}; tierctl cxl list tries again"
            told += [] if line is None else [line]
        return told

    def _make(self, step: Step) -> None:
        if step.path == AUTO_ONLINE:
            self._set_policy(step)
            return
        is_share = step.path.name == "dpa_size"
        if step.path.name == "commit":
            self._require_as_planned()
        reserved = self._change.reserved + is_share
        self._amend(replace(self._change, doing=str(step), reserved=reserved))
        try:
            self._files.write(self._root / step.path, step.value)
        except OSError:
            if step.path.name == "create_ram_region":
                self._give_up()
            raise
        if step.path.name == "create_ram_region":
            folder = self._regions.folder(self._plan.region)
            self._amend(replace(self._change, folder=folder))

    def _set_policy(self, step: Step) -> None:
        if self._policy is None:
            self._policy = self._journal.write(self._root / step.path, step.value)
        else:
            self._journal.revert(self._policy)
            self._policy = None

    def _amend(self, change: Region) -> None:
        assert self._entry is not None, "it was recorded first"
        self._change = change
        self._journal.amend(self._entry, change)

    def _give_up(self) -> None:
        """Forgets a region that was not made: one of its name is somebody else's."""
        assert self._entry is not None, "it was recorded first"
        self._journal.keep(self._entry)
        self._entry = None

    def _require_as_planned(self) -> None:
        """Looks whether somebody else has written to the region meanwhile."""
        plan, found = self._plan, self._regions.find(self._plan.region)
        wanted = (plan.ways, plan.granularity_bytes, plan.size_bytes, plan.decoders)
        is_same = found is not None and wanted == (
            found.interleave_ways,
            found.interleave_granularity_bytes,
            found.size_bytes,
            found.decoders,
        )
        if not is_same:
            raise Conflict(
                f"{plan.region} is not as it was set up: another tool has changed it meanwhile",
                hint="see that nothing else makes CXL regions (cxl, ndctl), and try again",
            )

    def _wait(self, within_s: float) -> None:
        end_s = time.monotonic() + within_s
        plan = self._plan
        while (missing := self._regions.missing(plan.region, plan.online.policy)) is not None:
            if time.monotonic() >= end_s:
                raise TierdError(
                    f"the memory of {plan.region} did not come as asked for: {missing}",
                    hint="dmesg tells what kmem said; a rule of udev may bring memory online, too",
                )
            time.sleep(LOOK_S)
