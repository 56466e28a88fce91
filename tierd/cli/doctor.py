# SPDX-License-Identifier: Apache-2.0
"""`tierctl doctor`: whether tierd can work here, what stands in its way, and what to do about it.

Each check only looks. One that may not look says so: most of it is for root alone.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import click

from tierd import config
from tierd.arbiter import LEAVE_OUT
from tierd.cli.errors import Failure
from tierd.cli.options import config_option, json_option
from tierd.config import Config, Rival
from tierd.discover.targets import find_targets
from tierd.discover.topology import discover
from tierd.errors import TierdError
from tierd.kernel import numa_balancing, process, text, tracepoint
from tierd.kernel.damon import Admin, Slot
from tierd.kernel.memory_tiers import read_memory_tiers
from tierd.kernel.pages import Pagemap
from tierd.kernel.proc_events import ProcEvents
from tierd.kernel.ring import Ring
from tierd.kernel.tunable import Files
from tierd.model import Pid, Topology
from tierd.observe import status
from tierd.sample.kdamonds import MARK_FIRST_US, MARKS

MOVERS = {
    "memtierd": "places pages too",
    "etmemd": "swaps out what is cold",
    "numad": "moves processes and their pages between nodes",
}
"""Daemons, by the name in comm, that move what tierd moves."""

_KERNEL = "boot a kernel with "


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_OF_RIVALS = {
    Rival.REFUSE: (Verdict.FAIL, "and tierd refuses"),
    Rival.OBSERVE: (Verdict.WARN, "and tierd only observes meanwhile"),
    Rival.IGNORE: (Verdict.WARN, "against what tierd decides"),
}
"""What tierd does about the kernel's own placement."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `next_step` is None where nothing needs to be done."""

    verdict: Verdict
    subject: str
    message: str
    next_step: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What is examined: the configuration and its tiers on the machine below `root`."""

    config: Config
    topology: Topology
    root: Path
    files: Files | None


def examine(
    config_path: Path | None, root: Path = Path("/"), files: Files | None = None
) -> list[Finding]:
    """Makes every check, the most basic first.

    Args:
        config_path: the configuration's file; the default one where it is None.
        root: where /proc, /sys, /dev, /etc and /usr are; what the running kernel can do is asked of
            itself.
        files: how DAMON's files are reached.
    """
    try:
        settings = config.load(config_path)
        topology = discover(settings.tiers, root)
    except TierdError as error:
        found = Finding(Verdict.FAIL, "configuration", str(error), error.hint or "mend it")
        settings = Config()
        return [found, *_all(Place(settings, discover((), root), root, files))]
    found = Finding(Verdict.OK, "configuration", "nothing is wrong in it")
    return [found, *_all(Place(settings, topology, root, files))]


def _all(place: Place) -> Iterator[Finding]:
    for subject, check in CHECKS.items():
        try:
            yield from check(place)
        except PermissionError as error:
            message = f"{error.filename}: {error.strerror}"
            yield Finding(Verdict.WARN, subject, message, "run this as root")
        except (TierdError, OSError) as error:
            hint = error.hint if isinstance(error, TierdError) else None
            yield Finding(Verdict.FAIL, subject, str(error), hint)


def _daemon(place: Place) -> Iterator[Finding]:
    try:
        running = status.read(place.config.daemon.runtime_dir)
    except TierdError as error:
        yield Finding(Verdict.WARN, "daemon", str(error), error.hint)
    else:
        yield Finding(Verdict.OK, "daemon", f"runs as process {running['pid']}: {running['mode']}")
        for note in running.get("notes", ()):
            if note not in place.topology.warnings:
                yield Finding(Verdict.WARN, "daemon", note)
    if (place.root / "dev/tierd").exists():
        yield Finding(
            Verdict.WARN,
            "daemon",
            "/dev/tierd belongs to another daemon named tierd, of a vendor's CXL kit",
            "give this one a directory of its own: runtime_dir in [daemon]",
        )


def _tiers(place: Place) -> Iterator[Finding]:
    names = ", ".join(
        f"{tier.name} (nodes {', '.join(map(str, tier.nodes))})" for tier in place.topology.tiers
    )
    enough = len(place.topology.tiers) >= 2
    if enough:
        yield Finding(Verdict.OK, "tiers", names)
    for warning in place.topology.warnings:
        said, _, advice = warning.partition("; ")
        yield Finding(Verdict.WARN if enough else Verdict.FAIL, "tiers", said, advice or None)


def _damon(place: Place) -> Iterator[Finding]:
    admin = Admin(place.root, place.files)
    admin.check()
    yield Finding(Verdict.OK, "DAMON", "the kernel has its interface")
    holder = admin.exclusive_holder()
    if holder is not None:
        switch = f"echo N > {admin.exclusive_switch(holder)}"
        ours_may = holder == "damon_stat"
        verdict = Verdict.OK if ours_may and place.config.damon.take_over else Verdict.FAIL
        way_out = f"set take_over = true in [damon], or {switch}" if ours_may else switch
        next_step = None if verdict is Verdict.OK else way_out
        yield Finding(verdict, "DAMON", f"{holder} keeps everybody else out", next_step)
    yield from _slots(admin.slots())


def _slots(slots: Sequence[Slot]) -> Iterator[Finding]:
    foreign = [slot for slot in slots if not slot.is_free and not _is_ours(slot)]
    if foreign:
        told = "; ".join(map(str, foreign))
        yield Finding(Verdict.OK, "DAMON", f"others use it too, and are left alone: {told}")
    if slots and not any(slot.is_free or _is_ours(slot) for slot in slots):
        yield Finding(
            Verdict.FAIL,
            "DAMON",
            f"all of its {len(slots)} slots are others'",
            "stop one, or have more slots made (nr_kdamonds) by who made these",
        )


def _is_ours(slot: Slot) -> bool:
    return slot.update_us is not None and 0 <= slot.update_us - MARK_FIRST_US < MARKS


def _tracepoint(place: Place) -> Iterator[Finding]:
    slower = "accesses are read from sysfs, fewer and slower"
    found = tracepoint.find(place.root)
    if found is None:
        yield Finding(
            Verdict.WARN,
            "tracepoint",
            f"damon:damon_aggregated is out of reach: {slower}",
            "mount -t tracefs nodev /sys/kernel/tracing, as root",
        )
        return
    try:
        Ring(event=found.id, layout=found.layout, pid=Pid(os.getpid()), regions=1).close()
    except PermissionError:
        paranoid = text.read_int(place.root / "proc/sys/kernel/perf_event_paranoid")
        yield Finding(
            Verdict.WARN,
            "tracepoint",
            f"perf refuses a ring (perf_event_paranoid is {paranoid}): {slower}",
            "run this, and tierd, as root or with CAP_PERFMON; where it is 3, CAP_SYS_ADMIN",
        )
        return
    yield Finding(Verdict.OK, "tracepoint", "accesses are read from a ring")


def _pagemap(place: Place) -> Iterator[Finding]:
    with Pagemap(Pid(os.getpid())) as pagemap:
        pagemap.folios(0, 1 << 20, 1)
        if pagemap.scans:
            yield Finding(Verdict.OK, "page tables", "PAGEMAP_SCAN tells which pages are there")
            return
    yield Finding(
        Verdict.WARN,
        "page tables",
        "no PAGEMAP_SCAN: every page of a range is asked for",
        _KERNEL + "Linux 6.7 or later",
    )


def _process_events(place: Place) -> Iterator[Finding]:
    try:
        with ProcEvents():
            yield Finding(Verdict.OK, "processes", "the kernel tells of new ones")
    except OSError as error:
        yield Finding(
            Verdict.WARN,
            "processes",
            f"the kernel does not tell of new ones ({error.strerror}): they are looked for",
            _KERNEL + "CONFIG_PROC_EVENTS=y, and be root outside of containers",
        )


def _numa_balancing(place: Place) -> Iterator[Finding]:
    mode = numa_balancing.read_mode(place.root)
    moves, rival = place.config.policy.mode.moves, place.config.conflicts.numa_balancing
    says = f"is {mode}: the kernel {numa_balancing.describe(mode)}" if mode else ""
    if moves and rival is Rival.COOPERATE:
        yield _cooperation(place, mode)
    elif not mode:
        yield Finding(Verdict.OK, "numa_balancing", "off: the kernel moves no pages by itself")
    elif not moves:
        yield Finding(Verdict.OK, "numa_balancing", f"{says}, and tierd only observes")
    elif rival is Rival.TAKE_OVER:
        yield Finding(Verdict.OK, "numa_balancing", f"is {mode}: tierd turns it off meanwhile")
    else:
        verdict, what = _OF_RIVALS[rival]
        yield Finding(verdict, "numa_balancing", f"{says}, {what}", numa_balancing.TURN_OFF)


def _cooperation(place: Place, mode: int | None) -> Finding:
    if mode is None:
        lacks = "the kernel has none, and cannot cooperate"
        return Finding(Verdict.FAIL, "numa_balancing", lacks, _KERNEL + "CONFIG_NUMA_BALANCING=y")
    tiers = set(read_memory_tiers(place.root).values())
    if len(tiers) < 2:
        alone = "the kernel knows no slower memory tier, and promotes nothing"
        return Finding(Verdict.WARN, "numa_balancing", alone, LEAVE_OUT)
    return Finding(Verdict.OK, "numa_balancing", f"is {mode}: the kernel promotes beside tierd")


def _rivals(place: Place) -> Iterator[Finding]:
    names = {pid: process.read_command(pid, place.root) for pid in process.read_pids(place.root)}
    rivals = [(pid, name) for pid, name in names.items() if name in MOVERS]
    for pid, name in rivals:
        message = f"process {pid} is {name}, which {MOVERS[name or '']}"
        yield Finding(Verdict.WARN, "rivals", message, f"stop it: systemctl stop {name}")
    profile = text.read(place.root / "etc/tuned/active_profile")
    if profile and "tuned" in names.values():
        yield from _tuned(profile, place.root)
    elif not rivals:
        yield Finding(Verdict.OK, "rivals", "no other daemon that moves pages runs")


def _tuned(profile: str, root: Path) -> Iterator[Finding]:
    folders = [root / "etc/tuned", root / "usr/lib/tuned", root / "usr/lib/tuned/profiles"]
    files = [folder / name / "tuned.conf" for name in profile.split() for folder in folders]
    writes = any("numa_balancing" in (text.read(file, 1 << 20) or "") for file in files)
    if writes:
        yield Finding(
            Verdict.WARN,
            "rivals",
            f"TuneD's profile {profile} sets numa_balancing",
            "take that line out of a copy of the profile in /etc/tuned",
        )
    else:
        yield Finding(
            Verdict.OK, "rivals", f"TuneD's profile {profile} leaves page placement alone"
        )


def _targets(place: Place) -> Iterator[Finding]:
    rules = place.config.targets
    if not rules:
        yield Finding(
            Verdict.WARN,
            "targets",
            "no [[target]] says whose memory is to be placed",
            "name one in /etc/tierd/tierd.toml, or give tierd run a --pid",
        )
        return
    found = find_targets(rules, place.root)
    told = ", ".join(f"{target.pid} ({target.command})" for target in found)
    yield Finding(Verdict.OK, "targets", told or "none of the processes named is there now")
    for target in found:
        allowed = target.allowed_nodes
        barred = [t.name for t in place.topology.tiers if allowed and not {*allowed} & {*t.nodes}]
        if barred:
            yield Finding(
                Verdict.WARN,
                "targets",
                f"the cpuset of {target.pid} ({target.command}) bars it from {', '.join(barred)}",
                f"allow the nodes in cpuset.mems of {target.cgroup or 'its cgroup'}",
            )


CHECKS: dict[str, Callable[[Place], Iterator[Finding]]] = {
    "daemon": _daemon,
    "tiers": _tiers,
    "DAMON": _damon,
    "tracepoint": _tracepoint,
    "page tables": _pagemap,
    "processes": _process_events,
    "numa_balancing": _numa_balancing,
    "rivals": _rivals,
    "targets": _targets,
}
"""The checks, by their subject."""


@click.command()
@json_option()
@config_option("The daemon's configuration")
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), hidden=True)
def doctor(*, as_json: bool, config_path: Path | None, root: Path) -> None:
    """Tell whether tierd can work here. What stands in its way, and what to do about it."""
    found = examine(config_path, root)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        for finding in found:
            click.echo(_as_text(finding))
    if any(finding.verdict is Verdict.FAIL for finding in found):
        raise click.exceptions.Exit(Failure.exit_code)


def _as_text(finding: Finding) -> str:
    colour = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}[finding.verdict]
    mark = click.style(f"{finding.verdict:<4}", fg=colour, bold=True)
    line = f"{mark}  {finding.subject}: {finding.message}"
    return line if finding.next_step is None else f"{line}\n      {finding.next_step}"
