# SPDX-License-Identifier: Apache-2.0
"""tierctl cxl drain: CXL memory out of use, and its region apart."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from tierd import config
from tierd.api.client import Client
from tierd.api.sockets import CONTROL
from tierd.cli.options import config_option, json_option
from tierd.cli.text import amount
from tierd.cli.writes import shown
from tierd.config import Config
from tierd.discover.topology import discover
from tierd.errors import TierdError
from tierd.journal import EntryId, Journal, RegionDrain
from tierd.kernel import process
from tierd.kernel.cxl import read_memdevs, read_regions
from tierd.kernel.free import FreeMemory
from tierd.kernel.tunable import KernelFiles, ToldFiles
from tierd.migrate.drain import Drain, apart, find_mapped
from tierd.model import NodeId
from tierd.provision import drain_plan as planning
from tierd.provision.create import open_journal
from tierd.provision.drain import WITHIN_S, Progress, RegionDrainer, left_of, look
from tierd.provision.drain_plan import DrainPlan

PASSES = 4
"""What programs allocate on the node after so many passes goes with its blocks."""

BAR = 30


def _complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Completes a region's or a device's name, where the kernel tells them."""
    try:
        names = [region.name for region in read_regions()]
        names += [memdev.name for memdev in read_memdevs()]
    except (OSError, TierdError):
        return []
    return [name for name in names if name.startswith(incomplete)]


@click.command("drain")
@click.argument("name", required=False, metavar="[REGION|MEMDEV]", shell_complete=_complete)
@click.option(
    "--timeout",
    "within_s",
    type=click.FloatRange(0.1, 86400),
    default=WITHIN_S,
    show_default=True,
    help="Give up on a block of memory after so many seconds.",
)
@click.option("--undo", is_flag=True, help="Bring back what a drain that was killed has left.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and change nothing.")
@json_option("docs/cxl.md")
@config_option("Take the tiers, the state directory and the daemon from this file")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def drain(
    *,
    name: str | None,
    within_s: float,
    undo: bool,
    dry_run: bool,
    as_json: bool,
    config_path: Path | None,
    root: Path,
) -> None:
    """Take CXL memory out of use. Its pages move off, and its region is taken apart.

    Programs go on. What fails brings all of it back, and so does an interrupt; after a kill, the
    same command goes on.
    """
    if undo and (dry_run or name is not None):
        raise click.UsageError("--undo takes back all that was left, and goes with nothing else")
    plan: DrainPlan | None
    session = _Session(settings=config.load(config_path), root=root, as_json=as_json)
    if dry_run:
        plan = planning.make(name, look(root))
        session.begin(plan)
        if not as_json:
            for step in plan.steps:
                click.echo(shown(step, root))
    else:
        _require_root()
        if undo:
            session.undo()
            return
        plan = session.drain(name, within_s)
    if as_json and plan is not None:
        click.echo(json.dumps(session.document(plan, dry_run=dry_run), indent=2))


def end_daemons_drains(settings: Config, journal: Journal, but: Collection[EntryId] = ()) -> None:
    """Has nodes used again that the daemon drains for a tierctl that was killed."""
    for entry, change in journal.changes.items():
        if isinstance(change, RegionDrain) and change.node is not None and entry not in but:
            _let_go(settings, NodeId(change.node))


def _require_root() -> None:
    if os.geteuid() != 0:
        raise TierdError(
            "tierctl cxl drain needs root: it writes to /sys",
            hint="run it with sudo; --dry-run shows to anybody what it would write",
        )


def _client(settings: Config) -> Client:
    return Client(settings.daemon.runtime_dir / CONTROL)


def _let_go(settings: Config, node: NodeId) -> None:
    """Ends the daemon's drain; without a daemon, or with its node gone, it has ended."""
    with suppress(TierdError):
        _client(settings).request("DELETE", f"/v1/drains/{node}")


@dataclass(slots=True, kw_only=True)
class _Session:
    """One call of the command, and what it says."""

    settings: Config
    root: Path
    as_json: bool
    undone: list[str] = field(default_factory=list)
    moved_pages: int | None = None
    _whys: dict[tuple[Path, str], str] = field(default_factory=dict)

    def begin(self, plan: DrainPlan) -> None:
        """Notes the lines of the writes that are to be made."""
        self._whys = {
            (self.root / step.path, step.value): shown(step, self.root) for step in plan.steps
        }

    def undo(self) -> None:
        with open_journal(self.settings.daemon.state_dir, self.root, KernelFiles()) as journal:
            end_daemons_drains(self.settings, journal)
            self.undone = journal.undo()
            left = journal.changes
        if self.as_json:
            click.echo(json.dumps({"undone": self.undone}, indent=2))
        elif not left:
            click.echo("\n".join(f"undone: {line}" for line in self.undone) or "nothing to undo")
        if left:
            raise TierdError(
                "\n".join(["not all could be undone", *self.undone]),
                hint="see above; after a reboot nothing of it is there any more",
            )

    def drain(self, name: str | None, within_s: float) -> DrainPlan | None:
        """Drains a region, or goes on with it; None where all but its end was done before."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        files = ToldFiles(KernelFiles(), self._written)
        with open_journal(self.settings.daemon.state_dir, self.root, files) as journal:
            left = _left(journal, name, self.root)
            ours = set() if left is None else {left[0]}
            self._undo_others(journal, but=ours)
            if journal.changes.keys() - ours:
                raise TierdError(
                    "\n".join(["what was left before could not all be undone", *self.undone]),
                    hint="see above; after a reboot nothing of it is there any more",
                )
            if left is not None and left[1].ends:
                self._finish(journal, left[0])
                return None
            plan = self._plan(journal, name if left is None else left[1].name)
            self.begin(plan)
            let_go = partial(_let_go, self.settings)
            RegionDrainer(
                plan,
                journal,
                files,
                self.root,
                within_s=within_s,
                tell=self._progress,
                let_go=let_go,
            ).run(partial(self._empty, plan))
        if not self.as_json:
            click.echo(f"\n{plan.region} is apart: {', '.join(plan.memdevs)} may be taken away")
        return plan

    def document(self, plan: DrainPlan, *, dry_run: bool) -> dict[str, Any]:
        """Returns the document that docs/cxl.md describes."""
        document = asdict(plan) | {"blocks": [block.number for block in plan.blocks]}
        for step in document["steps"]:
            step["path"] = str(self.root / step["path"])
        return document | {
            "moved_pages": self.moved_pages,
            "dry_run": dry_run,
            "undone": self.undone,
        }

    def _plan(self, journal: Journal, name: str | None) -> DrainPlan:
        """Plans; what is refused by now is undone, where it was begun before."""
        try:
            return planning.make(name, look(self.root))
        except TierdError as error:
            end_daemons_drains(self.settings, journal)
            error.args = ("\n".join([str(error), *journal.undo()]),)
            raise

    def _undo_others(self, journal: Journal, but: Collection[EntryId]) -> None:
        end_daemons_drains(self.settings, journal, but)
        self.undone = journal.undo(but=but)
        if not self.as_json:
            for line in self.undone:
                click.echo(f"undone: {line}\n")

    def _finish(self, journal: Journal, entry: EntryId) -> None:
        line = journal.revert(entry)
        if self.as_json:
            click.echo(json.dumps({"undone": [*self.undone, *([line] if line else [])]}, indent=2))
        else:
            click.echo(line or "it was apart already")

    def _empty(self, plan: DrainPlan, note: Callable[[NodeId], None]) -> None:
        """Moves what can be moved off the node: by the daemon where one runs, which knows heat."""
        node = plan.node
        if node is None or not plan.blocks:
            return
        try:
            self._empty_by_daemon(node, note)
        except TierdError:
            self._empty_alone(node)

    def _empty_by_daemon(self, node: NodeId, note: Callable[[NodeId], None]) -> None:
        client = _client(self.settings)
        status = client.get("/v1/status")
        if status["paused"]:
            raise TierdError("tierd is paused, and moves nothing")
        if all(drain["node"] != node for drain in status["drains"]):
            note(node)
        told = client.request("PUT", f"/v1/drains/{node}")
        while not told["done"] and told["passes"] < PASSES:
            self._moving(told)
            time.sleep(1)
            told = client.request("PUT", f"/v1/drains/{node}")
        self.moved_pages = told["moved_pages"]

    def _empty_alone(self, node: NodeId) -> None:
        from tierd.service import make_mover  # it loads all of the daemon

        topology = discover(self.settings.tiers, self.root, strict=False)
        if not any(node in tier.nodes for tier in topology.tiers) or len(topology.tiers) < 2:
            return
        topology = apart(topology, node)
        with FreeMemory(self.root) as free:
            work = Drain(
                node=node,
                mover=make_mover(self.settings, topology, free),
                room=free.room_bytes,
                find=partial(process.read_pids, self.root),
                find_in=find_mapped,
                learn=lambda _: None,
            )
            while not work.is_done and work.passes < PASSES:
                work.run(time.monotonic() + 1)
                self._moving({"node": node, "moved_pages": work.moved_pages})
        self.moved_pages = work.moved_pages

    def _moving(self, told: Mapping[str, Any]) -> None:
        self._draw(f"node {told['node']}: {told['moved_pages']} pages moved")

    def _progress(self, progress: Progress) -> None:
        share = progress.offline_bytes / max(progress.total_bytes, 1)
        bar = "#" * int(BAR * share) + "-" * (BAR - int(BAR * share))
        of = f"{amount(progress.offline_bytes)} of {amount(progress.total_bytes)} offline"
        self._draw(f"[{bar}] {of}, {progress.doing}")

    def _draw(self, line: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{line}", nl=False, err=True)

    def _written(self, path: Path, value: str) -> None:
        line = self._whys.get((path, value.strip()))
        if line is not None and not self.as_json:
            self._draw("")
            click.echo(line)


def _left(journal: Journal, name: str | None, root: Path) -> tuple[EntryId, RegionDrain] | None:
    """Returns the entry of the drain that this one would go on with, None without one."""
    names = {c.name for c in journal.changes.values() if isinstance(c, RegionDrain)}
    if name is None:
        wanted = next(iter(names)) if len(names) == 1 else None
    else:
        regions = {r.name for r in read_regions(root) if name == r.name or name in r.memdevs}
        wanted = next(iter(names & (regions | {name})), None)
    return None if wanted is None else left_of(journal, wanted)
